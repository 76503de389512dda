"""The common fixtures: seeds are repeatable, servers are empty, leaked threads fail a test."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests import conftest
from tests.support.servers import plain_client
from tests.support.waiting import eventually
from tests.support.xdist_scheduler import group_of

ROOT = Path(__file__).parents[2]


def run_pytest(directory: Path, program: str, *options: str, **environment: str) -> str:
    """Run pytest on a test file with our fixtures, and return its output."""
    path = directory / "test_it.py"
    path.write_text(program)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, *options, "--rootdir", str(directory), str(path)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=180,
    )
    return result.stdout + result.stderr


def test_each_test_runs_once_even_if_worker_processes_die(tmp_path: Path) -> None:
    program = f"""
import os
import pathlib
import pytest

@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("group", ["alone", "spark"])
def test_one(number, group):
    place = pathlib.Path({str(tmp_path)!r}, group + str(number))
    assert not place.exists(), "it ran before"
    place.touch()
    if number in (0, 11):
        os._exit(3)
"""
    assert "4 failed, 20 passed" in run_pytest(tmp_path, program, "-n2", "-q")


def test_leaked_threads_and_seeds_of_failed_tests_are_reported(tmp_path: Path) -> None:
    program = """
import threading

def test_leaks():
    threading.Thread(target=threading.Event().wait, name="meteor-session", daemon=True).start()

def test_leaks_a_thread_of_another_library():
    threading.Thread(target=threading.Event().wait, name="other", daemon=True).start()

def test_thread_ends_within_grace():
    timer = threading.Timer(0.1, lambda: None)
    timer.name = "meteor-timer"
    timer.start()

def test_unlucky(rng):
    assert rng.random() > 1
"""
    output = run_pytest(tmp_path, program, METEOR_SEED="12345")
    assert "1 failed, 3 passed, 1 error" in output
    assert "The test left the thread 'meteor-session' running" in output
    assert "random seed: METEOR_SEED=12345" in output
    assert "METEOR_SEED=12345 pytest 'test_it.py::test_unlucky'" in output
    assert f"assert {random.Random('12345 test_it.py::test_unlucky').random()} > 1" in output


def test_random_numbers_depend_only_on_the_seed_and_the_test_name(
    rng: random.Random, request: pytest.FixtureRequest
) -> None:
    again = random.Random(f"{os.environ['METEOR_SEED']} {request.node.nodeid}")
    assert [rng.random() for _ in range(5)] == [again.random() for _ in range(5)]


@pytest.mark.parametrize("_", range(2))
def test_url_is_the_address_of_an_empty_server(url: str, _: int) -> None:
    with plain_client(url) as client:
        assert client.dbsize() == 0
        client.set("key", "value")


def test_any_url_is_the_address_of_an_empty_server(any_url: str) -> None:
    if not any_url.startswith("fake://"):
        with plain_client(any_url) as client:
            assert client.dbsize() == 0
            client.set("key", "value")


@pytest.mark.parametrize(
    ("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)]
)
def test_missing_redis_is_a_failure_in_ci_and_a_skip_elsewhere(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setattr(conftest, "binaries", dict)
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="redis-server is not on PATH"):
        conftest.require_redis()


def test_hypothesis_has_no_deadline_and_prints_how_to_repeat_a_failure() -> None:
    profile = settings()
    assert profile.deadline is None
    assert profile.print_blob
    assert not profile.derandomize


def test_eventually_returns_the_value_it_waited_for() -> None:
    values = iter([None, 0, "ready"])
    assert eventually(lambda: next(values)) == "ready"


def test_eventually_fails_with_its_message() -> None:
    with pytest.raises(AssertionError, match="no luck"):
        eventually(lambda: False, timeout_s=0.05, message="no luck")


def test_one_worker_runs_tests_that_share_spark_and_another_runs_tests_that_start_it() -> None:
    def group(nodeid: str) -> str:
        return group_of(f"tests/{nodeid}", ROOT)

    shared = {group(f"spark/test_{name}.py::test_it") for name in ("batch", "sink", "source")}
    own = {group("spark/test_faults.py::test_it"), group("docs/test_examples.py::test_spark_x")}
    assert (len(shared), len(own)) == (1, 1)
    assert shared != own
    assert group("docs/test_examples.py::test_a") != group("docs/test_examples.py::test_b")
