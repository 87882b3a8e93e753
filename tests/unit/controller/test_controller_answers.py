"""Runs without a policy, which answer and write every prompt once, and runs that train from files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from transcript import SMALL, Script, Stream

from starling.common.kinds import GENERATE, INFER, REPLAY, SERVE, RunKind
from starling.common.wire import messages as wire
from starling.controller.core.compaction import compact
from starling.controller.core.events import (
    Event,
    Fetched,
    FinishRun,
    Note,
    Store,
    Stored,
    Ticked,
    Write,
)
from starling.controller.core.explain import waits, why
from starling.controller.core.machine import Controller
from starling.controller.core.records import (
    CheckpointLoaded,
    CompletionsStored,
    GroupsOpened,
    JournalEntry,
    RewardsStored,
    StoredGroup,
)
from starling.sim.replicas.weights import encoded_layout


class AnswerRun(Script):
    """A run without a policy; its files are kept in a dictionary."""

    def __init__(self, kind: RunKind = GENERATE, num_prompts: int = 5, **changes: Any) -> None:
        per_file = changes.get("prompts_per_step", SMALL.prompts_per_step)
        super().__init__(
            kind=kind,
            num_prompts=num_prompts,
            num_steps=-(-num_prompts // per_file),
            max_staleness=1,
            **changes,
        )
        self.files: dict[int, tuple[StoredGroup, ...]] = {}
        self.pending_stores: list[Store] = []
        """`Store` commands that were not carried out yet."""
        self.incarnation = 1
        """Incarnation of every replica; they restart together with the controller."""

    def start_run(self, *rollouts: str, slots: int = 2) -> list[str]:
        """All replicas join; the rollouts hold version 0."""
        if self.plan.num_rewards:
            self.joins("reward-0", slots=8, incarnation=self.incarnation)
        for name in rollouts or ("rollout-0",):
            self.joins_with_weights(name, slots=slots)
        return self.log

    def receive(self, sender: str, message: wire.Up, *buffers: bytes, incarnation: int = 0) -> list[str]:
        """Deliver `message` from the present incarnation of `sender`."""
        return super().receive(sender, message, *buffers, incarnation=incarnation or self.incarnation)

    def joins_with_weights(
        self, name: str, *, slots: int = 2, version: int = 0, incarnation: int = 0, checkpoint: str = ""
    ) -> list[str]:
        """A rollout joins with weights that it has loaded itself."""
        hello = wire.Hello(
            role="rollout",
            host="h",
            pid=1,
            num_slots=slots,
            version=version,
            has_layout=True,
            checkpoint=checkpoint,
        )
        return self.receive(name, hello, encoded_layout(name), incarnation=incarnation)

    def _step(self, event: Event) -> list[str]:
        lines = super()._step(event)
        self.pending_stores += [command for command in self.commands if isinstance(command, Store)]
        return lines

    @property
    def checkpoints(self) -> list[tuple[str, str]]:
        """Digest and origin of each checkpoint in the journal."""
        records = [write.record for write in self.journal]
        return [(record.digest, record.name) for record in records if isinstance(record, CheckpointLoaded)]

    def write_files(self) -> None:
        """Carry out all pending `Store` commands."""
        while self.pending_stores:
            store = self.pending_stores.pop()
            assert self.files.setdefault(store.step, store.groups) == store.groups
            self._step(Stored(self.now, store.step))

    def answer(self, name: str, lease: str) -> None:
        """Generate a group on `name`, and score it on `reward-0`."""
        self.generates(name, lease)
        key = lease.split(":")[1]
        for leased in self.state.replicas.leases.of("reward-0", "score"):
            if leased.split(":")[1] == key:
                self.scores(self.aliases.short(leased))

    def answer_all(self) -> None:
        """Answer all leased groups until none is leased."""
        while leased := [(name, lease) for name in ("rollout-0", "rollout-1") for lease in self.leased(name)]:
            for name, lease in leased:
                self.answer(name, lease)
                self.write_files()

    def leased(self, name: str) -> list[str]:
        """Return the groups leased to a rollout."""
        return [self.aliases.short(lease) for lease in self.state.replicas.leases.of(name, "generate")]

    def crash(self) -> None:
        """Crash the controller, and recover it from its journal."""
        journaled = [JournalEntry(write.record, write.payload) for write in self.journal]
        self.controller = Controller(
            self.plan,
            Stream("train"),
            Stream("sft"),
            [],
            journal=journaled,
            incarnation=self.controller.state.incarnation + 1,
        )
        self.state = self.controller.state
        self.incarnation += 1
        self.pending_stores.clear()

    @property
    def written(self) -> list[int]:
        """Ordinals of the groups in the files, in order."""
        return [group.ordinal for step in sorted(self.files) for group in self.files[step]]


def test_checkpoint_of_the_first_rollout_is_that_of_the_run_also_after_a_compaction() -> None:
    run = AnswerRun()
    run.joins_with_weights("rollout-0")  # of an older version: it reports none
    run.joins_with_weights("rollout-1", checkpoint="a" * 32)
    entries = [JournalEntry(write.record, write.payload) for write in run.journal]
    summary = compact(run.state)
    assert summary is not None
    for journal in (entries, [entries[0], JournalEntry(summary)]):
        run.controller = Controller(run.plan, Stream("train"), Stream("sft"), [], journal=journal, incarnation=2)
        run.state = run.controller.state
        assert run.state.weights.checkpoint == "a" * 32
        lines = run.joins_with_weights("rollout-2", checkpoint="b" * 32)
        assert any("refused: rollout-2 has loaded another checkpoint" in line for line in lines), lines
        assert "rollout-2" not in run.state.replicas.membership.members


@pytest.mark.parametrize("digest", ["a" * 31, "A" * 32, "a" * 33, "²" * 32, "a" * 32 + "\n"])
def test_malformed_digest_of_a_checkpoint_is_refused(digest: str) -> None:
    run = AnswerRun()
    lines = run.joins_with_weights("rollout-0", checkpoint=digest)
    assert any("refused: rollout-0 sent a digest of its checkpoint that is not 32" in line for line in lines), lines
    assert run.state.weights.checkpoint == ""


def test_checkpoint_means_nothing_where_a_policy_sends_the_weights() -> None:
    script = Script()
    for name, digest in (("rollout-0", "a" * 32), ("rollout-1", "b" * 32)):
        hello = wire.Hello(role="rollout", host="h", pid=1, num_slots=1, has_layout=True, checkpoint=digest)
        script.receive(name, hello, encoded_layout(name))
    assert set(script.state.replicas.membership.members) == {"rollout-0", "rollout-1"}
    assert script.state.weights.checkpoint == ""


def test_rollouts_get_no_work_before_the_controller_has_read_the_checkpoint() -> None:
    run = AnswerRun(num_rewards=0, reads_checkpoint=True)
    run.joins_with_weights("rollout-0", checkpoint="a" * 32)
    run.advance_time(1.0)
    assert run.leased("rollout-0") == []
    assert run.controller.waiting_for == "the digest of the checkpoint, which the controller reads"
    assert run.checkpoints == []
    lines = run.reads_checkpoint("a" * 32)
    assert run.checkpoints == [("a" * 32, "controller")]
    assert run.leased("rollout-0") == ["generate:t0:0", "generate:t1:0"]
    assert not any("refused" in line for line in lines), lines


def test_rollouts_that_joined_with_another_checkpoint_are_refused_once_the_controller_has_read_its_own() -> None:
    run = AnswerRun(num_rewards=0, reads_checkpoint=True)
    for name, checkpoint in (("rollout-0", "b" * 32), ("rollout-1", "a" * 32), ("rollout-2", "")):
        lines = run.joins_with_weights(name, checkpoint=checkpoint)
        assert f"{name} <- welcome" in lines
    lines = run.reads_checkpoint("a" * 32)
    assert any(line.startswith("rollout-0 <- refused: rollout-0 has loaded another checkpoint") for line in lines)
    assert sum("refused" in line for line in lines) == 2, "a line of metrics.jsonl, and a message"
    assert set(run.state.replicas.membership.members) == {"rollout-1", "rollout-2"}
    assert all(map(run.leased, ("rollout-1", "rollout-2")))
    for incarnation in (1, 2):
        lines = run.joins_with_weights("rollout-0", checkpoint="b" * 32, incarnation=incarnation)
        assert any("refused: rollout-0 has loaded another checkpoint" in line for line in lines), lines
    assert run.checkpoints == [("a" * 32, "controller")]


def test_first_rollout_decides_if_the_controller_cannot_read_the_checkpoint() -> None:
    run = AnswerRun(num_rewards=0, reads_checkpoint=True)
    for name, checkpoint in (("rollout-0", ""), ("rollout-1", "b" * 32), ("rollout-2", "a" * 32)):
        run.joins_with_weights(name, checkpoint=checkpoint)
    run.reads_checkpoint("")
    assert run.checkpoints == [("b" * 32, "rollout-1")]
    assert set(run.state.replicas.membership.members) == {"rollout-0", "rollout-1"}
    assert all(map(run.leased, ("rollout-0", "rollout-1")))


def test_first_rollout_decides_if_it_joins_after_the_controller_could_not_read_the_checkpoint() -> None:
    run = AnswerRun(num_rewards=0, reads_checkpoint=True)
    run.reads_checkpoint("")
    run.joins_with_weights("rollout-0", checkpoint="b" * 32)
    assert run.checkpoints == [("b" * 32, "rollout-0")]
    assert run.leased("rollout-0")


@pytest.mark.parametrize("compacted", [False, True])
def test_resumed_run_with_a_journaled_checkpoint_does_not_wait_for_the_controller_to_read_it(compacted: bool) -> None:
    run = AnswerRun(num_rewards=0, reads_checkpoint=True)
    run.reads_checkpoint("a" * 32)
    run.restart(compacted=compacted)
    lines = run.joins_with_weights("rollout-1", checkpoint="b" * 32, incarnation=2)
    assert any("refused: rollout-1 has loaded another checkpoint" in line for line in lines), lines
    run.joins_with_weights("rollout-0", checkpoint="a" * 32, incarnation=2)
    assert run.leased("rollout-0")
    assert run.reads_checkpoint("a" * 32) == []
    assert run.checkpoints == [("a" * 32, "controller")]


def test_run_fails_if_the_controller_has_not_read_the_checkpoint_in_time() -> None:
    run = AnswerRun(num_rewards=0, reads_checkpoint=True, start_s=5.0, lease_s=99.0)
    run.advance_time(4.0)
    run.joins_with_weights("rollout-0", checkpoint="a" * 32)
    run.advance_time(1.0)
    run.advance_time(4.0)
    [wait] = [wait for wait in waits(run.state) if wait["owner"] == "controller"]
    assert (wait["what"], wait["on"]) == ("the digest of the checkpoint", "the model folder")
    assert (wait["since_s"], wait["seconds_left"]) == (4.0, 1.0)
    assert why(run.state)[1]["root"] == wait
    assert run.state.lifecycle.failure == ""
    run.advance_time(2.0)
    assert run.state.lifecycle.failure.startswith("the controller has not read the checkpoint within 5 s")


def test_endpoints_do_not_wait_for_the_controller_to_read_the_checkpoint() -> None:
    run = AnswerRun(SERVE, 0, num_rewards=0, reads_checkpoint=True, start_s=5.0, lease_s=99.0)
    run.joins_with_weights("rollout-0", checkpoint="b" * 32)
    for _ in range(3):
        run.advance_time(4.0)
    assert run.controller.waiting_for == "requests at the endpoints of its rollouts"
    assert run.state.lifecycle.failure == ""
    assert any("refused" in line for line in run.reads_checkpoint("a" * 32))


def test_every_prompt_is_written_once_in_order() -> None:
    run = AnswerRun()
    run.start_run("rollout-0", "rollout-1", slots=3)
    run.answer_all()
    assert run.written == [0, 1, 2, 3, 4]
    assert [len(run.files[step]) for step in (1, 2, 3)] == [2, 2, 1]
    assert [len(group.buffers) for group in run.files[1]] == [4, 4]
    run.leaves("rollout-0"), run.leaves("rollout-1"), run.leaves("reward-0")
    assert [command.reason for command in run.commands if isinstance(command, FinishRun)] == ["the run is complete"]
    steps = [line for line in run.log if line.startswith("(step")]
    assert len(steps) == 3


def test_window_bounds_live_prompts() -> None:
    run = AnswerRun(num_prompts=50)
    run.start_run(slots=20)
    assert len(run.leased("rollout-0")) == run.state.buffer.num_slots == 4


def test_answers_keep_texts_only_and_no_rewards_without_scorers() -> None:
    run = AnswerRun(INFER, num_prompts=2, num_rewards=0)
    run.start_run()
    run.generates("rollout-0", "generate:t1:0")
    run.generates("rollout-0", "generate:t0:0")
    run.write_files()
    [first, _] = run.files[1]
    assert (first.tensors, first.buffers, first.rewards) == ((), (), ())
    assert [trajectory.text for trajectory in first.trajectories] == ["y", "y"]
    written = [write.payload for write in run.journal if isinstance(write.record, CompletionsStored)]
    assert written == [(), ()]


def test_unanswerable_prompts_do_not_fail_the_run() -> None:
    run = AnswerRun(INFER, num_prompts=40, num_rewards=0)
    run.start_run(slots=40)
    while leased := run.leased("rollout-0"):
        for lease in leased:
            run.fails("rollout-0", lease, "the prompt is too long", fatal=True)
            run.write_files()
    assert run.written == list(range(40))
    assert {group.problem for groups in run.files.values() for group in groups} == {"the prompt is too long"}
    assert not run.state.lifecycle.failure


def test_restarted_rollout_holds_the_initial_version() -> None:
    run = AnswerRun()
    run.start_run()
    assert run.leased("rollout-0") == ["generate:t0:0", "generate:t1:0"]
    run.disconnect("rollout-0")
    run.joins_with_weights("rollout-0", incarnation=2)
    assert run.leased("rollout-0") == ["generate:t0:1", "generate:t1:1"]


def test_rollout_with_a_new_engine_gets_work_again() -> None:
    run = AnswerRun(num_prompts=2)
    run.start_run()
    for lease in run.leased("rollout-0"):
        run.interrupts("rollout-0", lease, 1, 1)
    run.heartbeats("rollout-0", version=-1)
    assert not run.leased("rollout-0")
    for _ in range(int(run.plan.lease_s)):  # it returned its groups: others have the first choice
        run.heartbeats("reward-0")
        run.heartbeats("rollout-0", version=0)
        assert not run.leased("rollout-0")
        run.advance_time(1.0)
    assert run.leased("rollout-0") == ["generate:t0:1", "generate:t1:1"]


def test_rollout_without_engine_may_rejoin_a_restarted_controller() -> None:
    run = AnswerRun(num_prompts=2)
    run.start_run()
    for lease in run.leased("rollout-0"):
        run.interrupts("rollout-0", lease, 1, 1)
    run.heartbeats("rollout-0", version=-1)
    run.crash()
    run.incarnation = 1
    run.joins_with_weights("rollout-0", version=-1)
    assert run.sent_lines() == ["rollout-0 <- welcome"]
    run.joins_with_weights("rollout-1", version=-1)
    assert run.sent_lines()[0].startswith("rollout-1 <- refused: this run has no policy, and rollout-1 holds")
    run.joins("reward-0", slots=8)
    run.heartbeats("reward-0")
    run.heartbeats("rollout-0", version=0)
    assert run.leased("rollout-0") == ["generate:t0:1", "generate:t1:1"]


def test_stopped_answers_are_kept_and_resumed() -> None:
    run = AnswerRun(num_prompts=4)
    run.start_run()
    run.answer("rollout-0", "generate:t0:0")
    run.request_stop()
    run.leaves("rollout-0"), run.leaves("reward-0")
    assert any(isinstance(command, FinishRun) for command in run.commands)
    run.crash()
    run.start_run()
    run.advance_time(10.0)
    run.answer_all()
    assert run.written == [0, 1, 2, 3]
    generated = [write.record.key for write in run.journal if isinstance(write.record, CompletionsStored)]
    assert sorted(generated) == ["t0", "t1", "t2", "t3"], "no group was generated twice"


@examples(40)
@given(st.data())
def test_files_are_independent_of_controller_crashes(data: st.DataObject) -> None:
    run = AnswerRun(num_prompts=data.draw(st.integers(1, 7)))
    run.start_run("rollout-0", "rollout-1")
    for _ in range(200):
        leased = [(name, lease) for name in ("rollout-0", "rollout-1") for lease in run.leased(name)]
        if not leased:
            break
        name, lease = data.draw(st.sampled_from(leased))
        match data.draw(st.sampled_from(["answer", "answer", "fail", "die", "die unwritten"])):
            case "answer":
                run.answer(name, lease)
                run.write_files()
            case "fail":
                run.fails(name, lease, "odd", fatal=True)
                run.write_files()
            case died:
                if died == "die unwritten":
                    run.answer(name, lease)  # and its files are never written
                run.crash()
                run.start_run("rollout-0", "rollout-1")
                run.advance_time(5.0)
                run.write_files()
    assert run.written == list(range(run.plan.num_prompts))
    assert run.state.version == run.plan.num_steps


def test_serving_run_lasts_until_it_is_stopped() -> None:
    run = AnswerRun(SERVE, num_prompts=0, num_rewards=0)
    run.start_run()
    run.advance_time(1.0)
    assert run.controller.waiting_for == "requests at the endpoints of its rollouts"
    assert not [line for line in run.log if "drain" in line]
    run.receive("operator-0", wire.RequestEvaluation(request="a"))
    assert run.sent_lines() == [
        "operator-0 <- no: this run trains nothing and has no newest version; write starling evaluate --model"
    ]
    assert run.request_stop() == ["rollout-0 <- drain: enough"]
    run.leaves("rollout-0")
    assert any(isinstance(command, FinishRun) for command in run.commands)


# --- replay --------------------------------------------------------------------------------------------------------


class ReplayRun(Script):
    """A run that trains groups from trajectory files."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(kind=REPLAY, num_steps=3, **changes)

    def load_step(self, step: int) -> list[str]:
        """Load the groups of `step` from the files."""
        assert self.state.training.fetching == step
        records: list[JournalEntry] = []
        for ordinal in (2 * step - 2, 2 * step - 1):
            meta = wire.TrajectoryMeta(
                status=wire.Status.OK, num_tokens=1, text="y", oldest_version=0, newest_version=0
            )
            tensors = (wire.TensorMeta(dtype="int32", shape=(2,), nbytes=8),)
            generated = CompletionsStored(key=f"t{ordinal}", trajectories=(meta, meta), tensors=tensors)
            records += [JournalEntry(generated, (bytes([ordinal] * 8),))]
            records += [JournalEntry(RewardsStored(key=f"t{ordinal}", rewards=(1.0, 0.0)))]
        return self._step(Fetched(self.now, step, tuple(records)))


