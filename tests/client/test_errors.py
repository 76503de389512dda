"""Errors can be pickled and copied, with all their fields."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py import errors

#: A value for each error parameter without a default.
ARGUMENTS: dict[str, object] = {
    "problem": "What happened.",
    "message": "What happened.",
    "why": "is in the log, but its replica is down.",
    "stream": "orders",
    "writer": "query-1",
    "version": 4,
    "records": 10,
    "known": 9,
    "group": "g",
    "owner": "host-1",
    "alive": 2,
    "offset": 7,
    "offsets": (3, 5),
    "first": 3,
    "last": 5,
    "values": {"a": 1},
    "setting": "ack_timeout",
    "seconds": 30.0,
    "queue": "orders",
    "failed": {"b": errors.MemberLeft("b left.", group="g", member="b")},
    "record": meteor.Record(7, b"{", None, None, 0, 0),
}


def kinds(base: type[Any] = errors.MeteorError) -> Iterator[type[Any]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


def example(kind: type) -> errors.MeteorError:
    parameters = inspect.signature(kind).parameters.values()
    wanted = {each.name: each for each in parameters if each.default is inspect.Parameter.empty}
    positional = [
        ARGUMENTS[n] for n, each in wanted.items() if each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    named = {n: ARGUMENTS[n] for n, each in wanted.items() if each.kind is each.KEYWORD_ONLY}
    error = kind(*positional, **named)
    assert isinstance(error, errors.MeteorError)
    return error


def pickled(error: errors.MeteorError) -> object:
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize("how", [pickled, copy.copy, copy.deepcopy, errors.fresh])
@pytest.mark.parametrize("kind", sorted(set(kinds()), key=str))
def test_a_copied_or_pickled_error_keeps_its_type_text_and_fields(
    kind: type, how: Callable[[errors.MeteorError], object]
) -> None:
    error = example(kind)
    copied = how(error)
    assert type(copied) is kind
    assert copied is not error
    assert str(copied) == str(error)
    assert repr(vars(copied)) == repr(vars(error))


def test_a_fresh_copy_of_an_error_keeps_the_cause_but_not_the_traceback() -> None:
    kept = meteor.OutcomeUnknown("Who knows?", stream="orders")
    try:
        raise kept from ConnectionResetError()
    except meteor.OutcomeUnknown:
        fresh = errors.fresh(kept)
    assert isinstance(fresh.__cause__, ConnectionResetError)
    assert fresh.__traceback__ is None
