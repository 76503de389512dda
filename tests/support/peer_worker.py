"""A peer group member for chaos runs. It logs each message, and a poison message kills it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings

import meteor_py as meteor
from meteor_py.peers.messaging.message import Message


def main() -> None:
    url, name, member, path = sys.argv[1:5]
    warnings.simplefilter("ignore", meteor.DataSafetyWarning)  # this data may be lost
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with meteor.connect(url) as m, m.peer_group(name) as group:
        me = group.join(member or None)

        @me.on("work")
        def work(message: Message) -> int:
            body = message.body
            line = {"id": message.id, "at": time.monotonic(), "deliveries": message.deliveries}
            # One system call, so that a kill never leaves half a line.
            os.write(log, json.dumps(line | body).encode() + b"\n")
            if body["poison"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return int(body["n"])

        while not me.lost.wait(0.5) and os.getppid() != 1:
            pass


if __name__ == "__main__":
    main()
