"""A group session's background thread: renews the lease, and sends confirms."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from meteor_py.errors import ConnectionFailed, MeteorError
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.runtime.completion import SESSION_PREFIX
from meteor_py.runtime.threads import JoinableThread

if TYPE_CHECKING:
    from meteor_py.redis.connection import Connection
    from meteor_py.subscribe.group_session import GroupSession
    from meteor_py.subscribe.lease import Term

_log = logging.getLogger(__name__)

#: Shortest and longest pause between attempts, in seconds. The pause doubles each time.
_BACKOFF_S = (0.02, 0.5)

#: A call to make on the session's connection, in the session's term.
Job: TypeAlias = "Callable[[Connection, Term], object]"


class RenewalThread(JoinableThread):
    """Runs the session's jobs when they are due, until the session is closed.

    If the server does not reply, the thread retries. On any other error it ends the term.
    """

    def __init__(self, session: GroupSession) -> None:
        lease = session.lease
        super().__init__(self._work, f"{SESSION_PREFIX}-{lease.stream}-{lease.group}")
        self._session = session
        self._failures = 0  # consecutive failures
        self._retry_at = 0.0  # on the ``now()`` clock

    def _work(self) -> None:
        session = self._session
        try:
            while not session.closed:
                with session.condition:
                    job, wait_s = session.next_job(self._retry_at)
                    if job is None:
                        if not session.closed:  # close() may have notified before we took the lock
                            session.condition.wait(wait_s)
                        continue
                session.connection.use(partial(self._do, job))
        except BaseException as error:
            _log.exception("The thread that renews the lease for %s failed.", session.lease)
            failure = MeteorError(
                f"The thread that renews the lease for {session.lease} failed unexpectedly: "
                f"{error!r}."
            )
            failure.__cause__ = error
            session.confirms.fail(failure)
            session.confirms.report(failure)
        finally:
            session.leave()

    def _do(self, job: Job, connection: Connection) -> None:
        session = self._session
        term = session.term
        if term is None or session.closed:
            return
        try:
            job(connection, term)
            self._failures = 0
            self._retry_at = 0.0
        except ConnectionFailed as error:
            session.confirms.fail_overdue(error)
            if not self._failures:  # log once per outage
                _log.warning("The server for %s is unavailable; retrying: %s", session.lease, error)
            self._failures += 1
            self._retry_at = now() + pause_s(self._failures, *_BACKOFF_S)
        except MeteorError as error:  # such as a deleted group: a retry will not help
            _log.warning("Lost the lease for %s: %s", session.lease, error)
            session.give_up_term(connection, term, error)
