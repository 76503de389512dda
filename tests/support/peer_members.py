"""A peer group with two members, for tests of the command line."""

from __future__ import annotations

import pytest

from meteor_py import Membership, Message, PeerGroup
from tests.support.mailing import Post

HOSTILE = "evil\x1b[2J\u202egnp.exe\n"


@pytest.fixture
def group(post: Post) -> PeerGroup:
    return post.group()


@pytest.fixture
def members(group: PeerGroup) -> list[Membership]:
    """Two members: one leads, the other fails every message on the queue "hard"."""
    members = [group.join("w1", metadata={"host": HOSTILE}, priority=5), group.join("w2")]
    for member in members:
        member.on("jobs")(lambda message: {"did": message.body, "by": message.member})
        member.on_vote(lambda proposal: proposal.topic != "no")

    def hard(message: Message) -> int:
        if message.member == "w2":
            raise ValueError(HOSTILE)
        return 1

    for member in members:
        member.on("hard")(hard)
    return members
