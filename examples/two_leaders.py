"""Two leaders: one freezes while it works, the other takes over, and no update is lost.

    python examples/two_leaders.py

Two processes join a peer group. One is elected and writes a counter. SIGSTOP freezes it, as a long
pause of a virtual machine would. The other is elected in a higher term and continues the counter.
Then the first process wakes up in the middle of its work. It knows at once, without a request, that
its term is over, and its write is refused. Even if the write had already been sent, the server
would refuse it, because the write carries its term number. Finally SIGKILL ends the current
leader, and the first process leads again.

The program starts a private server and stops it at the end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import meteor_py as meteor
from meteor_py.testing import Server

TTL_S = 1.0

warnings.simplefilter("ignore", meteor.DataSafetyWarning)  # this example needs no data on disk


def work(name: str) -> None:
    """Run one of the two processes: join the group, and count while leading."""
    with meteor.connect() as m, m.peer_group("workers", ttl=TTL_S) as group, group.join(name) as me:
        say(name, "joined")
        while True:
            with me.leadership() as term:
                say(name, f"leads, term {term.number}")
                count(name, group, term)
            say(name, f"term {term.number} is over")


def count(name: str, group: meteor.PeerGroup, term: meteor.Term) -> None:
    """Write a counter for as long as this process leads."""
    while True:
        number = int(group.guarded("counter") or 0) + 1
        term.lost.wait(0.05)  # stands for real work
        valid = term.valid  # known locally, without a request
        try:
            # This write is fenced: it is refused once the term is over, even if `valid` was not
            # checked, or was checked too early.
            term.guard.set("counter", str(number))
        except meteor.StaleTerm as error:
            say(name, f"valid is {valid}; refused: {error}")
            return


def say(name: str, text: str) -> None:
    """Print a line. A single write keeps the lines of the processes apart."""
    sys.stdout.write(f"{name}: {text}\n")
    sys.stdout.flush()


def main() -> None:
    with (
        Server() as server,
        meteor.connect(server.url) as m,
        m.peer_group("workers", ttl=TTL_S) as group,
    ):
        workers = {name: start(name, server.url) for name in ("one", "two")}
        try:
            run_scenario(group, workers)
        finally:
            for process in workers.values():
                process.kill()
                process.wait()


def run_scenario(group: meteor.PeerGroup, workers: dict[str, subprocess.Popen[bytes]]) -> None:
    wait_for(lambda: len(group.members) == 2 and group.guarded("counter") is not None)
    first = leader(group)
    say("main", f"stopped {first} at {counter(group)}")
    os.kill(workers[first].pid, signal.SIGSTOP)
    stopped = time.monotonic()
    wait_for(lambda: leader(group) not in ("", first))
    second = leader(group)
    took_s = time.monotonic() - stopped
    say("main", f"{second} leads {took_s:.1f} s later, in a higher term")
    reached = counter(group)
    wait_for(lambda: counter(group) > reached + 3)
    os.kill(workers[first].pid, signal.SIGCONT)
    wait_for(lambda: any(m.id == first and m.alive for m in group.members))
    time.sleep(2 * TTL_S / 3)
    say("main", f"killed {second} at {counter(group)}")
    workers[second].kill()
    wait_for(lambda: leader(group) == first)
    reached = counter(group)
    wait_for(lambda: counter(group) > reached)
    say("main", f"{first} leads again, and has counted to {counter(group)}")


def start(name: str, url: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, name]
    return subprocess.Popen(command, env=os.environ | {"METEOR_URL": url})


def leader(group: meteor.PeerGroup) -> str:
    return group.leader.id if group.leader else ""


def counter(group: meteor.PeerGroup) -> int:
    return int(group.guarded("counter") or 0)


def wait_for(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"The condition was not met within {timeout_s:g} s.")
        time.sleep(0.01)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(sys.argv[1])
    else:
        main()
