"""Shared groups compared with a model under random operations."""

from __future__ import annotations

import random

import pytest

import meteor_py as meteor
from tests.support.servers import plain_client
from tests.support.shared_walk import Walk, changed_scripts, small_scripts

WALKS = 14
STEPS = 90

#: Faults that the walks must find. Each replaces a part of the scripts.
FAULTS = {
    "a key is never freed": (b"t.owner = NOBODY\nend", b"end"),
    "a freed key is not offered": (b"place and raw ~= before", b"place == 8 and raw ~= before"),
    "returned records are put at the end": (
        b"set_line(k, t, insert(t.line, offsets))",
        b"set_line(k, t, t.line .. to_line(offsets, 1, #offsets))",
    ),
    "a key exceeds its limit by one record": (
        b"cap - t.held, #t.line / 7",
        b"cap - t.held + 1, #t.line / 7",
    ),
    "suspects are delivered together": (b"      count = 1\n    elseif x and", b"    elseif x and"),
    "a last try is not delivered alone": (b"if got > 0 or c.holding > 0 then", b"if false then"),
    "no record is blamed for a death": (b"t.extended.blame >= 0 and t.held == 0", b"false"),
    "an acknowledged record keeps its failures": (
        b"if p.failing > 0 then\n      f",
        b"if false then\n      f",
    ),
    "a batch stays unsettled": (b"marks[me .. ':' .. n] = false, false", b"local _ = false"),
    "a delay ends at once": (b"t.extended.stop, p.due = DELAYED, min(p.due, due)", b"local _"),
    "a chunk is forgotten": (b"if x.far > 0 then pull_chunk(k, t) elseif", b"if"),
    "a step is taken twice": (b"if number == c.step then", b"if number == c.step and false then"),
    "a stopped key is claimed": (
        b"x.stop == DELAYED or x.stop == PARKED))\n  end",
        b"false))\n  end",
    ),
    "a key has two owners": (
        b"if owner ~= me and owner ~= NOBODY and not whole then return raw end",
        b"if owner ~= me then owner = NOBODY end",
    ),
    "scanned records overtake waiting ones": (
        b"t.line == '' and not pushed[k] and t.held",
        b"t.held",
    ),
    "waiting records are not counted": (
        b"p.waiting - count\n    if x and",
        b"p.waiting\n    if x and",
    ),
}


@pytest.mark.parametrize("number", range(WALKS))
def test_each_record_is_settled_once_in_order_and_by_one_consumer(
    url: str, rng: random.Random, number: int
) -> None:
    seed = f"{rng.randrange(1 << 32)}"
    if number % 2:
        with small_scripts():
            walk(url, seed, STEPS)
    else:
        walk(url, seed, STEPS)


@pytest.mark.parametrize("fault", FAULTS)
def test_walks_find_planted_faults(url: str, fault: str) -> None:
    with changed_scripts(dict([FAULTS[fault]])), small_scripts():
        for number in range(8):
            try:
                walk(url, f"planted {number}", STEPS)
            except (AssertionError, KeyError, meteor.MeteorError):
                return
            with plain_client(url) as plain:
                plain.flushall()
    pytest.fail("no walk found the fault")


def walk(url: str, seed: str, steps: int) -> None:
    print(f"walk seed: {seed!r}, steps: {steps}")
    with meteor.connect(url) as client, plain_client(url) as plain:
        walk = Walk(client, plain, seed)
        try:
            walk.run(steps)
        except BaseException:
            print(f"after: {walk.done}")
            raise
        finally:
            walk.close()
