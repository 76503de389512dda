"""A parser for sizes such as 10MB."""

from __future__ import annotations

import re

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Parse a size in bytes. k, M, G, T are powers of 1000; Ki, Mi, Gi, Ti are powers of 1024.

    >>> parse_size("10MB"), parse_size("1.5 GiB"), parse_size("4096")
    (10000000, 1610612736, 4096)
    """
    found = _SIZE.fullmatch(text.strip())
    if not found or (found[3] and not found[2]):
        raise ValueError(f"{text!r} is not a size; write a number of bytes, 10MB or 1GiB.")
    number, unit, binary = found.groups()
    scale = (1024 if binary else 1000) ** _POWERS[unit.lower()]
    return int(number) * scale if number.isdigit() else int(float(number) * scale)
