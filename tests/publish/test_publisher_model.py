"""Under random faults, the reports of publishers and subscribers match the log.

An acknowledged record is in the log once, at its ack's offset. A failed record is not there. A
record with an unknown outcome is there at most once. The log is in publishing order. After
failovers that lose records, the losses reported to each client are exactly the missing records.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Literal

import pytest

import meteor_py as meteor
from tests.conftest import ServerFactory
from tests.support.proxied_stream import ProxiedStream, ReplicatedStream
from tests.support.proxy_link import Fault
from tests.support.servers import Replica, binaries
from tests.support.waiting import eventually

FAULTS = 20
#: Errors after which a record may be in the log. After ``NotReplicated``, it is.
UNSURE = (meteor.OutcomeUnknown, meteor.NotReplicated)


class Faults:
    """Injects faults into a server and the connections to it."""

    def __init__(self, proxied: ProxiedStream, rng: random.Random) -> None:
        self.proxied = proxied
        self.rng = rng

    def happen(self) -> str:
        fault = self.rng.choice(
            [self.chaos, self.cut, self.refuse, self.flush_scripts, self.forbid, self.fill_up,
             self.fill_memory, self.pause, self.stall, self.kill, self.nothing]
        )  # fmt: skip
        fault()
        return fault.__name__

    def wait(self, longest: float = 0.15) -> None:
        """Wait for a fault's random duration."""
        time.sleep(self.rng.uniform(0, longest))

    def nothing(self) -> None:
        self.wait()

    def chaos(self) -> None:
        faults: list[Fault] = ["lost_reply", "torn_reply", "late_reply", "lost_request"]
        self.proxied.proxy.chaos(random.Random(self.rng.random()), 0.4, faults)
        self.wait(0.5)
        self.proxied.proxy.heal()

    def cut(self) -> None:
        cut = self.rng.choice(
            [self.proxied.proxy.cut_after_request, self.proxied.proxy.cut_before_request]
        )
        cut(self.rng.randint(1, 6), match=b"EVAL")
        self.wait()

    def refuse(self) -> None:
        self.proxied.proxy.refuse()
        self.proxied.proxy.cut()
        self.wait(0.6)
        self.proxied.proxy.accept()

    def flush_scripts(self) -> None:
        for _ in range(self.rng.randint(1, 20)):
            self.proxied.direct.script_flush()

    def forbid(self) -> None:
        command = self.rng.choice(["evalsha", "eval", "xadd", "hmget", "info"])
        with self._rule(f"-{command}", f"+{command}"):
            if self.rng.random() < 0.5:
                self.proxied.direct.script_flush()
            if self.rng.random() < 0.5:
                self.proxied.proxy.cut()
            self.wait(0.05)

    @contextmanager
    def _rule(self, begin: str, end: str) -> Iterator[None]:
        self.proxied.direct.execute_command("ACL", "SETUSER", "app", begin)
        yield
        self.proxied.direct.execute_command("ACL", "SETUSER", "app", end)

    def fill_up(self) -> None:
        self.proxied.set_meta(archived=0, max_unarchived=max(self.proxied.next, 0))
        self.wait(0.6)
        self.proxied.set_meta(max_unarchived=10**9)

    def fill_memory(self) -> None:
        self.proxied.direct.config_set("maxmemory", 1)
        self.wait(0.6)
        self.proxied.direct.config_set("maxmemory", 0)

    def pause(self) -> None:
        self.proxied.server.pause()
        self.wait(0.6)
        self.proxied.server.resume()

    def stall(self) -> None:
        self.proxied.proxy.stall(self.rng.choice(["requests", "replies", "both"]))
        self.wait(0.6)
        self.proxied.proxy.resume()

    def kill(self) -> None:
        self.proxied.server.kill()
        self.wait(0.3)
        self.proxied.server.start()


def check(log: list[bytes], acks: list[meteor.Ack]) -> dict[str, int]:
    """Check that the acks match the log; return how often each outcome occurred."""
    numbers = [int(value) for value in log]
    assert numbers == sorted(set(numbers)), "the log has duplicates or is out of order"
    present = set(numbers)
    outcomes: dict[str, int] = {}
    for number, ack in enumerate(acks):
        error = ack.exception(0)
        outcomes[type(error).__name__] = outcomes.get(type(error).__name__, 0) + 1
        if error is None:
            assert numbers[ack.result()] == number, f"record {number} is not where its ack says"
        elif isinstance(error, meteor.NotReplicated):
            assert numbers[error.offset] == number
        elif not isinstance(error, UNSURE):
            assert number not in present, f"record {number} was written, but failed: {error!r}"
    return outcomes


