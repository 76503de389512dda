"""A stream with a store, and archivers in this process or in child processes that fail on purpose.

    with StoredStream(url, tmp_path) as stored:
        end = stored.fill(1000)
        stored.process(fault="kill before rename").wait()
        stored.archiver()
        stored.check(end)

A fault such as "kill before rename" says how and when a process fails. It consists of "kill"
(SIGKILL) or "stop" (SIGSTOP), "before" or "after", a commit step and, optionally, the number of the
call at which that step fails (1 by default). The steps are functions of meteor_py and ``os``, which
are wrapped only in that process.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import meteor_py as meteor
from meteor_py.archive.archive_term import ArchiveTerm
from meteor_py.redis import keys
from meteor_py.store import segment_log
from tests.support.forking import exit_code, fork
from tests.support.group_members import (
    ANSWER_S,
    STREAM,
    GroupHarness,
    Process,
    Refused,
    answer,
    serve,
)
from tests.support.readers import check_values, value
from tests.support.waiting import eventually

#: Lease times in seconds: one that expires during a test, and one that does not.
SHORT_S = 0.4
LONG_S = 60.0

#: The commit steps that a fault can name, with the function that performs each.
STEPS: dict[str, tuple[Any, str]] = {
    "append": (meteor.ParquetStore, "append"),
    "state": (meteor.ParquetStore, "save_state"),
    "write": (segment_log, "write"),
    "fsync": (os, "fsync"),
    "rename": (os, "rename"),
    "advance": (ArchiveTerm, "_advance"),
}


def _may_mount() -> bool:
    """Return whether this process can mount directories. Root can, except in some containers."""
    try:
        tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, timeout=10)
    except OSError:
        return False  # unshare is not installed
    return tried.returncode == 0


needs_mounts = pytest.mark.skipif(not _may_mount(), reason="This process cannot mount directories.")


class StoredStream(GroupHarness):
    """A stream with a store, and its group of archivers. Starts no archiver by itself."""

    def __init__(self, url: str, root: Path, **settings: Any) -> None:
        defaults = {"capacity": 100, "archive": False}
        super().__init__(url, keys.ARCHIVERS, store=root, **defaults | settings)
        self.root = root

    def open(self, **options: Any) -> None:
        """Open the stream again, and use this handle from now on."""
        self.stream = self.client.stream(STREAM, **self._settings | options)

    def archiver(self, **options: Any) -> meteor.Archiver:
        """Start an archiver in this process that writes records without waiting for more."""
        settings = {"segment_age": 0.0, "lease_ttl": LONG_S} | options
        archiver = self.stream.archiver(**settings)
        self._stack.callback(archiver.close)
        return archiver.start()

    def archive(self) -> None:
        """Archive all records."""
        with self.archiver():
            self.stream.store.flush()

    def process(self, fault: str = "", **options: Any) -> ArchiverProcess:
        """Start an archiver in another process. See ``_Child`` for the options."""
        process = ArchiverProcess(self.url, self.root, fault, **options)
        self._stack.callback(process.close)
        return process

    def another_client(self) -> meteor.Client:
        return self._stack.enter_context(meteor.connect(self.url))

    # -- state ---------------------------------------------------------------------------------

    def fields(self, *names: str) -> list[bytes | None]:
        """Return fields from the stream's meta key."""
        found: Any = self.redis.hmget(keys.meta(STREAM), names)
        return list(found)

    @property
    def archived(self) -> int:
        return int(self.fields("archived")[0] or -1)

    def wait_archived(self, offset: int, timeout_s: float = 20) -> None:
        eventually(lambda: self.archived >= offset, timeout_s, f"offset {offset} was not archived")

    def ring(self) -> list[int]:
        """Return the first offset of each frame in the ring."""
        found: Any = self.redis.xrange(keys.log(STREAM))
        ids = [entry_id.decode().split("-") for entry_id, _ in found]
        return [int(last) - int(count) + 1 for last, count in ids]

    def files(self) -> list[str]:
        """Return the paths of all files in the store."""
        return files_in(self.root)

    def segments(self) -> list[str]:
        """Return the names of all visible segments."""
        names = (name.rpartition("/")[2] for name in self.files())
        return sorted(name for name in names if name.endswith(".parquet"))

    def stored(self) -> list[int]:
        """Return the offsets in the stream's segment files, after checking the record values."""
        offsets: list[int] = []
        for path in self.stream.store.files():
            table = pq.ParquetFile(path).read()
            part = table.column("offset").to_pylist()
            assert table.column("value").to_pylist() == [value(offset) for offset in part]
            offsets += part
        return offsets

    def read(self) -> list[int]:
        return offsets_of(self.stream)

    def harm(self) -> list[meteor.Flaw]:
        return harm_of(self.stream)

    def check(self, end: int) -> None:
        """Wait until all records are archived, and check that each is stored once and read once.

        Also check that the store has no harmful flaws, and that the ring was trimmed.
        """
        assert self.stream.store.flush() == end
        assert self.read() == self.stored() == list(range(end))
        assert self.harm() == []
        assert self.ring()[0] >= end - 2 * self.stream.config.capacity


def offsets_of(stream: meteor.Stream) -> list[int]:
    """Return the offsets of all records, after checking their values."""
    return [offset for batch in stream.read() for offset in check_values(batch)]


