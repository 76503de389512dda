"""If closing one kind of object fails, the other kinds are still closed, in closing order."""

from __future__ import annotations

import atexit
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

import meteor_py as meteor
from meteor_py.runtime import lifecycle
from meteor_py.runtime.lifecycle import ClosingOrder, Registry, close_each, close_owned
from tests.support.forking import exit_code, fork
from tests.support.interrupts import interrupt_at

ROOT = Path(__file__).parents[2]


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


def test_number_of_exit_handlers_does_not_grow_with_each_object(seen: list[str]) -> None:
    registry = register(seen, ClosingOrder.PUBLISHERS, keep=False)
    registry.add(Opened(object()))
    before = atexit._ncallbacks()
    for _ in range(100):
        registry.add(Opened(object()))
    assert atexit._ncallbacks() == before


def test_forked_child_without_exit_handlers_closes_its_own_objects(
    seen: list[str],
) -> None:
    registry = register(seen, ClosingOrder.PUBLISHERS)
    registry.add(Opened(object()))
    child = fork()
    if child == 0:
        try:
            atexit._clear()  # as multiprocessing does
            registry.add(Opened(object()))
            atexit._run_exitfuncs()
        finally:
            os._exit(0 if seen == ["fork PUBLISHERS", "exit PUBLISHERS"] else 7)
    assert exit_code(child) == 0


def test_exit_closes_objects_before_it_releases_an_embedded_server_opened_later(
    url: str, tmp_path: Path
) -> None:
    script = f"""
import meteor_py as meteor
first = meteor.connect({url!r}).stream("s", create=True).publisher()
second = meteor.connect("embedded://{tmp_path / "kept"}").stream("s").publisher(linger=60)
second.publish(b"x")
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, check=True)
    with meteor.connect(f"embedded://{tmp_path / 'kept'}") as client:
        assert client.stream("s").end().offset == 1


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_exit_closes_the_other_kinds_even_if_one_fails_or_is_interrupted(
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
