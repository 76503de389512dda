"""``meteor bench`` prints measured figures, and leaves the server unchanged."""

from __future__ import annotations

import pytest

from meteor_cli.commands.bench import measure
from tests.support.commands import METEOR, meteor, succeed
from tests.support.servers import plain_client
from tests.support.terminal import Terminal
from tests.support.waiting import eventually

WHAT = ["publish_many", "read_bytes", "read_arrow", "read_group", "publish", "latency"]


def test_bench_measures_everything_on_the_given_server(url: str) -> None:
    with plain_client(url) as neighbour:
        neighbour.set("mine", "1")
        done = succeed(url, "bench", "--records", "25000", "--size", "7", "--json")
        assert neighbour.keys("*") == [b"mine"]
    assert done.err.count("\n") == 1, "more than one line was printed"
    assert [found["what"] for found in done.objects] == WHAT
    for found in done.objects:
        assert url.removesuffix("/0") in found["server"]
        assert found["size"] == 7
        assert found["seconds"] > 0
    *rates, latency = done.objects
    for found in rates:
        assert found["records"] == 25_000
        assert found["records_per_s"] == pytest.approx(25_000 / found["seconds"])
        assert found["megabytes_per_s"] == pytest.approx(found["records_per_s"] * 7 / 1e6)
    assert latency["records"] == 2_000
    assert 0 < latency["p50_ms"] <= latency["p99_ms"]


def test_bench_without_a_url_uses_a_private_server() -> None:
    with Terminal([METEOR, "bench", "--records", "10000"], environment={"METEOR_URL": ""}) as seen:
        assert seen.wait() == 0
        assert "10,000 records of 100 bytes on Valkey" in seen.lines[0]
        headings, *rows = (line for line in seen.lines[1:] if line)
    assert headings.split("  ")[-1].strip() == "p99 ms"
    assert [row[:24].strip() for row in rows] == [
        "publish_many with lists",
        "read as bytes",
        "read as Arrow",
        "read in a group",
        "publish in a loop",
        "latency of one record",
    ]
    assert "…" not in "".join([headings, *rows])


def test_bench_limits_the_memory_that_large_records_use_on_the_server(url: str) -> None:
    done = succeed(url, "bench", "--records", "1000", "--size", "300000", "--json")
    kept = {found["what"]: found["records"] for found in done.objects}
    assert (kept["publish_many"], kept["read_bytes"]) == (1_000, 853)


def test_ctrl_c_leaves_no_stream(url: str) -> None:
    command = (METEOR, "--url", url, "bench", "--records", "1000000000")
    with plain_client(url) as neighbour, Terminal(command) as terminal:
        eventually(lambda: bool(neighbour.keys("meteor:{*")), 30, "the benchmark did not start")
        terminal.wait_for("publish_many with lists")
        terminal.press("\x03")
        assert terminal.wait() == 130
        assert "Traceback" not in terminal.text
        assert [key for key in neighbour.keys("*") if b"bench" in key] == []


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--records", "999"], 2, "is not in the range"),
        (["--size", "0"], 2, "is not in the range"),
        (["--url", "redis://127.0.0.1:1"], 1, "cannot be reached"),
    ],
)
def test_bench_error_prints_a_message_without_a_traceback(
    arguments: list[str], code: int, sentence: str
) -> None:
    done = meteor(None, "bench", *arguments)
    assert (done.code, done.out) == (code, b"")
    assert sentence in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("samples", "percent", "wanted"),
    [([7.0], 50, 7.0), ([7.0], 99, 7.0), ([3.0, 1.0, 2.0, 4.0], 50, 2.0)]
    + [([float(n) for n in range(1, 101)], percent, float(percent)) for percent in (1, 50, 99)],
)
def test_a_percentile_is_one_of_the_samples(
    samples: list[float], percent: int, wanted: float
) -> None:
    assert measure.percentile(samples, percent) == wanted
