"""The common fixtures keep their promises: seeds repeat, servers are empty, threads are missed."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.servers import plain_client
from tests.support.waiting import eventually
from tests.support.xdist_scheduler import group_of

ROOT = Path(__file__).parents[2]


def run_pytest(directory: Path, program: str, *options: str, **environment: str) -> str:
    """The output of pytest for a file of its own with our fixtures."""
    path = directory / "test_it.py"
    path.write_text(program)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, *options, "--rootdir", str(directory), str(path)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return result.stdout + result.stderr


@pytest.mark.parametrize("which", [0, 11])
def test_all_others_are_run_once_if_processes_die_of_a_test(tmp_path: Path, which: int) -> None:
    program = f"""
import os
import pathlib
import pytest

@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("group", ["alone", "spark"])
def test_one(number, group):
    place = pathlib.Path({str(tmp_path)!r}, group + str(number))
    assert not place.exists(), "it was run before"
    place.touch()
    if number == {which}:
        os._exit(3)
"""
    assert "2 failed, 22 passed" in run_pytest(tmp_path, program, "-n2", "-q")


def test_a_test_that_leaves_a_meteor_thread_running_fails(tmp_path: Path) -> None:
    program = """
import threading

def test_leaks():
    threading.Thread(target=threading.Event().wait, name="meteor-session", daemon=True).start()

def test_is_innocent():
    threading.Thread(target=threading.Event().wait, name="other", daemon=True).start()
"""
    output = run_pytest(tmp_path, program)
    assert "2 passed, 1 error" in output
    assert "The test left the thread 'meteor-session' running" in output


def test_a_thread_that_ends_within_the_grace_is_no_leak(tmp_path: Path) -> None:
    program = """
import threading

def test_slow_end():
    threading.Timer(0.3, lambda: None).start()
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.name = "meteor-timer"
"""
    assert "1 passed" in run_pytest(tmp_path, program)


def test_a_failed_test_prints_the_command_that_repeats_its_random_numbers(tmp_path: Path) -> None:
    program = """
def test_unlucky(rng):
    assert rng.random() > 1
"""
    first = run_pytest(tmp_path, program, METEOR_SEED="12345")
    assert "random seed: METEOR_SEED=12345" in first
    assert "METEOR_SEED=12345 pytest 'test_it.py::test_unlucky'" in first

    def value(output: str) -> str:
        return next(line for line in output.splitlines() if "assert 0." in line)

    assert value(run_pytest(tmp_path, program, METEOR_SEED="12345")) == value(first)
    assert value(run_pytest(tmp_path, program, METEOR_SEED="54321")) != value(first)


def test_random_numbers_depend_on_the_seed_and_the_test_only(
    rng: random.Random, request: pytest.FixtureRequest
) -> None:
    again = random.Random(f"{os.environ['METEOR_SEED']} {request.node.nodeid}")
    assert [rng.random() for _ in range(5)] == [again.random() for _ in range(5)]


@pytest.mark.parametrize("_", range(2))
def test_url_is_the_address_of_an_empty_server(url: str, _: int) -> None:
    with plain_client(url) as client:
        assert client.dbsize() == 0
        client.set("key", "value")


def test_any_url_is_empty_whatever_serves_it(any_url: str) -> None:
    if not any_url.startswith("fake://"):
        with plain_client(any_url) as client:
            assert client.dbsize() == 0
            client.set("key", "value")


def test_in_ci_a_missing_redis_is_a_failure_and_elsewhere_a_skip(tmp_path: Path) -> None:
    program = """
def test_everywhere(any_url):
    pass
"""
    nowhere = str(tmp_path)
    assert "2 passed, 1 skipped" in run_pytest(tmp_path, program, PATH=nowhere, CI="")
    assert "2 passed, 1 error" in run_pytest(tmp_path, program, PATH=nowhere, CI="true")


def test_hypothesis_has_no_deadline_and_prints_how_to_repeat() -> None:
    profile = settings()
    assert profile.deadline is None
    assert profile.print_blob
    assert not profile.derandomize


def test_eventually_returns_the_value_it_waited_for() -> None:
    values = iter([None, 0, "ready"])
    assert eventually(lambda: next(values)) == "ready"


def test_eventually_gives_up_with_its_message() -> None:
    with pytest.raises(AssertionError, match="no luck"):
        eventually(lambda: False, timeout_s=0.05, message="no luck")


def test_one_process_runs_what_shares_a_spark_and_one_what_starts_its_own() -> None:
    def group(nodeid: str) -> str:
        return group_of(f"tests/{nodeid}", ROOT)

    shared = {group(f"spark/test_{name}.py::test_it") for name in ("batch", "sink", "source")}
    own = {group("spark/test_faults.py::test_it"), group("docs/test_examples.py::test_spark_x")}
    assert (len(shared), len(own)) == (1, 1)
    assert shared != own
    assert group("docs/test_examples.py::test_a") != group("docs/test_examples.py::test_b")
