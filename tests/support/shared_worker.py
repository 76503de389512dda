"""A shared group consumer as a process: ``python -m tests.support.shared_worker JSON``.

It appends processed offsets to the list ``history`` before it acknowledges them, so the history
survives the process. It ends when the key ``stop`` exists.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from contextlib import suppress
from typing import Any

import meteor_py as meteor
from meteor_py.shared.record import Standing
from tests.support.servers import plain_client
from tests.support.sharing import GROUP, STREAM

HISTORY, STOP, READY = "history", "stop", "ready"
POISON = b"poison"


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    rng = random.Random(f"{options['seed']} {os.getpid()}")
    with plain_client(options["url"]) as plain, meteor.connect(options["meteor_url"]) as client:
        print(READY, flush=True)
        while not plain.exists(STOP):
            try:
                stream = client.stream(STREAM, create=False)
                with stream.shared_subscriber(GROUP, prefetch=options["prefetch"]) as sub:
                    if options["run"]:
                        run(sub, plain)
                        return
                    visit(sub, plain, rng, options)
            except (meteor.Fenced, meteor.OutcomeUnknown, meteor.ConnectionFailed):
                pass  # raised while opening or closing the subscriber


def visit(
    sub: meteor.SharedSubscriber, plain: Any, rng: random.Random, options: dict[str, Any]
) -> None:
    """Work until ``stop`` is set or, with the ``visits`` option, for a random number of polls."""
    polls = rng.randrange(1, 40) if options["visits"] else -1
    while polls and not plain.exists(STOP):
        polls -= 1
        try:
            work(sub, plain, rng, options["trouble"])
        except meteor.Fenced:
            pass  # other consumers may have these records now
        except (meteor.OutcomeUnknown, meteor.ConnectionFailed):
            with suppress(meteor.Fenced, meteor.OutcomeUnknown, meteor.ConnectionFailed):
                sub.rollback()  # return records that were polled but neither processed nor settled


def work(sub: meteor.SharedSubscriber, plain: Any, rng: random.Random, trouble: float) -> None:
    """Process the records of one poll; release or reject some at random."""
    processed: list[meteor.SharedRecord] = []
    for record in sub.poll(0.5, rng.choice([1, 10, 100, 1000])):
        if record.standing is not Standing.HELD:
            continue  # returned together with an earlier record of its key
        if record.value == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        luck = rng.random()
        if luck < trouble:
            record.release(rng.choice([0.0, 0.0, 0.05]))
        elif luck < 1.5 * trouble:
            record.reject("bad luck")
            # The key's later records are in order only if the server accepts the rejection.
            sub.flush()
        else:
            processed.append(record)
    if processed:
        plain.rpush(HISTORY, *(record.offset for record in processed))
        for record in processed:
            if record.standing is Standing.HELD:
                record.ack()


def run(sub: meteor.SharedSubscriber, plain: Any) -> None:
    """Call ``run()`` until ``stop`` is set. A poison record kills the process."""

    def handle(record: meteor.SharedRecord) -> None:
        if record.value == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        plain.rpush(HISTORY, record.offset)
        if plain.exists(STOP):
            sub.stop()

    sub.run(handle, concurrency=4)


if __name__ == "__main__":
    main()
