"""Peer group codecs: registered types, and bodies with unknown types."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from meteor_py.errors import HandlerFailed
from meteor_py.peers.codec import Format, PeerCodec, UnknownType, find_codec
from meteor_py.peers.messaging.message import Message
from tests.support.mailing import Post, Record, failure, inbox_length, result
from tests.support.peering import LONG_S, Open
from tests.support.peering import open_group as open_group
from tests.support.waiting import eventually


@dataclass
class User:
    name: str
    age: int


class Point(msgspec.Struct):
    x: int
    y: int


@pytest.fixture
def post(url: str) -> Iterator[Post]:
    with Post(url) as post:
        yield post


@pytest.mark.parametrize(
    ("format", "value"),
    [
        ("json", {"a": [1, 2.5, None, "ü", True]}),
        ("msgpack", {"a": [1, b"\0\xff", None]}),
        ("bytes", b"\0\xff"),
        ("json", None),
        ("bytes", None),
    ],
)
def test_value_survives_encoding(format: Format, value: Any) -> None:
    codec = PeerCodec(format)
    assert codec.decode(*codec.encode(value)) == value


@pytest.mark.parametrize("format", ["json", "msgpack"])
@pytest.mark.parametrize("value", [User("Ada", 36), Point(1, 2)])
def test_registered_type_survives_encoding(format: Format, value: object) -> None:
    codec = PeerCodec(format)
    codec.register(type(value), id=7)
    kind, data = codec.encode(value)
    assert kind == "7"
    assert codec.decode(kind, data) == value


def test_type_can_have_its_own_encode_and_decode() -> None:
    codec = PeerCodec("bytes")
    codec.register(
        User,
        id=1,
        encode=lambda user: f"{user.name}:{user.age}".encode(),
        decode=lambda data: User(data.decode().split(":")[0], int(data.decode().split(":")[1])),
    )
    assert codec.encode(User("Ada", 36)) == ("1", b"Ada:36")
    assert codec.decode("1", b"Ada:36") == User("Ada", 36)


def test_conflicting_or_invalid_registrations_are_refused() -> None:
    codec = PeerCodec()
    codec.register(User, id=1)
    for type_, number in ((Point, 1), (User, 2)):
        with pytest.raises(ValueError, match="already registered"):
            codec.register(type_, id=number)
    with pytest.raises(ValueError, match="neither"):
        codec.register(Point, id=3, encode=lambda point: b"")
    with pytest.raises(ValueError, match="Pass both encode and decode"):
        PeerCodec("bytes").register(User, id=1)
    with pytest.raises(ValueError, match="id must be"):
        codec.register(Point, id=-1)


def test_values_that_cannot_be_encoded_are_refused() -> None:
    with pytest.raises(TypeError):
        PeerCodec().encode(object())
    with pytest.raises(TypeError, match="send only bytes"):
        PeerCodec("bytes").encode("text")
    broken = PeerCodec()
    broken.register(User, id=1, encode=lambda user: "text", decode=lambda data: User("", 0))  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="must return bytes"):
        broken.encode(User("Ada", 36))


@pytest.mark.parametrize(("kind", "data"), [("9", b"x"), ("json", b"{"), ("pickle", b"x")])
def test_undecodable_bytes_raise_unknown_type(kind: str, data: bytes) -> None:
    with pytest.raises(UnknownType):
        PeerCodec().decode(kind, data)


def test_pickled_body_is_not_unpickled(post: Post) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("it was unpickled",))

    group = post.group(codec="bytes")
    got = Record()
    group.join("a").on("q")(got)
    data = pickle.dumps(Bomb())
    result(group.member("a").send("q", data))
    assert got.bodies == [data]


def test_codec_can_be_a_format_name_or_a_peer_codec() -> None:
    codec = PeerCodec()
    assert find_codec(codec) is codec
    assert find_codec("msgpack").format == "msgpack"
    with pytest.raises(ValueError, match="codec must be one of"):
        find_codec("pickle")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="PeerCodec"):
        find_codec(7)  # type: ignore[arg-type]


def test_members_with_different_formats_understand_each_other(post: Post) -> None:
    group, other = post.group(codec="msgpack"), post.group(codec="json")
    other.join("a").on("q")(lambda message: {"got": message.body})
    assert result(group.member("a").ask("q", [1, 2])) == {"got": [1, 2]}


def test_registered_types_work_in_messages_and_replies(any_url: str) -> None:
    codecs = [PeerCodec("msgpack"), PeerCodec("json")]
    for codec in codecs:
        codec.register(User, id=1, encode=msgspec.json.encode, decode=_load_user)
    with Post(any_url) as post:
        group, other = (post.group(codec=codec) for codec in codecs)

        @other.join("a").on("q")
        def older(message: Any) -> User:
            assert isinstance(message.body, User)
            return User(message.body.name, message.body.age + 1)

        assert result(group.member("a").ask("q", User("Ada", 36))) == User("Ada", 37)


def _load_user(data: bytes) -> User:
    return msgspec.json.decode(data, type=User)


@pytest.mark.parametrize("verb", ["tell", "send", "ask"])
def test_message_of_unknown_type_becomes_a_dead_letter(post: Post, verb: str) -> None:
    codec = PeerCodec()
    codec.register(User, id=1)
    group, other = post.group(codec=codec), post.group()
    got = Record(lambda message: message.body)
    me = other.join("a")
    me.on("q")(got)
    future = getattr(group.member("a"), verb)("q", User("Ada", 36))
    if verb == "tell":
        result(future)
    else:
        error = failure(future)
        assert isinstance(error, HandlerFailed)
        assert "Register it" in str(error)
    eventually(lambda: len(group.dead_letters()) == 1)
    (letter,) = group.dead_letters()
    assert (letter.member, letter.queue, letter.verb, letter.sender) == ("a", "q", verb, None)
    assert letter.type == "1"
    assert "Register it" in letter.reason
    assert letter.sent_at <= letter.failed_at <= group.now() + group._handle.clock.error_bound
    assert msgspec.json.decode(letter.body) == {"name": "Ada", "age": 36}
    assert inbox_length(group, "a") == 0
    assert result(group.member("a").ask("q", "still there")) == "still there"
    assert got.bodies == ["still there"]


def test_pulling_skips_undecodable_messages(post: Post) -> None:
    codec = PeerCodec()
    codec.register(User, id=1)
    group, other = post.group(codec=codec), post.group()
    me = other.join("a")
    result(group.member("a").tell("q", User("Ada", 36)))
    result(group.member("a").tell("q", "plain"))
    assert [message.body for message in me.inbox("q", timeout=0.5) if message.ack()] == ["plain"]
    assert len(group.dead_letters()) == 1


def test_dead_letters_are_listed_oldest_first(post: Post) -> None:
    codec = PeerCodec()
    codec.register(User, id=1)
    group, other = post.group(codec=codec), post.group()
    other.join("a").on("q")(lambda message: None)
    for age in range(5):
        assert isinstance(failure(group.member("a").send("q", User("Ada", age))), HandlerFailed)
    ages = [msgspec.json.decode(letter.body)["age"] for letter in other.dead_letters(3)]
    assert ages == [2, 3, 4]
    assert len(other.dead_letters()) == 5
    with pytest.raises(ValueError, match="limit"):
        other.dead_letters(0)


def test_reply_of_unknown_type_fails_for_the_sender(post: Post) -> None:
    codec = PeerCodec()
    codec.register(User, id=1)
    group, other = post.group(), post.group(codec=codec)
    other.join("a").on("q")(lambda message: User("Ada", 36))
    error = failure(group.member("a").ask("q"))
    assert isinstance(error, HandlerFailed)
    assert "Cannot decode the reply" in str(error)


class Odd(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Thing:
    """A value that cannot be encoded."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def encode(self) -> bytes:
        raise self.error


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "answer",
    [2**70, nested(100_000), Thing(KeyError("x")), Thing(SystemExit(1)), Thing(Odd())],
    ids=["overflow", "depth", "KeyError", "SystemExit", "no text"],
)
def test_reply_that_cannot_be_encoded_fails_the_message(open_group: Open, answer: object) -> None:
    codec = PeerCodec("msgpack")
    codec.register(Thing, id=1, encode=Thing.encode, decode=lambda data: Thing(KeyError()))
    group = open_group(ttl=LONG_S, codec=codec)
    me = group.join("a")
    me.on("q")(Record(lambda message: answer if message.body else "well"))
    error = failure(group.member("a").ask("q", 1, timeout=LONG_S))
    assert isinstance(error, HandlerFailed)
    assert "cannot be sent" in str(error)
    assert result(group.member("a").ask("q", 0, timeout=LONG_S)) == "well"  # its thread survived
    assert inbox_length(group, "a") == 0


