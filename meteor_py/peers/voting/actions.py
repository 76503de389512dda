"""Actions of a group: what its members have agreed to do at one instant, by the server's clock."""

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
    from meteor_py.peers.voting.voter import Voter

_log = logging.getLogger(__name__)

#: Seconds before its time when an action gets a thread, besides those for which that spins.
_AHEAD_S = 0.03
#: Seconds before its time when the server is asked for the time once more.
_SHARPEN_S = 0.3
#: Seconds after which the clock is looked at again, as it may have been set meanwhile.
_LOOK_S = 0.5
#: Seconds to wait for a better reading of the clock, and how often.
_READING_S = (0.2, 3)


@dataclass(frozen=True)
class Action:
    """Something that is done, or was missed."""

    name: str
    params: Any
    #: When it was to be done, in seconds by the clock of the group.
    at: float
    #: Seconds by which this process was late when it began, or learned of it.
    late: float
    #: Seconds by which ``late`` may be wrong, either way: as well as the time is known here.
    error_bound: float
    #: The poll that agreed on it.
    poll: str
    #: The member that proposed it; None if the proposer is no member.
    by: str | None


class Handler(NamedTuple):
    """What a member does."""

    function: Callable[..., object]
    early: float
    run_late: bool
    max_late: float
    #: Since when, by ``now()``.
    since: float


class Task(NamedTuple):
    """What one member has to do at a time."""

    at: float
    outcome: Outcome
    handler: Handler
    voter: Voter

    @property
    def ready_at(self) -> float:
        """When it needs a thread."""
        return self.at - self.handler.early - _AHEAD_S


class Actions:
    """The schedule of a group handle. Has a thread while something is to be done."""

    def __init__(self, group: GroupHandle) -> None:
        self._group = group
        self._tasks: list[Task] = []
        self._runners: list[JoinableThread] = []
        self._state = SignalSafeCondition()
        self._thread: JoinableThread | None = None
        self._stopped = False

    def is_sure(self, max_error: float) -> bool:
        """Whether the time is known that well; asks for it again if it is not."""
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
        """Have something done, or tell that it is too late."""
        self._group.now()  # the clock is known
        late = -self._group.clock.until(task.at)
        if late > 0:
            if now() - late < task.handler.since:
                return  # it was over before there was a handler
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
        """Tell that something is not done."""
        self._group.now()  # the clock is known
        task.voter.missed(self._action(task))

    def close(self, deadline: float) -> None:
        """Do nothing any more; wait for what is being done, until then by ``now()``."""
        with self._state:
            self._stopped = True
            self._tasks.clear()
            self._state.notify_all()
            threads = [*([self._thread] if self._thread else []), *self._runners]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - now(), 0.0))
                if thread.is_alive():
                    _log.warning("An action of group %r does not end.", self._group.name)

    # -- in its thread -------------------------------------------------------------------------

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
                self._state.wait(min(pause, _LOOK_S))

    def _start(self, task: Task) -> None:
        name = f"meteor-action-{self._group.name}"
        runner = JoinableThread(self._do, name, task)
        self._runners = [thread for thread in self._runners if thread.is_alive()]
        self._runners.append(runner)
        runner.start()

    def _do(self, task: Task) -> None:
        clock, handler = self._group.clock, task.handler
        while not self._stopped and (left := clock.until(task.at) - handler.early) > 0:
            time.sleep(min(left, _AHEAD_S))
        while not self._stopped and clock.until(task.at) > 0:
            time.sleep(0)  # lets other threads of this process run
        if self._stopped or task.voter.gone:
            return
        action = self._action(task)
        try:
            if action.late > handler.max_late and not handler.run_late:
                task.voter.missed(action)
            else:
                handler.function(action)
        except BaseException:  # also SystemExit: nothing would report it
            _log.exception("Action %r of group %r failed.", action.name, self._group.name)

    def _action(self, task: Task) -> Action:
        outcome, clock = task.outcome, self._group.clock
        assert outcome.action is not None, "it is one"
        return Action(
            name=outcome.action,
            params=outcome.topic,
            at=task.at,
            late=-clock.until(task.at),
            error_bound=clock.error_bound,
            poll=outcome.poll,
            by=outcome.by,
        )
