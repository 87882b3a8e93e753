"""Replicas for `bench/controller.py` that answer at once at negligible cost, so that the core dominates."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from starling.common.wire import messages as wire
from starling.controller.core.events import Command, Event, Fetch, Fetched, FinishRun, Received, Send, Ticked
from starling.controller.core.machine import Controller
from starling.controller.core.plan import RunPlan
from starling.weightsync.offers.offer import RankOffer, digest_of, holds_of, make_offer
from starling.weightsync.plan.layout import Box, Layout, Place, RankLayout, Shard, TensorSpec, encode, pieces_of

GROUP_SIZE = 8
TOKENS = 256
"""Tokens of a completion; each has 10 bytes in the four buffers of a group."""
SLOTS = 4
HEARTBEATS_PER_GROUP = 1
"""Heartbeats per generated group: a large model takes seconds for a group, and sends a heartbeat each second."""


class Prompts:
    """Prompt source with generated, cached prompts."""

    def __init__(self) -> None:
        self._prompt = wire.Prompt(id="train/0/0", text="x" * 200)

    def prompt(self, position: int) -> wire.Prompt:
        """Return the prompt at `position`."""
        return self._prompt


def plan_for(num_rollouts: int, num_steps: int, groups_per_rollout: int = 1) -> RunPlan:
    """Return the plan of a run in which each rollout generates `groups_per_rollout` groups per step."""
    return RunPlan(
        seed=0,
        sampling=wire.Sampling(max_tokens=TOKENS),
        eval_sampling=wire.Sampling(max_tokens=TOKENS),
        num_steps=num_steps,
        prompts_per_step=num_rollouts * groups_per_rollout,
        group_size=GROUP_SIZE,
        max_staleness=1,
        num_rollouts=num_rollouts,
        num_rewards=max(1, num_rollouts // 16),
    )


def layout_of(replica: str) -> Layout:
    """Return a layout of one rank with one small tensor, as planning is not measured."""
    shard = Shard(tensor=0, box=Box(offset=(0,), size=(4,)), storage="w", offset_bytes=0, strides=(1,))
    spec = TensorSpec(name="w", shape=(4,), dtype="float32")
    return Layout(replica=replica, tensors=(spec,), ranks=(RankLayout(place=Place(host="h"), shards=(shard,)),))


@dataclass
class Cluster:
    """All replicas of a run, as a queue of their next messages."""

    plan: RunPlan
    controller: Controller
    act: Callable[[Sequence[Command]], None] = lambda commands: None
    """Called with the commands of each event, before they are answered."""
    now: float = 0.0
    finished: FinishRun | None = None
    num_events: int = 0
    _said: deque[tuple[str, wire.Up, tuple[bytes, ...]]] = field(default_factory=deque)
    _held: dict[str, dict[str, None]] = field(default_factory=dict)
    _versions: dict[str, int] = field(default_factory=dict)

    def join(self) -> None:
        """Queue the hello of every replica."""
        roles = [("policy", 1), ("reward", self.plan.num_rewards), ("rollout", self.plan.num_rollouts)]
        for role, num in roles:
            for index in range(num):
                name = f"{role}-{index}"
                slots = {"policy": 0, "reward": 256, "rollout": SLOTS}[role]
                layout = () if role == "reward" else (encode(layout_of(name)),)
                hello = wire.Hello(
                    role=role,  # type: ignore[arg-type]
                    host=f"host-{index // 8}" if role == "rollout" else f"{role}-host",
                    pid=1,
                    num_slots=slots,
                    version=0 if role == "policy" else -1,
                    has_layout=role != "reward",
                )
                self._held[name], self._versions[name] = {}, hello.version
                self._said.append((name, hello, layout))

    def events(self) -> Iterator[Event]:
        """Yield the next events until the end of the run."""
        num = 0
        while self._said:
            name, message, buffers = self._said.popleft()
            num += 1
            self.now += 1e-4
            yield Received(self.now, name, 1, message, buffers)
            if num % 2500 == 0:
                yield Ticked(self.now)
            if isinstance(message, wire.GroupGenerated):
                for _ in range(HEARTBEATS_PER_GROUP):
                    yield Received(self.now, name, 1, self._heartbeat(name))

    def _heartbeat(self, name: str) -> wire.Heartbeat:
        held = tuple(wire.HeldLease(lease=lease, phase="working") for lease in self._held[name])
        return wire.Heartbeat(leases=held, version=self._versions[name])

    def take(self, commands: Sequence[Command]) -> None:
        """Queue the replicas' answers to `commands`."""
        self.act(commands)
        for command in commands:
            match command:
                case Send(peer=peer, message=message):
                    self._answer(peer, message)
                case FinishRun():
                    self.finished = command
                case Fetch(step=step):
                    raise AssertionError(f"step {step} is read again: {Fetched}")

    def _answer(self, peer: str, message: wire.Down) -> None:
        if isinstance(message, wire.ReleaseLeases):
            for lease in message.leases:
                self._held[peer].pop(lease, None)
            return
        answer: wire.Up | None = None
        buffers: tuple[bytes, ...] = ()
        match message:
            case wire.GenerateGroup(lease=lease):
                version = self._versions[peer]
                answer, buffers = _generated(lease, version), _buffers(version)
            case wire.ScoreGroup(lease=lease):
                answer = wire.GroupScored(
                    lease=lease, rewards=(1.0,) * GROUP_SIZE, statuses=(wire.Status.OK,) * GROUP_SIZE
                )
            case wire.TrainStep(lease=lease, step=step):
                self._versions[peer] = step
                answer = wire.StepTrained(lease=lease, step=step, metrics={"loss": 0.0})
            case wire.PublishWeights(lease=lease, version=version):
                answer = wire.WeightsPublished(lease=lease, version=version, publish_s=0.0)
                buffers = (encode(_offer(version)),)
            case wire.AdoptWeights(lease=lease, version=version):
                self._versions[peer] = version
                answer = wire.WeightsAdopted(
                    lease=lease,
                    version=version,
                    root=_offer(version).root,
                    pull_s=0.0,
                    pause_s=0.0,
                    size_bytes=16,
                    transport="local",
                )
            case wire.SaveCheckpoint(lease=lease, step=step, state=state):
                answer = wire.CheckpointSaved(lease=lease, step=step, path="/", state=state)
            case wire.Drain():
                answer = wire.Leave(reason="drained")
            case _:
                return
        lease = getattr(message, "lease", "")
        if lease:
            self._held[peer][lease] = None
        self._said.append((peer, answer, buffers))