def notes_of(run: Script, kind: str) -> dict[str, Any]:
    [note] = [command for command in run.commands if isinstance(command, Note) and command.kind == kind]
    return note.fields


def test_each_step_is_read_and_trained_without_rollouts_or_publications() -> None:
    run = ReplayRun()
    run.joins("policy-0")
    lines = run.load_step(1)
    assert lines == ["policy-0 <- train:1:0 train0 train1"]
    [send] = run.sent
    assert send.buffers == (bytes([0] * 8), bytes([1] * 8))
    run.trains(1)
    assert notes_of(run, "trained")["prompts"] == ["train0", "train1"]
    for step in (2, 3):
        assert run.load_step(step) == [f"policy-0 <- train:{step}:0 train{2 * step - 2} train{2 * step - 1}"]
        run.trains(step)
    assert notes_of(run, "step")["staleness_max"] == 2, "staleness is reported, and bounds nothing"
    assert run.sent_lines()[-1] == "policy-0 <- checkpoint:3:0"
    assert not any(isinstance(write.record, CompletionsStored) for write in run.journal), "the groups are in the files"


def test_restarted_controller_resumes_reading_files() -> None:
    run = ReplayRun()
    run.joins("policy-0")
    run.load_step(1)
    run.trains(1)
    run.load_step(2)
    leased = run.state.replicas.leases.all_of("policy-0")[0].id
    journaled = [JournalEntry(write.record, write.payload) for write in run.journal if isinstance(write, Write)]
    run.controller = Controller(run.plan, Stream("train"), Stream("sft"), [], journal=journaled, incarnation=2)
    run.state = run.controller.state
    run.joins("policy-0", version=1, incarnation=1)
    run.receive("policy-0", wire.Heartbeat(leases=(wire.HeldLease(lease=leased, phase="working"),), version=1))
    run.receive("policy-0", wire.StepTrained(lease=leased, step=2, metrics={"loss": 1.0}))
    assert run.state.version == 2, "the step in progress counts"
    assert run.load_step(3) == ["policy-0 <- train:3:0 train4 train5"]


