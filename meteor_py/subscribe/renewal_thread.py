"""The background thread of a group session: renews the lease, and sends confirms."""

from __future__ import annotations

import logging
from collections.abc import Callable
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

#: Seconds between two tries, doubled each time up to the second figure.
_BACKOFF_S = (0.02, 0.5)

#: Something to do on the session's connection, under its term.
Job: TypeAlias = "Callable[[Connection, Term], object]"


class RenewalThread(JoinableThread):
    """Does the session's jobs when they are due, until the session is closed.

    A server that does not reply is asked again; on any other error the term is given up.
    """

    def __init__(self, session: GroupSession) -> None:
        lease = session.lease
        super().__init__(self._work, f"{SESSION_PREFIX}-{lease.stream}-{lease.group}")
        self._session = session
        self._failures = 0  # in a row
        self._retry_at = 0.0  # by ``now()``

    def _work(self) -> None:
        session = self._session
        try:
            while not session.closed:
                with session.condition:
                    job, wait_s = session.next_job(self._retry_at)
                    if job is None:
                        if not session.closed:  # before the lock was taken: nothing would wake us
                            session.condition.wait(wait_s)
                        continue
                self._do(job)
        except BaseException as error:
            _log.exception("The thread that renews the lease of %s died.", session.lease)
            failure = MeteorError(
                f"The thread that renews the lease of {session.lease} failed unexpectedly: "
                f"{error!r}."
            )
            failure.__cause__ = error
            session.confirms.fail(failure)
            session.confirms.report(failure)
        finally:
            session.leave()

    def _do(self, job: Job) -> None:
        self._session.connection.use(lambda connection: self._do_on(connection, job))

    def _do_on(self, connection: Connection, job: Job) -> None:
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
            if not self._failures:  # once per outage
                _log.warning("The lease of %s cannot be renewed now: %s", session.lease, error)
            self._failures += 1
            self._retry_at = now() + pause_s(self._failures, *_BACKOFF_S)
        except MeteorError as error:  # gone, or forbidden: it will not get better by itself
            _log.warning("The lease of %s is lost: %s", session.lease, error)
            session.give_up_term(connection, term, error)
