"""Helpers that call peer group scripts directly: messages, votes and cleanup."""

from __future__ import annotations

import itertools
from typing import Any

from tests.support.peering import Peers


def send(
    peers: Peers,
    message: str,
    *,
    to: str = "any",
    member: str = "",
    verb: str = "tell",
    random: int = 0,
    wait_ms: int = 60_000,
    body: str = "1",
    options: str = "",
    queue: str = "q",
    handle: str = "handle",
    batch: int | None = None,
) -> list[str]:
    """Send one message; return its result, or the refusal of the whole call."""
    numbers = peers.__dict__.setdefault("batches", itertools.count(1))
    args = [message, "", "", queue, verb, to, member, random, options, 128, wait_ms, "json", body]
    reply = peers.run("send", handle, handle, batch or next(numbers), "", "", *args)
    if reply[0] == "IDLE":
        peers.run("heartbeat", "")
        reply = peers.run("send", handle, handle, batch or next(numbers), "1", "", *args)
    return str(reply[1]).split("\n") if reply[0] == "OK" else reply


def inbox(peers: Peers, member: str) -> list[str]:
    """Return the ids of a member's messages, in order."""
    return [fields[b"id"].decode() for fields in entries(peers, f"inbox:{member}")]


def entries(peers: Peers, part: str) -> list[dict[bytes, bytes]]:
    found = peers.client._connector.call("XRANGE", peers.prefix + part, "-", "+")
    return [dict(zip(flat[::2], flat[1::2], strict=True)) for _, flat in found]


def settle(peers: Peers, member: str) -> None:
    """Settle a member's first message."""
    (place, flat), *_ = peers.client._connector.call(
        "XRANGE", peers.prefix + f"inbox:{member}", "-", "+"
    )
    message = dict(zip(flat[::2], flat[1::2], strict=True))[b"id"]
    args = (member, f"s-{member}", "settle", place, message, "ok", "json", "1")
    assert peers.run("settle", *args) == ["OK", 1]


def answer(peers: Peers, message: str, member: str) -> bytes | None:
    found: bytes | None = peers.client._connector.call(
        "HGET", peers.prefix + f"message:{message}", f"r:{member}"
    )
    return found


def propose(
    peers: Peers, poll: str, rule: Any = "majority", *, action: str = "", at: int | str = ""
) -> list[Any]:
    args = [poll, rule, 60_000, at, 200, action, "json:1", "", "", "0", ""]
    return peers.run("propose", *args)


def vote(peers: Peers, poll: str, member: str, says: str) -> None:
    assert peers.run("vote", poll, member, f"s-{member}", says) == ["OK", 1]


def result(peers: Peers, poll: str) -> bytes | None:
    found: bytes | None = peers.client._connector.call(
        "HGET", peers.prefix + f"poll:{poll}", "result"
    )
    return found


def commands(peers: Peers, name: str) -> int:
    stats: Any = peers.client.redis.info("commandstats")
    return int(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"])


def leftovers(peers: Peers) -> list[str]:
    """Return the names of the group's keys, except for the clock and the state."""
    return sorted(name.removeprefix(peers.prefix) for name in peers.everything())
