"""Runs without a policy: every prompt is answered once, and written once; runs that train from files."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transcript import SMALL, Script, Stream

from starling.common.wire import messages as wire
from starling.controller.core.events import Event, Fetched, FinishRun, Note, Store, Stored, Write
from starling.controller.core.kinds import GENERATE, INFER, REPLAY, SERVE, RunKind
from starling.controller.core.machine import Controller
from starling.controller.core.records import CompletionsStored, JournalEntry, RewardsStored, StoredGroup
from starling.sim.replicas.weights import encoded_layout


class Answering(Script):
    """A run without a policy, whose files are in a dictionary."""

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
        self.asked: list[Store] = []
        """What is to be written, and is not yet."""
        self.epoch = 1
        """Incarnation of every replica: they are started anew with the controller."""

    def begins(self, *rollouts: str, slots: int = 2) -> list[str]:
        """All replicas join; the rollouts hold version 0."""
        if self.plan.num_rewards:
            self.joins("reward-0", slots=8, epoch=self.epoch)
        for name in rollouts or ("rollout-0",):
            self.enters(name, slots=slots)
        return self.log

    def hears(self, sender: str, message: wire.Up, *buffers: bytes, epoch: int = 0) -> list[str]:
        """`sender` says `message`."""
        return super().hears(sender, message, *buffers, epoch=epoch or self.epoch)

    def enters(self, name: str, *, slots: int = 2, version: int = 0, epoch: int = 0) -> list[str]:
        """A rollout says hello with the weights that it has read."""
        hello = wire.Hello(role="rollout", host="h", pid=1, num_slots=slots, version=version, has_layout=True)
        return self.hears(name, hello, encoded_layout(name), epoch=epoch)

    def _step(self, event: Event) -> list[str]:
        lines = super()._step(event)
        self.asked += [command for command in self.commands if isinstance(command, Store)]
        return lines

    def writes(self) -> None:
        """Write the files that are asked for."""
        while self.asked:
            asked = self.asked.pop()
            assert self.files.setdefault(asked.step, asked.groups) == asked.groups
            self._step(Stored(self.now, asked.step))

    def answers(self, name: str, lease: str) -> None:
        """`name` generates a group, and `reward-0` scores it."""
        self.generates(name, lease)
        key = lease.split(":")[1]
        for held in self.state.replicas.leases.of("reward-0", "score"):
            if held.split(":")[1] == key:
                self.scores(self.aliases.short(held))

    def answers_all(self) -> None:
        """Answer whatever is given out, until nothing is."""
        while held := [(name, lease) for name in ("rollout-0", "rollout-1") for lease in self.held(name)]:
            for name, lease in held:
                self.answers(name, lease)
                self.writes()

    def held(self, name: str) -> list[str]:
        """Return the groups that a rollout works on."""
        return [self.aliases.short(lease) for lease in self.state.replicas.leases.of(name, "generate")]

    def dies(self) -> None:
        """The controller crashes, and recovers from its journal."""
        past = [JournalEntry(write.record, write.payload) for write in self.journal]
        self.controller = Controller(
            self.plan,
            Stream("train"),
            Stream("sft"),
            [],
            journal=past,
            incarnation=self.controller.state.incarnation + 1,
        )
        self.state = self.controller.state
        self.epoch += 1
        self.asked.clear()

    @property
    def written(self) -> list[int]:
        """The ordinals in the files, in their order."""
        return [group.ordinal for step in sorted(self.files) for group in self.files[step]]


def test_every_prompt_is_written_once_in_order() -> None:
    run = Answering()
    run.begins("rollout-0", "rollout-1", slots=3)
    run.answers_all()
    assert run.written == [0, 1, 2, 3, 4]
    assert [len(run.files[step]) for step in (1, 2, 3)] == [2, 2, 1]
    assert [len(group.buffers) for group in run.files[1]] == [4, 4]
    run.leaves("rollout-0"), run.leaves("rollout-1"), run.leaves("reward-0")
    assert [command.reason for command in run.commands if isinstance(command, FinishRun)] == ["the run is complete"]
    steps = [line for line in run.log if line.startswith("(step")]
    assert len(steps) == 3


def test_window_bounds_live_prompts() -> None:
    run = Answering(num_prompts=50)
    run.begins(slots=20)
    assert len(run.held("rollout-0")) == run.state.buffer.num_slots == 4


def test_answers_keep_texts_only_and_no_rewards_without_scorers() -> None:
    run = Answering(INFER, num_prompts=2, num_rewards=0)
    run.begins()
    run.generates("rollout-0", "generate:t1:0")
    run.generates("rollout-0", "generate:t0:0")
    run.writes()
    [first, _] = run.files[1]
    assert (first.tensors, first.buffers, first.rewards) == ((), (), ())
    assert [trajectory.text for trajectory in first.trajectories] == ["y", "y"]
    written = [write.payload for write in run.journal if isinstance(write.record, CompletionsStored)]
    assert written == [(), ()]


def test_unanswerable_prompts_do_not_fail_the_run() -> None:
    run = Answering(INFER, num_prompts=40, num_rewards=0)
    run.begins(slots=40)
    while held := run.held("rollout-0"):
        for lease in held:
            run.fails("rollout-0", lease, "the prompt is too long", fatal=True)
            run.writes()
    assert run.written == list(range(40))
    assert {group.problem for groups in run.files.values() for group in groups} == {"the prompt is too long"}
    assert not run.state.lifecycle.failure


def test_restarted_rollout_holds_the_initial_version() -> None:
    run = Answering()
    run.begins()
    assert run.held("rollout-0") == ["generate:t0:0", "generate:t1:0"]
    run.loses("rollout-0")
    run.enters("rollout-0", epoch=2)
    assert run.held("rollout-0") == ["generate:t0:1", "generate:t1:1"]


def test_rollout_with_a_new_engine_gets_work_again() -> None:
    run = Answering(num_prompts=2)
    run.begins()
    for lease in run.held("rollout-0"):
        run.interrupts("rollout-0", lease, 1, 1)
    run.beats("rollout-0", version=-1)
    assert not run.held("rollout-0")
    run.beats("rollout-0", version=0)
    assert run.held("rollout-0") == ["generate:t0:1", "generate:t1:1"]


def test_rollout_without_engine_may_rejoin_a_restarted_controller() -> None:
    run = Answering(num_prompts=2)
    run.begins()
    for lease in run.held("rollout-0"):
        run.interrupts("rollout-0", lease, 1, 1)
    run.beats("rollout-0", version=-1)
    run.dies()
    run.epoch = 1
    run.enters("rollout-0", version=-1)
    assert run.sent_lines() == ["rollout-0 <- welcome"]
    run.enters("rollout-1", version=-1)
    assert run.sent_lines()[0].startswith("rollout-1 <- refused: this run has no policy, and rollout-1 holds")
    run.joins("reward-0", slots=8)
    run.beats("reward-0")
    run.beats("rollout-0", version=0)
    assert run.held("rollout-0") == ["generate:t0:1", "generate:t1:1"]


def test_stopped_answers_are_kept_and_resumed() -> None:
    run = Answering(num_prompts=4)
    run.begins()
    run.answers("rollout-0", "generate:t0:0")
    run.stops()
    run.leaves("rollout-0"), run.leaves("reward-0")
    assert any(isinstance(command, FinishRun) for command in run.commands)
    run.dies()
    run.begins()
    run.waits(10.0)
    run.answers_all()
    assert run.written == [0, 1, 2, 3]
    generated = [write.record.key for write in run.journal if isinstance(write.record, CompletionsStored)]
    assert sorted(generated) == ["t0", "t1", "t2", "t3"], "nothing was generated twice"


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whenever_the_controller_dies_the_files_are_the_same(data: st.DataObject) -> None:
    run = Answering(num_prompts=data.draw(st.integers(1, 7)))
    run.begins("rollout-0", "rollout-1")
    for _ in range(200):
        held = [(name, lease) for name in ("rollout-0", "rollout-1") for lease in run.held(name)]
        if not held:
            break
        name, lease = data.draw(st.sampled_from(held))
        match data.draw(st.sampled_from(["answer", "answer", "fail", "die", "die unwritten"])):
            case "answer":
                run.answers(name, lease)
                run.writes()
            case "fail":
                run.fails(name, lease, "odd", fatal=True)
                run.writes()
            case died:
                if died == "die unwritten":
                    run.answers(name, lease)  # and what it asked to be written never is
                run.dies()
                run.begins("rollout-0", "rollout-1")
                run.waits(5.0)
                run.writes()
    assert run.written == list(range(run.plan.num_prompts))
    assert run.state.version == run.plan.num_steps


def test_serving_run_goes_on_until_it_is_stopped() -> None:
    run = Answering(SERVE, num_prompts=0, num_rewards=0)
    run.begins()
    run.waits(1.0)
    assert run.controller.waiting_for == "requests at the endpoints of its rollouts"
    assert not [line for line in run.log if "drain" in line]
    run.hears("operator-0", wire.RequestEvaluation(request="a"))
    assert run.sent_lines() == [
        "operator-0 <- no: this run trains nothing and has no newest version; write starling evaluate --model"
    ]
    assert run.stops() == ["rollout-0 <- drain: enough"]
    run.leaves("rollout-0")
    assert any(isinstance(command, FinishRun) for command in run.commands)


# --- replay --------------------------------------------------------------------------------------------------------


class Replaying(Script):
    """A run that trains what files have."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(kind=REPLAY, num_steps=3, **changes)

    def reads(self, step: int) -> list[str]:
        """The files give the groups of `step`."""
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


