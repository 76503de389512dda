"""A completion ends waits, runs callbacks, and tracks whether its error was observed."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import pytest

from meteor_py.runtime import completion as module
from meteor_py.runtime.completion import SENDER_PREFIX, SESSION_PREFIX, Completion
from meteor_py.runtime.locks import SignalSafeEvent


def test_a_wait_ends_when_the_operation_is_settled() -> None:
    completion = Completion()
    assert not completion.wait(0.0)
    threading.Timer(0.05, completion.settle).start()
    assert completion.wait(5.0)
    assert completion.wait(0.0)
    assert (completion.settled, completion.error) == (True, None)


def test_callbacks_run_once_and_mark_the_error_as_observed() -> None:
    completion, late = Completion(), Completion()
    called: list[str] = []
    completion.on_settled(lambda: called.append("before"))
    completion.settle(ValueError())
    late.settle(ValueError())
    assert (completion.observed, late.observed) == (True, False)
    late.on_settled(lambda: called.append("after"))
    assert (called, late.observed) == (["before", "after"], True)


def test_an_operation_settled_while_a_wait_begins_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    completion = Completion()

    class LateEvent(SignalSafeEvent):
        def __init__(self) -> None:
            completion.settle()  # by the sender, which does not see this event yet
            super().__init__()

    monkeypatch.setattr(module, "SignalSafeEvent", LateEvent)
    assert completion.wait(0.0)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_callback_added_while_the_operation_is_settled_is_called_once(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    completion = Completion()
    called: list[str] = []

    class Callbacks(deque[Any]):
        def append(self, callback: Any) -> None:
            if moment == "before":
                completion.settle()
            super().append(callback)
            if moment == "after":
                completion.settle()

    monkeypatch.setattr(module, "deque", Callbacks)
    completion.on_settled(lambda: called.append("once"))
    assert (called, completion.observed) == (["once"], True)


def test_settling_an_operation_needs_no_lock() -> None:
    """A signal handler may wait for the sender while the code that it interrupts holds the lock."""
    completion = Completion()
    with module._lock:
        thread = threading.Thread(target=completion.settle, daemon=True)
        thread.start()
        thread.join(5)
        assert completion.settled


def test_a_forked_child_does_not_call_its_parents_callbacks() -> None:
    completion = Completion()
    completion.on_settled(lambda: pytest.fail("called"))
    error = ValueError()
    completion.abandon(error)
    assert completion.wait(0.0)
    assert (completion.error, completion.observed) == (error, False)


@pytest.mark.parametrize("prefix", [SENDER_PREFIX, SESSION_PREFIX])
def test_a_thread_that_settles_operations_must_not_wait_for_an_operation(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.current_thread(), "name", f"{prefix}-orders")
    done = Completion()
    done.settle()
    assert done.wait(None)
    with pytest.raises(RuntimeError, match="must not wait"):
        Completion().wait(None)
