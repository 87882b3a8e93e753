"""The commit queue: what waits for a commit, what does not, and in which order it is carried out."""

from __future__ import annotations

from pathlib import Path

import pytest

from starling.common.wire.messages import Down, Drain, ReleaseLeases
from starling.controller.core.events import Command, Note, Send, Write
from starling.controller.core.records import CompletionsStored, GroupsOpened, RewardsStored
from starling.controller.shell.journal.commit_queue import CommitQueue
from starling.controller.shell.journal.journal import Journal

REWARDS = Write(RewardsStored(key="t0", rewards=(1.0,)))
OPENED = Write(GroupsOpened(first=0, num=1))
RELEASE: Down = ReleaseLeases(leases=("score:t0:1.1",))


def queue_of(journal: Journal, done: list[Command]) -> CommitQueue:
    """Return a queue that appends what it carries out to `done`."""
    return CommitQueue(journal, lambda command, _: done.append(command), full_timeout_s=1.0, on_full=lambda _: None)


def test_rewards_and_their_release_share_the_next_commit(tmp_path: Path) -> None:
    journal, done = Journal(tmp_path / "journal.sqlite"), list[Command]()
    queue = queue_of(journal, done)
    release, drain = Send("reward-0", RELEASE), Send("rollout-0", Drain(reason="over"))
    queue.add(REWARDS, "")
    queue.add(release, "")
    assert not queue.is_urgent
    assert (list(journal.records()), done) == ([], []), "a replica drops its result after the record is durable"
    queue.add(drain, "")
    assert queue.is_urgent
    assert done == [], "commands keep their order"
    queue.flush()
    assert list(journal.records()) == [REWARDS.record]
    assert done == [release, drain]
    assert not queue.is_urgent
    assert not queue.is_pending
    journal.close()


def test_groups_that_are_scored_one_by_one_take_one_commit_each(tmp_path: Path) -> None:
    journal, num_commits = Journal(tmp_path / "journal.sqlite"), 0
    queue = queue_of(journal, [])
    for number in range(16):
        completions = CompletionsStored(key=f"t{number}", trajectories=(), tensors=())
        for command in (Write(completions), Send("reward-0", Drain(reason="as a command to score them"))):
            queue.add(command, "")
        num_commits += queue.is_urgent
        queue.flush()
        queue.add(Write(RewardsStored(key=f"t{number}", rewards=(1.0,))), "")
        queue.add(Send("reward-0", RELEASE), "")
        num_commits += queue.is_urgent
    assert num_commits == 16
    queue.flush()
    assert len(list(journal.records())) == 32
    journal.close()


@pytest.mark.parametrize("command", [OPENED, Send("rollout-0", Drain(reason="over")), Note("filtered", {})])
def test_everything_else_is_urgent_once_a_record_waits(tmp_path: Path, command: Command) -> None:
    journal, done = Journal(tmp_path / "journal.sqlite"), list[Command]()
    queue = queue_of(journal, done)
    queue.add(REWARDS, "")
    queue.add(command, "")
    assert queue.is_urgent
    journal.close()