def told(run: Script, kind: str) -> dict[str, Any]:
    [note] = [command for command in run.commands if isinstance(command, Note) and command.kind == kind]
    return note.fields


def test_each_step_is_read_and_trained_without_rollouts_or_publications() -> None:
    run = Replaying()
    run.joins("policy-0")
    lines = run.reads(1)
    assert lines == ["policy-0 <- train:1:0 train0 train1"]
    [send] = run.sent
    assert send.buffers == (bytes([0] * 8), bytes([1] * 8))
    run.trains(1)
    assert told(run, "trained")["prompts"] == ["train0", "train1"]
    for step in (2, 3):
        assert run.reads(step) == [f"policy-0 <- train:{step}:0 train{2 * step - 2} train{2 * step - 1}"]
        run.trains(step)
    assert told(run, "step")["staleness_max"] == 2, "it is told, and bounds nothing"
    assert run.sent_lines()[-1] == "policy-0 <- checkpoint:3:0"
    assert not any(isinstance(write.record, CompletionsStored) for write in run.journal), "the files have them"


def test_restarted_controller_resumes_reading_files() -> None:
    run = Replaying()
    run.joins("policy-0")
    run.reads(1)
    run.trains(1)
    run.reads(2)
    held = run.state.replicas.leases.all_of("policy-0")[0].id
    past = [JournalEntry(write.record, write.payload) for write in run.journal if isinstance(write, Write)]
    run.controller = Controller(run.plan, Stream("train"), Stream("sft"), [], journal=past, incarnation=2)
    run.state = run.controller.state
    run.joins("policy-0", version=1, epoch=1)
    run.hears("policy-0", wire.Heartbeat(leases=(wire.HeldLease(lease=held, phase="working"),), version=1))
    run.hears("policy-0", wire.StepTrained(lease=held, step=2, metrics={"loss": 1.0}))
    assert run.state.version == 2, "the step that it had in hand counts"
    assert run.reads(3) == ["policy-0 <- train:3:0 train4 train5"]


