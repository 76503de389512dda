"""``meteor archive``: what it shows, what it deletes, and what it does until it is ended."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_cli.args.sizes import parse_size
from tests.support.archivers import LONG_S, Depot
from tests.support.commands import METEOR, Running, succeed
from tests.support.commands import meteor as run_meteor
from tests.support.group_members import STREAM
from tests.support.readers import everything, fill
from tests.support.terminal import Terminal
from tests.support.waiting import eventually

DAMAGE = b"PAR1 is not enough"


@pytest.fixture
def depot(url: str, tmp_path: Path) -> Iterator[Depot]:
    """A stream with a store, which nobody archives."""
    with Depot(url, tmp_path / "store") as depot:
        yield depot


@pytest.fixture
def filled(depot: Depot) -> Depot:
    """The same with three files, of 60 records each."""
    for _ in range(3):
        depot.fill(60)
        depot.archive()
    return depot


def state(depot: Depot) -> tuple[Any, ...]:
    """All that a command could have changed."""
    return everything(depot.redis), depot.files()


def at_terminal(depot: Depot, *arguments: str, columns: int = 100) -> Terminal:
    command = [str(METEOR), "--url", depot.url, "archive", *arguments]
    return Terminal(command, columns=columns)


# ls


def test_ls_shows_the_files_that_count_in_order(filled: Depot) -> None:
    done = succeed(filled.url, "archive", "ls", STREAM)
    files = [Path(file).name for file in filled.stream.store.files()]
    rows = [line.split() for line in done.lines]
    assert rows[0] == ["first", "last", "records", "size", "term", "file"]
    assert [(row[0], row[1], row[2], row[-1]) for row in rows[1:]] == [
        (str(first), str(first + 59), "60", file)
        for first, file in zip((0, 60, 120), files, strict=True)
    ]
    assert "180 records in 3 files" in done.err
    assert str(filled.root) in done.err


def test_ls_as_json_has_the_same_fields_for_ever(filled: Depot) -> None:
    found = succeed(filled.url, "archive", "ls", STREAM, "--json").objects
    epoch = filled.stream.describe().epoch
    files = filled.stream.store.files()
    assert found == [
        {
            "stream": STREAM,
            "first": 60 * n,
            "last": 60 * n + 59,
            "records": 60,
            "size": Path(file).stat().st_size,
            "epoch": epoch,
            "term": found[n]["term"],
            "file": file,
        }
        for n, file in enumerate(files)
    ]
    assert [entry["term"] for entry in found] == sorted({entry["term"] for entry in found})


def test_ls_cuts_no_name_to_fit_a_narrow_terminal(filled: Depot) -> None:
    with at_terminal(filled, "ls", STREAM, columns=40) as terminal:
        assert terminal.wait() == 0
        shown = "".join(terminal.lines)
        assert all(Path(file).name in shown for file in filled.stream.store.files())


def test_ls_says_why_there_is_nothing(depot: Depot) -> None:
    depot.fill(60)
    done = succeed(depot.url, "archive", "ls", STREAM)
    assert done.out == b""
    assert f"`meteor archive run {STREAM}`" in done.err
    depot.archive()
    depot.stream.store.expire(offset=60)
    done = succeed(depot.url, "archive", "ls", STREAM)
    assert done.out == b""
    assert "all below 60 has expired" in done.err


def test_ls_shows_a_damaged_store_as_it_is(filled: Depot) -> None:
    Path(filled.stream.store.files()[1]).unlink()
    found = succeed(filled.url, "archive", "ls", STREAM, "--json").objects
    assert [entry["first"] for entry in found] == [0, 120]


# verify


def test_verify_tells_what_is_whole(filled: Depot) -> None:
    done = succeed(filled.url, "archive", "verify", STREAM)
    assert (done.out, done.err) == (
        b"",
        f"meteor: stream {STREAM!r}: records 0 to 179 are whole.\n",
    )


def test_verify_finds_a_damaged_file(filled: Depot) -> None:
    damaged = Path(filled.stream.store.files()[1])
    damaged.write_bytes(DAMAGE)
    done = run_meteor(filled.url, "archive", "verify", STREAM)
    assert done.code == 1
    (line,) = done.lines
    assert line.startswith("corrupt: records 60 to 119, ")
    assert damaged.name in line
    done = run_meteor(filled.url, "archive", "verify", STREAM, "--json")
    assert done.code == 1
    (flaw,) = done.objects
    problem = flaw.pop("problem")
    assert isinstance(problem, str)
    assert flaw == {
        "stream": STREAM,
        "kind": "corrupt",
        "first": 60,
        "last": 119,
        "place": damaged.name,
        "harmless": False,
    }


def test_verify_marks_what_does_no_harm_and_succeeds(filled: Depot) -> None:
    filled.stream.store.compact()
    done = succeed(filled.url, "archive", "verify", STREAM)
    assert len(done.lines) == 3
    assert all(line.startswith("leftover (harmless): ") for line in done.lines)
    found = succeed(filled.url, "archive", "verify", STREAM, "--json").objects
    assert [(flaw["kind"], flaw["harmless"]) for flaw in found] == [("leftover", True)] * 3


def test_verify_shows_its_progress_at_a_terminal(filled: Depot) -> None:
    with at_terminal(filled, "verify", STREAM) as terminal:
        assert terminal.wait() == 0
        assert f"verifying {STREAM}".encode() in terminal.output
        assert "records 0 to 179 are whole" in terminal.text


# compact


def test_compact_tells_how_many_files_fewer_there_are(filled: Depot) -> None:
    done = succeed(filled.url, "archive", "compact", STREAM, "--max-records", "120")
    assert "1 file fewer to read, 2 in all" in done.err
    done = succeed(filled.url, "archive", "compact", STREAM, "--max-bytes", "1kB")
    assert "nothing to merge; 2 files" in done.err
    done = succeed(filled.url, "archive", "compact", STREAM)
    assert "1 file fewer to read, 1 in all" in done.err
    assert filled.stored() == list(range(180))


# expire


def test_a_dry_run_of_expire_shows_what_would_go_and_changes_nothing(filled: Depot) -> None:
    before = state(filled)
    done = succeed(filled.url, "archive", "expire", STREAM, "--offset", "130", "--dry-run")
    assert [line.split()[:3] for line in done.lines[1:]] == [["0", "59", "60"], ["60", "119", "60"]]
    assert "would be deleted: records 0 to 119" in done.err
    assert "120 records in 2 files" in done.err
    assert state(filled) == before


def test_expire_deletes_whole_files_below_an_offset(filled: Depot) -> None:
    done = succeed(filled.url, "archive", "expire", STREAM, "--offset", "130", "--yes")
    assert "deleted from the store: records 0 to 119" in done.err
    assert filled.stream.store.bounds() == (120, 180)
    assert [name[:20].lstrip("0") for name in filled.segments()] == ["120"]


def test_expire_by_size_keeps_what_fits(filled: Depot) -> None:
    size = filled.stream.store.segments()[-1].size
    succeed(filled.url, "archive", "expire", STREAM, "--max-bytes", f"{size}B", "-y")
    assert filled.stream.store.bounds() == (120, 180)


def test_expire_by_time_deletes_what_is_older(filled: Depot) -> None:
    done = succeed(filled.url, "archive", "expire", STREAM, "--before", "-1h", "--yes")
    assert "nothing to delete" in done.err
    now = datetime.now(UTC).isoformat()
    succeed(filled.url, "archive", "expire", STREAM, "--before", now, "--yes")
    assert filled.stream.store.bounds() == (180, 180)


def test_expire_deletes_nothing_unasked(filled: Depot) -> None:
    before = state(filled)
    done = run_meteor(filled.url, "archive", "expire", STREAM, "--offset", "130")
    assert done.code == 2
    assert "records 0 to 119" in done.err
    assert "--yes" in done.err
    with at_terminal(filled, "expire", STREAM, "--offset", "130") as terminal:
        terminal.wait_for("Go on?")
        terminal.press("n\n")
        assert terminal.wait() != 0
    assert state(filled) == before


def test_expire_deletes_what_was_agreed_to(filled: Depot) -> None:
    with at_terminal(filled, "expire", STREAM, "--offset", "130") as terminal:
        terminal.wait_for("Go on?")
        filled.fill(60)
        filled.archive()
        terminal.press("y\n")
        assert terminal.wait() == 0
    assert filled.stream.store.bounds() == (120, 240)


def test_expire_tells_which_groups_hold_records_back_unless_forced(filled: Depot) -> None:
    for group, confirmed in (("quick", 180), ("slow", 70), ("stuck", 10)):
        filled.stream.seek_group(group, confirmed)
    ask = ["archive", "expire", STREAM, "--offset", "130", "--yes"]
    done = succeed(filled.url, *ask)
    assert "records 0 to 119 stay, because groups 'slow', 'stuck' have not" in done.err
    assert "--force" in done.err
    assert "nothing to delete" in done.err
    filled.stream.delete_group("stuck")
    done = succeed(filled.url, *ask)
    assert "records 60 to 119 stay, because group 'slow' has not" in done.err
    assert filled.stream.store.bounds() == (60, 180)
    succeed(filled.url, *ask, "--force")
    assert filled.stream.store.bounds() == (120, 180)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "Say what may go"),
        (["--max-bytes", "many"], "is not a size"),
        (["--before", "whenever"], "is not a time"),
        (["--offset", "-1"], "is not in the range"),
    ],
)
def test_expire_must_be_told_what_may_go(filled: Depot, options: list[str], sentence: str) -> None:
    done = run_meteor(filled.url, "archive", "expire", STREAM, "--yes", *options)
    assert done.code == 2
    assert sentence in done.err
    assert filled.stream.store.bounds() == (0, 180)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("0", 0), ("4096", 4096), ("7B", 7), ("10k", 10_000), ("10MB", 10**7)),
        *(("1GiB", 2**30), ("1.5 tib", 3 * 2**39), ("0.5M", 500_000)),
    ],
)
def test_a_size_may_have_a_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1", "1iB", "1XB", "1 2", "1e9", "٣", "9" * 30])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


# run


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_run_archives_what_others_publish_and_gives_up_its_lease_when_it_is_ended(
    depot: Depot, how: signal.Signals, code: int
) -> None:
    ttl = ["--lease-ttl", str(LONG_S)]
    with Running(depot.url, "archive", "run", STREAM, "--segment-age", "0", *ttl) as command:
        assert f"goes to file://{depot.root}" in command.line("stderr")
        assert "this process archives it" in command.line("stderr")
        depot.fill(60)
        depot.wait_archived(60)
        while "archived below 60, 0 wait" not in command.line("stderr"):
            pass  # ends: it raises when nothing more comes
        assert depot.lease_left_ms > 0
        done = command.end(how)
    assert (done.code, done.out) == (code, b"")
    assert "Traceback" not in done.err
    assert depot.owner is None
    depot.archiver()  # which could not have waited for the end of that lease
    depot.fill(60)
    depot.check(120)


def test_run_without_names_archives_all_that_have_a_store(depot: Depot, tmp_path: Path) -> None:
    other = depot.client.stream("other", store=tmp_path / "elsewhere", archive=False)
    depot.client.stream("plain")
    depot.fill(60)
    fill(other, 70)
    with Running(depot.url, "archive", "run", "--segment-age", "0") as command:
        depot.wait_archived(60)
        eventually(lambda: other.describe().archived == 70, 20)
        done = command.end(signal.SIGTERM)
    assert done.code == 143
    assert "plain" not in done.err


def test_run_tells_who_archives_and_when_it_takes_over(depot: Depot) -> None:
    with depot.archiver() as rival:
        eventually(lambda: depot.owner == rival.member, 20)
        with Running(depot.url, "archive", "run", STREAM) as command:
            command.line("stderr")
            assert f"{rival.member} archives it, and this process waits" in command.line("stderr")
            rival.close()
            assert "this process archives it" in command.line("stderr")
            assert command.end(signal.SIGINT).code == 130


def test_run_goes_on_when_a_store_that_went_away_is_back(depot: Depot) -> None:
    away = depot.root.with_name("away")
    with Running(depot.url, "archive", "run", STREAM, "--segment-age", "0") as command:
        command.line("stderr")
        assert "this process archives it" in command.line("stderr")
        depot.root.rename(away)
        depot.fill(60)
        while "Nothing can be archived" not in command.line("stderr"):
            pass  # ends: it raises when nothing more comes
        away.rename(depot.root)
        while "archived below 60, 0 wait" not in command.line("stderr"):
            pass
        assert command.end(signal.SIGINT).code == 130
    assert depot.stored() == list(range(60))


@pytest.mark.parametrize("anew", [False, True])
def test_run_ends_with_an_error_when_its_last_stream_is_deleted(depot: Depot, anew: bool) -> None:
    with Running(depot.url, "archive", "run", STREAM) as command:
        command.line("stderr")
        assert "this process archives it" in command.line("stderr")
        depot.stream.delete()
        if anew:
            depot.open()
        done = command.end()
    assert done.code == 1
    assert f"stream {STREAM!r} was deleted" in done.err
    assert "no archiver is left" in done.err
    assert "Traceback" not in done.err


def test_run_goes_on_with_the_others_when_a_stream_is_deleted(depot: Depot, tmp_path: Path) -> None:
    other = depot.client.stream("other", store=tmp_path / "elsewhere", archive=False)
    names = [STREAM, "other", STREAM]
    with Running(depot.url, "archive", "run", *names, "--segment-age", "0") as command:
        eventually(lambda: other.describe().archiver, 20)
        depot.stream.delete()
        while "was deleted" not in command.line("stderr"):
            pass  # ends: it raises when nothing more comes
        fill(other, 70)
        eventually(lambda: other.describe().archived == 70, 20)
        assert command.end(signal.SIGINT).code == 130


# run --once


def test_run_once_archives_what_is_there_and_ends(depot: Depot, tmp_path: Path) -> None:
    other = depot.client.stream("other", store=tmp_path / "elsewhere", archive=False)
    depot.fill(60)
    fill(other, 70)
    done = succeed(depot.url, "archive", "run", "--once", "--segment-records", "30")
    assert f"stream {STREAM!r}: archived below 60, 60 of that now" in done.err
    assert (depot.archived, other.describe().archived) == (60, 70)
    assert depot.owner is None
    done = succeed(depot.url, "archive", "run", "--once", STREAM)
    assert "archived below 60, 0 of that now" in done.err


def test_run_once_is_content_with_what_another_archives(depot: Depot) -> None:
    depot.fill(60)
    with depot.archiver(segment_age=LONG_S) as rival:
        eventually(lambda: depot.owner == rival.member, 20)
        succeed(depot.url, "archive", "run", STREAM, "--once")
        assert depot.archived == 60
        assert depot.owner == rival.member


def test_run_once_shows_its_progress_at_a_terminal(depot: Depot) -> None:
    depot.fill(60)
    with at_terminal(depot, "run", "--once", STREAM) as terminal:
        assert terminal.wait() == 0
        assert f"archiving {STREAM}".encode() in terminal.output
        assert "archived below 60" in terminal.text


# Without a store


COMMANDS = [["ls"], ["verify"], ["compact"], ["run"], ["expire", "--offset", "1", "--yes"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_stream_without_a_store_or_none_at_all_is_an_error_with_a_hint(
    url: str, command: list[str]
) -> None:
    with meteor.connect(url) as m:
        m.stream("plain")
    name, *options = command
    done = run_meteor(url, "archive", name, "plain", *options)
    assert (done.code, done.out) == (1, b"")
    assert "`meteor streams create NAME --store DIR`" in done.err
    assert "client." not in done.err
    done = run_meteor(url, "archive", name, "nowhere", *options)
    assert done.code == 1
    assert "There is no stream 'nowhere'" in done.err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_store_that_is_gone_is_an_error_and_one_that_was_moved_is_named(
    depot: Depot, command: list[str]
) -> None:
    depot.fill(60)
    depot.archive()
    moved = depot.root.with_name("moved")
    depot.root.rename(moved)
    name, *options = command
    done = run_meteor(depot.url, "archive", name, STREAM, *options)
    assert (done.code, done.out) == (1, b"")
    assert "nothing is there" in done.err
    assert not depot.root.exists()
    options += ["--once"] if name == "run" else []
    succeed(depot.url, "archive", name, STREAM, *options, "--store", str(moved))


def test_run_without_names_needs_a_stream_with_a_store(url: str) -> None:
    with meteor.connect(url) as m:
        m.stream("plain")
    done = run_meteor(url, "archive", "run")
    assert done.code == 1
    assert "no stream has a store; `meteor streams create" in done.err


def test_run_without_names_leaves_out_what_cannot_be_archived(depot: Depot, tmp_path: Path) -> None:
    other = depot.client.stream("other", store=tmp_path / "elsewhere", archive=False)
    depot.client.stream("hidden", store=meteor.MemoryStore("hidden"), archive=False)
    fill(other, 70)
    depot.root.rename(depot.root.with_name("away"))
    done = succeed(depot.url, "archive", "run", "--once")
    assert f"stream {STREAM!r} is left out: " in done.err
    assert "stream 'hidden' is left out: " in done.err
    assert "client." not in done.err
    assert other.describe().archived == 70
    other.delete()
    assert run_meteor(depot.url, "archive", "run", "--once").code == 1
