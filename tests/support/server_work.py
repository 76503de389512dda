"""Counters for the work that each call makes a server do while nothing else can run.

A call is a script, a transaction, or a single command. ``MONITOR`` shows the commands of each call
and their arguments. A read counts as bounded if its arguments contain a count or a range. Counted
work does not depend on the speed of the machine, so tests can assert on it. The server also
measures the duration of each call, but tests only print that.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from meteor_py.redis import scripts
from tests.support.servers import plain_client

_END = "the last call"
_LINE = re.compile(r'^\d+\.\d+ \[\d+ ([^\]]*)\] "([^"]*)"')
#: Commands that read or free a whole collection, however large it is.
_WHOLE = {"HGETALL", "HKEYS", "HVALS", "SMEMBERS", "KEYS", "DEL", "SORT"}
#: Keys of collections that stay small.
_SMALL = re.compile(r'(meta|state|events)"|:lease')


@dataclass
class Call:
    """A script, a transaction or a command."""

    name: str
    #: The number of commands that the call runs, and of their arguments.
    commands: int = 0
    arguments: int = 0
    #: Commands that read or free a collection of any size.
    unbounded: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        self.commands += 1
        self.arguments += line.count('" "')
        if _is_unbounded(line):
            self.unbounded.append(line)


@dataclass
class Work:
    """The calls made during a block, and the slowest of them."""

    calls: list[Call] = field(default_factory=list)
    #: The command name of the slowest call, and its duration in milliseconds.
    longest: tuple[str, float] = ("", 0.0)

    @property
    def scripts(self) -> int:
        return sum(call.name.startswith("EVAL") for call in self.calls)

    def most(self, what: str) -> Call:
        """Return the call with the most commands or arguments."""
        return max(self.calls, key=lambda call: int(getattr(call, what)), default=Call(""))

    @property
    def unbounded(self) -> list[str]:
        return [line for call in self.calls for line in call.unbounded]


def _is_unbounded(line: str) -> bool:
    found = _LINE.match(line)
    command, words = (found[2].upper(), line.split('" "')) if found else ("", [])
    last = words[-1].rstrip('"') if words else ""
    if command in _WHOLE:
        return not _SMALL.search(line)
    if command in ("ZRANGE", "LRANGE", "ZRANGEBYSCORE", "XRANGE"):
        limited = any(word.upper() in ("LIMIT", "COUNT") for word in words)
        if command in ("ZRANGE", "LRANGE"):
            limited = "-1" not in words[3:4] and last != "-1"
        return not limited
    return False


@contextmanager
def counted(url: str) -> Iterator[Work]:
    """Count the work of all calls during the block."""
    work, lines = Work(), list[str]()
    with plain_client(url) as plain, plain_client(url) as watcher:
        slower = plain.config_get("slowlog-log-slower-than")["slowlog-log-slower-than"]
        connection = watcher.connection_pool.get_connection()
        connection.send_command("MONITOR")
        assert connection.read_response() == b"OK"

        def watch() -> None:
            while _END not in (line := connection.read_response().decode(errors="replace")):
                lines.append(line)

        thread = threading.Thread(target=watch)
        thread.start()
        plain.config_set("slowlog-log-slower-than", 200)
        plain.config_set("slowlog-max-len", 10_000)
        plain.slowlog_reset()
        try:
            yield work
        finally:
            slow: Any = plain.slowlog_get(10_000)
            plain.config_set("slowlog-log-slower-than", slower)
            plain.echo(_END)
            thread.join(30)
            connection.disconnect()
    work.calls = _calls(lines)
    for entry in slow:
        name = entry["command"].split()[0].decode()
        if entry["duration"] / 1000 > work.longest[1]:
            work.longest = (name, entry["duration"] / 1000)


def _script_name(sha: str) -> str:
    found = [script.name for script in scripts.ALL if script.sha == sha]
    return f"EVALSHA {found[0] if found else sha}"


def _calls(lines: list[str]) -> list[Call]:
    calls: list[Call] = []
    transactions: dict[str, Call] = {}
    script: Call | None = None
    for line in lines:
        found = _LINE.match(line)
        if found is None:
            continue
        source, command = found[1], found[2].upper()
        if source == "lua":
            if script is not None:
                script.add(line)
            continue
        script = None
        if command == "MULTI":
            transactions[source] = Call("MULTI")
        elif command == "EXEC":
            if source in transactions:
                calls.append(transactions.pop(source))
        elif source in transactions:
            transactions[source].add(line)
        else:
            calls.append(Call(command))
            if command.startswith("EVAL"):
                script = calls[-1]
                if command.startswith("EVALSHA"):
                    script.name = _script_name(line.split('" "')[1])
                script.arguments += line.count('" "')
            else:
                calls[-1].add(line)
    return calls
