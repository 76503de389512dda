"""TLS: each option that a `rediss://` address can have, against a real server."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

import meteor_py as meteor
from meteor_py.redis import address
from meteor_py.redis.connection import Connection
from tests.conftest import require_redis
from tests.support.certificates import PASSWORD, create_certificates, tls_options
from tests.support.servers import HOST, Server, binaries, free_port
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    create_certificates(folder)
    return folder


def start(folder: Path, *options: str) -> tuple[Server, str]:
    require_redis()
    port = free_port()
    server = Server(
        binaries()["redis"],
        *tls_options(folder, port),
        *options,
    )
    return server, f"rediss://{HOST}:{port}/0"


@pytest.fixture(scope="module")
def tls_url(folder: Path) -> Iterator[str]:
    server, url = start(folder, "--tls-auth-clients", "no")
    with server:
        yield url


@pytest.fixture(scope="module")
def old_url(folder: Path) -> Iterator[str]:
    """A server that offers only TLS 1.2, with one cipher."""
    cipher = "ECDHE-ECDSA-AES256-GCM-SHA384"
    server, url = start(
        *(folder, "--tls-auth-clients", "no", "--tls-protocols", "TLSv1.2"),
        *("--tls-ciphers", cipher),
    )
    with server:
        yield url


@pytest.fixture(scope="module")
def strict_url(folder: Path) -> Iterator[str]:
    """A server that requires a client certificate."""
    server, url = start(folder, "--tls-auth-clients", "yes")
    with server:
        yield url


def connect(url: str, **options: object) -> meteor.Client:
    query = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in options.items())
    return meteor.connect(f"{url}?{query}" if query else url)


def use(client: meteor.Client) -> None:
    """Publish and read with every kind of connection."""
    with client as m:
        stream = m.stream("s")
        with stream.publisher() as pub, stream.subscriber(group="g") as sub:
            offset = pub.publish(b"hello").result(10)
            assert sub.poll(10)[-1].offset == offset
            sub.confirm().result(10)
        assert m.redis.ping()
        stream.delete()


def refusal(client: meteor.Client) -> str:
    with client as m, pytest.raises(meteor.ConnectionFailed) as caught:
        m.streams()
    return str(caught.value)


def test_certificate_authority_file_is_trusted(tls_url: str, folder: Path) -> None:
    use(connect(tls_url, ssl_ca_certs=folder / "ca.pem"))


def test_certificate_authority_directory_is_trusted(tls_url: str, folder: Path) -> None:
    use(connect(tls_url, ssl_ca_path=folder / "authorities"))


def test_certificate_authorities_in_the_url_are_trusted(tls_url: str, folder: Path) -> None:
    use(connect(tls_url, ssl_ca_data=(folder / "ca.pem").read_text()))


def test_unknown_authority_is_refused(tls_url: str, folder: Path) -> None:
    for client in (connect(tls_url), connect(tls_url, ssl_ca_certs=folder / "other.pem")):
        assert "certificate verify failed" in refusal(client)


@pytest.mark.parametrize("level", ["required", "optional"])
def test_server_is_verified_unless_verification_is_off(
    tls_url: str, folder: Path, level: str
) -> None:
    assert "certificate verify failed" in refusal(connect(tls_url, ssl_cert_reqs=level))
    use(connect(tls_url, ssl_cert_reqs=level, ssl_ca_certs=folder / "ca.pem"))
    use(connect(tls_url, ssl_cert_reqs="none"))


def test_host_name_is_checked_unless_the_check_is_off(tls_url: str, folder: Path) -> None:
    named = tls_url.replace(HOST, "localhost")
    trusted = {"ssl_ca_certs": folder / "ca.pem"}
    assert "Hostname mismatch" in refusal(connect(named, **trusted))
    use(connect(named, **trusted, ssl_check_hostname="false"))


def test_lowest_tls_version_is_enforced(tls_url: str, old_url: str, folder: Path) -> None:
    trusted = {"ssl_ca_certs": folder / "ca.pem"}
    use(connect(tls_url, **trusted, ssl_min_version=772))
    use(connect(old_url, **trusted, ssl_min_version=771))
    assert "version" in refusal(connect(old_url, **trusted, ssl_min_version=772))


def test_only_the_given_ciphers_are_used(old_url: str, folder: Path) -> None:
    trusted = {"ssl_ca_certs": folder / "ca.pem"}
    use(connect(old_url, **trusted, ssl_ciphers="ECDHE-ECDSA-AES256-GCM-SHA384"))
    assert refusal(connect(old_url, **trusted, ssl_ciphers="ECDHE-ECDSA-CHACHA20-POLY1305"))
    assert refusal(connect(old_url, **trusted, ssl_ciphers="NONSENSE"))


def test_client_sends_its_certificate(strict_url: str, folder: Path) -> None:
    trusted = {"ssl_ca_certs": folder / "ca.pem"}
    own = {"ssl_certfile": folder / "client.pem", "ssl_keyfile": folder / "client.key"}
    use(connect(strict_url, **trusted, **own))
    use(connect(strict_url, **trusted, ssl_certfile=folder / "together.pem"))


@pytest.mark.parametrize("login", [{}, {"db": 1}, {"username": "app", "password": "secret"}])
def test_missing_client_certificate_is_named_as_the_likely_cause(
    strict_url: str, folder: Path, login: dict[str, object]
) -> None:
    message = refusal(connect(strict_url, ssl_ca_certs=folder / "ca.pem", **login))
    assert "closed the connection after the TLS handshake" in message
    assert "requires a client certificate, set ssl_certfile and ssl_keyfile" in message


def _socket_of(connection: Connection) -> socket.socket:
    sock = connection._socket()
    assert sock is not None
    return sock


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after the end"])
def test_missing_client_certificate_is_named_whenever_the_first_command_is_sent(
    strict_url: str, folder: Path, late: bool
) -> None:
    """A command sent at once may get the server's alert. A later one gets a broken pipe or EOF."""
    place = address.parse(f"{strict_url}?ssl_ca_certs={quote(str(folder / 'ca.pem'), safe='')}")
    connection = Connection(place, 10)
    connection.connect()
    if late:
        ended = select.poll()
        ended.register(_socket_of(connection), select.POLLRDHUP)
        assert ended.poll(10_000), "the server did not close the connection"
    with pytest.raises(meteor.ConnectionFailed, match="set ssl_certfile and ssl_keyfile"):
        connection.call("PING")


