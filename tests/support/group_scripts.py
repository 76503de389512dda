"""Direct calls to the subscriber group scripts."""

from __future__ import annotations

from typing import Any

import meteor_py as meteor
from meteor_py.redis import keys, scripts
from tests.client.test_scripts import HISTORY, INCARNATION, StreamScripts

TTL_MS = 60_000

Answer = tuple[Any, ...]


class GroupScripts(StreamScripts):
    """A stream ``s`` with a group ``g``, and each script as a method that returns its reply."""

    def __init__(self, client: meteor.Client, name: str = "s", group: str = "g") -> None:
        super().__init__(client, name)
        self.g = group
        self.group, self.lease = keys.group(name, group), keys.lease(name, group)
        self.events, self.groups = keys.events(name), keys.groups(name)

    def open(
        self,
        start: int | str = 0,
        *,
        create: bool = True,
        floating: bool = False,
        incarnation: str = INCARNATION,
    ) -> Answer:
        script_keys = [self.meta, self.group, self.lease, self.groups]
        args = (
            incarnation,
            self.g,
            "create" if create else "",
            start,
            "floating" if floating else "",
        )
        return self.answer(scripts.OPEN_GROUP, script_keys, *args)

    def acquire(
        self,
        nonce: str,
        member: str = "",
        *,
        ttl_ms: int = TTL_MS,
        expired: int | str = "",
        incarnation: str = INCARNATION,
    ) -> Answer:
        args = (incarnation, self.g, member or f"m-{nonce}", nonce, ttl_ms, expired)
        return self.answer(scripts.ACQUIRE_LEASE, self.owned, *args, 0)

    def renew(
        self,
        nonce: str,
        term: int,
        *,
        ttl_ms: int = TTL_MS,
        incarnation: str = INCARNATION,
        member: str = "",
    ) -> Answer:
        args = (incarnation, self.g, member or f"m-{nonce}", nonce, ttl_ms, term, 1)
        return self.answer(scripts.RENEW_LEASE, self.owned, *args)

    def release(self, nonce: str, *, lapse: bool = False, lease: str = "") -> Answer:
        """Release the lease.

        With ``lapse``, pass the lease value that the caller knows. This is ``lease``, if given, or
        the current value, or "expired" if the lease is free.
        """
        script_keys = [self.group, self.lease, self.events]
        known = (lease or self.lease_text() or "expired") if lapse else ""
        args = (self.g, f"m-{nonce}", nonce, known)
        return self.answer(scripts.RELEASE_LEASE, script_keys, *args)

    def confirm(
        self,
        nonce: str,
        term: int,
        offset: int,
        *,
        epoch: int = 1,
        history: str = HISTORY,
        incarnation: str = INCARNATION,
    ) -> Answer:
        args = (incarnation, history, nonce, term, epoch, offset)
        return self.answer(scripts.CONFIRM_OFFSET, [self.meta, self.group], *args)

    def seek(
        self,
        offset: int,
        *,
        floating: bool = False,
        force: bool = False,
        request: str = "r",
        incarnation: str = INCARNATION,
    ) -> Answer:
        script_keys = [self.meta, self.group, self.lease, self.events, self.groups]
        flags = ("floating" if floating else "", "force" if force else "")
        return self.answer(
            scripts.SEEK_GROUP, script_keys, incarnation, self.g, offset, *flags, request
        )

    def delete(self, *, force: bool = False, incarnation: str = INCARNATION) -> Answer:
        script_keys = [self.meta, self.group, self.lease, self.events, self.groups]
        args = (incarnation, self.g, "force" if force else "")
        return self.answer(scripts.DELETE_GROUP, script_keys, *args)

    # -- state ---------------------------------------------------------------------------------

    @property
    def owned(self) -> list[str]:
        return [self.meta, self.group, self.lease, self.events]

    def answer(self, script: scripts.Script, script_keys: list[str], *args: Any) -> Answer:
        answer = self.run(script, script_keys, *args)
        return tuple(x.decode() if isinstance(x, bytes) else x for x in answer)

    def expire(self) -> None:
        """Make the lease expire."""
        self.plain.delete(self.lease)

    def field(self, name: str) -> str | None:
        found: Any = self.plain.hget(self.group, name)
        return None if found is None else found.decode()

    def fields(self) -> dict[str, str]:
        found: Any = self.plain.hgetall(self.group)
        return {name.decode(): text.decode() for name, text in found.items()}

    def holder(self) -> str | None:
        """Return the member and term that the lease names."""
        text = self.lease_text()
        return None if text is None else text.rpartition(" ")[0]

    def lease_text(self) -> str | None:
        found: Any = self.plain.get(self.lease)
        return None if found is None else found.decode()

    def last_event(self) -> str:
        found: Any = self.plain.xrevrange(self.events, count=1)
        return found[0][0].decode() if found else "0-0"

    def happened(self) -> list[dict[str, str]]:
        """Return all events, oldest first."""
        found: Any = self.plain.xrange(self.events)
        return [{k.decode(): v.decode() for k, v in fields.items()} for _, fields in found]

    def snapshot(self) -> dict[bytes, Any]:
        """Return the contents of all keys, without their times to live."""
        looks: dict[Any, Any] = {
            b"hash": self.plain.hgetall,
            b"stream": self.plain.xrange,
            b"string": self.plain.get,
            b"set": self.plain.smembers,
        }
        names: Any = self.plain.keys("*")
        return {key: looks[self.plain.type(key)](key) for key in names}
