"""Group members in other processes, and the group as the server sees it.

    with GroupHarness(url) as harness:
        harness.fill(3)
        first, second = harness.members(2, lease_ttl=0.5)
        assert first.poll() == [0, 1, 2]
        first.kill()
        assert second.poll(10) == [0, 1, 2]

A `Member` is a child process with one subscriber. It executes one command at a time and replies to
each. Every wait for a reply has a deadline. The process never outlives the test.
"""

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import redis

import meteor_py as meteor
from meteor_py.redis import keys
from meteor_py.testing.watchdog import Watchdog
from tests.support.forking import exit_code, fork
from tests.support.preloaded_process import PreloadedProcess
from tests.support.readers import check_values, fill

STREAM = "orders"
GROUP = "billing"

#: Seconds to wait for a reply, in addition to the command's own timeout.
ANSWER_S = 30.0

_ROOT = Path(__file__).resolve().parents[2]


class Refused(Exception):
    """A command failed in a member: the library raised ``kind``."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class State(NamedTuple):
    """The state that a member reports."""

    assigned: bool
    term: int | None
    position: int
    confirmed: int


class Process:
    """A child process that exchanges lines of text with the test and never outlives it."""

    def __init__(self, *args: str) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="meteor-member-"))
        self._log = self._directory / "log"
        with self._log.open("wb") as log:
            self._process = PreloadedProcess(
                args,
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C must interrupt only the tests
            )
        self._watchdog = Watchdog(self._directory)
        self._watchdog.guard(self._process.pid)
        self._received = b""

    def write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    def read(self, within_s: float = ANSWER_S) -> str:
        """Return the next output line."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + within_s
        while b"\n" not in self._received:
            left = max(deadline - time.monotonic(), 0.0)
            if not select.select([self._process.stdout], [], [], left)[0]:
                raise AssertionError(f"No line within {within_s:g} s. The log: {self._words()}")
            part = self._process.stdout.read(65_536)
            if not part:
                raise AssertionError(f"The process has ended. Its log: {self._words()}")
            self._received += part
        line, self._received = self._received.split(b"\n", 1)
        return line.decode()

    def kill(self) -> None:
        """Send SIGKILL and wait for the exit."""
        self._process.kill()
        self._process.wait(ANSWER_S)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def pause(self) -> None:
        """Send SIGSTOP and wait until it takes effect."""
        self._process.pause(ANSWER_S)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def wait(self) -> int:
        """Wait until the process exits; return its exit code."""
        return self._process.wait(ANSWER_S)

    def close(self) -> None:
        """Kill the process if it is still running. Idempotent."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._watchdog.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _words(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


class Member(Process):
    """A process with one subscriber. The first command waits until the process is ready."""

    def __init__(self, url: str, stream: str, group: str, **options: Any) -> None:
        orders = {"url": url, "stream": stream, "group": group, "options": options}
        super().__init__("-m", "tests.support.group_members", json.dumps(orders))
        self._name: str | None = None
        self._unanswered = 0

    @property
    def name(self) -> str:
        """The member's name as a lease owner; waits until the member is ready."""
        if self._name is None:
            self._name = json.loads(self.read())["value"]
        return self._name

    def ask(self, command: str, /, *args: Any, within_s: float = ANSWER_S) -> Any:
        """Execute a command and return the reply.

        Raises:
            Refused: The library raised an exception.
        """
        self.tell(command, *args)
        return self.answer(within_s)

    def tell(self, command: str, /, *args: Any) -> None:
        """Send a command without waiting; ``answer`` returns the reply."""
        assert self.name
        assert not self._unanswered, "the member is still executing a command"
        self.write(json.dumps([command, *args]))
        self._unanswered += 1

    def answer(self, within_s: float = ANSWER_S) -> Any:
        answer = json.loads(self.read(within_s))
        self._unanswered -= 1
        if "error" in answer:
            raise Refused(answer["error"], answer["text"])
        return answer["value"]

    def poll(self, timeout: float = 5.0, max_records: int = 10_000) -> list[int]:
        """Poll once; return the batch's offsets. The member checks the record values."""
        offsets: list[int] = self.ask("poll", timeout, max_records, within_s=timeout + ANSWER_S)
        return offsets

    def step(self, number: int = 1) -> list[int]:
        """Return the offsets of the next ``number`` records in the member's loop."""
        offsets: list[int] = self.ask("step", number)
        return offsets

    def confirm(self, offset: int | None = None) -> int:
        """Confirm, and return the Ack's result."""
        confirmed: int = self.ask("confirm", offset)
        return confirmed

    @property
    def state(self) -> State:
        return State(*self.ask("state"))