def test_untrusted_client_certificate_is_named_as_the_likely_cause(
    strict_url: str, folder: Path
) -> None:
    own = {"ssl_certfile": folder / "other.pem", "ssl_keyfile": folder / "other.key"}
    message = refusal(connect(strict_url, ssl_ca_certs=folder / "ca.pem", **own))
    assert "The server may not accept this client certificate" in message


def test_connection_lost_after_a_reply_is_not_blamed_on_certificates(folder: Path) -> None:
    server, url = start(folder, "--tls-auth-clients", "no")
    with server:
        place = f"{url}?ssl_ca_certs={quote(str(folder / 'ca.pem'), safe='')}"
        for login in ("", "&db=1"):
            connection = Connection(address.parse(place + login), 10)
            connection.connect()
            if not login:
                assert connection.call("PING") == b"PONG"
            server.client().client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(meteor.ConnectionFailed, match="cannot be reached"):
                connection.call("PING")


def test_password_decrypts_the_clients_key(strict_url: str, folder: Path) -> None:
    own = {
        "ssl_ca_certs": folder / "ca.pem",
        "ssl_certfile": folder / "client.pem",
        "ssl_keyfile": folder / "locked",
    }
    use(connect(strict_url, **own, ssl_password=PASSWORD))
    # A missing password does not cause a prompt.
    for wrong in ({}, {"ssl_password": f"{PASSWORD}-wrong"}):
        client = connect(strict_url, **own, **wrong)
        assert PASSWORD not in refusal(client) + repr(client) + str(client.address)


def test_missing_certificate_authority_file_is_reported(tls_url: str) -> None:
    assert "No such file" in refusal(connect(tls_url, ssl_ca_certs="/nowhere/ca.pem"))


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("ssl_cert_reqs=maybe", "ssl_cert_reqs must be one of required, optional, none"),
        ("ssl_min_version=770", r"ssl_min_version must be 771 \(TLS 1.2\) or 772 \(TLS 1.3\)"),
        ("ssl_min_version=high", "ssl_min_version"),
        ("ssl_keyfile=/key", "ssl_keyfile needs a certificate"),
    ],
)
def test_wrong_values_are_refused_before_connecting(query: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        meteor.connect(f"rediss://host:6380/0?{query}")


def test_error_for_an_unknown_option_lists_the_known_ones() -> None:
    plain = "client_name, db, password, username"
    tls = (
        "ssl_ca_certs, ssl_ca_data, ssl_ca_path, ssl_cert_reqs, ssl_certfile, ssl_check_hostname, "
        "ssl_ciphers, ssl_keyfile, ssl_min_version, ssl_password"
    )
    with pytest.raises(ValueError, match=f"'ssl_cacert' cannot be set.*can set {plain}, {tls}; "):
        meteor.connect("rediss://host:6380/0?ssl_cacert=/ca.pem")
    with pytest.raises(ValueError, match=f"'ssl_cacert' cannot be set.*can set {plain};"):
        meteor.connect("redis://host:6379/0?ssl_cacert=/ca.pem")
    with pytest.raises(ValueError, match=r"'ssl_ca_certs' is a TLS option\. Use rediss://"):
        meteor.connect("redis://host:6379/0?ssl_ca_certs=/ca.pem")


def test_every_option_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "production" / "tls.md").read_text()
    options = address._TLS_OPTIONS + address.LOGIN_OPTIONS
    assert [name for name in options if f"`{name}`" not in text] == []


def test_lone_records_take_the_direct_line_through_tls(folder: Path, tls_url: str) -> None:
    with meteor.connect(f"{tls_url}?ssl_ca_certs={quote(str(folder / 'ca.pem'))}") as client:
        stream = client.stream("direct", create=True)
        with stream.publisher() as pub:
            pub.publish(b"first").result(10)

            def is_direct() -> bool:
                ack = pub.publish(b"x")
                direct = pub._sender._line.batch is ack._completion
                ack.result(10)
                return direct

            eventually(is_direct)
            for offset in range(stream.describe().next, 200):
                ack = pub.publish(b"y")
                if offset % 2:
                    assert ack.result(10) == offset
            pub.flush(10)
        assert stream.describe().next == 200


def test_publisher_notices_that_the_server_closed_its_idle_connection(
    tls_url: str, folder: Path
) -> None:
    with connect(tls_url, ssl_ca_certs=folder / "ca.pem") as m, m.stream("s").publisher() as pub:
        pub.publish(b"x").result(10)
        pub.flush()
        connection = pub._sender._connection
        assert (connection.connected, connection.readable) == (True, False)
        m.redis.client_kill_filter(_type="normal", skipme=True)
        eventually(lambda: connection.readable)
        pub._sender._acknowledged_at = time.monotonic()  # as if a batch had just been acknowledged
        assert pub._sender.must_check
        pub.flush()  # checks for a loss, on a new connection
        assert (connection.connected, connection.readable) == (True, False)
