"""A short run whose replicas answer at once, recorded like a run of the controller's shell."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from starling.common.wire import messages as wire
from starling.controller.core.events import Command, Event, FinishRun, Received, Send, Ticked
from starling.controller.core.machine import Controller
from starling.controller.core.plan import RunPlan
from starling.controller.shell.recording.recorder import Recorder, RecordingPrompts
from starling.weightsync.offers.offer import Offer, RankOffer, digest_of, holds_of, make_offer
from starling.weightsync.plan.layout import Box, Layout, Place, RankLayout, Shard, TensorSpec, encode, pieces_of

PLAN = RunPlan(
    seed=0,
    sampling=wire.Sampling(max_tokens=4),
    eval_sampling=wire.Sampling(max_tokens=4, temperature=0.0),
    num_supervised_steps=1,
    num_steps=2,
    prompts_per_step=2,
    group_size=2,
    evaluate_at_start=True,
)
HELD_OUT = [wire.Prompt(id=f"held-out/{n}", text="x") for n in range(2)]
REPLICAS: tuple[tuple[str, wire.Role], ...] = (
    ("policy-0", "policy"),
    ("rollout-0", "rollout"),
    ("reward-0", "reward"),
)


class Rows:
    """Prompt source with generated prompts."""

    def __init__(self, name: str) -> None:
        self.name = name

    def prompt(self, position: int) -> wire.Prompt:
        """Return the prompt at `position`."""
        return wire.Prompt(id=f"{self.name}/{position}", text="x")


def layout_of(replica: str) -> Layout:
    """Return a layout of one rank with one float32 tensor of four elements."""
    shard = Shard(tensor=0, box=Box(offset=(0,), size=(4,)), storage="w", offset_bytes=0, strides=(1,))
    spec = TensorSpec(name="w", shape=(4,), dtype="float32")
    return Layout(replica=replica, tensors=(spec,), ranks=(RankLayout(place=Place(host="here"), shards=(shard,)),))


def offer_of(version: int) -> Offer:
    """Return an offer of weights that encode the version."""
    holds = holds_of(pieces_of(layout_of("policy-0"), 0))
    root = digest_of(version.to_bytes(4, "little") * 4)
    rank = RankOffer(rank=0, transport="local", address="/", secret="t", snapshot=version, holds=holds, root=root)
    return make_offer(version, (rank,))


def hello(name: str, role: wire.Role, now: float) -> Received:
    """Return the event of a replica's hello."""
    message = wire.Hello(
        role=role, host="here", pid=1, num_slots=4, version=0 if role == "policy" else -1, has_layout=role != "reward"
    )
    return Received(now, name, 1, message, (encode(layout_of(name)),) if message.has_layout else ())


def answer(command: wire.Down) -> tuple[wire.Up, tuple[bytes, ...]] | None:
    """Return a replica's answer to a command, or None."""
    match command:
        case wire.GenerateGroup(lease=lease, num_completions=num):
            one = wire.TrajectoryMeta(
                status=wire.Status.OK,
                num_tokens=2,
                text="[so] it is",
                oldest_version=command.min_version,
                newest_version=command.min_version,
            )
            kinds = (("int32", 1), ("int32", 2 * num), ("float32", 2 * num), ("int32", 2 * num))
            tensors = tuple(wire.TensorMeta(dtype=kind, shape=(n,), nbytes=4 * n) for kind, n in kinds)
            message = wire.GroupGenerated(lease=lease, trajectories=(one,) * num, tensors=tensors)
            versions = command.min_version.to_bytes(4, "little") * 2 * num
            return message, (b"abcd", bytes(8 * num), bytes(8 * num), versions)
        case wire.ScoreGroup(lease=lease, completions=completions):
            num = len(completions)
            return wire.GroupScored(lease=lease, rewards=(1.0,) * num, statuses=(wire.Status.OK,) * num), ()
        case wire.TrainStep(lease=lease, step=step):
            return wire.StepTrained(lease=lease, step=step, metrics={}), ()
        case wire.PublishWeights(lease=lease, version=version):
            return wire.WeightsPublished(lease=lease, version=version, publish_s=0.1), (encode(offer_of(version)),)
        case wire.AdoptWeights(lease=lease, version=version):
            adopted = wire.WeightsAdopted(
                lease=lease,
                version=version,
                root=offer_of(version).root,
                pull_s=0.1,
                pause_s=0.1,
                size_bytes=16,
                transport="local",
            )
            return adopted, ()
        case wire.SaveCheckpoint(lease=lease, step=step):
            return wire.CheckpointSaved(lease=lease, step=step, path="/p", state=command.state), ()
        case wire.Drain():
            return wire.Leave(reason="drained"), ()
        case _:
            return None


def record_run(
    path: Path, *, max_events: int = 500, cap_bytes: int = 1 << 30
) -> tuple[Controller, list[list[Command]]]:
    """Run to the end, or for `max_events`; return the core and its commands after each event."""
    recorder = Recorder(path, run="a-run", incarnation=1, plan=PLAN, past=(), held_out=HELD_OUT, cap_bytes=cap_bytes)
    prompts = RecordingPrompts(Rows("prompts"), "prompts", recorder)
    examples = RecordingPrompts(Rows("examples"), "examples", recorder)
    controller = Controller(PLAN, prompts, examples, HELD_OUT)
    due: deque[Event] = deque(hello(name, role, 1.0) for name, role in REPLICAS)
    steps: list[list[Command]] = []
    while len(steps) < max_events and not any(
        isinstance(command, FinishRun) for command in (steps[-1] if steps else ())
    ):
        now = 1.0 + 0.25 * len(steps)
        event = due.popleft() if due else Ticked(now)
        recorder.event(event)
        steps.append(list(controller.step(event)))
        for command in steps[-1]:
            if isinstance(command, Send) and (answered := answer(command.message)) is not None:
                due.append(Received(now, command.peer, 1, *answered))
    recorder.close()
    return controller, steps
