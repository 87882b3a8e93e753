"""Interrupted groups: which partial completions are kept, and which rollout resumes them."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
from generated_results import reason, valid
from hypothesis import given
from hypothesis import strategies as st
from transcript import Script, Stream

from starling.common.wire import messages as wire
from starling.controller.core.groups.partial import parse_partial
from starling.controller.core.machine import Controller
from starling.controller.core.records import JournalEntry, PartialCompletionsStored


def generating(**changes: Any) -> Script:
    """Return a run in which rollout-0 generates t0 and t1, and rollout-1 is idle."""
    script = Script(max_staleness=1, prompts_per_step=1, **changes)
    script.start_run()
    return script


def dispatched_groups(script: Script) -> list[wire.GenerateGroup]:
    return [send.message for send in script.sent if isinstance(send.message, wire.GenerateGroup)]


def adopt_second(script: Script) -> None:
    script.joins("rollout-1")
    script.adopts("rollout-1", 0, 1)


def end_cooldown(script: Script) -> None:
    """Let time pass until a rollout that gave groups back may have others, while all replicas send heartbeats."""
    until = script.now + script.plan.lease_s
    while script.now < until:
        for name, member in sorted(script.state.replicas.membership.members.items()):
            held = [script.aliases.short(lease.id) for lease in script.state.replicas.leases.all_of(name)]
            script.heartbeats(name, *held, version=member.version)
        script.advance_time(1.0)


def test_interrupted_group_is_resumed_by_another_rollout() -> None:
    script = generating()
    script.interrupts("rollout-0", "generate:t0:0", 3, 0)
    assert dispatched_groups(script) == [], "the rollout that returned the group is in cooldown"
    adopt_second(script)
    [command] = dispatched_groups(script)
    assert [completion.num_tokens for completion in command.partial] == [3, 0]
    assert [tensor.nbytes for tensor in command.tensors] == [12, 12, 12]
    assert script.state.buffer.get(0).tries == 0  # type: ignore[union-attr]


def test_cooldown_ends_after_a_lease() -> None:
    script = generating()
    script.interrupts("rollout-0", "generate:t0:0", 3, 3)
    for _ in range(int(script.plan.lease_s)):
        for name in ("policy-0", "reward-0"):
            script.heartbeats(name)
        script.heartbeats("rollout-0", "generate:t1:0", version=0)
        assert dispatched_groups(script) == []
        script.advance_time(1.0)
    assert [command.prompt.id for command in dispatched_groups(script)] == ["train0"]


def test_cooldown_does_not_end_with_an_adoption() -> None:
    """A rollout can say at any time that its weights are torn, and adopt them again."""
    script = generating()
    script.interrupts("rollout-0", "generate:t0:0", 3, 3)
    script.interrupts("rollout-0", "generate:t1:0", 3, 3)
    script.heartbeats("rollout-0", version=-1)
    assert dispatched_groups(script) == []
    script.adopts("rollout-0", 0, 1)
    assert dispatched_groups(script) == []
    end_cooldown(script)
    assert [command.prompt.id for command in dispatched_groups(script)] == ["train0", "train1"]


def test_group_that_kills_engines_is_discarded() -> None:
    """A handover is no failure of the group; lost engines count, the second one as a failed try."""
    script = generating(max_tries=1)
    kept = []
    for number in range(4):
        group = script.state.buffer.get(0)
        assert group is not None
        assert group.tries == number // 2
        kept.append(group.partial is not None)
        script.interrupts("rollout-0", f"generate:t0:{number}", 3, 3, lost=True)
        script.heartbeats("rollout-0", "generate:t1:0", version=-1)
        script.adopts("rollout-0", 0, number + 1)
        end_cooldown(script)
    assert kept == [False, True, False, True], "after two lost engines the group starts over without its tokens"
    assert script.state.buffer.get(0) is None
    assert "2 engines died while they worked on it" in script.state.buffer.last_discarded


def test_longer_partial_completions_win() -> None:
    script = generating()
    script.interrupts("rollout-0", "generate:t0:0", 4, 4)
    adopt_second(script)
    script.interrupts("rollout-1", "generate:t0:1", 2, 2)
    script.joins("rollout-2")
    script.adopts("rollout-2", 0, 2)
    [command] = dispatched_groups(script)
    assert [completion.num_tokens for completion in command.partial] == [4, 4]


def test_journal_keeps_the_longest_partial_completions() -> None:
    script = generating()
    script.interrupts("rollout-0", "generate:t0:0", 4, 4)
    adopt_second(script)
    script.interrupts("rollout-1", "generate:t0:1", 2, 2)
    stored = [write.record for write in script.journal if isinstance(write.record, PartialCompletionsStored)]
    assert [sum(one.num_tokens for one in record.partial) for record in stored] == [8]


def test_partial_tokens_of_a_future_version_are_dropped() -> None:
    script = generating()
    script.interrupts("rollout-0", "generate:t0:0", 3, 3, version=1)
    adopt_second(script)
    assert [command.partial for command in dispatched_groups(script)] == [()]


def test_stale_partial_tokens_are_dropped_at_dispatch() -> None:
    script = generating()
    script.generate_and_score(0)
    script.trains(1)
    script.publishes(1)
    script.interrupts("rollout-0", "generate:t1:0", 3, 3)
    script.receive("operator-0", wire.ChangeSetting(request="a", key="rl.max_staleness", value=0))
    script.joins("rollout-1")
    script.adopts("rollout-1", 1, 1)
    commands = {command.prompt.id: command.partial for command in dispatched_groups(script)}
    assert commands["train1"] == (), "a token of version 0 would have staleness 1 in step 2"


def test_group_keeps_the_temperature_of_its_tokens() -> None:
    script = generating()
    script.interrupts("rollout-0", "generate:t0:0", 3, 3)
    script.receive("operator-0", wire.ChangeSetting(request="a", key="sampling.temperature", value=0.5))
    adopt_second(script)
    [command] = dispatched_groups(script)
    assert command.sampling.temperature == 1.0


@pytest.mark.parametrize(("temperature", "kept"), [(-1.0, 0), (1.0, 3)], ids=["not told", "told"])
def test_reclaimed_partial_completions_need_a_temperature(temperature: float, kept: int) -> None:
    before = generating()
    script = Script()
    script.plan, script.aliases = before.plan, before.aliases
    journaled = [JournalEntry(write.record, write.payload) for write in before.journal]
    script.controller = Controller(before.plan, Stream("train"), Stream("sft"), [], journal=journaled, incarnation=2)
    script.state = script.controller.state
    script.joins("rollout-0")
    script.interrupts("rollout-0", "generate:t0:0", 3, 0, temperature=temperature)
    group = script.state.buffer.get(0)
    assert group is not None
    assert (group.partial.num_tokens if group.partial else 0) == kept


def test_interrupted_evaluation_group_is_resumed() -> None:
    script = Script(evaluate_at_start=True)
    script.start_run()
    script.interrupts("rollout-0", "generate:e0:0", 4)
    adopt_second(script)
    [command] = [command for command in dispatched_groups(script) if command.purpose == "evaluate" and command.partial]
    assert [completion.num_tokens for completion in command.partial] == [4]


@pytest.mark.parametrize(
    ("lengths", "num_tensors", "num_versions", "complaint"),
    [
        ((3,), 3, 3, "1 completions of 3 tokens were returned for a group of 2"),
        ((4, -1), 3, 3, "2 completions of 3 tokens"),
        ((2, 1), 2, 3, "2 tensors came in 2 buffers instead of 3"),
        ((2, 1), 3, 2, r"versions is int32\[3\] in 8 bytes"),
    ],
)
def test_inconsistent_partial_completions_are_refused(
    lengths: tuple[int, ...], num_tensors: int, num_versions: int, complaint: str
) -> None:
    kinds = ("int32", "float32", "int32")
    tensors = [wire.TensorMeta(dtype=kind, shape=(3,), nbytes=12) for kind in kinds]
    completions = tuple(wire.PartialCompletionMeta(num_tokens=length) for length in lengths)
    buffers = (bytes(12), bytes(12), bytes(4 * num_versions))[:num_tensors]
    with pytest.raises(ValueError, match=complaint):
        parse_partial(completions, tuple(tensors[:num_tensors]), buffers, 2, None)


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=4))
def test_partial_versions_are_read_from_the_tensor(completions: list[list[int]]) -> None:
    versions = [version for completion in completions for version in completion]
    tensors = tuple(
        wire.TensorMeta(dtype=kind, shape=(len(versions),), nbytes=4 * len(versions))
        for kind in ("int32", "float32", "int32")
    )
    buffers = (bytes(4 * len(versions)),) * 2 + (struct.pack(f"<{len(versions)}i", *versions),)
    metas = tuple(wire.PartialCompletionMeta(num_tokens=len(completion)) for completion in completions)
    partial = parse_partial(metas, tensors, buffers, len(completions), None)
    if not versions:
        assert partial is None
    else:
        assert partial is not None
        assert (partial.num_tokens, partial.oldest_version) == (len(versions), min(versions))
        assert partial.is_within(min(versions), max(versions))
        assert not partial.is_within(min(versions) + 1, max(versions))


@pytest.mark.parametrize("temperature", [1e-30, 1e30, 0.5])
@pytest.mark.parametrize("reclaimed", [False, True])
def test_partial_completions_of_a_temperature_that_the_run_has_not_had_are_thrown_away(
    temperature: float, reclaimed: bool
) -> None:
    script = generating()
    if reclaimed:
        script.disconnect("rollout-0")
        script.joins("rollout-0")
        script.state.replicas.membership.members["rollout-0"].version = 0
    script.interrupts("rollout-0", "generate:t0:0", 3, 3, temperature=temperature)
    group = script.state.buffer.get(0)
    assert group is not None
    assert (group.partial, group.temperature) == (None, 1.0), "the next rollout would sample at it, the policy train"


def test_reclaimed_group_of_a_temperature_that_the_run_has_not_had_is_a_failed_try() -> None:
    script = generating()
    script.disconnect("rollout-0")
    script.joins("rollout-0")
    result = valid()
    result.temperature = 1e-30
    result.send(script)
    assert "sampled at temperature 1e-30, which this run has not had" in reason(script)


@pytest.mark.parametrize(("tokens", "temperature"), [(3, 0.25), (9, 1.0)])
def test_reclaimed_group_of_a_step_is_not_sampled_as_one_of_an_evaluation(tokens: int, temperature: float) -> None:
    """The next rollout would sample the rest of it at that temperature, and the policy train on it."""
    script = generating(eval_sampling=wire.Sampling(max_tokens=9, temperature=0.25))
    script.disconnect("rollout-0")
    script.joins("rollout-0")
    script.state.replicas.membership.members["rollout-0"].version = 0
    script.interrupts("rollout-0", "generate:t0:0", tokens, tokens, temperature=temperature)
    group = script.state.buffer.get(0)
    assert group is not None
    assert (group.partial, group.temperature) == (None, 1.0)


def test_partial_completions_with_kept_tokens_are_thrown_away_where_none_are_recorded() -> None:
    script = generating()
    tensors = [wire.TensorMeta(dtype=kind, shape=(2,), nbytes=8) for kind in ("int32", "float32", "int32")]
    tensors += [wire.TensorMeta(dtype="int32", shape=(2,), nbytes=8, name=name) for name in ("kept_counts", "kept_ids")]
    interrupted = wire.GroupInterrupted(
        lease="generate:t0:0",
        reason="",
        partial=(wire.PartialCompletionMeta(num_tokens=1),) * 2,
        tensors=tuple(tensors),
    )
    script.receive("rollout-0", interrupted, *[bytes(8)] * 3, struct.pack("<ii", 1, 1), bytes(8))
    group = script.state.buffer.get(0)
    assert group is not None
    assert group.partial is None


def test_ended_completions_without_a_token_are_thrown_away() -> None:
    """An answer has the versions of the tokens of each completion: a rollout that resumes from these would end."""
    script = generating()
    tensors = tuple(wire.TensorMeta(dtype=kind, shape=(3,), nbytes=12) for kind in ("int32", "float32", "int32"))
    partial = (
        wire.PartialCompletionMeta(num_tokens=3),
        wire.PartialCompletionMeta(num_tokens=0, status=wire.Status.OK),
    )
    interrupted = wire.GroupInterrupted(lease="generate:t0:0", reason="", partial=partial, tensors=tensors)
    script.receive("rollout-0", interrupted, *[bytes(12)] * 3)
    assert not [write for write in script.journal if isinstance(write.record, PartialCompletionsStored)]
    adopt_second(script)
    assert [command.partial for command in dispatched_groups(script)] == [()]


def test_partial_completions_without_kept_tokens_are_thrown_away_where_they_are_recorded() -> None:
    """A rollout that finds them all complete would answer without kept tokens, and be blamed for it."""
    script = generating(sampling=wire.Sampling(max_tokens=4, top_k=8, logprobs="truncated"))
    script.interrupts("rollout-0", "generate:t0:0", 3, 3)
    adopt_second(script)
    assert [command.partial for command in dispatched_groups(script)] == [()]


def test_partial_completions_are_thrown_away_when_the_run_is_resumed_with_kept_tokens() -> None:
    script = generating()
    script.interrupts("rollout-0", "generate:t0:0", 3, 3)
    script.plan = replace(script.plan, sampling=wire.Sampling(max_tokens=4, top_k=8, logprobs="truncated"))
    script.restart()
    group = script.state.buffer.get(0)
    assert group is not None
    assert group.partial is not None
    script.advance_time(1)
    assert group.partial is None
