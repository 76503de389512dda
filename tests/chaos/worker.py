"""``python -m tests.chaos.worker ROLE ORDERS``: one process of a chaos run."""

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
from tests.chaos.orders import Orders, Signs
from tests.chaos.publishing import Publishing
from tests.chaos.reading import Reading

#: Seconds to connect and to wait for a reply: shorter than the longest faults.
TIMEOUT_S = 2.0
CHECK_S = 0.05


def main(role: str, orders: Orders) -> None:
    if orders.mutant:
        mutants.plant(orders.mutant)
    directory = Path(orders.directory)
    writer = Writer(directory / f"{orders.name}.jsonl")
    signs = Signs(directory)
    try:
        with meteor.connect(orders.url, timeout=TIMEOUT_S) as client:
            if role == "member":
                take_part(orders, client, writer, signs)
            else:
                work(role, orders, client, writer, signs)
    except Exception:
        writer.add("error", who=orders.name, text=traceback.format_exc(limit=-4))
        raise


def work(role: str, orders: Orders, client: meteor.Client, writer: Writer, signs: Signs) -> None:
    programs: dict[str, type[Publishing | Archiving | Reading]]
    programs = {"publisher": Publishing, "archiver": Archiving, "reader": Reading}
    idle = signs.calm if role == "publisher" else signs.end
    while not idle():
        try:
            program = programs[role](orders, client, writer, signs)
        except (meteor.ConnectionFailed, *UNAVAILABLE):
            time.sleep(CHECK_S)
        else:
            program.run()
            return


def take_part(orders: Orders, client: meteor.Client, writer: Writer, signs: Signs) -> None:
    """Join each group, in one thread per group."""
    rng = random.Random(orders.seed)
    members = [
        Member(orders, group, client, writer, signs, random.Random(rng.random()))
        for group in orders.groups
    ]
    for member in members:
        member.start()
    while not signs.end():
        time.sleep(CHECK_S)
        if signs.calm():
            for member in members:
                member.confirm_rest()
    for member in members:
        member.interrupt()
    for member in members:
        member.join(20.0)
        if member.is_alive():
            writer.add("error", who=member.who, group=member.group, text="The member did not exit.")


if __name__ == "__main__":
    main(sys.argv[1], Orders.decode(sys.argv[2]))
