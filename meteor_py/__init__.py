"""Real-time streaming for Python on Redis or Valkey: Kafka without the brokers.

>>> import meteor_py as meteor
>>> with meteor.connect("embedded://") as m:
...     stream = m.stream("orders")
...     with stream.publisher() as pub:
...         pub.publish(b"hello", key=b"k").result()
...     with stream.subscriber(initial_offset="earliest") as sub:
...         sub.poll().values()
0
[b'hello']
"""

from meteor_py._version import __version__
from meteor_py.ack import Ack, ManyAck
from meteor_py.client import Client, connect
from meteor_py.codec import Codec
from meteor_py.config import (
    Compression,
    InitialOffset,
    PublisherConfig,
    StreamConfig,
    SubscriberConfig,
)
from meteor_py.errors import (
    AccessDenied,
    ActionRefused,
    ClockTooUncertain,
    ConnectionFailed,
    CorruptFrameError,
    DecodeError,
    Fenced,
    GroupActive,
    GroupConfigMismatch,
    GroupError,
    GroupNotFound,
    HandlerFailed,
    InboxFull,
    InvalidInitialOffset,
    LeaseLost,
    LogTruncated,
    MemberLeft,
    MembershipLost,
    MemberTaken,
    MemberUnknown,
    MessageExpired,
    MessageFailed,
    MeteorError,
    NoConfirmedOffset,
    NoLeader,
    NotGrouped,
    NotReplicated,
    OutcomeUnknown,
    OutOfMemory,
    PartialFailure,
    PeerError,
    PeerGroupNotFound,
    PublisherClosed,
    PublisherFull,
    PublishError,
    ReadError,
    RecordsLost,
    RecordTooLarge,
    SegmentCorrupt,
    ServerNotFound,
    ServerRefused,
    ServerStartFailed,
    StaleTerm,
    StoreMismatch,
    StoreUnavailable,
    StreamConfigMismatch,
    StreamCorrupt,
    StreamError,
    StreamFull,
    StreamNotFound,
    UnsupportedFrameError,
)
from meteor_py.group import GroupDescription
from meteor_py.history import Position
from meteor_py.link import DataSafetyWarning
from meteor_py.meta import Description
from meteor_py.peers.actions import Action
from meteor_py.peers.codec import PeerCodec
from meteor_py.peers.config import PeersConfig
from meteor_py.peers.event import Event
from meteor_py.peers.group import PeerGroup
from meteor_py.peers.letter import PeerLetter
from meteor_py.peers.member import Member, Status
from meteor_py.peers.membership import Membership
from meteor_py.peers.message import Message
from meteor_py.peers.picture import View
from meteor_py.peers.proposal import Outcome, Proposal
from meteor_py.peers.replies import Replies
from meteor_py.peers.target import Target
from meteor_py.peers.term import Term
from meteor_py.publisher import Publisher
from meteor_py.receiver import Receiver
from meteor_py.record import ARROW_SCHEMA, Record, RecordBatch
from meteor_py.serverinfo import ServerDescription
from meteor_py.shared.config import ConsumerConfig, SharedConfig
from meteor_py.shared.group import Consumer, GroupState, SharedDescription, SharedGroup
from meteor_py.shared.record import SharedRecord
from meteor_py.shared.subscriber import SharedSubscriber
from meteor_py.store.archive import Archive
from meteor_py.store.archiver import Archiver
from meteor_py.store.base import Bounds, Flaw, RingbufferStore
from meteor_py.store.memory import MemoryStore
from meteor_py.store.parquet import ParquetStore
from meteor_py.store.segment import SegmentDescription
from meteor_py.stream import Stream
from meteor_py.subscriber import Subscriber

__all__ = [
    "ARROW_SCHEMA",
    "AccessDenied",
    "Ack",
    "Action",
    "ActionRefused",
    "Archive",
    "Archiver",
    "Bounds",
    "Client",
    "ClockTooUncertain",
    "Codec",
    "Compression",
    "ConnectionFailed",
    "Consumer",
    "ConsumerConfig",
    "CorruptFrameError",
    "DataSafetyWarning",
    "DecodeError",
    "Description",
    "Event",
    "Fenced",
    "Flaw",
    "GroupActive",
    "GroupConfigMismatch",
    "GroupDescription",
    "GroupError",
    "GroupNotFound",
    "GroupState",
    "HandlerFailed",
    "InboxFull",
    "InitialOffset",
    "InvalidInitialOffset",
    "LeaseLost",
    "LogTruncated",
    "ManyAck",
    "Member",
    "MemberLeft",
    "MemberTaken",
    "MemberUnknown",
    "Membership",
    "MembershipLost",
    "MemoryStore",
    "Message",
    "MessageExpired",
    "MessageFailed",
    "MeteorError",
    "NoConfirmedOffset",
    "NoLeader",
    "NotGrouped",
    "NotReplicated",
    "OutOfMemory",
    "Outcome",
    "OutcomeUnknown",
    "ParquetStore",
    "PartialFailure",
    "PeerCodec",
    "PeerError",
    "PeerGroup",
    "PeerGroupNotFound",
    "PeerLetter",
    "PeersConfig",
    "Position",
    "Proposal",
    "PublishError",
    "Publisher",
    "PublisherClosed",
    "PublisherConfig",
    "PublisherFull",
    "ReadError",
    "Receiver",
    "Record",
    "RecordBatch",
    "RecordTooLarge",
    "RecordsLost",
    "Replies",
    "RingbufferStore",
    "SegmentCorrupt",
    "SegmentDescription",
    "ServerDescription",
    "ServerNotFound",
    "ServerRefused",
    "ServerStartFailed",
    "SharedConfig",
    "SharedDescription",
    "SharedGroup",
    "SharedRecord",
    "SharedSubscriber",
    "StaleTerm",
    "Status",
    "StoreMismatch",
    "StoreUnavailable",
    "Stream",
    "StreamConfig",
    "StreamConfigMismatch",
    "StreamCorrupt",
    "StreamError",
    "StreamFull",
    "StreamNotFound",
    "Subscriber",
    "SubscriberConfig",
    "Target",
    "Term",
    "UnsupportedFrameError",
    "View",
    "__version__",
    "connect",
]