def test_restarted_policy_replays_steps_from_the_same_files() -> None:
    run = ReplayRun()
    run.joins("policy-0")
    for step in (1, 2):
        run.load_step(step)
        run.trains(step)
    run.disconnect("policy-0")
    run.advance_time(run.plan.lease_s + 1)
    run.joins("policy-0", incarnation=2)
    assert run.state.training.fetching == 1
    assert run.load_step(1) == ["policy-0 <- train:1:1 train0 train1"]
    [send] = run.sent
    assert isinstance(send.message, wire.TrainStep)
    assert (send.message.replayed, send.buffers) == (True, (bytes([0] * 8), bytes([1] * 8)))


def test_file_with_too_few_groups_fails_the_run() -> None:
    run = ReplayRun()
    run.joins("policy-0")
    run._step(Fetched(run.now, 1, ()))
    assert run.state.lifecycle.failure == "the files have 0 groups of step 1, not 2"


def test_group_of_a_file_that_cannot_be_trained_fails_the_run() -> None:
    run = ReplayRun()
    run.joins("policy-0")
    run._step(Fetched(run.now, 1, (), "the group of prompt 'p' in step-000001.msgpack cannot be trained: odd"))
    assert run.state.lifecycle.failure == "the group of prompt 'p' in step-000001.msgpack cannot be trained: odd"


