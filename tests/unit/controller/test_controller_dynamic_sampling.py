"""Dynamic sampling: groups from which nothing can be learnt are set aside, and each step is full all the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from transcript import Script, Stream

from starling.controller.core.events import Note
from starling.controller.core.groups.buffer import TrainBuffer
from starling.controller.core.groups.group import GroupState
from starling.controller.core.machine import Controller
from starling.controller.core.records import JournalEntry, StepCommitted
from starling.controller.core.training.metrics import filtered_metrics


def script(**changes: object) -> Script:
    return Script(dynamic_sampling=True, **changes)


def finishes(script: Script, ordinal: int, *rewards: float) -> None:
    script.generates("rollout-0", f"generate:t{ordinal}:0")
    script.scores(f"score:t{ordinal}:0", *rewards)


def told(script: Script) -> dict[str, object]:
    """Return the metrics of the step that was committed last."""
    return [write.record.metrics for write in script.journal if isinstance(write.record, StepCommitted)][-1]


def test_step_metrics_count_filtered_groups() -> None:
    run = script()
    run.begins()
    for ordinal, rewards in enumerate([(1, 1), (0, 1), (0, 0), (0.5, 0.5), (1, 0)]):
        finishes(run, ordinal, *rewards)
    run.trains(1)
    assert told(run)["num_filtered"] == 3
    assert told(run)["filtered_share"] == 3 / 5
    assert told(run)["num_discarded"] == 0, "they are not lost"
    assert told(run)["reward_mean"] == 0.5
    assert told(run)["sampled_reward_mean"] == (1 + 0.5 + 0 + 0.5 + 0.5) / 5
    run.publishes(1)
    run.adopts("rollout-0", 1)
    for ordinal in (5, 6):
        run.generates("rollout-0", f"generate:t{ordinal}:0", 1)
        run.scores(f"score:t{ordinal}:0")
    run.trains(2)
    assert told(run)["num_filtered"] == told(run)["filtered_share"] == 0


def test_restarted_controller_sends_the_same_commands() -> None:
    run = script()
    run.begins()
    for ordinal, rewards in enumerate([(1, 1), (0, 1), (0, 0), (1, 0)]):
        finishes(run, ordinal, *rewards)
    past = [JournalEntry(write.record, write.payload) for write in run.journal]
    again = Controller(run.plan, Stream("train"), Stream("sft"), run.held_out, journal=past, incarnation=2).state.buffer
    ledger = run.state.buffer
    assert (
        filtered_metrics(again, 1)
        == filtered_metrics(ledger, 1)
        == {
            "num_filtered": 2,
            "filtered_share": 0.5,
            "sampled_reward_mean": 0.5,
        }
    )
    assert again.num_filtered_in_a_row == ledger.num_filtered_in_a_row == 0
    assert again.free_slots() == ledger.free_slots()


def test_equal_rewards_are_trained_without_dynamic_sampling() -> None:
    run = Script()
    run.begins()
    for ordinal in (0, 1):
        finishes(run, ordinal, 1, 1)
    run.trains(1)
    assert "num_filtered" not in told(run)
    assert told(run)["reward_mean"] == 1


def test_evaluation_keeps_equal_rewards() -> None:
    run = script(evaluate_at_start=True)
    run.begins(slots=8)
    for ordinal in (0, 1):
        run.generates("rollout-0", f"generate:e{ordinal}:0", num=1)
        run.scores(f"score:e{ordinal}:0", 1.0)
    assert run.state.evaluations.evaluated == {"start": 0}


def test_filter_limit_fails_the_run() -> None:
    run = script(filter_limit=3)
    run.begins()
    for ordinal, rewards in enumerate([(1, 1), (0, 0), (0, 1), (0, 0), (0, 0)]):
        finishes(run, ordinal, *rewards)
    assert not any("failed" in line or "drain" in line for line in run.waits(1))
    finishes(run, 5, 0, 0)
    [line] = [line for line in run.waits(1) if line.startswith("policy-0 <- drain")]
    assert "the last 3 groups were all filtered out" in line
    assert "rl.filter_limit" in line


def test_default_limit_is_ten_steps_worth() -> None:
    assert script().plan.max_filtered == 20
    assert script(filter_limit=7).plan.max_filtered == 7


def test_filtered_group_is_noted_with_its_reward() -> None:
    run = script()
    run.begins()
    finishes(run, 0, 0.25, 0.25)
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
    """Whatever ends first and how: steps take the kept groups in order, and slots bound what is live."""
    ledger = TrainBuffer(num_steps=4, prompts_per_step=prompts_per_step, max_staleness=max_staleness, max_tries=0)
    prompts, kept, filtered, passed = Stream("train"), [], [], 0
    for chosen, outcome in outcomes:
        for _ in range(ledger.free_slots()):
            ledger.lease(ledger.admit(prompts.prompt(ledger.num_admitted)), 0)
        under_way = ledger.within(GroupState.LEASED)
        assert ledger.num_live <= ledger.num_slots
        if not under_way:
            break  # the last step is full
        group = under_way[chosen % len(under_way)]
        ranks = {other.ordinal: ledger.rank(other) for other in ledger.live()}
        if outcome == "discard":
            ledger.discard(group)
        else:
            ledger.store_completions(group, (), (), ())
            ledger.store_rewards(group, (0.0, 1.0), {}) if outcome == "keep" else ledger.filter(group, 0.5)
            (kept if outcome == "keep" else filtered).append(group.ordinal)
        assert all(ledger.rank(other) <= ranks[other.ordinal] for other in ledger.live()), "a place only moves forward"
        step = ledger.num_frozen_steps + 1
        for sealed in ledger.freeze_next(step):
            assert sealed.ordinal in kept
            kept.remove(sealed.ordinal)
            assert not kept or sealed.ordinal < min(kept)
        if ledger.num_frozen_steps == step:
            assert len(ledger.frozen_groups(step)) == prompts_per_step
            last = ledger.frozen_groups(step)[-1].ordinal
            num = sum(ordinal < last for ordinal in filtered) - passed
            passed += num
            assert len(ledger.filtered_rewards(step)) == num
            ledger.retire(step)
    assert ledger.num_admitted == ledger.num_live + ledger.num_trained_groups + ledger.num_discarded + len(filtered)
