"""The outcome of an operation can be awaited, runs callbacks, and tracks observed errors."""

from __future__ import annotations

import threading

import pytest

from meteor_py.runtime.completion import SENDER_PREFIX, SESSION_PREFIX, Completion


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


def test_a_forked_child_does_not_call_the_callbacks_of_its_parent() -> None:
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
