"""The roles of docs/acl.md can do their work and nothing else."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

import meteor_py as meteor
from tests.conftest import ServerFactory
from tests.servers import Server

PAGE = Path(__file__).parent.parent / "docs" / "acl.md"


def roles() -> dict[str, list[str]]:
    """The rules of each role in the page."""
    block = re.search(r"```acl\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    lines = [line.split() for line in block[1].splitlines()]
    return {words[1]: words[2:] for words in lines}


@pytest.fixture(params=["valkey", "redis"])
def guarded(request: pytest.FixtureRequest, private_server: ServerFactory) -> Server:
    """A server with these roles, a stream that the admin made, and the scripts loaded."""
    server = private_server(kind=request.param)
    with server.client() as client:
        for name, rules in roles().items():
            if name != "default":  # left on, for the tests' own client
                client.execute_command("ACL", "SETUSER", name, "reset", *rules)
    with connect(server, "admin") as admin:
        admin.stream("orders", capacity=100)
        admin.stream("other")
    with connect(server, "loader") as loader:
        loader.load_scripts()
    return server


def connect(server: Server, role: str) -> meteor.Client:
    return meteor.connect(f"redis://{role}:{role}-password@127.0.0.1:{server.port}")


def test_publisher_and_subscriber_can_do_their_work(guarded: Server) -> None:
    with connect(guarded, "publisher") as m:
        stream = m.stream("orders", create=False)
        with stream.publisher() as pub:
            assert pub.publish_many([b"%d" % n for n in range(1000)]).result() == 0
            assert pub.publish(b"last", key=b"k").result() == 1000
    with connect(guarded, "subscriber") as m:
        stream = m.stream("orders", create=False)
        description = stream.describe()
        assert description.next == 1001
        assert description.bytes
        with stream.subscriber(initial_offset="earliest") as sub:
            assert sub.poll().last_offset >= 999


def test_a_publisher_cannot_read_or_use_another_stream(guarded: Server) -> None:
    with connect(guarded, "publisher") as m:
        stream = m.stream("orders", create=False)
        with stream.subscriber() as sub, pytest.raises(meteor.AccessDenied):
            sub.poll(timeout=0)
        with pytest.raises(meteor.AccessDenied):
            m.stream("other", create=False)
        with pytest.raises(meteor.AccessDenied):
            stream.delete()


def test_a_subscriber_cannot_write(guarded: Server) -> None:
    with connect(guarded, "subscriber") as m, warnings.catch_warnings():
        warnings.simplefilter("ignore", meteor.DataSafetyWarning)  # it may not see INFO
        stream = m.stream("orders", create=False)
        with pytest.raises(meteor.AccessDenied):
            stream.configure(capacity=1)
        with stream.publisher() as pub, pytest.raises(meteor.AccessDenied):
            pub.publish(b"x").result()
    with guarded.client() as client:
        assert client.xlen("meteor:{orders}:log") == 0


def test_the_loader_can_load_scripts_only(guarded: Server) -> None:
    with connect(guarded, "loader") as m, pytest.raises(meteor.AccessDenied):
        m.stream("orders", create=False)


def test_a_missing_script_is_named_when_it_may_not_be_brought(guarded: Server) -> None:
    with guarded.client() as client:
        client.script_flush()
    with connect(guarded, "publisher") as m:
        stream = m.stream("orders", create=False)
        with stream.publisher() as pub, pytest.raises(meteor.AccessDenied, match=r"acl\.md"):
            pub.publish(b"x").result()
