"""``--json`` prints exactly the fields in the schema, from which the reference is generated."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import meteor_cli
from meteor_cli.render.schema import CONSUMER_FIELDS, EVENTS, FIELDS, GROUP_FIELDS, KEY_FIELDS
from meteor_py import connect
from meteor_py.redis import keys
from tests.support.commands import RunningCommand, meteor, succeed

#: Fields that are omitted if they were not measured.
_OPTIONAL = {"records_per_s", "megabytes_per_s", "p50_ms", "p99_ms"}


@pytest.fixture
def printed(url: str, tmp_path: Path) -> dict[str, list[Any]]:
    """The output of each command for a stream with groups and, at the end, a damaged store."""
    with connect(url) as m:
        stream = m.stream("orders", store=str(tmp_path), ordering_key="key")
        with stream.publisher() as pub:
            pub.publish(b"x").result()
        sub = stream.shared_subscriber("packing")  # the client closes it
        assert sub.poll()
        stream.store.flush()
        stream.seek_group("billing", 0)
        shown = {
            command: succeed(url, *command.split(), *arguments, "--json").objects
            for command, arguments in {
                "server info": [],
                "streams ls": [],
                "streams info": ["orders"],
                "groups ls": ["orders"],
                "groups info": ["orders", "billing"],
                "shared ls": ["orders"],
                "shared info": ["orders", "packing"],
                "seek": ["orders", "billing", "--to", "latest", "--dry-run"],
                "archive ls": ["orders"],
                "top --once": [],
                "bench": ["--records", "1000"],
            }.items()
        }
        m.redis.hset(keys.shared("orders", "packing", "meta"), "max_waiting", "x")
        shown["shared fsck"] = meteor(
            url, *("shared", "fsck", "orders", "packing", "--json")
        ).objects
        with RunningCommand(url, "watch", "--json", "--interval", "0.1") as watching:
            assert "watching 1 stream" in watching.line("stderr")
            m.stream("others", create=True)
            shown["watch"] = [ast.literal_eval(watching.line().replace("null", "None"))]
    (file,) = tmp_path.rglob("*.parquet")
    file.write_bytes(b"damaged")
    shown["archive verify"] = meteor(url, "archive", "verify", "orders", "--json").objects
    return shown


def test_json_fields_match_the_schema(printed: dict[str, list[Any]]) -> None:
    # The tests of `meteor peers` check the fields of these commands.
    others = {command for command in FIELDS if command.startswith("peers ")}
    assert printed.keys() == FIELDS.keys() - others
    for command, objects in printed.items():
        assert objects, command
        for shown in objects:
            extra = set(EVENTS[shown["event"]]) if command == "watch" else set()
            assert set(shown) - extra <= set(FIELDS[command]), command
            assert set(FIELDS[command]) - _OPTIONAL <= set(shown), command
            for group in shown.get("groups", []):
                assert set(group) == set(GROUP_FIELDS[command])
            for key in shown.get("keys", []):
                assert set(key) == set(KEY_FIELDS)
            if command in ("shared ls", "shared info"):
                assert [set(consumer) for consumer in shown["consumers"]] == [set(CONSUMER_FIELDS)]


def test_every_event_is_in_the_schema() -> None:
    folder = Path(meteor_cli.__file__).parent
    calls = [
        node
        for name in ("live/changes.py", "live/watch.py")
        for node in ast.walk(ast.parse((folder / name).read_text()))
        if isinstance(node, ast.Call)
    ]
    found: dict[str, set[str]] = {}
    for call in calls:
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        words = [a.value for a in call.args if isinstance(a, ast.Constant)]
        event = next((word for word in words if word in EVENTS), None)
        if name in ("_change", "Change") and words:
            assert event is not None, ast.unparse(call)
            facts = {keyword.arg for keyword in call.keywords if keyword.arg}
            found.setdefault(event, set()).update(facts)
    assert found.keys() == EVENTS.keys()
    for event, facts in found.items():
        assert facts <= set(EVENTS[event]), event
