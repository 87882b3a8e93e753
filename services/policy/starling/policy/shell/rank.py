"""One rank of a policy: its part of the model, and the operations that all ranks of the replica make together.

Rank 0, in the policy's own process, calls the methods; the other ranks execute commands, each of which stands for one
of them (`starling.policy.shell.rank_process`). A policy of one rank is the same without the others.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starling.algo.tokenizer import check_end_token, load_tokenizer
from starling.common.errors import ConfigError, WeightsError
from starling.common.ids import TrainerKind
from starling.common.kinds import KINDS
from starling.common.service import ServiceArguments
from starling.common.wire import messages as wire
from starling.policy.shell.loading import PolicyProcess, create_learner, load_fixed
from starling.policy.train.checkpoint.header import VerifiedState, read_header
from starling.policy.train.checkpoint.shared_export import ExportFiles
from starling.policy.train.checkpoint.state import PartsSnapshot, SavedState, StateSnapshot
from starling.policy.train.checkpoint.storage import Storage
from starling.policy.train.data.examples import examples_of, pairs_of
from starling.policy.train.data.groups import groups_from_wire
from starling.policy.train.metrics.step import StepMetrics
from starling.policy.train.parallel.group import (
    LOOPBACK,
    RankHost,
    SharedFiles,
    control_group,
    join_ranks,
    leave_ranks,
)
from starling.weightsync.offers.offer import LayoutPart, Transport
from starling.weightsync.plan.layout import Layout
from starling.weightsync.plan.planner import Plan, decode_plan
from starling.weightsync.publisher.published import PublishedSnapshot
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.quantise.recipe import FUSED_BY_VLLM, linear_weights
from starling.weightsync.tensors.modules import layout_of, local_tensors
from starling.weightsync.tensors.quantiser import GroupExchange

if TYPE_CHECKING:
    from starling.policy.train.parallel.mesh import Mesh
    from starling.policy.train.parallel.replicas.peers import PeerGroup

LayoutParts = dict[str, LayoutPart]
"""By key of the layout."""


@dataclass(frozen=True)
class RankSetup:
    """What all ranks of a replica on one host begin with."""

    settings: PolicyProcess
    arguments: ServiceArguments
    """Command line of the policy."""
    path: Path
    """Of the model's folder."""
    transport: tuple[Transport, bool]
    """Of the weights, and whether it encrypts them."""
    files: SharedFiles | None = None
    """None for a policy of one rank."""