def harm_of(stream: meteor.Stream) -> list[meteor.Flaw]:
    """Return the harmful flaws in a store."""
    return [flaw for flaw in stream.store.verify() if not flaw.harmless]


def files_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def archiver_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("meteor-archiver")]


class ArchiverProcess(Process):
    """A process with one archiver."""

    def __init__(self, url: str, root: Path, fault: str, **options: Any) -> None:
        orders = {"url": url, "root": str(root), "fault": fault} | options
        super().__init__("-m", "tests.support.archivers", json.dumps(orders))
        self._ready = False

    def ready(self) -> None:
        """Wait until the process is archiving.

        Raises:
            Refused: The library raised an exception.
        """
        if not self._ready:
            self._ready = True
            self._answer()

    def ask(self, command: str, /, *args: Any) -> Any:
        """Execute a command and return the reply.

        Raises:
            Refused: The library raised an exception.
        """
        self.ready()
        self.write(json.dumps([command, *args]))
        return self._answer()

    def _answer(self) -> Any:
        answer = json.loads(self.read())
        if "error" in answer:
            raise Refused(answer["error"], answer["text"])
        return answer["value"]

    def wait_killed(self) -> None:
        """Wait until the process has killed itself."""
        assert self.wait() == -signal.SIGKILL

    def wait_stopped(self) -> None:
        """Wait until the process has stopped itself."""
        self._process.wait_stopped(ANSWER_S)


# The child process


class _Child:
    """The commands of a process, one method each.

    Args:
        bind: Maps mount points to the directories to mount there. Only this process sees these
            mounts, so it can see a different store, like a process on another host.
        background: Have the client archive in the background, and start no explicit archiver.
        archiver: Settings for the archiver.
    """

    def __init__(
        self,
        url: str,
        root: str,
        fault: str,
        bind: dict[str, str] | None = None,
        background: bool = False,
        **archiver: Any,
    ) -> None:
        for place, other in (bind or {}).items():
            self.mount(other, place)
        self.refusals: list[str] = []  # names of the errors from refused commits
        self._note_refusals()
        if fault:
            plant(fault)
        self.client = meteor.connect(url)
        self.archiver: meteor.Archiver | None = None
        self.stream = self.client.stream(STREAM, store=root, archive=background)
        if not background:
            settings = {"segment_age": 0.0, "lease_ttl": SHORT_S} | archiver
            self.archiver = self.stream.archiver(**settings).start()

    def _note_refusals(self) -> None:
        advance = ArchiveTerm._advance

        def noting(archive_term: ArchiveTerm, to: int) -> None:
            try:
                advance(archive_term, to)
            except Exception as error:
                self.refusals.append(type(error).__name__)
                raise

        setattr(ArchiveTerm, "_advance", noting)  # noqa: B010 - mypy rejects an assignment

    def refused(self) -> list[str]:
        return self.refusals

    def error(self) -> str | None:
        """Return the class name of the last error, if any."""
        assert self.archiver is not None
        return type(self.archiver.error).__name__ if self.archiver.error else None

    def alive(self) -> bool:
        return bool(archiver_threads())

    def mount(self, directory: str, place: str) -> None:
        """Mount one directory over another, in this process only."""
        subprocess.run(["mount", "--bind", directory, place], check=True, timeout=ANSWER_S)

    def read(self) -> list[int]:
        return offsets_of(self.stream)

    def close(self) -> None:
        self.client.close()
        if self.archiver is not None:
            self.archiver.close()

    def fork(self) -> list[str]:
        """Fork a child that closes its client and exits.

        Return the names of the child's archiver threads, in one string, and its exit code.
        """
        reading, writing = os.pipe()
        pid = fork()
        if pid == 0:
            os.close(reading)
            os.write(writing, "".join(each.name for each in archiver_threads()).encode())
            self.client.close()
            raise SystemExit(0)
        os.close(writing)
        code = exit_code(pid)
        with os.fdopen(reading) as pipe:
            return [pipe.read(), str(code)]


def plant(fault: str) -> None:
    """Make this process fail as ``fault`` describes."""
    what, when, step, number = (*fault.split(), "1")[:4]
    owner, name = STEPS[step]
    taken: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def fail(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        due = calls == int(number)
        if due and when == "before":
            _fail(what)
        result = taken(*args, **options)
        if due and when == "after":
            _fail(what)
        return result

    setattr(owner, name, fail)


def _fail(what: str) -> None:
    # Signal this thread, not the process: the kernel could stop another thread first, and this
    # one would continue past the step.
    how = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what]
    signal.pthread_kill(threading.get_ident(), how)


def main() -> None:
    orders = json.loads(sys.argv[1])
    if "bind" in orders and "unshared" not in sys.argv:  # get private mounts first
        program = [sys.executable, "-m", "tests.support.archivers", sys.argv[1], "unshared"]
        os.execvp("unshare", ["unshare", "--mount", *program])
    logging.basicConfig(level=logging.INFO)  # shown when a test fails
    try:
        child = _Child(**orders)
    except Exception as error:
        answer({"error": type(error).__name__, "text": str(error)})
        return
    answer({"value": None})
    serve(child)


if __name__ == "__main__":
    main()
