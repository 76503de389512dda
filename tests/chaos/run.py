"""One chaos run: start all workers, cause faults, heal, drain the groups, and check.

Everything that a run starts ends with it, even if the run is aborted: workers and servers have
watchdogs, and the server's watchdog removes the history directory.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import meteor_py as meteor
from tests.chaos import history
from tests.chaos.backend import Backend, ClusterOfServers, SingleServer
from tests.chaos.checker import check
from tests.chaos.history import Event, Writer
from tests.chaos.mutants import MUTANTS
from tests.chaos.nemesis import CLUSTER_KINDS, KINDS, STORE_KINDS, Nemesis
from tests.chaos.observers import (
    Recorder,
    Sampler,
    is_in_order,
    read_log,
    record_store,
    wait_for,
)
from tests.chaos.slot import Role, Slot
from tests.chaos.violation import Violation
from tests.chaos.worker_config import STREAM, RunSignals, WorkerConfig

#: Capacity of a ring that keeps all records of a run, and of one that soon overtakes a paused
#: group.
LARGE, SMALL = 10_000_000, 200
#: Maximum number of records that may wait for a store's archivers.
UNARCHIVED = 1_000
START_S = 30.0
DRAIN_S = 30.0
END_S = 25.0
STEP_S = 0.01
#: Maximum factor by which a run is extended until every kind of fault has occurred.
EXTENSION = 2.5

Progress = Callable[[str, float], object]


@dataclass(frozen=True)
class Plan:
    """The parameters of a run. The seed fixes faults and choices, but not their timing."""

    seed: int
    seconds: float = 20.0
    groups: int = 10
    members: int = 3
    publishers: int = 2
    server: str = "valkey"
    #: Use a cluster of three primaries and three replicas.
    cluster: bool = False
    small_ring: bool = False
    #: Use a small ring with a store.
    store: bool = False
    archivers: int = 3
    readers: int = 2
    mutant: str = ""
    #: Kinds of faults. If empty, all that are possible with this cluster and store.
    kinds: tuple[str, ...] = ()
    every_s: tuple[float, float] = (0.3, 1.0)
    lease_ttl_s: float = 1.0
    #: Member pauses, in lease TTLs: too short to lose the lease, just long enough, and long.
    pauses: tuple[float, ...] = (0.5, 1.1, 3.0)
    batch_pause_s: float = 0.06
    hang: float = 0.003
    #: See WorkerConfig.
    die: float = 0.01
    compact_pause_s: float = 1.0

    @property
    def faults(self) -> tuple[str, ...]:
        also = STORE_KINDS * self.store + CLUSTER_KINDS * self.cluster
        return self.kinds or KINDS + also

    @property
    def capacity(self) -> int | None:
        """The capacity of a ring that drops records; None if the ring drops none."""
        return SMALL if self.small_ring or self.store else None

    @property
    def group_names(self) -> list[str]:
        return [f"g{n}" for n in range(self.groups)]

    @property
    def command(self) -> str:
        """The command that repeats the run as closely as possible."""
        parts = [f"python -m tests.chaos --seeds 1 --first-seed {self.seed}"]
        parts.append(f"--seconds {self.seconds:g} --groups {self.groups} --members {self.members}")
        if self.publishers != Plan.publishers:
            parts.append(f"--publishers {self.publishers}")
        if self.server != Plan.server:
            parts.append(f"--server {self.server}")
        if self.mutant:
            # The mutant implies the other options.
            return " ".join([*parts, f"--mutant {self.mutant}"])
        parts.append("--store" if self.store else "--no-store")
        parts.append("--cluster" if self.cluster else "--no-cluster")
        parts += ["--small-ring"] if self.small_ring else []
        if self.kinds:
            parts.append(f"--faults {','.join(self.kinds)}")
        if self.every_s != Plan.every_s:
            parts.append("--every {:g},{:g}".format(*self.every_s))
        return " ".join(parts)


def mutant_plan(name: str, seed: int) -> Plan:
    """Return the plan of a run that soon reveals a planted bug."""
    return Plan(seed, mutant=name, **MUTANTS[name].plan)


@dataclass
class Result:
    """The figures and violations of a run."""

    plan: Plan
    events: Counter[str] = field(default_factory=Counter)  # number of events, by kind
    records: Counter[str] = field(default_factory=Counter)  # number of values in them, by kind
    faults: Counter[str] = field(default_factory=Counter)
    terms: int = 0
    take_overs: int = 0
    archived: int = 0
    archiver_terms: int = 0
    drain_s: float = 0.0
    violations: list[Violation] = field(default_factory=list)

    def count(self, events: list[Event]) -> None:
        for event in events:
            self.events[event.kind] += 1
            self.records[event.kind] += len(event.values)
        terms = {(e.group, e.term) for e in events if e.kind == "deliver" and e.term >= 0}
        self.terms = len(terms)
        self.take_overs = len(terms) - len({group for group, _ in terms})
        self.archived = max((e.last for e in events if e.kind == "archived"), default=0)
        self.archiver_terms = len({e.term for e in events if e.kind == "append"})


def run(
    plan: Plan, progress: Progress = lambda phase, share: None, keep: Path | None = None
) -> Result:
    """Execute and check a run. If it has violations, copy its histories to the directory `keep`."""
    result = Result(plan)
    with ExitStack() as stack:
        servers = ClusterOfServers if plan.cluster else SingleServer
        backend: Backend = servers(plan.server, stack)
        directory = backend.directory / "chaos"
        directory.mkdir()
        with ExitStack() as equipment:
            Participants(plan, backend, directory, equipment).play(result, progress)
        progress("checking", 0.0)
        events = history.read(directory)
        result.count(events)
        unarchived = UNARCHIVED if plan.store else None
        result.violations = check(events, plan.group_names, plan.capacity, unarchived)
        if result.violations and keep is not None:
            kept = keep / f"seed-{plan.seed}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(directory, kept)
    return result


class Participants:
    """All participants in a run."""

    def __init__(self, plan: Plan, backend: Backend, directory: Path, stack: ExitStack) -> None:
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._signals = RunSignals(directory)
        self._directory = directory
        self._backend = backend
        self._stack = stack
        self._writer = Writer(directory / "run.jsonl")
        stack.callback(self._writer.close)
        self._store = directory / "store" if plan.store else None
        self._stream = self._create(stack.enter_context(meteor.connect(backend.url)))
        self._sampler = Sampler(backend, plan.group_names, self._writer)
        stack.callback(self._sampler.stop)
        self._recorder = Recorder(self._stream, self._writer)
        stack.callback(self._recorder.stop)
        self._members = [
            self._slot("member", f"m{n}", tuple(plan.group_names)) for n in range(plan.members)
        ]
        # This member runs in its own process, so that its faults affect no other group.
        self._members.append(self._slot("member", "solo", (self._rng.choice(plan.group_names),)))
        self._publishers = [self._slot("publisher", f"p{n}") for n in range(plan.publishers)]
        some = plan.store
        self._archivers = [self._slot("archiver", f"a{n}") for n in range(plan.archivers * some)]
        self._readers = [self._slot("reader", f"r{n}") for n in range(plan.readers * some)]
        self._nemesis = Nemesis(
            self._rng,
            backend,
            [*self._members, *self._readers],
            self._publishers,
            self._writer,
            groups=plan.group_names,
            kinds=plan.faults,
            lease_ttl_s=plan.lease_ttl_s,
            pauses=plan.pauses,
            every_s=plan.every_s,
            archivers=self._archivers,
            store=self._store,
            signals=self._signals,
        )

    def _create(self, client: meteor.Client) -> meteor.Stream:
        if self._store is None:
            return client.stream(STREAM, capacity=LARGE)
        return client.stream(
            STREAM, capacity=SMALL, max_unarchived=UNARCHIVED, store=self._store, archive=False
        )

    def _slot(self, role: Role, name: str, groups: tuple[str, ...] = ()) -> Slot:
        proxies = self._backend.open_proxies(self._stack)
        config = WorkerConfig(
            name=name,
            url=self._backend.url if self._plan.cluster else proxies.url,
            remap=proxies.remap if self._plan.cluster else {},
            directory=str(self._directory),
            seed=f"{self._plan.seed} {name}",
            groups=groups,
            lease_ttl_s=self._plan.lease_ttl_s,
            batch_pause_s=self._plan.batch_pause_s,
            hang=self._plan.hang,
            mutant=self._plan.mutant,
            store=str(self._store or ""),
            die=self._plan.die,
            compact_pause_s=self._plan.compact_pause_s,
        )
        slot = Slot(role, config, proxies, self._writer)
        self._stack.callback(slot.kill)
        return slot

    def play(self, result: Result, progress: Progress) -> None:
        self._start(progress)
        self._harm(progress)
        progress("draining", 0.0)
        began = time.monotonic()
        self._nemesis.heal()
        self._drain()
        result.drain_s = time.monotonic() - began
        result.faults = self._nemesis.happened
        progress("ending", 0.0)
        self._signals.make_end()
        for slot in [*self._members, *self._readers, *self._archivers]:
            slot.finish(END_S)
        self._sampler.stop()
        self._recorder.catch_up(self._stream.describe().next, END_S)
        self._recorder.stop()
        try:
            read_log(self._stream, self._writer, whole=self._plan.store)
            if self._plan.store:
                record_store(self._stream, self._writer)
        except meteor.MeteorError as error:
            self._writer.add("error", who="run", text=f"At the end: {error!r}")

    def _start(self, progress: Progress) -> None:
        """Start all workers, and wait until each group has confirmed a record."""
        progress("starting", 0.0)
        for slot in self._members:
            slot.replace()
        expected = self._plan.groups
        if not wait_for(self._sampler, lambda s: len(s.confirmed) == expected, START_S):
            words = "\n".join(slot.log_tail for slot in self._members)
            raise RuntimeError(f"Not all groups started. The members' logs end with:\n{words}")
        self._sampler.start()
        self._recorder.start()
        for slot in [*self._archivers, *self._publishers, *self._readers]:
            slot.replace()
        busy = wait_for(self._sampler, lambda s: all(s.confirmed.values()), START_S)
        if not busy:
            self._writer.add("error", who="run", text="Not all groups confirmed a first record.")
        if self._plan.small_ring:
            # Shrink the ring only now: a group that has read nothing skips dropped records without
            # a report.
            self._stream.configure(capacity=SMALL)

    def _harm(self, progress: Progress) -> None:
        begin = time.monotonic()
        seconds = self._plan.seconds
        while (passed := time.monotonic() - begin) < seconds or (
            passed < EXTENSION * seconds and not self._nemesis.has_done_everything
        ):
            progress("causing faults", min(passed / seconds, 1.0))
            self._nemesis.step()
            self._replace_dead(
                [*self._members, *self._publishers, *self._archivers, *self._readers]
            )
            time.sleep(STEP_S)

    def _replace_dead(self, slots: Sequence[Slot]) -> None:
        """Replace workers that have died by themselves."""
        for slot in slots:
            if self._nemesis.is_busy(slot):
                continue
            if slot.needs_replacement():
                slot.replace()
            slot.resume()  # a late stop_at_commit may have stopped the archiver

    def _drain(self) -> None:
        """Stop the publishers, and wait until all groups and the archivers reach the end."""
        self._signals.make_calm()
        for slot in self._publishers:
            slot.finish(END_S)

        def drained(sample: Event) -> bool:
            self._replace_dead([*self._members, *self._archivers, *self._readers])
            positions = [sample.confirmed.get(group, 0) for group in self._plan.group_names]
            if self._plan.store:
                positions.append(sample.archived)
            return min(positions) >= sample.last

        wait_for(self._sampler, drained, DRAIN_S)
        if self._plan.store:
            wait_for(self._sampler, lambda _: is_in_order(self._stream), DRAIN_S)
        self._sampler.sample()  # the final state