class PolicyRank:
    """The model of one rank, with its publisher."""

    def __init__(self, setup: RankSetup, *, rank: int = 0, host: RankHost | None = None) -> None:
        """Connect with the other ranks, and load the model.

        Args:
            setup: of the ranks of this host.
            rank: of this process.
            host: this one, of several; None for the only one.

        Raises:
            ConfigError: the model cannot be loaded, or the ranks do not fit it.
        """
        settings, arguments, path = setup.settings, setup.arguments, setup.path
        self._transport = setup.transport
        self._settings, self._name, self._rank = settings, arguments.name, rank
        self._folder, self.node = arguments.folder, 0 if host is None else host.node
        self.trains = KINDS[settings.run.kind].trains
        self._mesh: Mesh | None = None
        if setup.files is not None:
            mesh = settings.policy.parallel
            forms_groups = mesh.elastic or setup.transport[0] == "nccl"  # with other replicas
            address = settings.network.host if forms_groups else LOOPBACK
            self._mesh = join_ranks(mesh, rank, settings.model.device, setup.files, host, address=address)
        # Now: after the load, ranks could have to wait longer for each other than an operation may take.
        self._writers = None if self._mesh is None else control_group(settings.policy.saving.patience_s)
        """The ranks' threads that write."""
        fetch_to = arguments.folder / f".weights-{arguments.name}{f'-{rank}' if rank else ''}"
        self.checkpoint = ""
        """Digest of the folder of a model that is not trained."""
        if self.trains:
            self.learner = create_learner(path, settings, fetch_to, self._mesh)
        else:
            self.learner, self.checkpoint = load_fixed(path, settings, fetch_to)
        self.clock = self.learner.clock
        self.tokenizer = None if settings.diffusion is not None else self._load_tokenizer(path)
        if KINDS[settings.run.kind].learns_from_examples_only:
            check_end_token(self.tokenizer, path)
        parallel = self.learner.parallel
        self._step_metrics = StepMetrics(
            self.learner.tensors if parallel is None else parallel.owned(self.learner.tensors),
            self.clock,
            self.learner.model.device,
            settings.policy,
            None if parallel is None else parallel.sum_all,
        )
        self._publisher: Publisher | None = None
        self._plans: dict[str, tuple[bytes, Plan]] = {}
        """The plans of the last publication, by key of the layout, encoded and decoded."""

    def _load_tokenizer(self, path: Path) -> Any:
        config, trusted = self.learner.model.config, self._settings.model.trust_remote_code
        return load_tokenizer(path, config, trust_remote_code=trusted)

    @property
    def size_bytes(self) -> int:
        """Bytes of a version, of all ranks."""
        parallel = self.learner.parallel
        tensors = self.learner.tensors if parallel is None else parallel.outline.tensors
        return sum(tensor.nbytes for tensor in tensors.values())

    @cached_property
    def storage(self) -> Storage:
        """The storage of states and exports."""
        saving = self._settings.policy.saving
        return (
            Storage(saving.folder, saving.storage_options) if saving.folder else Storage(str(self._folder.absolute()))
        )

    def open_state(self, url: str) -> SavedState:
        """Open a state that rank 0 has verified."""
        storage = Storage(url, self._settings.policy.saving.storage_options if "://" in url else None)
        return SavedState.of(VerifiedState(storage, read_header(storage)))

    @property
    def publisher(self) -> Publisher:
        """Offers the versions of this rank's part."""
        assert self._publisher is not None, "call serve() first"
        return self._publisher

    def layout(self) -> Layout:
        """Return the layout of this rank's part of a version."""
        return layout_of(self.learner.published(), self._name, base=self.learner.base)

    def serve(self, layout: Layout) -> None:
        """Prepare to publish. `layout`: of all ranks. Raises ConfigError if policy.snapshots does not fit them."""
        settings = self._settings
        form = settings.weights.quantise
        transport, encrypted = self._transport
        self._publisher = publisher = Publisher(
            layout,
            transport=transport,
            rank=self._rank,
            encrypt=encrypted,
            host=settings.network.host,
            read_timeout_s=settings.policy.publish_timeout_s,
            digests=settings.weights.digests,
            delta_versions=settings.policy.delta_versions,
            quantise=linear_weights(form, FUSED_BY_VLLM) if form else None,
            exchange=GroupExchange() if form and self._mesh is not None else None,
            snapshots=settings.policy.snapshots,
        )
        try:
            publisher.prepare(local_tensors(self.learner.published()))
        except WeightsError as error:
            publisher.close()
            raise ConfigError(f"policy.snapshots = {settings.policy.snapshots!r}: {error}") from error

    def train(
        self, message: wire.TrainStep, buffers: tuple[bytes, ...]
    ) -> tuple[dict[str, float], tuple[wire.Alarm, ...]]:
        """Make a step, with other replicas if it says so. Returns the metrics of all ranks, and the alarms.

        Raises:
            PeersLostError: not with those replicas; nothing has changed.
        """
        self.learner.join_peers(message.peers, message.replica, message.group)
        self._step_metrics.begin(message.num_replicas)
        trained = self._supervise(message) if message.examples else self._reinforce(message, buffers)
        found = self._step_metrics.end(message.step, trained)
        self.learner.next_prompt = max(self.learner.next_prompt, message.next_prompt)
        return found

    def _supervise(self, message: wire.TrainStep) -> dict[str, float]:
        if message.objective in ("dpo", "reward_model"):
            pairs = pairs_of(self.tokenizer, message.examples)
            return self.learner.prefer(
                pairs,
                objective=message.objective,
                step=message.step,
                num_steps=message.num_steps,
                changes=message.settings,
            )
        examples = examples_of(self.tokenizer, message.examples)
        return self.learner.supervise(examples, num_steps=message.num_steps, changes=message.settings)

    def _reinforce(self, message: wire.TrainStep, buffers: tuple[bytes, ...]) -> dict[str, float]:
        return self.learner.reinforce(
            groups_from_wire(message.groups, buffers, self.learner.limits),
            step=message.step,
            num_steps=message.num_steps,
            temperature=message.temperature,
            max_tokens=message.max_tokens,
            changes=message.settings,
        )

    def snapshot(self, version: int, layouts: tuple[str, ...], plans: tuple[bytes, ...]) -> PublishedSnapshot:
        """Copy the present weights into a snapshot; see `Publisher.snapshot` and `_decode`."""
        decoded = self._decode(layouts, plans)
        self.learner.check_whole()
        return self.publisher.snapshot(version, local_tensors(self.learner.published()), decoded)

    def add_layout_roots(self, layouts: tuple[str, ...], plans: tuple[bytes, ...]) -> None:
        """Compute further layout roots of the newest snapshot; see `Publisher.add_layout_roots` and `_decode`."""
        self.publisher.add_layout_roots(self._decode(layouts, plans))

    def _decode(self, layouts: tuple[str, ...], plans: tuple[bytes, ...]) -> dict[str, Plan]:
        """Return the plans to the layouts of rollouts, which seldom change.

        Raises:
            WeightsError: not a plan for each layout.
        """
        if len(layouts) != len(plans):
            raise WeightsError(f"{len(plans)} plans came for {len(layouts)} layouts.")
        known, self._plans = self._plans, {}
        for key, data in zip(layouts, plans, strict=True):
            before = known.get(key)
            self._plans[key] = before if before is not None and before[0] == data else (data, decode_plan(data))
        return {key: plan for key, (_, plan) in self._plans.items()}

    def resume(self, saved: SavedState, next_kind: TrainerKind | None) -> int:
        """Restore a saved state; see `Learner.resume`."""
        return self.learner.resume(saved, next_kind=next_kind)

    def send_state(self, peers: tuple[str, str], group: str, version: int) -> None:
        """Send the present state, `version`, to the same rank of another replica; see `Learner.send_state`."""
        pair = self._pair(peers, group, 0)
        try:
            self.learner.send_state(version, pair)
        finally:
            pair.close()

    def receive_state(self, peers: tuple[str, str], group: str) -> int:
        """Copy the state of the same rank of another replica. Returns its version.

        Raises:
            PeersLostError: it does not send its state; this one's is lost, too.
        """
        from starling.policy.train.parallel.replicas.peer_state import ReceivedState

        pair = self._pair(peers, group, 1)
        try:
            received = ReceivedState(pair)
            version = self.learner.resume(received)
            received.end()
        finally:
            pair.close()
        return version

    def _pair(self, peers: tuple[str, str], group: str, place: int) -> PeerGroup:
        from starling.policy.train.parallel.replicas.peers import PeerGroup

        timeout_s = self._settings.policy.parallel.replica_timeout_s
        return PeerGroup(peers, place, f"{group}/{self._rank}", timeout_s, self.learner.model.device)

    def write_state(self, snapshot: StateSnapshot, storage: Storage, path: str) -> dict[str, str]:
        """Write this rank's parts of a state, together with the writing threads of the other ranks.

        Returns the digests of all files. Raises ConfigError if the storage of one of them fails.
        """
        assert isinstance(snapshot, PartsSnapshot), "a policy of one rank writes its states itself"
        assert self._writers is not None
        return snapshot.write_parts(storage, path, self._writers)

    def export_files(self, shard_mb: int, *, merged: bool) -> ExportFiles:
        """Return the files of an export of the present model, for all ranks to write; `merged`: see `ExportFiles`."""
        parallel = self.learner.parallel
        assert parallel is not None, "a policy of one rank exports whole tensors"
        return ExportFiles(self.learner.model, parallel.outline, shard_mb, merged=merged)

    def sleep(self) -> int:
        """Leave the device to others. Returns the bytes freed there."""
        self.publisher.settle()
        return self.learner.sleep()

    def leave(self) -> None:
        """Disconnect from the other ranks, which do the same."""
        if self._mesh is not None:
            leave_ranks()


def shared_files() -> SharedFiles:
    """Return files for the ranks that this process forks: anonymous ones, which no other process can open."""
    return SharedFiles(*(Path(f"/proc/self/fd/{os.memfd_create(name)}") for name in SharedFiles._fields))
