"""The ``meteor`` command, and the examples, as somebody at a terminal meets them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

METEOR = Path(sys.executable).parent / "meteor"
EXAMPLE = Path(__file__).parent.parent / "examples" / "two_terminals.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [METEOR, *arguments], check=False, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--url", "redis://:secret@127.0.0.1:1", "demo"], 1, "cannot be reached"),
        (["--url", "localhost:6379", "demo"], 1, "is not an address of a server"),
        (["demo", "--records", "5"], 2, "is not in the range"),
        (["nonsense"], 2, "No such command"),
    ],
)
def test_an_error_is_a_sentence_and_an_exit_code(
    arguments: list[str], code: int, sentence: str
) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert sentence in done.stderr
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr


def test_with_debug_there_is_a_traceback() -> None:
    assert "Traceback" in run("--debug", "--url", "redis://127.0.0.1:1", "demo").stderr


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
