"""Output of ``meteor peers watch``: the state of a group, then its events."""

from __future__ import annotations

import queue
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

from meteor_cli.render.json import to_json
from meteor_cli.render.sanitize import sanitize
from meteor_cli.render.terminal import Sink
from meteor_cli.render.text import counted, say

if TYPE_CHECKING:
    from meteor_py import Event, Member, PeerGroup, View

#: Seconds between checks of the output pipe, and between checks of the server.
_CHECK_S, _PING_S = 0.5, 2.0
#: Maximum length of a topic, in characters, in human-readable output.
_TOPIC_MAX = 200
#: Texts for the reasons why a leader stepped down.
_WHY = {
    "expired": "its heartbeats stopped",
    "left": "it left",
    "removed": "it was removed",
    "resigned": "it resigned",
    "taken over": "it joined again",
    "resync": "the reason is unknown",
}

#: Texts for member events, by kind and reason.
_VERBS = {
    ("joined", None): "joined",
    ("updated", None): "has new metadata",
    ("alive", None): "is back",
    ("left", None): "is gone",
    ("left", "left"): "left",
    ("left", "expired"): "left: its heartbeats stopped",
    ("left", "removed"): "was removed",
    ("dead", None): "is dead",
    ("dead", "left"): "closed; it may come back",
    ("dead", "expired"): "is dead: its heartbeats stopped",
}

Fields = dict[str, Any]


class PeerWatcher:
    """Prints a peer group's events in order."""

    def __init__(self, group: PeerGroup, *, as_json: bool) -> None:
        self._group = group
        self._as_json = as_json
        self._sink = Sink()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._is_gone = False
        self._ping_at = time.monotonic() + _PING_S

    def begin(self) -> None:
        """Print the current state of the group; ``step`` prints all events after it."""
        group = self._group
        with group._handle.lock:  # so that no event arrives between the two calls
            group.on_event(self._events.put)
            view = group.snapshot()
        say(f"watching group {group.name!r}.")
        leader = view.leader.id if view.leader else None
        members = [member_fields(member, leader) for member in view.members]
        facts: Fields = {"leader": leader, "term": view.term or None, "members": members}
        self._print(view.number, "state", describe(view), facts)
        if not self._as_json:
            for member in view.members:
                leads = ", leader" if member.id == leader else ""
                line = f"{'':25} {sanitize(member.id)}: {member.status}{leads}\n"
                self._sink.write(line.encode())

    def step(self) -> None:
        """Print the next event, if any. Raises ``BrokenPipeError`` if the pipe has no reader."""
        try:
            event = self._events.get(timeout=_CHECK_S)
        except queue.Empty:
            self._sink.check_reader()
            if time.monotonic() >= self._ping_at:
                self._ping()
            return
        self._print(event.view, event.kind, *describe_event(event), at_ms=event.at)

    def _ping(self) -> None:
        """Report that the server went away or came back. A monitor must survive an outage."""
        from meteor_py import ConnectionFailed, MeteorError

        reason = None
        try:
            self._group._handle.protocol.look()
        except ConnectionFailed as error:
            reason = str(error)
        except MeteorError:
            pass  # for example, the group was deleted, which an event reports
        if reason is not None and not self._is_gone:
            self._print(self._group.view, "server_gone", reason, {"reason": reason})
        elif reason is None and self._is_gone:
            self._print(self._group.view, "server_back", "the server is back", {})
        self._is_gone = reason is not None
        self._ping_at = time.monotonic() + _PING_S

    def _print(self, view: int, event: str, text: str, facts: Fields, at_ms: int = 0) -> None:
        """Print an event that happened at ``at_ms``, or now if that is 0."""
        at = datetime.fromtimestamp(at_ms / 1000 if at_ms else time.time()).astimezone()
        if self._as_json:
            head = {"time": at.isoformat(timespec="milliseconds"), "group": self._group.name}
            line = to_json({**head, "view": view, "event": event, **facts})
        else:
            line = f"{at.isoformat(timespec='seconds')} #{view} {sanitize(text)}"
        self._sink.write(f"{line}\n".encode())


