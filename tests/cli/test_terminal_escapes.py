"""No command prints a control character that came from a stream, a group or its own arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meteor_py import connect
from meteor_py.redis import keys
from tests.support.commands import meteor

#: Clears the screen, sets the title, changes the color, reverses text, and returns to column 1.
EVIL = "\x1b[2J\x1b]0;x\x07\x9b31m\u202egnp.exe\r"
RAW = EVIL.encode()
#: Control and format characters, except for newline and tab.
FORBIDDEN = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")
SHOWN = re.compile(r"\\x1b\[2J|\\u001b\[2J|G1sySh")  # EVIL escaped, in JSON, or in base64

#: Arguments for each command, with EVIL where a user could have pasted it.
COMMANDS: list[tuple[str, ...]] = [
    ("streams", "ls"), ("streams", "ls", "--json"),
    ("streams", "info", "orders"), ("streams", "info", "orders", "--json"),
    ("streams", "info", "places"), ("streams", "info", "places", "--json"),
    ("streams", "info", EVIL), ("streams", "create", EVIL), ("streams", "rm", EVIL, "--yes"),
    ("streams", "configure", EVIL, "--capacity", "5"), ("streams", "repair", "broken"),
    ("streams", "repair", EVIL),
    ("groups", "ls"), ("groups", "ls", "--json"), ("groups", "ls", "orders"),
    ("groups", "info", "orders", "billing"), ("groups", "info", "orders", "billing", "--json"),
    ("groups", "info", "orders", EVIL), ("groups", "rm", "orders", "billing", "--dry-run"),
    ("groups", "rm", "orders", EVIL, "--yes"),
    ("seek", "orders", "billing", "--to", "earliest", "--dry-run"),
    ("seek", "orders", "billing", "--to", "earliest", "--yes"),
    ("seek", "orders", EVIL, "--to", "0"), ("seek", "orders", "billing", "--to", EVIL),
    ("shared", "ls"), ("shared", "ls", "--json"), ("shared", "info", "orders", "packing"),
    ("shared", "info", "orders", "packing", "--json"), ("shared", "fsck", "orders", "packing"),
    ("shared", "purge", "orders", "packing", EVIL, "--dry-run"),
    ("shared", "resume", "orders", "packing", EVIL), ("shared", "info", "orders", EVIL),
    ("peers", "ls"), ("peers", "ls", "--json"), ("peers", "members", "workers"),
    ("peers", "members", "workers", "--json"), ("peers", "leader", "workers"),
    ("peers", "dead", "workers"), ("peers", "dead", "workers", "--json"),
    ("peers", "remove", "workers", EVIL, "--yes"), ("peers", "members", EVIL),
    ("archive", "ls", "orders"), ("archive", "ls", "orders", "--json"),
    ("archive", "verify", "orders"), ("archive", "ls", "places"), ("archive", "verify", EVIL),
    ("tail", "orders", "-e"), ("tail", "orders", "-e", "--json"),
    ("tail", "orders", "-e", "--format", r"%o %k %h %v\n"), ("tail", "orders", "-e", "-k", EVIL),
    ("tail", EVIL, "-e"), ("tail", "orders", "-o", EVIL, "-e"), ("tail", "broken", "-e"),
    ("publish", EVIL, "x"), ("top", "--once"), ("top", "--once", "--json"), (EVIL,),
]  # fmt: skip


@pytest.fixture
def hostile_url(url: str, tmp_path: Path) -> Iterator[str]:
    """A server with hostile records, names, owners, members, messages and addresses."""
    with connect(url) as m:
        stream = m.stream("orders", store=tmp_path, ordering_key="key")
        with stream.publisher() as pub:
            pub.publish(RAW, key=RAW, headers={EVIL: RAW}).result()
            pub.publish(b"x", key=b"k").result()
        stream.store.flush()
        stream.seek_group("billing", 0)
        raw = m.redis
        group: Any = raw.hgetall(keys.group("orders", "billing"))
        raw.hset(keys.group("orders", EVIL), mapping=group)
        raw.sadd(keys.groups("orders"), EVIL)
        for name in ("billing", EVIL):
            raw.set(keys.lease("orders", name), f"{EVIL.replace(' ', '')} 7 1")
        m.stream("places", store=tmp_path / "other", archive=False)
        raw.hset(keys.settings("places"), "store_uri", f"file:///{EVIL}")
        m.stream("broken", create=True)
        raw.xadd(keys.log("broken"), {EVIL: EVIL}, id="5-0")
        peers = m.peer_group("workers")
        member = peers.join("w1", metadata={"name": EVIL})
        raw.xadd(keys.peers("workers", "dead"), {"member": EVIL, "reason": EVIL, "body": RAW})
        with stream.shared_subscriber("packing") as sub:
            assert sub.poll(10)
            consumers: Any = raw.hgetall(keys.shared("orders", "packing", "members"))
            named = {name: value + RAW for name, value in consumers.items()}
            raw.hset(keys.shared("orders", "packing", "members"), mapping=named)
            yield url
        member.close()


def test_no_command_prints_control_characters_from_untrusted_text(hostile_url: str) -> None:
    escaped = 0
    for arguments in COMMANDS:
        done = meteor(hostile_url, *arguments)
        printed = done.out.decode(errors="surrogateescape") + done.err
        found = FORBIDDEN.search(printed)
        assert found is None, (arguments, printed)
        # Surrogates stand for bytes that are not UTF-8.
        assert max(printed, default="") < "\udc80", (arguments, printed)
        assert "Traceback" not in printed, (arguments, printed)
        escaped += SHOWN.search(printed) is not None
    assert escaped > len(COMMANDS) / 2, "the hostile texts did not reach the commands"
