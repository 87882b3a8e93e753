"""Dynamic sampling: groups without a learning signal are filtered out, and each step is still full."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from transcript import Script, Stream

from starling.controller.core.events import Note
from starling.controller.core.groups.buffer import GroupBuffer
from starling.controller.core.groups.group import GroupState
from starling.controller.core.machine import Controller
from starling.controller.core.records import JournalEntry, RewardsStored, StepCommitted
from starling.controller.core.training.metrics import filtered_metrics


def script(**changes: object) -> Script:
    return Script(dynamic_sampling=True, **changes)


def finish_group(script: Script, ordinal: int, *rewards: float) -> None:
    script.generates("rollout-0", f"generate:t{ordinal}:0")
    script.scores(f"score:t{ordinal}:0", *rewards)


def committed_metrics(script: Script) -> dict[str, object]:
    """Return the metrics of the last committed step."""
    return [write.record.metrics for write in script.journal if isinstance(write.record, StepCommitted)][-1]


def test_step_metrics_count_filtered_groups() -> None:
    run = script()
    run.start_run()
    for ordinal, rewards in enumerate([(1, 1), (0, 1), (0, 0), (0.5, 0.5), (1, 0)]):
        finish_group(run, ordinal, *rewards)
    run.trains(1)
    assert committed_metrics(run)["num_filtered"] == 3
    assert committed_metrics(run)["filtered_share"] == 3 / 5
    assert committed_metrics(run)["num_discarded"] == 0, "filtered groups are not counted as lost"
    assert committed_metrics(run)["reward_mean"] == 0.5
    assert committed_metrics(run)["sampled_reward_mean"] == (1 + 0.5 + 0 + 0.5 + 0.5) / 5
    run.publishes(1)
    run.adopts("rollout-0", 1)
    for ordinal in (5, 6):
        run.generates("rollout-0", f"generate:t{ordinal}:0", 1)
        run.scores(f"score:t{ordinal}:0")
    run.trains(2)
    assert committed_metrics(run)["num_filtered"] == committed_metrics(run)["filtered_share"] == 0


def test_restarted_controller_sends_the_same_commands() -> None:
    run = script()
    run.start_run()
    for ordinal, rewards in enumerate([(1, 1), (0, 1), (0, 0), (1, 0)]):
        finish_group(run, ordinal, *rewards)
    past = [JournalEntry(write.record, write.payload) for write in run.journal]
    again = Controller(run.plan, Stream("train"), Stream("sft"), run.held_out, journal=past, incarnation=2).state.buffer
    buffer = run.state.buffer
    assert (
        filtered_metrics(again, 1)
        == filtered_metrics(buffer, 1)
        == {
            "num_filtered": 2,
            "filtered_share": 0.5,
            "sampled_reward_mean": 0.5,
        }
    )
    assert again.filtering.num_in_a_row == buffer.filtering.num_in_a_row == 0
    assert again.num_free_slots() == buffer.num_free_slots()


def test_equal_rewards_are_trained_without_dynamic_sampling() -> None:
    run = Script()
    run.start_run()
    for ordinal in (0, 1):
        finish_group(run, ordinal, 1, 1)
    run.trains(1)
    assert "num_filtered" not in committed_metrics(run)
    assert committed_metrics(run)["reward_mean"] == 1


def test_evaluation_keeps_equal_rewards() -> None:
    run = script(evaluate_at_start=True)
    run.start_run(slots=8)
    for ordinal in (0, 1):
        run.generates("rollout-0", f"generate:e{ordinal}:0", num=1)
        run.scores(f"score:e{ordinal}:0", 1.0)
    assert run.state.evaluations.evaluated == {"start": 0}


def test_filter_limit_fails_the_run() -> None:
    run = script(filter_limit=3)
    run.start_run()
    for ordinal, rewards in enumerate([(1, 1), (0, 0), (0, 1), (0, 0), (0, 0)]):
        finish_group(run, ordinal, *rewards)
    assert not any("failed" in line or "drain" in line for line in run.advance_time(1))
    finish_group(run, 5, 0, 0)
    [line] = [line for line in run.advance_time(1) if line.startswith("policy-0 <- drain")]
    assert "the last 3 groups were all filtered out" in line
    assert "rl.filter_limit" in line


def test_default_limit_is_ten_steps_worth() -> None:
    assert script().plan.max_filtered == 20
    assert script(filter_limit=7).plan.max_filtered == 7


def test_filtered_group_is_noted_with_its_reward() -> None:
    run = script()
    run.start_run()
    finish_group(run, 0, 0.25, 0.25)
    [note] = [command for command in run.commands if isinstance(command, Note) and command.kind == "filtered"]
    assert note.fields == {"prompt": "train0", "reward": 0.25}


@given(
    st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["keep", "filter", "discard"])), max_size=60),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_every_step_is_full_and_nothing_is_out_of_order(
    outcomes: list[tuple[int, str]], prompts_per_step: int, max_staleness: int
) -> None:
    """For any order of results: steps take the kept groups in order, and slots bound the live groups."""
    buffer = GroupBuffer(num_steps=4, prompts_per_step=prompts_per_step, max_staleness=max_staleness, max_tries=0)
    prompts, kept, filtered, passed = Stream("train"), [], [], 0
    for chosen, outcome in outcomes:
        for _ in range(buffer.num_free_slots()):
            buffer.lease(buffer.admit(prompts.prompt(buffer.num_admitted)), 0)
        in_progress = buffer.within(GroupState.LEASED)
        assert buffer.num_live <= buffer.num_slots
        if not in_progress:
            break  # the last step is full
        group = in_progress[chosen % len(in_progress)]
        ranks = {other.ordinal: buffer.rank(other) for other in buffer.live()}
        if outcome == "discard":
            buffer.discard(group)
        else:
            buffer.store_completions(group, (), (), ())
            if outcome == "keep":
                buffer.store_rewards(group, RewardsStored(key=group.key, rewards=(0.0, 1.0)))
            else:
                buffer.filter(group, 0.5, "reward-0")
            (kept if outcome == "keep" else filtered).append(group.ordinal)
        assert all(buffer.rank(other) <= ranks[other.ordinal] for other in buffer.live()), "ranks only decrease"
        step = buffer.num_frozen_steps + 1
        for frozen in buffer.freeze_next(step):
            assert frozen.ordinal in kept
            kept.remove(frozen.ordinal)
            assert not kept or frozen.ordinal < min(kept)
        if buffer.num_frozen_steps == step:
            assert len(buffer.frozen_groups(step)) == prompts_per_step
            last = buffer.frozen_groups(step)[-1].ordinal
            num = sum(ordinal < last for ordinal in filtered) - passed
            passed += num
            assert len(buffer.filtered_rewards(step)) == num
            buffer.retire(step)
    assert buffer.num_admitted == buffer.num_live + buffer.num_trained_groups + buffer.num_discarded + len(filtered)
