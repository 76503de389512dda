"""The crash step of the tour: kills and restarts a server while a publisher is publishing."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import meteor_py as meteor
from meteor_cli.commands.demo.worker import PATIENCE_S, wait_until
from meteor_cli.commands.server import is_alive
from meteor_py.server import open_embedded

RECORDS = 100_000
_CALL = 500
#: Kill the server when this publish_many call, counted from 0, is acknowledged.
_KILL_AFTER = 50
#: Make this many calls before the kill, so that some of them are still in flight.
_ON_THE_WAY = 100
#: Maximum length of the temporary directory's path, so that the path of the server's socket is
#: short enough. With a longer path, the server's address would change when the server restarts.
_DIRECTORY_MAX = 50


@dataclass(frozen=True)
class Outcome:
    #: Seconds from the kill until records were acknowledged again.
    pause_s: float
    #: Whether the stream has each record exactly once, in order.
    complete: bool
    #: Acknowledged records that the server lost because the disk was too slow.
    lost: range


def crash(advance: Callable[[int], None]) -> Outcome:
    """Kill and restart a private server, never the ``--url`` server, while publishing."""
    root = tempfile.gettempdir()
    with (
        warnings.catch_warnings(),
        tempfile.TemporaryDirectory(
            prefix="meteor-demo-", dir="/tmp" if len(root) > _DIRECTORY_MAX else root
        ) as directory,
        open_embedded(directory) as server,
        meteor.connect(server.url) as m,
    ):
        warnings.simplefilter("ignore", meteor.DataSafetyWarning)
        stream = m.stream("crash", capacity=RECORDS)
        lost = range(0)
        pause_s = 0.0
        try:
            pause_s = _publish(stream, server.pid, directory, advance)
        except meteor.LogTruncated as error:
            lost = range(error.first, error.last + 1)
        found = [value for batch in stream.read() for value in batch.values()]
        return Outcome(pause_s, found == [b"%d" % n for n in range(RECORDS)], lost)


def _publish(
    stream: meteor.Stream, pid: int, directory: str, advance: Callable[[int], None]
) -> float:
    """Publish all records, killing and restarting the server in between.

    Returns:
        Seconds from the kill until records published after it were acknowledged.
    """
    calls = [[b"%d" % n for n in range(start, start + _CALL)] for start in range(0, RECORDS, _CALL)]
    with ExitStack() as stack:
        pub = stream.publisher()
        stack.callback(_abandon, pub)
        acks = [pub.publish_many(call) for call in calls[:_ON_THE_WAY]]
        acks[_KILL_AFTER].result(PATIENCE_S)
        killed_at = time.perf_counter()
        _kill(pid)
        acks += [pub.publish_many(call) for call in calls[_ON_THE_WAY:]]
        stack.enter_context(open_embedded(directory))
        acks[_ON_THE_WAY].result(PATIENCE_S)
        pause_s = time.perf_counter() - killed_at
        for number, ack in enumerate(acks, 1):
            ack.result(PATIENCE_S)
            advance(number * _CALL)
        return pause_s


def _kill(pid: int) -> None:
    """Kill a process and wait until it has ended, because it could still reply until then."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), f"Server {pid} was killed but is still running")


def _abandon(pub: meteor.Publisher) -> None:
    """Close a publisher without waiting for its server, which may be gone after Ctrl-C."""
    try:
        pub.close(timeout=0)
    except meteor.MeteorError:
        pass  # publishing has already ended with an error or Ctrl-C