@pytest.mark.filterwarnings("ignore::meteor_py.DataSafetyWarning")
@pytest.mark.parametrize(("kind", "acks"), [("valkey", 0), ("redis", 0), ("valkey", 1)])
def test_under_random_faults_acks_are_correct_and_nothing_is_duplicated_or_reordered(
    private_server: ServerFactory, rng: random.Random, kind: Literal["valkey", "redis"], acks: int
) -> None:
    server = private_server(
        *("--appendonly", "yes", "--appendfsync", "always"),
        *("--user", "app", "on", "nopass", "~*", "&*", "+@all"),
        kind=kind,
    )
    published: list[meteor.Ack] = []
    stop = threading.Event()
    with ExitStack() as stack:
        # Small frames of seven records keep the window full.
        proxied = stack.enter_context(ProxiedStream(server, capacity=7, user="app"))
        pub = proxied.publisher(acks=acks, delivery_timeout=rng.choice([0.4, 1.0, 3.0]))
        if acks:
            stack.enter_context(Replica(server))
        proxied.stream.configure(capacity=10_000_000)

        def publish() -> None:
            chooser = random.Random(rng.random())
            while not stop.is_set():
                for _ in range(chooser.choice([1, 3, 30, 100])):
                    published.append(pub.publish(b"%d" % len(published)))
                stop.wait(chooser.uniform(0, 0.02))

        thread = threading.Thread(target=publish)
        thread.start()
        faults = Faults(proxied, rng)
        try:
            happened = [faults.happen() for _ in range(FAULTS)]
        finally:
            stop.set()
            thread.join()
            proxied.proxy.heal()
        with suppress(meteor.MeteorError):  # some records have failed
            pub.flush(20)

        def delivers() -> bool:
            published.append(pub.publish(b"%d" % len(published)))
            return published[-1].exception(10) is None

        eventually(delivers, 20, "the publisher did not recover")
        outcomes = check(proxied.values(), published)
        print(kind, dict(sorted(outcomes.items())), happened)
        # With acks=1, most records are NotReplicated if the replica is usually disconnected.
        assert outcomes["NoneType"] + outcomes.get("NotReplicated", 0) > 10


class TrackingSubscriber:
    """A subscriber that stores the records it has read, and removes those reported as lost."""

    def __init__(self, proxied: ProxiedStream) -> None:
        self.seen: dict[int, bytes] = {}
        self.losses: list[tuple[int, int]] = []
        self._sub = proxied.subscriber(initial_offset="earliest")

    def knows(self, log: dict[int, bytes]) -> bool:
        self.poll()
        return self.seen == log

    def poll(self) -> None:
        try:
            batch = self._sub.poll(0.05, max_records=50)
        except meteor.LogTruncated as error:
            self.losses.append((error.first, error.last))
            for offset in range(error.first, error.last + 1):
                del self.seen[offset]  # KeyError if the subscriber never read the lost record
            self._sub.skip_gap()
        except meteor.ConnectionFailed:
            pass
        else:
            for record in batch:
                assert record.offset not in self.seen, "a record was returned twice"
                self.seen[record.offset] = record.value


class TrackingPublisher:
    """A publisher that stores acknowledged records, and removes those reported as lost."""

    def __init__(self, proxied: ProxiedStream, name: str, acks: int) -> None:
        self.acked: dict[int, bytes] = {}
        self.losses: list[tuple[int, int]] = []
        self._name = name
        self._number = 0
        self._waiting: list[tuple[bytes, meteor.Ack]] = []
        self._pub = proxied.publisher(acks=acks)

    def publish(self) -> None:
        try:
            value = f"{self._name}{self._number}".encode()
            self._waiting.append((value, self._pub.publish(value)))
            self._number += 1
        except meteor.LogTruncated as error:
            self._lose(error)
        self._collect()

    def finish(self) -> None:
        while self._waiting:
            self._waiting[0][1].exception(20)
            self._collect()
        self.publish()
        try:
            self._pub.flush(20)
        except meteor.LogTruncated as error:
            self._lose(error)
        self._collect()

    def _collect(self) -> None:
        while self._waiting and self._waiting[0][1].done():
            value, ack = self._waiting.pop(0)
            error = ack.exception()
            if isinstance(error, meteor.LogTruncated):
                self._lose(error)
            elif error is None:
                self.acked[ack.result()] = value
            else:
                raise error

    def _lose(self, error: meteor.LogTruncated) -> None:
        self.losses.append((error.first, error.last))
        for offset in range(error.first, error.last + 1):
            self.acked.pop(offset, None)


def test_after_random_failovers_clients_know_exactly_which_records_are_in_the_log(
    private_server: ServerFactory, rng: random.Random
) -> None:
    with ExitStack() as stack:
        replicated = ReplicatedStream(
            stack, private_server(kind="redis" if "redis" in binaries() else "valkey")
        )
        proxied = replicated.proxied
        tellers = [
            TrackingPublisher(proxied, "a", 0),
            TrackingPublisher(proxied, "b", 0),
            TrackingPublisher(proxied, "c", 1),
        ]
        followers = [TrackingSubscriber(proxied) for _ in range(3)]

        def live(steps: int, busy: float) -> None:
            for _ in range(steps):
                if rng.random() < busy:
                    rng.choice(tellers).publish()
                if rng.random() < 0.3:
                    rng.choice(followers).poll()

        for _ in range(3):
            live(rng.randint(0, 60), 0.8)
            replicated.lag()
            live(rng.randint(0, 60), rng.choice([0.2, 0.8]))
            replicated.fail_over()
            live(rng.randint(0, 60), rng.choice([0.0, 0.5]))
            replicated.link, replicated.replica = replicated.add_replica()
        for teller in tellers:
            teller.finish()
        log = {record.offset: record.value for batch in proxied.stream.read() for record in batch}
        for follower in followers:
            eventually(partial(follower.knows, log), message="a subscriber does not match the log")
        for teller in tellers:
            assert teller.acked.items() <= log.items()
        assert len(set(log.values())) == len(log)
        print([teller.losses for teller in tellers], [follower.losses for follower in followers])
