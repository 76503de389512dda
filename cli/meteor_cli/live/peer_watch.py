"""What ``meteor peers watch`` prints: how a group stands, and its events, as lines."""

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

#: Seconds between two looks whether somebody still reads, and whether the server answers.
_LOOK_S, _PING_S = 0.5, 2.0
#: Characters of a topic that are shown to people.
_TOPIC_MAX = 200
#: Why a leader leads no more.
_WHY = {
    "expired": "it was not heard of",
    "left": "it left",
    "removed": "it was removed",
    "resigned": "it has resigned",
    "taken over": "it has joined again",
    "resync": "found out afterwards",
}

#: What a member did or met, by the kind of the event and the reason that it gives.
_VERBS = {
    ("joined", None): "joined",
    ("updated", None): "has new metadata",
    ("alive", None): "is back",
    ("left", None): "is gone",
    ("left", "left"): "left",
    ("left", "expired"): "left: it was not heard of",
    ("left", "removed"): "was removed",
    ("dead", None): "is dead",
    ("dead", "left"): "has ended, and may come back",
    ("dead", "expired"): "is dead: it was not heard of",
}

Fields = dict[str, Any]


class PeerWatcher:
    """Takes in the events of one group, and prints them in their order."""

    def __init__(self, group: PeerGroup, *, as_json: bool) -> None:
        self._group = group
        self._as_json = as_json
        self._sink = Sink()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._is_gone = False
        self._look_at = time.monotonic() + _PING_S

    def begin(self) -> None:
        """Print how the group stands now; what happens from then on follows."""
        group = self._group
        with group._handle.lock:  # nothing in between
            group.on_event(self._events.put)
            view = group.snapshot()
        lead = view.leader.id if view.leader else None
        members = [member_fields(member, lead) for member in view.members]
        facts: Fields = {"leader": lead, "term": view.term or None, "members": members}
        self._print(view.number, "state", describe(view), facts)
        if not self._as_json:
            for member in view.members:
                leads = ", leads" if member.id == lead else ""
                self._sink.write(
                    f"{'':25} {sanitize(member.id)}: {member.status}{leads}\n".encode()
                )
        say(f"watching group {group.name!r}.")

    def step(self) -> None:
        """Print the next event, if one comes.

        Raises:
            BrokenPipeError: Nobody reads any more.
        """
        try:
            event = self._events.get(timeout=_LOOK_S)
        except queue.Empty:
            self._sink.check_reader()
            if time.monotonic() >= self._look_at:
                self._ping()
            return
        self._print(event.view, event.kind, *tell(event), at_ms=event.at)

    def _ping(self) -> None:
        """A monitor that ends with what it monitors is of no use: it goes on."""
        from meteor_py import ConnectionFailed, MeteorError

        reason = None
        try:
            self._group._handle.protocol.look()
        except ConnectionFailed as error:
            reason = str(error)
        except MeteorError:
            pass  # deleted: its events tell
        if reason is not None and not self._is_gone:
            self._print(self._group.view, "server_gone", reason, {"reason": reason})
        elif reason is None and self._is_gone:
            self._print(self._group.view, "server_back", "the server answers again", {})
        self._is_gone = reason is not None
        self._look_at = time.monotonic() + _PING_S

    def _print(self, view: int, event: str, text: str, facts: Fields, at_ms: int = 0) -> None:
        """Print an event; 0: it is of this moment."""
        at = datetime.fromtimestamp(at_ms / 1000 if at_ms else time.time()).astimezone()
        if self._as_json:
            head = {"time": at.isoformat(timespec="milliseconds"), "group": self._group.name}
            line = to_json({**head, "view": view, "event": event, **facts})
        else:
            line = f"{at.isoformat(timespec='seconds')} #{view} {sanitize(text)}"
        self._sink.write(f"{line}\n".encode())


def member_fields(member: Member, leader: str | None) -> Fields:
    """A member as ``--json`` shows it."""
    settings = ("persistent", "priority", "joined", "metadata")
    state = {"id": member.id, "status": member.status.value, "leads": member.id == leader}
    return state | {name: getattr(member, name) for name in settings}


def describe(view: View) -> str:
    """How a group stands, in a sentence."""
    alive = sum(member.alive for member in view.members)
    dead = len(view.members) - alive
    text = counted(alive, "member") + (f" and {dead:,} dead" if dead else "")
    if view.leader is None:
        return f"{text}, no leader"
    return f"{text}, {view.leader.id} leads, term {view.term}"


def tell(event: Event) -> tuple[str, Fields]:
    """An event for people, and what programs get of it besides."""
    who, why = event.member, event.reason
    seen = {"resync": event.resync}
    match event.kind:
        case "joined" | "updated" | "alive" | "left" | "dead":
            reason = {"reason": why} if event.kind in ("left", "dead") else {}
            verb = _VERBS.get((event.kind, why)) or _VERBS[event.kind, None]
            return f"{who} {verb}", {"member": who} | reason | seen
        case "elected":
            return f"{who} leads, term {event.term}", {"member": who, "term": event.term} | seen
        case "resigned":
            facts = {"member": who, "term": event.term, "reason": why}
            return f"{who} leads no more: {_WHY.get(why or '', why)}", facts | seen
        case "proposed":
            return _tell_proposal(event)
        case "decided":
            return _tell_decision(event)
    return "the server has lost state of the group, or it was deleted", seen


def _tell_proposal(event: Event) -> tuple[str, Fields]:
    topic, rule = _topic(event), _field(event, "rule")
    action = _field(event, "name") or None
    what = f"action {action}" if action else f"{topic}"
    who = event.member or "somebody"
    facts = {"member": event.member or None, "poll": event.poll, "kind": rule, "action": action}
    return f"{who} puts to the vote ({rule}): {what}", facts | {"topic": topic}


def _tell_decision(event: Event) -> tuple[str, Fields]:
    votes = {
        name: [one for one in _field(event, name).split(",") if one]
        for name in ("yes", "no", "abstained", "missing")
    }
    passed = _field(event, "result") == "yes"
    action = _field(event, "name") or None
    counts = ", ".join(f"{len(who)} {name}" for name, who in votes.items() if who) or "no votes"
    what = f"action {action}" if action else "the vote"
    text = f"{what} passed: {counts}" if passed else f"{what} did not pass: {counts}"
    if event.reason in ("left", "timeout"):
        text += f" ({event.reason})"
    facts = {"member": event.member or None, "poll": event.poll, "passed": passed}
    return text, facts | {"reason": event.reason, "action": action} | votes


def _field(event: Event, name: str) -> str:
    return event.fields.get(name, b"").decode(errors="replace")


def _topic(event: Event) -> str:
    """What is voted on, as it is written; of other types than JSON only which it is."""
    kind, _, data = event.fields.get("topic", b"").partition(b":")
    if kind == b"json":
        text = data.decode(errors="replace")
        return text if len(text) <= _TOPIC_MAX else f"{text[:_TOPIC_MAX]}\u2026"
    return f"({counted(len(data), 'byte')} of {kind.decode(errors='replace')})" if kind else "null"
