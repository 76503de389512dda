"""The competitors' servers, which run on free loopback ports until the jobs are done.

All data is in one temporary folder. Kafka runs as one KRaft node from the class path, with one
partition and one replica. Unlike a default broker, it allows sessions of 2 seconds and does not
delay a group's first rebalance, so that its groups can be compared with ours.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from meteor_py.server.binary import find_server

HOST = "127.0.0.1"
KAFKA_HEAP = "-Xmx2g"
START_S = 60.0
STOP_S = 30.0
_SETTLE_S = 4.0

#: As docs/production/server-settings.md recommends. By default, the server would rewrite its
#: append-only file several times in a job.
_REWRITE = ("--auto-aof-rewrite-min-size", "1gb")

_KAFKA_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{control}
listeners=PLAINTEXT://{host}:{port},CONTROLLER://{host}:{control}
advertised.listeners=PLAINTEXT://{host}:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
num.partitions=1
auto.create.topics.enable=false
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=2000
group.consumer.min.session.timeout.ms=2000
group.consumer.session.timeout.ms=2000
group.consumer.min.heartbeat.interval.ms=500
group.consumer.heartbeat.interval.ms=600
"""


@dataclass(frozen=True)
class Addresses:
    """Where the servers listen."""

    memory: str
    aof: str
    kafka: str
    nats: str


@dataclass(frozen=True)
class Idle:
    """The cost of an idle server."""

    name: str
    #: Seconds from start to first reply.
    start_s: float
    #: Resident memory in MiB, a few seconds after the start.
    mib: float


@contextmanager
def running(libraries: Path) -> Iterator[tuple[Addresses, list[Idle]]]:
    """Start all servers; yield their addresses, and the cost of each while it is idle."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="competitors-")))
        memory, aof, kafka, control, nats = (_free_port() for _ in range(5))
        idle = [
            stack.enter_context(_valkey(folder, "memory", memory, "--appendonly", "no")),
            stack.enter_context(_valkey(folder, "aof", aof, "--appendonly", "yes", *_REWRITE)),
            stack.enter_context(_nats(folder, nats)),
            stack.enter_context(_kafka(folder, libraries, kafka, control)),
        ]
        addresses = Addresses(
            memory=f"redis://{HOST}:{memory}",
            aof=f"redis://{HOST}:{aof}",
            kafka=f"{HOST}:{kafka}",
            nats=f"nats://{HOST}:{nats}",
        )
        yield addresses, idle


@contextmanager
def _valkey(folder: Path, name: str, port: int, *options: str) -> Iterator[Idle]:
    data = folder / name
    data.mkdir()
    command = [
        str(find_server()), "--bind", HOST, "--port", str(port), "--save", "", "--dir", str(data),
        *options,
    ]  # fmt: skip
    with _server(f"Valkey, {name}", command, folder, lambda: _replies(port, b"PING\r\n")) as idle:
        yield idle


@contextmanager
def _nats(folder: Path, port: int) -> Iterator[Idle]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    binary = shutil.which("nats-server", path=path)
    if binary is None:
        raise FileNotFoundError(
            "nats-server was not found. Run `make bench-competitors`, which installs it."
        )
    command = [binary, "-a", HOST, "-p", str(port), "-js", "-sd", str(folder / "nats")]
    with _server("NATS, JetStream", command, folder, lambda: _replies(port, b"")) as idle:
        yield idle


@contextmanager
def _kafka(folder: Path, libraries: Path, port: int, control: int) -> Iterator[Idle]:
    from confluent_kafka.admin import AdminClient

    properties = folder / "kafka.properties"
    properties.write_text(
        _KAFKA_PROPERTIES.format(host=HOST, port=port, control=control, data=folder / "kafka")
    )
    java = ["java", KAFKA_HEAP, "-cp", f"{libraries}/*"]
    tool = [*java, "kafka.tools.StorageTool"]
    made = subprocess.run([*tool, "random-uuid"], capture_output=True, text=True, check=True)
    cluster = made.stdout.split()[-1]
    subprocess.run(
        [*tool, "format", "-t", cluster, "-c", str(properties)],
        check=True,
        stdout=subprocess.DEVNULL,
    )

    def replies() -> bool:
        admin = AdminClient({"bootstrap.servers": f"{HOST}:{port}", "log_level": 0})
        return _replies(port) and bool(admin.list_topics(timeout=10).brokers)

    with _server("Kafka", [*java, "kafka.Kafka", str(properties)], folder, replies) as idle:
        yield idle


@contextmanager
def _server(
    name: str, command: Sequence[str], folder: Path, replies: Callable[[], bool]
) -> Iterator[Idle]:
    """Run a server, and stop only that process at the end."""
    log = folder / f"{name.partition(',')[0]}.log"
    began = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        while not replies():
            if process.poll() is not None or time.monotonic() - began > START_S:
                raise RuntimeError(f"{name} does not reply. Its log ends with: {_tail(log)}")
            time.sleep(0.005)
        start_s = time.monotonic() - began
        time.sleep(_SETTLE_S)
        yield Idle(name, start_s, _resident_mib(process.pid))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _replies(port: int, request: bytes | None = None) -> bool:
    """Return whether the server accepts a connection and replies to ``request``, if any."""
    try:
        with socket.create_connection((HOST, port), 1.0) as connection:
            if request is None:
                return True
            connection.settimeout(1.0)
            connection.sendall(request)
            return bool(connection.recv(1))
    except OSError:
        return False


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-500:]
