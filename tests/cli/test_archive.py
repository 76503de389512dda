"""``meteor archive``: lists and maintains files, and archives until the command ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_cli.args.sizes import parse_size
from tests.support.archivers import LONG_S, StoredStream
from tests.support.commands import METEOR, RunningCommand, succeed
from tests.support.commands import meteor as run_meteor
from tests.support.group_members import STREAM
from tests.support.readers import everything, fill
from tests.support.terminal import Terminal
from tests.support.waiting import eventually

DAMAGE = b"PAR1 is not enough"


@pytest.fixture
def stored(url: str, tmp_path: Path) -> Iterator[StoredStream]:
    """A stream with a store and no archiver."""
    with StoredStream(url, tmp_path / "store") as stored:
        yield stored


@pytest.fixture
def filled(stored: StoredStream) -> StoredStream:
    """A stream with three archived files of 60 records each."""
    for _ in range(3):
        stored.fill(60)
        stored.archive()
    return stored


def state(stored: StoredStream) -> tuple[Any, ...]:
    """Return everything that a command could change."""
    return everything(stored.redis), stored.files()


def at_terminal(stored: StoredStream, *arguments: str, columns: int = 100) -> Terminal:
    command = [str(METEOR), "--url", stored.url, "archive", *arguments]
    return Terminal(command, columns=columns)


# ls


def test_ls_shows_the_live_files_in_order(filled: StoredStream) -> None:
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


def test_ls_as_json_has_stable_fields(filled: StoredStream) -> None:
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


def test_ls_does_not_truncate_names_on_a_narrow_terminal(filled: StoredStream) -> None:
    with at_terminal(filled, "ls", STREAM, columns=40) as terminal:
        assert terminal.wait() == 0
        shown = "".join(terminal.lines)
        assert all(Path(file).name in shown for file in filled.stream.store.files())


def test_ls_explains_why_no_file_is_listed(stored: StoredStream) -> None:
    stored.fill(60)
    done = succeed(stored.url, "archive", "ls", STREAM)
    assert done.out == b""
    assert f"`meteor archive run {STREAM}`" in done.err
    stored.archive()
    stored.stream.store.expire(offset=60)
    done = succeed(stored.url, "archive", "ls", STREAM)
    assert done.out == b""
    assert "all records below 60 have expired" in done.err


def test_ls_lists_the_remaining_files_in_a_damaged_store(filled: StoredStream) -> None:
    Path(filled.stream.store.files()[1]).unlink()
    found = succeed(filled.url, "archive", "ls", STREAM, "--json").objects
    assert [entry["first"] for entry in found] == [0, 120]


# verify


def test_verify_reports_an_intact_archive(filled: StoredStream) -> None:
    done = succeed(filled.url, "archive", "verify", STREAM)
    assert (done.out, done.err) == (
        b"",
        f"meteor: stream {STREAM!r}: records 0 to 179 are intact.\n",
    )


def test_verify_finds_a_damaged_file(filled: StoredStream) -> None:
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


def test_verify_finds_no_flaw_after_compaction(filled: StoredStream) -> None:
    filled.stream.store.compact()
    assert succeed(filled.url, "archive", "verify", STREAM).lines == []
    assert succeed(filled.url, "archive", "verify", STREAM, "--json").objects == []


def test_verify_shows_its_progress_at_a_terminal(filled: StoredStream) -> None:
    with at_terminal(filled, "verify", STREAM) as terminal:
        assert terminal.wait() == 0
        assert f"verifying {STREAM}".encode() in terminal.output
        assert "records 0 to 179 are intact" in terminal.text


# compact


def test_compact_reports_how_many_files_it_saved(filled: StoredStream) -> None:
    done = succeed(filled.url, "archive", "compact", STREAM, "--max-records", "120")
    assert "1 file fewer, 2 left" in done.err
    done = succeed(filled.url, "archive", "compact", STREAM, "--max-bytes", "1kB")
    assert "nothing to merge; 2 files" in done.err
    done = succeed(filled.url, "archive", "compact", STREAM)
    assert "1 file fewer, 1 left" in done.err
    assert filled.stored() == list(range(180))


# expire


def test_expire_dry_run_changes_nothing(filled: StoredStream) -> None:
    before = state(filled)
    done = succeed(filled.url, "archive", "expire", STREAM, "--offset", "130", "--dry-run")
    assert [line.split()[:3] for line in done.lines[1:]] == [["0", "59", "60"], ["60", "119", "60"]]
    assert "records 0 to 119 of stream 'orders' would be deleted" in done.err
    assert "120 records in 2 files" in done.err
    assert state(filled) == before


def test_expire_deletes_whole_files_below_an_offset(filled: StoredStream) -> None:
    done = succeed(filled.url, "archive", "expire", STREAM, "--offset", "130", "--yes")
    assert "records 0 to 119 of stream 'orders' deleted from the store" in done.err
    assert filled.stream.store.bounds() == (120, 180)
    assert [name[:20].lstrip("0") for name in filled.segments()] == ["120"]


def test_expire_by_size_keeps_the_newest_files_that_fit(filled: StoredStream) -> None:
    size = filled.stream.store.segments()[-1].size
    succeed(filled.url, "archive", "expire", STREAM, "--max-bytes", f"{size}B", "-y")
    assert filled.stream.store.bounds() == (120, 180)


def test_expire_by_time_deletes_older_files(filled: StoredStream) -> None:
    done = succeed(filled.url, "archive", "expire", STREAM, "--before", "-1h", "--yes")
    assert "nothing to delete" in done.err
    now = datetime.now(UTC).isoformat()
    succeed(filled.url, "archive", "expire", STREAM, "--before", now, "--yes")
    assert filled.stream.store.bounds() == (180, 180)


def test_expire_needs_confirmation(filled: StoredStream) -> None:
    before = state(filled)
    done = run_meteor(filled.url, "archive", "expire", STREAM, "--offset", "130")
    assert done.code == 2
    assert "Records 0 to 119" in done.err
    assert "--yes" in done.err
    with at_terminal(filled, "expire", STREAM, "--offset", "130") as terminal:
        terminal.wait_for("Continue?")
        terminal.press("n\n")
        assert terminal.wait() != 0
    assert state(filled) == before


def test_expire_deletes_no_more_than_the_user_has_confirmed(filled: StoredStream) -> None:
    with at_terminal(filled, "expire", STREAM, "--offset", "130") as terminal:
        terminal.wait_for("Continue?")
        filled.fill(60)
        filled.archive()
        terminal.press("y\n")
        assert terminal.wait() == 0
    assert filled.stream.store.bounds() == (120, 240)


def test_expire_keeps_unconfirmed_records_without_force(filled: StoredStream) -> None:
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
        ([], "Pass --before"),
        (["--max-bytes", "many"], "is not a size"),
        (["--before", "whenever"], "is not a time"),
        (["--offset", "-1"], "is not in the range"),
    ],
)
def test_expire_needs_a_valid_criterion(
    filled: StoredStream, options: list[str], sentence: str
) -> None:
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
def test_size_can_have_a_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1", "1iB", "1XB", "1 2", "1e9", "٣", "9" * 30])
def test_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


# run


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_run_archives_and_releases_its_lease_at_the_end(
    stored: StoredStream, how: signal.Signals, code: int
) -> None:
    ttl = ["--lease-ttl", str(LONG_S)]
    with RunningCommand(
        stored.url, "archive", "run", STREAM, "--segment-age", "0", *ttl
    ) as command:
        assert f"to file://{stored.root}" in command.line("stderr")
        assert "this process is the archiver" in command.line("stderr")
        stored.fill(60)
        stored.wait_archived(60)
        while "all records below 60 are archived, 0 waiting" not in command.line("stderr"):
            pass  # line() raises when the command has ended
        assert stored.lease_left_ms > 0
        done = command.end(how)
    assert (done.code, done.out) == (code, b"")
    assert "Traceback" not in done.err
    assert stored.owner is None
    stored.archiver()  # gets the lease only if it was released: it cannot have expired yet
    stored.fill(60)
    stored.check(120)


def test_run_without_names_archives_all_streams_with_a_store(
    stored: StoredStream, tmp_path: Path
) -> None:
    other = stored.client.stream("other", store=tmp_path / "elsewhere", archive=False)
    stored.client.stream("plain", create=True)
    stored.fill(60)
    fill(other, 70)
    with RunningCommand(stored.url, "archive", "run", "--segment-age", "0") as command:
        stored.wait_archived(60)
        eventually(lambda: other.describe().archived == 70, 20)
        done = command.end(signal.SIGTERM)
    assert done.code == 143
    assert "plain" not in done.err


def test_run_reports_the_archiver_and_a_takeover(stored: StoredStream) -> None:
    with stored.archiver() as rival:
        eventually(lambda: stored.owner == rival.member, 20)
        with RunningCommand(stored.url, "archive", "run", STREAM) as command:
            command.line("stderr")
            assert (
                f"{rival.member} is the archiver, and this process is standing by"
                in command.line("stderr")
            )
            rival.close()
            assert "this process is the archiver" in command.line("stderr")
            assert command.end(signal.SIGINT).code == 130


def test_run_continues_when_the_store_is_back(stored: StoredStream) -> None:
    away = stored.root.with_name("away")
    with RunningCommand(stored.url, "archive", "run", STREAM, "--segment-age", "0") as command:
        command.line("stderr")
        assert "this process is the archiver" in command.line("stderr")
        stored.root.rename(away)
        stored.fill(60)
        while "Failed to archive stream" not in command.line("stderr"):
            pass  # line() raises when the command has ended
        away.rename(stored.root)
        while "all records below 60 are archived, 0 waiting" not in command.line("stderr"):
            pass
        assert command.end(signal.SIGINT).code == 130
    assert stored.stored() == list(range(60))


@pytest.mark.parametrize("recreated", [False, True])
def test_run_ends_with_an_error_when_its_last_stream_is_deleted(
    stored: StoredStream, recreated: bool
) -> None:
    with RunningCommand(stored.url, "archive", "run", STREAM) as command:
        command.line("stderr")
        assert "this process is the archiver" in command.line("stderr")
        stored.stream.delete()
        if recreated:
            stored.open()
        done = command.end()
    assert done.code == 1
    assert f"stream {STREAM!r} was deleted" in done.err
    assert "all archivers have stopped" in done.err
    assert "Traceback" not in done.err


def test_run_continues_when_one_stream_is_deleted(stored: StoredStream, tmp_path: Path) -> None:
    other = stored.client.stream("other", store=tmp_path / "elsewhere", archive=False)
    names = [STREAM, "other", STREAM]
    with RunningCommand(stored.url, "archive", "run", *names, "--segment-age", "0") as command:
        eventually(lambda: other.describe().archiver, 20)
        stored.stream.delete()
        while "was deleted" not in command.line("stderr"):
            pass  # line() raises when the command has ended
        fill(other, 70)
        eventually(lambda: other.describe().archived == 70, 20)
        assert command.end(signal.SIGINT).code == 130


# run --once


def test_run_once_archives_existing_records(stored: StoredStream, tmp_path: Path) -> None:
    other = stored.client.stream("other", store=tmp_path / "elsewhere", archive=False)
    stored.fill(60)
    fill(other, 70)
    done = succeed(stored.url, "archive", "run", "--once", "--segment-records", "30")
    assert f"stream {STREAM!r}: archived 60 new records. All records below 60" in done.err
    assert (stored.archived, other.describe().archived) == (60, 70)
    assert stored.owner is None
    done = succeed(stored.url, "archive", "run", "--once", STREAM)
    assert "archived 0 new records. All records below 60" in done.err


def test_run_once_succeeds_if_another_archiver_archives_the_records(stored: StoredStream) -> None:
    stored.fill(60)
    with stored.archiver(segment_age=LONG_S) as rival:
        eventually(lambda: stored.owner == rival.member, 20)
        succeed(stored.url, "archive", "run", STREAM, "--once")
        assert stored.archived == 60
        assert stored.owner == rival.member


def test_run_once_shows_its_progress_at_a_terminal(stored: StoredStream) -> None:
    stored.fill(60)
    with at_terminal(stored, "run", "--once", STREAM) as terminal:
        assert terminal.wait() == 0
        assert f"archiving {STREAM}".encode() in terminal.output
        assert "archived 60 new records" in terminal.text


# Without a store


COMMANDS = [["ls"], ["verify"], ["compact"], ["run"], ["expire", "--offset", "1", "--yes"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_command_for_a_stream_without_a_store_prints_a_hint(url: str, command: list[str]) -> None:
    with meteor.connect(url) as m:
        m.stream("plain", create=True)
    name, *options = command
    done = run_meteor(url, "archive", name, "plain", *options)
    assert (done.code, done.out) == (1, b"")
    assert "`meteor streams create NAME --store DIR`" in done.err
    assert "client." not in done.err
    done = run_meteor(url, "archive", name, "nowhere", *options)
    assert done.code == 1
    assert "There is no stream 'nowhere'" in done.err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_missing_store_is_an_error_and_the_store_option_finds_a_moved_store(
    stored: StoredStream, command: list[str]
) -> None:
    stored.fill(60)
    stored.archive()
    moved = stored.root.with_name("moved")
    stored.root.rename(moved)
    name, *options = command
    done = run_meteor(stored.url, "archive", name, STREAM, *options)
    assert (done.code, done.out) == (1, b"")
    assert "There is no store" in done.err
    assert not stored.root.exists()
    options += ["--once"] if name == "run" else []
    succeed(stored.url, "archive", name, STREAM, *options, "--store", str(moved))


def test_run_without_names_needs_a_stream_with_a_store(url: str) -> None:
    with meteor.connect(url) as m:
        m.stream("plain", create=True)
    done = run_meteor(url, "archive", "run")
    assert done.code == 1
    assert "no stream has a store. `meteor streams create" in done.err


def test_run_without_names_skips_unreachable_stores(stored: StoredStream, tmp_path: Path) -> None:
    other = stored.client.stream("other", store=tmp_path / "elsewhere", archive=False)
    stored.client.stream("hidden", store=meteor.MemoryStore("hidden"), archive=False)
    fill(other, 70)
    stored.root.rename(stored.root.with_name("away"))
    done = succeed(stored.url, "archive", "run", "--once")
    assert f"skipping stream {STREAM!r}: " in done.err
    assert "skipping stream 'hidden': " in done.err
    assert "client." not in done.err
    assert other.describe().archived == 70
    other.delete()
    assert run_meteor(stored.url, "archive", "run", "--once").code == 1