_META = wire.TrajectoryMeta(
    status=wire.Status.OK, num_tokens=TOKENS, text="y" * TOKENS, oldest_version=0, newest_version=0
)
_TENSORS = tuple(
    wire.TensorMeta(dtype=dtype, shape=(num,), nbytes=4 * num)
    for dtype, num in (
        ("int32", 64),
        ("int32", GROUP_SIZE * TOKENS),
        ("float32", GROUP_SIZE * TOKENS),
        ("int32", GROUP_SIZE * TOKENS),
    )
)
BUFFERS = tuple(bytes(tensor.nbytes) for tensor in _TENSORS)
"""Of version 0."""
_metas: dict[int, tuple[wire.TrajectoryMeta, ...]] = {}
_offers: dict[int, object] = {}


@functools.cache
def _buffers(version: int) -> tuple[bytes, ...]:
    """Return the buffers of a group whose tokens are all of `version`."""
    return (*BUFFERS[:3], version.to_bytes(4, "little") * (GROUP_SIZE * TOKENS))


def _generated(lease: str, version: int) -> wire.GroupGenerated:
    if version not in _metas:
        meta = wire.TrajectoryMeta(
            status=_META.status, num_tokens=TOKENS, text=_META.text, oldest_version=version, newest_version=version
        )
        _metas[version] = (meta,) * GROUP_SIZE
    return wire.GroupGenerated(lease=lease, trajectories=_metas[version], tensors=_TENSORS)


def _offer(version: int):  # type: ignore[no-untyped-def]
    if version not in _offers:
        rank = RankOffer(
            rank=0,
            transport="local",
            address="/",
            secret="s",
            snapshot=version,
            holds=holds_of(pieces_of(layout_of("policy-0"), 0)),
            root=digest_of(version.to_bytes(4, "little") * 4),
        )
        _offers[version] = make_offer(version, (rank,))
    return _offers[version]
