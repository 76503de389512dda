"""The publisher program: publishes small batches and records the outcome of each."""

from __future__ import annotations

import random
import time
from collections import deque

import meteor_py as meteor
from tests.chaos.history import Writer, payload, value_of
from tests.chaos.worker_config import STREAM, RunSignals, WorkerConfig

#: With more batches in flight than this, the publisher waits for the oldest one.
PENDING_MAX = 200
SETTLE_S = 30.0

#: Errors that do not say whether the record is in the log.
UNSURE = (meteor.OutcomeUnknown, meteor.NotReplicated)

Outcome = meteor.Ack | meteor.ManyAck


class Publishing:
    """One publisher, from its first record to its last."""

    def __init__(
        self, config: WorkerConfig, client: meteor.Client, writer: Writer, signals: RunSignals
    ) -> None:
        self._config = config
        self._rng = random.Random(config.seed)
        self._writer = writer
        self._signals = signals
        self._counter = 0
        self._pending: deque[tuple[list[bytes], Outcome]] = deque()
        timeout_s = self._rng.choice((1.0, 3.0, 10.0))
        stream = client.stream(STREAM, create=False)
        self._publisher = stream.publisher(delivery_timeout=timeout_s)

    def run(self) -> None:
        while not self._signals.calm():
            self._publish()
            self._settle(PENDING_MAX)
            if self._rng.random() < 0.2 and self._pending:
                self._settle(len(self._pending) - 1)  # wait for the oldest batch
            time.sleep(self._rng.uniform(0, 2 * self._config.batch_pause_s))
        self._settle(0)
        try:
            self._publisher.close(SETTLE_S)
        except meteor.MeteorError:
            pass  # the acks of the affected records report this error too

    def _publish(self) -> None:
        count = self._rng.choice((1, 2, 10, self._rng.randint(1, 50)))
        values = [payload(self._config.name, self._counter + n) for n in range(count)]
        self._counter += count
        self._note("publish", values)
        together = self._rng.random() < 0.5
        for part in [values] if together else [[value] for value in values]:
            try:
                ack = (
                    self._publisher.publish_many(part)
                    if together
                    else self._publisher.publish(part[0])
                )
            except meteor.LogTruncated as error:
                self._writer.add(
                    "truncated", who=self._config.name, first=error.first, last=error.last
                )
            except meteor.MeteorError as error:  # the publisher did not accept the batch
                self._note("failed", part, text=repr(error))
            else:
                self._pending.append((part, ack))

    def _settle(self, most: int) -> None:
        """Record the outcomes of the oldest batches, waiting while more than `most` are pending."""
        while self._pending and (len(self._pending) > most or self._pending[0][1].done()):
            values, ack = self._pending.popleft()
            error = ack.exception(SETTLE_S)
            if error is None:
                self._note("acked", values, offsets=offsets_of(ack))
            elif isinstance(error, UNSURE) or len(values) > 1:
                # Some records in a batch may be in the log although others have failed.
                self._note("unknown", values, text=repr(error))
            else:
                self._note("failed", values, text=repr(error))

    def _note(self, kind: str, values: list[bytes], **fields: object) -> None:
        names = [value_of(value) for value in values]
        self._writer.add(kind, who=self._config.name, values=names, **fields)  # type: ignore[arg-type]


def offsets_of(ack: Outcome) -> list[int]:
    if isinstance(ack, meteor.ManyAck):
        return [offset for each in ack.ranges for offset in each]
    return [ack.result(0)]
