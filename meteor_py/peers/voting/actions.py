"""Actions: functions that all members run at an agreed time on the server's clock."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from meteor_py.peers.voting.proposal import Outcome
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.runtime.threads import JoinableThread

if TYPE_CHECKING:
    from meteor_py.peers.group_handle import GroupHandle
    from meteor_py.peers.member_handle import MemberHandle

_log = logging.getLogger(__name__)

#: Start an action's thread this many seconds before it is due, in addition to ``early``.
_AHEAD_S = 0.03
#: Take one more reading of the server's clock this many seconds before an action.
_SHARPEN_S = 0.3
#: Check the clock at least this often, in seconds, because it may be adjusted at any time.
_CHECK_S = 0.5
#: Seconds to wait for a better clock reading, and the number of attempts.
_READING_S = (0.2, 3)


@dataclass(frozen=True)
class Action:
    """An action that is running, or was missed."""

    name: str
    params: Any
    #: The agreed time, in seconds on the group's clock.
    at: float
    #: Seconds between ``at`` and the moment when this process started the action or found that it
    #: had missed it.
    late: float
    #: Maximum error of ``late`` in seconds, either way: the error of this process's group clock.
    error_bound: float
    #: The id of the poll that approved it.
    poll: str
    #: The member that proposed it; None if it was proposed through a ``PeerGroup``.
    by: str | None
    #: This member's own vote; None if it abstained or did not vote.
    vote: bool | None


class Handler(NamedTuple):
    """A member's handler for an action."""

    function: Callable[..., object]
    early: float
    run_late: bool
    max_late: float
    #: When it was registered, on the ``now()`` clock.
    since: float


class Task(NamedTuple):
    """An action that one member must run."""

    at: float
    outcome: Outcome
    handler: Handler
    member: MemberHandle

    @property
    def ready_at(self) -> float:
        """When the task needs a thread, on the group's clock."""
        return self.at - self.handler.early - _AHEAD_S


class Actions:
    """A group handle's action schedule. It has a thread while actions are pending."""

    def __init__(self, group: GroupHandle) -> None:
        self._group = group
        self._tasks: list[Task] = []
        self._runners: list[JoinableThread] = []
        self._state = SignalSafeCondition()
        self._thread: JoinableThread | None = None
        self._stopped = False

    def is_sure(self, max_error: float) -> bool:
        """Return whether the clock's error is at most ``max_error``, after more readings if
        needed."""
        self._group.now()
        clock = self._group.clock
        wait_s, times = _READING_S
        for _ in range(times):
            if clock.error_bound <= max_error:
                return True
            self._group.heartbeat.hurry()
            deadline = now() + wait_s
            while clock.error_bound > max_error and now() < deadline:
                time.sleep(0.005)
        return clock.error_bound <= max_error

    def schedule(self, task: Task) -> None:
        """Schedule an action, or report it as missed."""
        self._group.now()  # waits for a first reading of the clock
        late = -self._group.clock.until(task.at)
        if late > 0:
            if now() - late < task.handler.since:
                return  # the action was due before the handler was registered
            if not task.handler.run_late:
                self.miss(task)
                return
        else:
            self._group.heartbeat.hurry()
        with self._state:
            if self._stopped:
                return
            self._tasks.append(task)
            if self._thread is None:
                name = f"meteor-actions-{self._group.name}"
                self._thread = JoinableThread(self._run, name)
                self._thread.start()
            self._state.notify_all()

    def miss(self, task: Task) -> None:
        """Report an action as missed."""
        self._group.now()  # waits for a first reading of the clock
        task.member.voter.missed(self._action(task))

    def close(self, deadline: float) -> None:
        """Start no more actions, and wait for running ones until ``deadline`` (``now()`` clock)."""
        with self._state:
            self._stopped = True
            self._tasks.clear()
            self._state.notify_all()
            threads = [*([self._thread] if self._thread else []), *self._runners]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - now(), 0.0))
                if thread.is_alive():
                    _log.warning("An action in group %r did not end in time.", self._group.name)

    # -- in the schedule's thread --------------------------------------------------------------

    def _run(self) -> None:
        sharpened = 0.0
        while True:
            with self._state:
                if self._stopped:
                    return
                if not self._tasks:
                    self._thread = None
                    return
                task = min(self._tasks, key=attrgetter("ready_at"))
                left = self._group.clock.until(task.ready_at)
                if left <= 0:
                    self._tasks.remove(task)
                    self._start(task)
                    continue
            if left <= _SHARPEN_S and sharpened != task.at:
                sharpened = task.at
                self._group.heartbeat.hurry()
            with self._state:
                pause = left - _SHARPEN_S if left > _SHARPEN_S else left
                self._state.wait(min(pause, _CHECK_S))

    def _start(self, task: Task) -> None:
        name = f"meteor-action-{self._group.name}"
        runner = JoinableThread(self._act, name, task)
        self._runners = [thread for thread in self._runners if thread.is_alive()]
        self._runners.append(runner)
        runner.start()

    def _act(self, task: Task) -> None:
        clock, handler = self._group.clock, task.handler
        while not self._stopped and (left := clock.until(task.at) - handler.early) > 0:
            time.sleep(min(left, _AHEAD_S))
        while not self._stopped and clock.until(task.at) > 0:
            time.sleep(0)  # lets other threads in this process run
        if self._stopped or not task.member.active:
            return
        action = self._action(task)
        try:
            if action.late > handler.max_late and not handler.run_late:
                task.member.voter.missed(action)
            else:
                handler.function(action)
        except BaseException:  # even SystemExit: nothing else would report it
            _log.exception("Action %r in group %r failed.", action.name, self._group.name)

    def _action(self, task: Task) -> Action:
        outcome, clock = task.outcome, self._group.clock
        assert outcome.action is not None, "a vote without an action was scheduled"
        return Action(
            name=outcome.action,
            params=outcome.topic,
            at=task.at,
            late=-clock.until(task.at),
            error_bound=clock.error_bound,
            poll=outcome.poll,
            by=outcome.by,
            vote=_vote_of(task),
        )


def _vote_of(task: Task) -> bool | None:
    """Return how the task's member voted; None if it abstained or did not vote."""
    ids = {task.member.id, *task.member.former_ids}
    if ids.intersection(task.outcome.yes):
        return True
    return False if ids.intersection(task.outcome.no) else None
