"""Two terminals that exchange records, without installing a server or giving an address.

    python examples/two_terminals.py read        # in one terminal: waits for records
    python examples/two_terminals.py publish     # in another: sends each line that you type

The first program starts your personal server, which keeps its data on disk. The server stops when
the last program ends.
"""

from __future__ import annotations

import sys

import meteor_py as meteor


def publish(stream: meteor.Stream) -> None:
    """Publish each line of standard input."""
    with stream.publisher() as pub:
        for line in sys.stdin:
            print("offset", pub.publish(line.rstrip("\n")).result())


def read(stream: meteor.Stream) -> None:
    """Print each record as it arrives, until Ctrl-C."""
    with stream.subscriber() as sub:
        print("waiting at offset", sub.position, flush=True)
        for record in sub:
            print(f"{record.time:%H:%M:%S} {record.offset}: {record.value}", flush=True)


if __name__ == "__main__":
    roles = {"publish": publish, "read": read}
    if len(sys.argv) != 2 or sys.argv[1] not in roles:
        sys.exit(f"usage: {sys.argv[0]} publish|read")
    with meteor.connect() as m:
        try:
            roles[sys.argv[1]](m.stream("two-terminals", codec="text"))
        except KeyboardInterrupt:
            sys.exit(130)
