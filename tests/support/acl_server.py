"""A server that has the roles from docs/acl.md, for testing each role's permissions.

with connect(guarded, "subscriber") as m, pytest.raises(meteor.AccessDenied):
    m.stream("orders", create=False).configure(capacity=1)
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import meteor_py as meteor
from tests.conftest import ServerFactory
from tests.support.readers import everything
from tests.support.servers import Server

PAGE = Path(__file__).parents[2] / "docs" / "acl.md"


def roles() -> dict[str, list[str]]:
    """Return the ACL rules for each role in docs/acl.md."""
    block = re.search(r"```acl\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    lines = [line.split() for line in block[1].splitlines()]
    return {words[1]: words[2:] for words in lines}


def dead_letter_rules() -> list[str]:
    """Return the additional rules that docs/acl.md gives for dead letters."""
    block = re.search(r"`(\([^`]*\{dead\}[^`]*\))`", PAGE.read_text())
    assert block is not None
    return re.findall(r"\([^)]*\)", block[1])


@pytest.fixture(params=["valkey", "redis"])
def guarded(request: pytest.FixtureRequest, private_server: ServerFactory) -> Server:
    """A server with the roles from docs/acl.md, two streams and the scripts."""
    return guard(private_server(kind=request.param))


def guard(server: Server) -> Server:
    """Create the roles and two streams on a server, and load the scripts."""
    with server.client() as client:
        for name, rules in roles().items():
            if name != "default":  # stays enabled for the tests' own client
                client.execute_command("ACL", "SETUSER", name, "reset", *rules)
    with connect(server, "admin") as admin:
        admin.stream("orders", capacity=100)
        admin.stream("other", create=True)
    with connect(server, "loader") as loader:
        loader.load_scripts()
    return server


def connect(server: Server, role: str) -> meteor.Client:
    return meteor.connect(f"redis://{role}:{role}-password@127.0.0.1:{server.port}")


def fill(server: Server, records: int) -> None:
    with connect(server, "publisher") as m, m.stream("orders", create=False).publisher() as pub:
        pub.publish_many([b"x"] * records).result()


def contents(server: Server) -> dict[bytes, tuple[object, ...]]:
    with server.client() as plain:
        return everything(plain)