def test_group_of_a_file_that_the_policy_rejects_fails_the_run() -> None:
    run = ReplayRun()
    run.joins("policy-0")
    run.load_step(1)
    [lease] = [lease.id for lease in run.state.replicas.leases.all_of("policy-0")]
    reason = "group 'train1' has token 99"
    run.receive(
        "policy-0", wire.LeaseFailed(lease=lease, status=wire.Status.INFRA_LOST, reason=reason, rejected=("train1",))
    )
    assert run.state.lifecycle.failure == f"group 1 of the trajectory files cannot be trained: {reason}"


@pytest.mark.parametrize("records", [True, False])
def test_trained_groups_are_written_to_files_on_request(records: bool) -> None:
    run = Script(records=records)
    run.start_run()
    run.generate_and_score(0, 1)
    stores = [command for command in run.commands if isinstance(command, Store)]
    assert [len(store.groups) for store in stores] == [2] * records
    if records:
        lines = [line for line in run.log if line.startswith(("files", "policy-0 <- train"))]
        assert lines == ["files <- 1: train0 train1", "policy-0 <- train:1:0 train0 train1"], (
            "the file is written first"
        )
        assert msgspec.msgpack.encode(stores[0].groups[0])


def test_completions_get_the_zero_rewards_that_a_power_cut_took() -> None:
    """Nothing scores in this run, so no replica would send rewards for completions that the journal has without."""
    one = wire.TrajectoryMeta(status=wire.Status.OK, num_tokens=1, text="", oldest_version=0, newest_version=0)
    records = [GroupsOpened(first=0, num=2), CompletionsStored(key="t0", trajectories=(one, one), tensors=())]
    plan = replace(SMALL, kind=INFER, num_prompts=2, num_steps=1, num_rewards=0, max_staleness=1)
    journal = [JournalEntry(record) for record in records]
    controller = Controller(plan, Stream("train"), Stream("sft"), (), journal=journal, incarnation=2)
    written = [command.record for command in controller.step(Ticked(0.0)) if isinstance(command, Write)]
    assert written == [RewardsStored(key="t0", rewards=(0.0, 0.0))]