class Event(NamedTuple):
    """A change in the group, timed by the server's clock."""

    ms: int
    what: str
    member: str
    term: int


class GroupHarness:
    """A stream, a group on it, and the group's members. Closes everything that it opened."""

    def __init__(self, url: str, group: str = GROUP, **settings: Any) -> None:
        self.url = url
        self.group = group
        self._settings = settings
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.client = self._stack.enter_context(meteor.connect(self.url))
        self.stream = self.client.stream(STREAM, create=True, **self._settings)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def redis(self) -> redis.Redis:
        return self.client.redis

    # -- members -------------------------------------------------------------------------------

    def member(self, *, url: str = "", group: str = "", **options: Any) -> Member:
        """Start a member in another process."""
        member = Member(url or self.url, STREAM, group or self.group, **options)
        self._stack.callback(member.close)
        return member

    def members(self, number: int, **options: Any) -> list[Member]:
        """Start several members at once, and wait until they are ready."""
        members = [self.member(**options) for _ in range(number)]
        assert len({member.name for member in members}) == number
        return members

    def program(self, text: str, *args: str) -> Process:
        """Start a program in another process; its first argument is the URL."""
        process = Process("-c", text, self.url, *args)
        self._stack.callback(process.close)
        return process

    def subscriber(self, **options: Any) -> meteor.Subscriber:
        """Open a subscriber in this process."""
        settings: dict[str, Any] = {"group": self.group} | options
        subscriber = self.stream.subscriber(**settings)
        self._stack.callback(discard, subscriber)
        return subscriber

    def fill(self, *sizes: int) -> int:
        """Append frames of these sizes; return the next offset."""
        return fill(self.stream, *sizes)

    # -- the group as the server sees it -------------------------------------------------------

    def field(self, name: str) -> str | None:
        found: Any = self.redis.hget(keys.group(STREAM, self.group), name)
        return None if found is None else found.decode()

    def set_fields(self, **fields: str | int) -> None:
        self.redis.hset(keys.group(STREAM, self.group), mapping=fields)  # type: ignore[arg-type]

    @property
    def confirmed(self) -> int | None:
        """The confirmed offset; None if nothing was ever confirmed."""
        found = self.field("confirmed")
        return None if found is None else int(found)

    @property
    def owner(self) -> str | None:
        """The member that holds the lease; None if the lease is free."""
        found: Any = self.redis.get(keys.lease(STREAM, self.group))
        return None if found is None else found.decode().partition(" ")[0]

    @property
    def lease_left_ms(self) -> int:
        """Milliseconds until the lease expires; -2 if it is free."""
        left: Any = self.redis.pttl(keys.lease(STREAM, self.group))
        return int(left)

    def take_away(self, member: str = "somebody") -> None:
        """Assign the lease to another member in Redis, as if that member had acquired it."""
        term = int(self.field("term") or 0) + 1
        self.set_fields(term=term, owner=member, nonce="another nonce")
        self.redis.set(keys.lease(STREAM, self.group), f"{member} {term}")

    def server_ms(self) -> int:
        seconds, micros = self.redis.time()
        return int(seconds * 1000 + micros // 1000)

    def events(self, *what: str) -> list[Event]:
        """Return this group's events, or only those of the given kinds."""
        found: Any = self.redis.xrange(keys.events(STREAM))
        events: list[Event] = []
        for entry_id, raw in found:
            fields = {key.decode(): value.decode() for key, value in raw.items()}
            if fields["group"] == self.group and (not what or fields["event"] in what):
                ms = int(entry_id.split(b"-")[0])
                member, term = fields.get("member", ""), int(fields.get("term", 0))
                events.append(Event(ms, fields["event"], member, term))
        return events


def discard(subscriber: meteor.Subscriber) -> None:
    """Close a subscriber, ignoring errors."""
    try:
        subscriber.close()
    except meteor.MeteorError:
        pass


# The child process


class _Child:
    """The commands that a member executes, one method each."""

    def __init__(self, url: str, stream: str, group: str, options: dict[str, Any]) -> None:
        self.client = meteor.connect(url)
        self.stream = self.client.stream(stream, create=False)
        self.subscriber = self.stream.subscriber(group=group, **options)
        self.loop: Iterator[meteor.Record] | None = None

    def poll(self, timeout: float, max_records: int) -> list[int]:
        return check_values(self.subscriber.poll(timeout, max_records))

    def confirm(self, offset: int | None) -> int:
        return self.subscriber.confirm(offset).result(ANSWER_S)

    def confirm_and_close(self) -> None:
        self.subscriber.confirm()
        self.subscriber.close()

    def state(self) -> State:
        sub = self.subscriber
        return State(sub.is_assigned, sub.term, sub.position, sub.confirmed)

    def take(self, number: int, pause_s: float) -> list[int]:
        """Iterate over records, confirming each after ``pause_s`` seconds of simulated work.

        Return the offsets of the first ``number`` records.
        """
        offsets: list[int] = []
        for record in self.subscriber:
            time.sleep(pause_s)
            self.subscriber.confirm()
            offsets.append(record.offset)
            if len(offsets) == number:
                return offsets
        raise RuntimeError("The loop over the records ended.")

    def step(self, number: int) -> list[int]:
        """Take records from the member's endless loop, which only an error ends."""
        loop = self.loop or iter(self.subscriber)
        self.loop = None
        offsets = [next(loop).offset for _ in range(number)]
        self.loop = loop
        return offsets

    def receive(self, fails: int) -> str:
        """Run a receiver until its handler raises; return the receiver's error."""

        def handle(record: meteor.Record) -> None:
            if record.offset == fails:
                raise ValueError(f"no {fails}")

        receiver = self.subscriber.attach_receiver(handle)
        receiver.join()
        return repr(receiver.error)

    def hang(self, seconds: float) -> None:
        """Sleep instead of polling, like a slow or stuck application."""
        time.sleep(seconds)

    def close(self) -> None:
        self.subscriber.close()

    def deactivate(self) -> None:
        self.subscriber.deactivate()

    def reactivate(self) -> None:
        self.subscriber.reactivate()

    def close_client(self) -> None:
        self.client.close()

    def drop(self) -> None:
        """Drop the subscriber without closing it."""
        del self.subscriber
        gc.collect()

    def leave(self) -> NoReturn:
        """Exit without closing anything."""
        raise SystemExit(0)

    def leave_with_confirm(self) -> NoReturn:
        self.subscriber.confirm()
        raise SystemExit(0)

    def fork(self) -> list[str]:
        """Fork a child that uses the inherited subscriber and exits.

        Return the name of the error from each call ("none" if it succeeded), and the exit code.
        """
        reading, writing = os.pipe()
        pid = fork()
        if pid == 0:
            os.close(reading)
            sub = self.subscriber
            tries = (sub.poll, sub.confirm, sub.deactivate, sub.reactivate, lambda: sub.term)
            told = "".join(f"{_error_of(each)}\n" for each in tries)
            os.write(writing, told.encode())
            sub.close()
            raise SystemExit(0)
        os.close(writing)
        code = exit_code(pid)
        with os.fdopen(reading) as pipe:
            return [*pipe.read().split(), str(code)]


def _error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "none"


def main() -> None:
    child = _Child(**json.loads(sys.argv[1]))
    answer({"value": child.subscriber.member})
    serve(child)


def serve(child: object) -> None:
    """Execute the command on each input line and reply, until the input ends."""
    for line in sys.stdin:
        command, *args = json.loads(line)
        try:
            answer({"value": getattr(child, command)(*args)})
        except Exception as error:
            answer({"error": type(error).__name__, "text": str(error)})


def answer(words: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
