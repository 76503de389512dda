"""Direct calls of the scripts of peer groups: messages, votes, and leftovers."""

from __future__ import annotations

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
    most: int = 10_000,
    wait_ms: int = 60_000,
    body: str = "1",
) -> list[Any]:
    args = [message, "handle", "", "q", verb, to, member, random, "0", 128, most, wait_ms]
    return peers.run("send", *args, "json", body, "", "")


def inbox(peers: Peers, member: str) -> list[str]:
    """Returns the ids of a member's messages, in order."""
    return [fields[b"id"].decode() for fields in entries(peers, f"inbox:{member}")]


def entries(peers: Peers, part: str) -> list[dict[bytes, bytes]]:
    found = peers.client._connector.call("XRANGE", peers.prefix + part, "-", "+")
    return [dict(zip(flat[::2], flat[1::2], strict=True)) for _, flat in found]


def settle(peers: Peers, member: str) -> None:
    """Settle the first message of a member."""
    (place, flat), *_ = peers.client._connector.call(
        "XRANGE", peers.prefix + f"inbox:{member}", "-", "+"
    )
    message = dict(zip(flat[::2], flat[1::2], strict=True))[b"id"]
    assert peers.run("settle", member, f"s-{member}", place, message, "ok", "json", "1") == [
        "OK",
        1,
    ]


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
    """Returns the names of the group's keys, except for the clock."""
    return sorted(name.removeprefix(peers.prefix) for name in peers.everything())
