"""The examples, as somebody at a terminal meets them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "two_terminals.py"


def test_what_is_typed_in_one_terminal_is_read_in_the_other(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METEOR_URL", url)
    command = [sys.executable, "-W", "ignore", str(EXAMPLE)]
    with subprocess.Popen([*command, "read"], stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "waiting at offset 0\n"
        typed = subprocess.run(
            [*command, "publish"], input="hello\n", check=True, capture_output=True, text=True
        )
        assert typed.stdout == "offset 0\n"
        assert reader.stdout.readline().endswith(" 0: hello\n")
        reader.send_signal(2)  # Ctrl-C
        assert reader.wait(10) == 130
