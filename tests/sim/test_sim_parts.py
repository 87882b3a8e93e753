"""Parts of the simulation that could hide a bug of the real system: journal, network, all-reduce."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.wire.messages import TrainStep
from starling.controller.core import records
from starling.sim.environment.clock import SimulatedClock
from starling.sim.environment.journal import SimulatedJournal
from starling.sim.environment.network import SimulatedNetwork
from starling.sim.errors import Violation
from starling.sim.replicas.collective import Collective, StepItem, StepShare
from starling.sim.replicas.rollout import MAX_OVER_MEAN, length_of
from starling.sim.scenario.faults import Faults


def opened(first: int) -> records.GroupsOpened:
    """Return a record."""
    return records.GroupsOpened(first=first, num=1)


def journal_of(seed: int) -> tuple[SimulatedClock, SimulatedJournal]:
    """Return an empty journal and its clock."""
    clock = SimulatedClock()
    return clock, SimulatedJournal(clock, random.Random(seed), 0.01, lambda: None)


@given(
    seed=st.integers(0, 1000),
    actions=st.lists(st.sampled_from(["append", "pass", "crash"]), max_size=40),
)
def test_journal_durable_records_survive_crashes(seed: int, actions: list[str]) -> None:
    clock, journal = journal_of(seed)
    for _ in actions:
        clock.after(1e9, lambda: None)  # the clock must never run out of actions
    written: list[records.Record] = []
    for action in actions:
        if action == "append":
            written.append(opened(len(written)))
            journal.append(written[-1], ())
        elif action == "pass":
            clock.advance()
        else:
            durable = journal.num_durable
            journal.crash()
            assert durable <= journal.num_durable == journal.num_records
            written = written[: journal.num_durable]
    assert journal.records() == written


def test_journal_commit_covers_records_before_its_begin() -> None:
    clock, journal = journal_of(0)
    journal.append(opened(0), ())
    journal.append(opened(1), ())
    journal.append(opened(2), ())
    assert journal.num_durable == 0
    clock.advance()
    assert journal.num_durable == 1, "the first commit did not wait for more records"
    clock.advance()
    assert journal.num_durable == 3


def generated(key: str) -> records.CompletionsStored:
    """Return a record of completions."""
    return records.CompletionsStored(key=key, trajectories=(), tensors=())


def append_step(journal: SimulatedJournal, step: int, ordinals: tuple[int, ...]) -> None:
    """Append the records of a step's groups, in another order than that of training."""
    for ordinal in reversed(ordinals):
        journal.append(generated(f"t{ordinal}"), (b"first",))
        journal.append(generated(f"t{ordinal}"), (b"%d" % ordinal,))
        journal.append(records.RewardsStored(key=f"t{ordinal}", rewards=(1.0,)), ())
    journal.append(records.StepFrozen(step=step, ordinals=ordinals, prompts=()), ())


def test_journal_fetches_a_step_until_it_is_pruned() -> None:
    _, journal = journal_of(0)
    append_step(journal, 1, (0, 1))
    with pytest.raises(Violation, match="was not committed"):
        journal.fetch(1)
    journal.append(records.StepCommitted(step=1), ())
    fetched = journal.fetch(1)
    assert [kept.payload for kept in fetched] == [(b"0",), (), (b"1",), ()]
    assert [type(kept.record).__name__ for kept in fetched] == ["CompletionsStored", "RewardsStored"] * 2
    append_step(journal, 2, (2, 3))
    payloads = [kept.payload for kept in journal.entries() if kept.payload]
    assert payloads == [(b"first",), (b"3",), (b"first",), (b"2",)], "without the payloads of the committed step"
    journal.prune(1)
    with pytest.raises(Violation, match="deleted"):
        journal.fetch(1)


@given(seed=st.integers(0, 1000), num=st.integers(1, 50))
def test_network_without_faults_keeps_order(seed: int, num: int) -> None:
    clock = SimulatedClock()
    network, heard = SimulatedNetwork(clock, random.Random(seed), Faults()), list[int]()
    for i in range(num):
        network.send("rollout-0", True, heard.append, i)
    for _ in range(num):
        clock.advance()
    assert heard == list(range(num))


def test_network_partition_loses_messages_in_both_directions() -> None:
    clock = SimulatedClock()
    network, heard = SimulatedNetwork(clock, random.Random(0), Faults()), list[str]()
    network.send("rollout-0", True, heard.append, "in transit")
    network.partition(["rollout-0"])
    network.partition(["rollout-0"])
    network.send("rollout-0", False, heard.append, "after")
    network.send("rollout-1", True, heard.append, "another")
    network.heal(["rollout-0"])
    clock.advance()
    clock.advance()
    assert heard == ["another"]
    network.heal(["rollout-0"])
    network.send("rollout-0", True, heard.append, "healed")
    clock.advance()
    assert heard == ["another", "healed"]


def share(
    policy: str, replica: int, peers: str, done: list[str], *, group: str = "g", prompts: str = "xyz"
) -> StepShare:
    """Return the part of one of `peers` in a step of three groups."""
    message = TrainStep(lease=f"train:1:1.{policy}", step=1, replica=replica, peers=tuple(peers), group=group)
    items = {prompt: StepItem(prompt.encode()) for prompt in prompts}
    return StepShare(policy, message, items, "start", lambda: done.append(policy))


def test_network_loses_everything_in_transit_at_once() -> None:
    clock = SimulatedClock()
    network, arrived = SimulatedNetwork(clock, random.Random(0), Faults()), list[int]()
    network.partition(["b"], late=True)
    for peer, up in (("a", True), ("a", False), ("b", True)):
        network.send(peer, up, arrived.append, 1)
    network.lose_all()
    network.heal(["b"])
    network.send("a", True, arrived.append, 2)
    clock.after(1.0, lambda: None)
    while clock.now < 1.0:
        clock.advance()
    assert arrived == [2]


def test_collective_waits_for_all_policies_of_a_step() -> None:
    collective, done = Collective(), list[str]()
    collective.arrive(share("a", 0, "abc", done))
    collective.arrive(share("b", 1, "abc", done))
    collective.leave("b")
    collective.arrive(share("c", 2, "abc", done))
    assert done == [], "one policy has died"
    collective.leave("c")
    collective.arrive(share("c", 1, "ac", done, group="h"))
    assert done == []
    collective.arrive(share("a", 0, "ac", done, group="h"))
    assert sorted(done) == ["a", "c"]


def test_collective_does_not_mix_process_groups_nor_batches() -> None:
    collective, done = Collective(), list[str]()
    collective.arrive(share("a", 0, "ab", done))
    collective.arrive(share("b", 1, "ab", done, group="h"))
    collective.arrive(share("b", 1, "ab", done, prompts="xy"))
    assert done == []
    collective.arrive(share("b", 1, "ab", done))
    assert sorted(done) == ["a", "b"]


def test_length_of_has_its_mean_and_a_tail() -> None:
    lengths = [length_of(seed, 20.0) for seed in range(20_000)]
    assert 18 <= sum(lengths) / len(lengths) <= 21
    assert max(lengths) == 20 * MAX_OVER_MEAN
    assert length_of(7, 20.0) == length_of(7, 20.0)
