"""Planted bugs: each must be caught, or the judge is blind.

They are planted inside the workers of a run and nowhere else. They alter the text of a script, and
refuse to be planted if the text that they replace is not there: a mutant that has silently become
the original would be taken for a bug that nobody sees.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from meteor_py import scripts
from tests.chaos.violation import Wrong


@dataclass(frozen=True)
class Mutant:
    """One bug: in which script what becomes what, and how it shows."""

    what: str
    script: str
    changes: tuple[tuple[str, str], ...]
    #: One of these is found for certain.
    shows_as: frozenset[Wrong]
    #: A run in which it comes to light soon.
    plan: dict[str, Any] = field(default_factory=dict)


MUTANTS = {
    "unfenced-confirm": Mutant(
        "confirms are not compared with term and nonce",
        "CONFIRM",
        (("if g[2] ~= ARGV[3] or g[3] ~= ARGV[4] then", "if false then"),),
        frozenset({Wrong.STALE_CONFIRM, Wrong.WENT_BACK}),
        {
            # A keeper renews before it confirms, so one that was paused soon learns that it has
            # lost the lease. One whose application hangs has let it go, and renews no more.
            "kinds": ("pause_owner",),
            "hang": 0.1,
            "seconds": 4.0,
        },
    ),
    "greedy-trim": Mutant(
        "the ring is trimmed by one record too many",
        "PUBLISH",
        (("math.max(floor, 0)", "math.max(floor + 1, 0)"),),
        frozenset({Wrong.OVERTRIMMED}),
        {"small_ring": True, "kinds": ("cut",), "batch_pause_s": 0.02, "groups": 2, "seconds": 3.0},
    ),
    "ignored-lease": Mutant(
        "the lease is given to whoever asks",
        "ACQUIRE",
        (
            ("elseif left ~= -2 then", "elseif false then"),
            ("elseif g[4] and g[4] ~= '' and g[2] ~= ARGV[6] then", "elseif false then"),
        ),
        frozenset({Wrong.STALE_DELIVERY}),
        {"kinds": ("cut",), "groups": 4, "seconds": 3.0},
    ),
    "unchecked-sequence": Mutant(
        "a batch that is sent again is written again",
        "PUBLISH",
        (("elseif seq ~= tonumber(p[2]) + 1 then", "elseif false then"),),
        frozenset({Wrong.DUPLICATED}),
        {
            "kinds": ("lose_reply", "cut", "stall"),
            "every_s": (0.1, 0.3),
            "groups": 2,
            "seconds": 6.0,
        },
    ),
    "skipping-take-over": Mutant(
        "a new term begins one record late",
        "ACQUIRE",
        (
            (
                "local position = tonumber(g[5] or g[6])",
                "local position = math.min(tonumber(g[5] or g[6]) + 1, tonumber(m[3]))",
            ),
        ),
        frozenset({Wrong.SKIPPED}),
        {"kinds": ("kill_member", "pause_owner"), "groups": 4, "seconds": 6.0},
    ),
}


def plant(name: str) -> None:
    """Alter this process."""
    mutant = MUTANTS[name]
    script: scripts.Script = getattr(scripts, mutant.script)
    source = script.source.decode()
    for old, new in mutant.changes:
        if source.count(old) != 1:
            raise AssertionError(f"{name}: {script} has {source.count(old)} times {old!r}.")
        source = source.replace(old, new)
    script.source = source.encode()
    script.sha = hashlib.sha1(script.source, usedforsecurity=False).hexdigest()
    first, _, rest = source.partition("\n")
    script.plain_source = (rest if first.startswith("#!") else source).encode()
