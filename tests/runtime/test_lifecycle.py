"""If closing one kind of object fails, the other kinds are still closed, in closing order."""

from __future__ import annotations

import itertools

import pytest

from meteor_py.runtime import lifecycle
from meteor_py.runtime.lifecycle import ClosingOrder, Registry, close_each, close_owned
from tests.support.interrupts import interrupt_at


class Opened:
    def __init__(self, owner: object) -> None:
        self.owner = owner


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recorded calls, such as "close 2 PUBLISHERS". Replaces the library's own registries."""
    monkeypatch.setattr(lifecycle, "_registries", [])
    return []


def register(
    seen: list[str],
    order: ClosingOrder,
    error: BaseException | None = None,
    *,
    keep: bool = True,
) -> Registry[Opened]:
    def note(moment: str) -> None:
        seen.append(f"{moment} {order.name}")
        if error is not None:
            raise error

    return Registry(
        order,
        owner=lambda opened: opened.owner,
        close=lambda opened: note(f"close {len(opened)}"),
        at_exit=lambda opened: note("exit"),
        after_fork=lambda opened: note("fork"),
        keep=keep,
    )


def test_kinds_are_closed_in_closing_order_not_in_registration_order(
    seen: list[str],
) -> None:
    for order in (ClosingOrder.ARCHIVERS, ClosingOrder.PEER_GROUPS, ClosingOrder.PUBLISHERS):
        register(seen, order)
    close_owned(object())
    assert seen == ["close 0 PEER_GROUPS", "close 0 PUBLISHERS", "close 0 ARCHIVERS"]


def test_only_the_owners_objects_are_closed(seen: list[str]) -> None:
    registry, ours = register(seen, ClosingOrder.PUBLISHERS), object()
    for owner in (ours, object(), ours):
        registry.add(Opened(owner))
    close_owned(ours)
    assert seen == ["close 2 PUBLISHERS"]


@pytest.mark.parametrize("keep", [True, False])
def test_objects_are_closed_even_if_others_are_opened_at_any_moment(
    seen: list[str], keep: bool
) -> None:
    registry, ours = register(seen, ClosingOrder.PUBLISHERS, keep=keep), object()
    opened, another = [Opened(ours) for _ in range(3)], Opened(object())
    for each in opened:
        registry.add(each)
    for moment in itertools.count(1):
        if not interrupt_at(moment, lambda: registry.add(another), lambda: close_owned(ours)):
            break
        registry.discard(another)
    assert set(seen) == {"close 3 PUBLISHERS"}
    assert moment > 10


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_exit_closes_the_other_kinds_even_if_one_is_interrupted(
    seen: list[str], error: BaseException
) -> None:
    register(seen, ClosingOrder.SUBSCRIBERS, error)
    register(seen, ClosingOrder.PUBLISHERS)
    with pytest.raises(type(error)):
        lifecycle._close_all()
    assert seen == ["exit SUBSCRIBERS", "exit PUBLISHERS"]


def test_a_fork_abandons_the_other_kinds_even_if_one_fails(seen: list[str]) -> None:
    register(seen, ClosingOrder.SUBSCRIBERS, ValueError("x"))
    register(seen, ClosingOrder.PUBLISHERS)
    with pytest.raises(ValueError, match="x"):
        lifecycle._abandon_all()
    assert seen == ["fork SUBSCRIBERS", "fork PUBLISHERS"]


def test_an_interrupt_is_not_hidden_by_an_earlier_error(seen: list[str]) -> None:
    register(seen, ClosingOrder.SUBSCRIBERS, ValueError("x"))
    register(seen, ClosingOrder.PUBLISHERS, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        close_owned(object())


def test_every_object_is_closed_and_the_first_failure_is_raised() -> None:
    closed: list[int] = []

    def close(number: int) -> None:
        closed.append(number)
        if number:
            raise ValueError(str(number))

    with pytest.raises(ValueError, match="1"):
        close_each([0, 1, 2], close)
    assert closed == [0, 1, 2]