def test_restarted_policy_replays_steps_from_the_same_files() -> None:
    run = Replaying()
    run.joins("policy-0")
    for step in (1, 2):
        run.reads(step)
        run.trains(step)
    run.loses("policy-0")
    run.waits(run.plan.lease_s + 1)
    run.joins("policy-0", epoch=2)
    assert run.state.training.fetching == 1
    assert run.reads(1) == ["policy-0 <- train:1:1 train0 train1"]
    [send] = run.sent
    assert isinstance(send.message, wire.TrainStep)
    assert (send.message.replayed, send.buffers) == (True, (bytes([0] * 8), bytes([1] * 8)))


def test_file_with_too_few_groups_fails_the_run() -> None:
    run = Replaying()
    run.joins("policy-0")
    run._step(Fetched(run.now, 1, ()))
    assert run.state.lifecycle.failure == "the files have 0 groups of step 1, not 2"


@pytest.mark.parametrize("records", [True, False])
def test_trained_groups_are_written_to_files_on_request(records: bool) -> None:
    run = Script(records=records)
    run.begins()
    run.makes_groups(0, 1)
    stores = [command for command in run.commands if isinstance(command, Store)]
    assert [len(store.groups) for store in stores] == [2] * records
    if records:
        lines = [line for line in run.log if line.startswith(("files", "policy-0 <- train"))]
        assert lines == ["files <- 1: train0 train1", "policy-0 <- train:1:0 train0 train1"], "first the file"
        assert msgspec.msgpack.encode(stores[0].groups[0])
