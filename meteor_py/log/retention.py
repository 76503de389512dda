"""Changes to a stream's settings. New limits also apply to the records already in its ring.

``redis/lua/log/_append.lua`` enforces the limits with marks, which it sets as it appends. Frames
that were published without limits have no marks. So when the limits change, this module measures
the ring once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from meteor_py.log.catalog import check_settings
from meteor_py.log.handle import StreamHandle
from meteor_py.records.config import STORE_SETTINGS, StreamConfig
from meteor_py.redis import keys
from meteor_py.redis.scripts import APPLY_LIMITS, CONFIGURE_STREAM, MEASURE_RING

#: Limits that the value 0 removes.
_LIMITS = ("max_age", "max_bytes", "retain", "retain_bytes")
#: The fields of ``meta`` whose names differ from the names of the settings.
_FIELDS = {"max_age": "keep", "max_bytes": "keep", "ordering_key": "group_by"}
#: Adjacent marks are at least ``limit / _STEPS`` apart, as in ``_append.lua``.
_STEPS = 32


class _Mark(NamedTuple):
    """A point in the ring: the end of a frame."""

    offset: int
    #: The total bytes of all frames up to this one, counted as in ``_append.lua``.
    bytes: int
    #: The frame's append time, in ms.
    time: int


def configure(stream: StreamHandle, requested: dict[str, Any]) -> None:
    """Change a stream's settings; see ``Stream.configure``."""
    for setting in STORE_SETTINGS:
        if setting in requested and stream.store_id is None:
            raise ValueError(
                f"{setting} needs a stream with a store, but {stream.name!r} has none. Omit it, or "
                "create another stream with store=."
            )
    changes: dict[str, Any] = {
        setting: None if setting in _LIMITS and _is_zero(value) else value
        for setting, value in requested.items()
    }
    meta = stream.snapshot()[0]  # another client may have changed the settings
    current = meta.config
    if "ordering_key" in changes and current.ordering_key is not None:
        check_settings(stream.name, meta, {"ordering_key": changes["ordering_key"]})
    config = replace(current, **changes).check_room()
    fields = config.to_fields()
    capacity = fields["capacity"] if "capacity" in changes else ""
    names = dict.fromkeys(_FIELDS.get(setting, setting) for setting in changes)
    others = [item for name in names if name != "capacity" for item in (name, fields.get(name, ""))]
    args = [stream.incarnation, capacity, *others]
    script_keys = [*stream.keys, keys.settings(stream.name)]
    if config.ordering_key is not None:
        script_keys.append(keys.index(stream.name))
    while (reply := stream.run(CONFIGURE_STREAM, args, script_keys))[0] == b"MORE":
        pass  # terminates: each step trims at least one entry in a finite ring
    if reply[0] == b"ORDERED":  # another client has just added an ordering key
        meta = stream.snapshot()[0]
        check_settings(stream.name, meta, {"ordering_key": changes["ordering_key"]})
    stream.config = config
    if "keep" in names:
        _apply_limits(stream, config, int(reply[1]), int(reply[2]))


def _is_zero(value: object) -> bool:
    return value == 0 and not isinstance(value, bool)


def _apply_limits(stream: StreamHandle, config: StreamConfig, end: int, total: int) -> None:
    """Drop the records that exceed the limits in ``config``, and store marks for the other frames.

    If the caller dies before this is done, the server drops the records later, all at once.

    Args:
        stream: The stream, whose new limits are already stored on the server.
        config: The stream's settings.
        end: The end of the stream when the limits were stored.
        total: The stream's ``bytes`` field at that moment.
    """
    if (config.max_age, config.max_bytes) == (None, None):
        return
    floor, marks = _measure(stream, config, end, total)
    text = "".join(f"{offset:016}{size:016}{time:016}" for offset, size, time in reversed(marks))
    args = [stream.incarnation, config.to_fields()["keep"], floor, end, text]
    while stream.run(APPLY_LIMITS, args, [*stream.keys, *stream.index_keys])[0] == b"MORE":
        pass  # terminates: each step trims at least one entry in a finite ring


def _measure(
    stream: StreamHandle, config: StreamConfig, end: int, total: int
) -> tuple[int, list[_Mark]]:
    """Return the first offset to keep, and marks for the frames after it, newest first."""
    age_ms = float("inf") if config.max_age is None else config.max_age * 1000
    most = float("inf") if config.max_bytes is None else config.max_bytes
    marks: list[_Mark] = []
    left, at = total, f"{end}-0" if end else ""
    while at:
        clock, next_id, *found = stream.connector.run(MEASURE_RING, stream.keys[:1], [at])
        at = next_id.decode()
        frames = zip(found[::3], found[1::3], found[2::3], strict=True)
        for offset, size, time in (map(int, frame) for frame in frames):
            mark = _Mark(offset, left, time)
            # Always keep the newest frame, even if it exceeds a limit. Publishing does the same.
            if marks and (total - left + size > most or int(clock) - time >= age_ms):
                # Mark this frame too, because the trim keeps it if it is not archived yet.
                return offset + 1, [*marks, mark]
            if not marks or (
                marks[-1].bytes - left >= most / _STEPS or marks[-1].time - time >= age_ms / _STEPS
            ):
                marks.append(mark)
            left -= size
    return 0, marks
