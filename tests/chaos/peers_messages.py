"""Messages between processes that are killed, paused and replaced; part of ``make chaos``.

Some messages are poison, and the network loses requests and replies.

Every message is handled or becomes a dead letter. Messages from one sender to one named member are
handled in order. A poison message kills at most ``max_deliveries`` processes and becomes a dead
letter. Any other message becomes a dead letter only if about as many processes died while handling
it, or if its target was ``any`` and no member could take it.

METEOR_CHAOS_S sets the duration of a run in seconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.peers.group import PeerGroup
from tests.conftest import ServerFactory
from tests.support.peering import on_key
from tests.support.preloaded_process import PreloadedProcess
from tests.support.proxy import Proxy
from tests.support.servers import HOST
from tests.support.waiting import eventually

GROUP = "chaos"
TTL_S = 1.0
MAX_DELIVERIES = 5
NAMED = ("n0", "n1", "n2")
UNNAMED = 2
SENDERS = 3
#: Maximum number of unfinished messages per sender.
WINDOW = 100
#: Timeout of a message in seconds. It is longer than a run, so no message expires.
LONG_S = 3_600.0
RUN_S = float(os.environ.get("METEOR_CHAOS_S", "60"))
#: Reasons why a message whose target is ``any`` becomes a dead letter before a member handles it.
UNPLACED = ("no member is left", "it moved too often")


class Workers:
    """The member processes, and the faults injected into them."""

    def __init__(self, url: str, log: Path, rng: random.Random) -> None:
        self._url, self._log, self._rng = url, log, rng
        self.running: dict[str, PreloadedProcess] = {}
        self.faults: Counter[str] = Counter()
        for slot in (*NAMED, *(f"u{n}" for n in range(UNNAMED))):
            self.start(slot)

    def start(self, slot: str) -> None:
        member = slot if slot in NAMED else ""
        self.running[slot] = PreloadedProcess(
            ["-m", "tests.support.peer_worker", self._url, GROUP, member, str(self._log)],
        )

    def step(self) -> None:
        """Restart processes that poison messages have killed. Inject a fault into one process."""
        for slot, process in list(self.running.items()):
            if process.poll() is not None:
                self.faults["poisoned"] += 1
                self.start(slot)
        slot = self._rng.choice(list(self.running))
        process = self.running[slot]
        fault = self._rng.choice(("kill", "kill", "pause", "replace"))
        self.faults[fault] += 1
        if fault == "kill":
            process.kill()
            process.wait()
            self.start(slot)
            return
        process.send_signal(signal.SIGSTOP)
        if fault == "replace":
            self.start(slot)  # the new process takes over the name, or joins under another name
        time.sleep(self._rng.uniform(0.1, 1.8) * TTL_S)
        process.send_signal(signal.SIGCONT)
        if fault == "replace":
            time.sleep(0.3)
            process.kill()
            process.wait()

    def restart_dead(self) -> None:
        for slot, process in list(self.running.items()):
            if process.poll() is not None:
                self.start(slot)

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


class Sender:
    """A thread that sends numbered messages to named members and to ``any``."""

    def __init__(self, group: PeerGroup, number: int, seed: int) -> None:
        self.number = number
        self.sent: list[tuple[dict[str, Any], str, Future[Any]]] = []
        self._group = group
        self._rng = random.Random(seed)
        self._counts: Counter[str] = Counter()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._send_all, daemon=True)
        self.thread.start()

    def _send_all(self) -> None:
        rng = self._rng
        while not self.stopped.is_set():
            to = rng.choice((*NAMED, *NAMED, "any"))
            verb = rng.choice(("tell", "tell", "send", "ask"))
            self._counts[to] += 1
            body = {"s": self.number, "to": to, "n": self._counts[to]}
            body["poison"] = rng.random() < 0.002
            target = self._group.any if to == "any" else self._group.member(to)
            future = getattr(target, verb)("work", body, timeout=LONG_S, wait_for_handler=True)
            self.sent.append((body, verb, future))
            while sum(not f.done() for _, _, f in self.sent[-2 * WINDOW :]) > WINDOW:
                if self.stopped.wait(0.01):
                    return
            time.sleep(0.0005)


@pytest.mark.timeout(RUN_S + 400)
def test_messages_survive_kills_pauses_takeovers_poison_and_lost_replies(
    private_server: ServerFactory, rng: random.Random, tmp_path: Path
) -> None:
    server, log = private_server(), tmp_path / "deliveries"
    with Proxy(HOST, server.port) as proxy, meteor.connect(server.url) as m:
        watcher = m.peer_group(GROUP, ttl=TTL_S, max_deliveries=MAX_DELIVERIES)
        workers = Workers(proxy.url, log, rng)
        clients = [meteor.connect(proxy.url) for _ in range(SENDERS)]
        try:
            eventually(lambda: {*NAMED} <= {one.id for one in watcher.members}, 60)
            senders = [
                Sender(client.peer_group(GROUP), number, rng.randrange(1 << 32))
                for number, client in enumerate(clients)
            ]
            proxy.chaos(rng, 0.002, ("lost_reply", "lost_request", "torn_reply", "late_reply"))
            ends = time.monotonic() + RUN_S
            while time.monotonic() < ends:
                workers.step()
                time.sleep(rng.uniform(0.0, 0.5))
            for sender in senders:
                sender.stopped.set()
                sender.thread.join(60)
            proxy.heal()
            sent = [one for sender in senders for one in sender.sent]
            await_all(watcher, workers, sent)
            check(watcher, sent, log, workers.faults)
        finally:
            workers.close()
            for client in clients:
                client.close()


def await_all(
    watcher: PeerGroup, workers: Workers, sent: list[tuple[dict[str, Any], str, Future[Any]]]
) -> None:
    """Wait until every message is settled. Poison may still kill some processes."""

    def settled() -> bool:
        workers.restart_dead()
        inboxes = watcher._handle.protocol.connector.redis.keys("*:inbox:*")
        prefix = watcher._handle.protocol.prefix
        parts = [key.decode().removeprefix(prefix) for key in inboxes]  # type: ignore[union-attr]
        waiting = sum(int(on_key(watcher, "XLEN", part)) for part in parts)
        return waiting == 0 and all(future.done() for _, _, future in sent)

    eventually(settled, 240, "some messages were never settled")


def check(
    watcher: PeerGroup,
    sent: list[tuple[dict[str, Any], str, Future[Any]]],
    log: Path,
    faults: Counter[str],
) -> None:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    handled: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        handled[_key(line)].append(line)
    reasons = {_key(json.loads(one.body)): one.reason for one in watcher.dead_letters()}
    firsts: dict[tuple[int, str], list[float]] = defaultdict(list)
    poisons = 0
    for body, verb, future in sent:
        found, reason = handled[_key(body)], reasons.get(_key(body))
        if body["poison"]:
            poisons += 1
            assert len(found) <= MAX_DELIVERIES, (body, found)
            assert reason is not None, f"not a dead letter: {body}"
        elif reason is None:
            assert found, f"never handled: {body}"
            assert future.exception(0) is None, (body, verb, future.exception(0))
            assert verb != "ask" or future.result(0) == body["n"], body
        elif reason not in UNPLACED or body["to"] != "any":
            # If a session ends before the handler starts, the log has no line for the delivery.
            # Allow for two such deliveries.
            assert len(found) >= MAX_DELIVERIES - 2, f"{reason}: {body}, {found}"
        if found and body["to"] != "any":
            firsts[body["s"], body["to"]].append(min(line["at"] for line in found))
    for (sender, to), times in firsts.items():
        assert times == sorted(times), f"messages from sender {sender} to {to} out of order"
    again = sum(len(found) - 1 for found in handled.values() if found)
    print(
        f"{len(sent):,} messages, {len(lines):,} deliveries, {again:,} of them repeated; "
        f"{poisons} poison messages; dead letters: {dict(Counter(reasons.values()))}; "
        f"faults: {dict(faults)}"
    )


def _key(body: dict[str, Any]) -> tuple[int, str, int]:
    """Return a message's sender, target and number, which identify it."""
    return body["s"], body["to"], body["n"]