@pytest.mark.parametrize("value", [2**70, nested(100_000), Thing(KeyError("x"))])
def test_body_that_cannot_be_encoded_raises_value_error(value: object) -> None:
    codec = PeerCodec("msgpack")
    codec.register(Thing, id=1, encode=Thing.encode, decode=lambda data: Thing(KeyError()))
    with pytest.raises(ValueError, match="Cannot encode") as info:
        codec.encode(value)
    assert info.value.__cause__ is not None


@pytest.mark.parametrize("value", [float("nan"), [{"x": float("inf")}, None], (1, -float("inf"))])
def test_nan_and_infinity_are_refused_in_json(open_group: Open, value: object) -> None:
    group = open_group(ttl=LONG_S)
    me = group.join("a", metadata={"nothing": None})
    assert me.group.members[0].metadata == {"nothing": None}
    for way in (
        lambda: group.join(metadata=value),
        lambda: me.update(value),
        lambda: group.member("a").tell("q", value),
        lambda: group.propose(value),
    ):
        with pytest.raises(ValueError, match="NaN and infinity"):
            way()
    codec = PeerCodec("msgpack")
    assert repr(codec.decode(*codec.encode([float("nan")]))) == "[nan]"


def test_handler_whose_error_cannot_be_printed_fails_its_message(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)

    def fail(message: Message) -> None:
        raise Odd

    group.join("a").on("q")(fail)
    assert "Odd" in str(failure(group.member("a").ask("q", timeout=LONG_S)))


@dataclass
class Plain:
    """A type that is registered without a number."""

    x: int


def test_type_without_a_number_is_identified_by_its_name() -> None:
    codec = PeerCodec("msgpack")
    codec.register(Plain)
    kind, data = codec.encode(Plain(7))
    assert kind == f"@{__name__}.Plain"
    assert codec.decode(kind, data) == Plain(7)
    assert not codec.is_plain(kind)
    with pytest.raises(UnknownType, match="not known here"):
        PeerCodec("msgpack").decode(kind, data)
    with pytest.raises(ValueError, match="already registered"):
        codec.register(Plain)
