"""``python -m tests.chaos.worker ROLE CONFIG``: one process in a chaos run."""

from __future__ import annotations

import random
import sys
import time
import traceback
from pathlib import Path

import meteor_py as meteor
from tests.chaos import mutants
from tests.chaos.archiving import UNAVAILABLE, Archiving
from tests.chaos.history import Writer
from tests.chaos.member import Member
from tests.chaos.publishing import Publishing
from tests.chaos.reading import Reading
from tests.chaos.worker_config import RunSignals, WorkerConfig
from tests.support.servers import HOST

#: Seconds to connect and to wait for a reply: shorter than the longest faults.
TIMEOUT_S = 2.0
CHECK_S = 0.05


def main(role: str, config: WorkerConfig) -> None:
    if config.mutant:
        mutants.plant(config.mutant)
    directory = Path(config.directory)
    writer = Writer(directory / f"{config.name}.jsonl")
    signals = RunSignals(directory)
    try:
        remap = {(HOST, node): (HOST, proxy) for node, proxy in config.remap.items()}
        with meteor.connect(config.url, timeout=TIMEOUT_S, remap=remap) as client:
            if role == "member":
                take_part(config, client, writer, signals)
            else:
                work(role, config, client, writer, signals)
    except Exception:
        writer.add("error", who=config.name, text=traceback.format_exc(limit=-4))
        raise


def work(
    role: str, config: WorkerConfig, client: meteor.Client, writer: Writer, signals: RunSignals
) -> None:
    programs: dict[str, type[Publishing | Archiving | Reading]]
    programs = {"publisher": Publishing, "archiver": Archiving, "reader": Reading}
    idle = signals.calm if role == "publisher" else signals.end
    while not idle():
        try:
            program = programs[role](config, client, writer, signals)
        except (meteor.ConnectionFailed, *UNAVAILABLE):
            time.sleep(CHECK_S)
        else:
            program.run()
            return


def take_part(
    config: WorkerConfig, client: meteor.Client, writer: Writer, signals: RunSignals
) -> None:
    """Be a member of each group until the run ends, in one thread per group."""
    rng = random.Random(config.seed)
    members = [
        Member(config, group, client, writer, signals, random.Random(rng.random()))
        for group in config.groups
    ]
    for member in members:
        member.start()
    while not signals.end():
        time.sleep(CHECK_S)
        if signals.calm():
            for member in members:
                member.confirm_rest()
    for member in members:
        member.interrupt()
    for member in members:
        member.join(20.0)
        if member.is_alive():
            writer.add("error", who=member.who, group=member.group, text="The member did not exit.")


if __name__ == "__main__":
    main(sys.argv[1], WorkerConfig.decode(sys.argv[2]))