def member_fields(member: Member, leader: str | None) -> Fields:
    """Return the JSON fields of a member."""
    settings = ("persistent", "priority", "joined", "metadata")
    state = {"id": member.id, "status": member.status.value, "leads": member.id == leader}
    return state | {name: getattr(member, name) for name in settings}


def describe(view: View) -> str:
    """Summarize the state of a group in one line."""
    alive = sum(member.alive for member in view.members)
    dead = len(view.members) - alive
    text = counted(alive, "member") + (f" and {dead:,} dead" if dead else "")
    if view.leader is None:
        return f"{text}, no leader"
    return f"{text}, leader {view.leader.id}, term {view.term}"


def describe_event(event: Event) -> tuple[str, Fields]:
    """Return a human-readable description and the JSON fields of an event."""
    member, why = event.member, event.reason
    seen = {"resync": event.resync}
    match event.kind:
        case "joined" | "updated" | "alive" | "left" | "dead":
            reason = {"reason": why} if event.kind in ("left", "dead") else {}
            verb = _VERBS.get((event.kind, why)) or _VERBS[event.kind, None]
            return f"{member} {verb}", {"member": member} | reason | seen
        case "property":
            # The value is JSON. None means that the property was deleted or its value is unknown.
            value = _field(event, "value") or None
            text = f"was set to {_shorten(value)}" if value else "was changed or deleted"
            change: Fields = {"property": event.property, "value": value}
            return f"property {event.property} {text}", change | seen
        case "elected":
            facts = {"member": member, "term": event.term}
            return f"{member} is the leader, term {event.term}", facts | seen
        case "resigned":
            facts = {"member": member, "term": event.term, "reason": why}
            return f"{member} is no longer the leader: {_WHY.get(why or '', why)}", facts | seen
        case "proposed":
            return _describe_proposal(event)
        case "decided":
            return _describe_decision(event)
    return "the server lost some of the group's state, or the group was deleted", seen


def _describe_proposal(event: Event) -> tuple[str, Fields]:
    topic, rule = _topic(event), _field(event, "rule")
    action = _field(event, "name") or None
    what = f"action {action}" if action else f"{topic}"
    proposer = f" by {event.member}" if event.member else ""
    facts = {"member": event.member or None, "poll": event.poll, "kind": rule, "action": action}
    return f"vote called{proposer} ({rule}): {what}", facts | {"topic": topic}


def _describe_decision(event: Event) -> tuple[str, Fields]:
    votes = {
        name: [one for one in _field(event, name).split(",") if one]
        for name in ("yes", "no", "abstained", "missing")
    }
    passed = _field(event, "result") == "yes"
    action = _field(event, "name") or None
    counts = ", ".join(f"{len(ids)} {name}" for name, ids in votes.items() if ids) or "no votes"
    what = f"action {action}" if action else "the vote"
    text = f"{what} passed: {counts}" if passed else f"{what} did not pass: {counts}"
    if event.reason in ("left", "timeout", "no leader"):
        text += f" ({event.reason})"
    facts = {"member": event.member or None, "poll": event.poll, "passed": passed}
    return text, facts | {"reason": event.reason, "action": action} | votes


def _field(event: Event, name: str) -> str:
    return event.fields.get(name, b"").decode(errors="replace")


def _shorten(text: str) -> str:
    return text if len(text) <= _TOPIC_MAX else f"{text[:_TOPIC_MAX]}\u2026"


def _topic(event: Event) -> str:
    """Return the topic as shortened JSON, or for other encodings only its size and type."""
    kind, _, data = event.fields.get("topic", b"").partition(b":")
    if kind == b"json":
        return _shorten(data.decode(errors="replace"))
    return f"({counted(len(data), 'byte')} of {kind.decode(errors='replace')})" if kind else "null"
