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
from meteor_py.archive.admin import Archive
from meteor_py.archive.archiver import Archiver
from meteor_py.client import Client, close_on_signal, connect
from meteor_py.errors import (
    AccessDenied,
    AckTimeout,
    ActionRefused,
    ClockTooUncertain,
    ConnectionFailed,
    CorruptFrame,
    CorruptSegment,
    CorruptStream,
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
    NoHandler,
    NoLeader,
    NotGrouped,
    NotReplicated,
    OutcomeUnknown,
    OutOfMemory,
    PartialFailure,
    PeerError,
    PeerGroupActive,
    PeerGroupNotFound,
    PublisherClosed,
    PublisherFull,
    PublishError,
    ReadError,
    RecordsLost,
    RecordTooLarge,
    Rewound,
    ServerNotFound,
    ServerRefused,
    ServerStartFailed,
    StaleTerm,
    StoreMismatch,
    StoreUnavailable,
    StreamConfigMismatch,
    StreamError,
    StreamFull,
    StreamNotFound,
    UnsupportedFrame,
)
from meteor_py.peers.codec import PeerCodec
from meteor_py.peers.config import PeersConfig
from meteor_py.peers.event import Event
from meteor_py.peers.group import PeerGroup
from meteor_py.peers.leadership import Term
from meteor_py.peers.member import Member, Status
from meteor_py.peers.membership import Membership
from meteor_py.peers.messaging.dead_letter import PeerLetter
from meteor_py.peers.messaging.message import Message
from meteor_py.peers.messaging.replies import Replies
from meteor_py.peers.messaging.target import Target
from meteor_py.peers.view import View
from meteor_py.peers.voting.actions import Action
from meteor_py.peers.voting.proposal import Outcome, Proposal
from meteor_py.publish.ack import Ack, ManyAck
from meteor_py.publish.publisher import Publisher
from meteor_py.records.codec import Codec
from meteor_py.records.config import (
    Compression,
    InitialOffset,
    PublisherConfig,
    StreamConfig,
    SubscriberConfig,
)
from meteor_py.records.descriptions import Description, GroupDescription, RepairReport
from meteor_py.records.position import Position
from meteor_py.records.record import ARROW_SCHEMA, Record, RecordBatch
from meteor_py.redis.connection import DataSafetyWarning
from meteor_py.redis.server_info import ServerDescription
from meteor_py.shared.admin import Consumer, KeyState, SharedDescription, SharedGroup
from meteor_py.shared.config import ConsumerConfig, SharedConfig
from meteor_py.shared.record import SharedRecord
from meteor_py.shared.subscriber import SharedSubscriber
from meteor_py.store.base import (
    Bounds,
    ColumnStore,
    ConcurrentStore,
    Flaw,
    RingbufferStore,
    StatefulStore,
)
from meteor_py.store.memory import MemoryStore
from meteor_py.store.parquet import ParquetStore
from meteor_py.store.segment import SegmentDescription
from meteor_py.stream import Stream
from meteor_py.subscribe.receiver import Receiver
from meteor_py.subscribe.subscriber import Subscriber

__all__ = [
    "ARROW_SCHEMA",
    "AccessDenied",
    "Ack",
    "AckTimeout",
    "Action",
    "ActionRefused",
    "Archive",
    "Archiver",
    "Bounds",
    "Client",
    "ClockTooUncertain",
    "Codec",
    "ColumnStore",
    "Compression",
    "ConcurrentStore",
    "ConnectionFailed",
    "Consumer",
    "ConsumerConfig",
    "CorruptFrame",
    "CorruptSegment",
    "CorruptStream",
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
    "HandlerFailed",
    "InboxFull",
    "InitialOffset",
    "InvalidInitialOffset",
    "KeyState",
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
    "NoHandler",
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
    "PeerGroupActive",
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
    "RepairReport",
    "Replies",
    "Rewound",
    "RingbufferStore",
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
    "StatefulStore",
    "Status",
    "StoreMismatch",
    "StoreUnavailable",
    "Stream",
    "StreamConfig",
    "StreamConfigMismatch",
    "StreamError",
    "StreamFull",
    "StreamNotFound",
    "Subscriber",
    "SubscriberConfig",
    "Target",
    "Term",
    "UnsupportedFrame",
    "View",
    "__version__",
    "close_on_signal",
    "connect",
]
