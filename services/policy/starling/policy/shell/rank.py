"""One rank of a policy: its part of the model, and the operations that all ranks of the replica make together.

Rank 0, in the policy's own process, calls the methods; the other ranks execute the commands of `serve_rank`, each of
which stands for one of them. A policy of one rank is the same without the others.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from starling.algo.tokenizer import check_end_token, load_tokenizer
from starling.common.errors import ConfigError, WeightsError
from starling.common.ids import TrainerKind
from starling.common.kinds import KINDS
from starling.common.observe.process import EXIT_FAILED, end_process
from starling.common.service import ServiceArguments
from starling.common.wire import messages as wire
from starling.policy.shell.facts import share_of
from starling.policy.shell.loading import PolicyProcess, create_learner, load_fixed
from starling.policy.shell.ranks import RankLink
from starling.policy.train.checkpoint.header import VerifiedState, read_header
from starling.policy.train.checkpoint.parts import Part
from starling.policy.train.checkpoint.shared_export import ExportFiles
from starling.policy.train.checkpoint.state import PartsSnapshot, SavedState, StateSnapshot
from starling.policy.train.checkpoint.storage import Storage
from starling.policy.train.data.examples import examples_of, pairs_of
from starling.policy.train.data.groups import groups_from_wire
from starling.policy.train.metrics.step import StepMetrics
from starling.policy.train.parallel.group import RankHost, SharedFiles, control_group, join_ranks, leave_ranks
from starling.weightsync.offers.offer import LayoutPart, Transport
from starling.weightsync.plan.layout import Layout, decode_layout, encode
from starling.weightsync.plan.planner import Plan, decode_plan
from starling.weightsync.publisher.published import PublishedSnapshot
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.quantise.recipe import FUSED_BY_VLLM, linear_weights
from starling.weightsync.tensors.modules import layout_of, local_tensors
from starling.weightsync.tensors.quantiser import GroupExchange

if TYPE_CHECKING:
    from starling.policy.train.parallel.mesh import Mesh
    from starling.policy.train.parallel.replicas.peers import PeerGroup

log = structlog.get_logger(__name__)


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Load the model. The answer is the layout of this rank's part."""

    store: str = ""
    """Of ranks on several hosts, see `RankHost`."""


class Serve(msgspec.Struct, frozen=True, kw_only=True, tag="serve"):
    """Prepare to publish."""

    layout: bytes
    """Of all ranks."""


class Train(msgspec.Struct, frozen=True, kw_only=True, tag="train"):
    """Make a step."""

    message: wire.TrainStep
    buffers: tuple[bytes, ...]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """Copy the present weights, as a version, into a snapshot."""

    version: int
    layouts: tuple[str, ...]
    plans: tuple[bytes, ...]
    """To the layouts of rollouts, by their keys in `layouts`."""


class AddRoots(msgspec.Struct, frozen=True, kw_only=True, tag="add_roots"):
    """Compute these layout roots of the newest snapshot, too."""

    layouts: tuple[str, ...]
    plans: tuple[bytes, ...]


class Roots(msgspec.Struct, frozen=True, kw_only=True, tag="roots"):
    """Answer with this rank's parts of the layout roots of a version; other commands are executed meanwhile."""

    version: int
    timeout_s: float


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """Answer with the offer of this rank's newest snapshot, once it is digested; other commands are executed
    meanwhile."""

    timeout_s: float


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag="sleep"):
    """Leave the device to others."""


class Wake(msgspec.Struct, frozen=True, kw_only=True, tag="wake"):
    """Return to the device."""


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """Restore a saved state, which rank 0 has verified."""

    url: str
    next_kind: TrainerKind | None


class SendState(msgspec.Struct, frozen=True, kw_only=True, tag="send_state"):
    """Send the present state to the same rank of another replica."""

    peers: tuple[str, str]
    """Addresses of the stores of this replica and of the other one."""
    group: str
    version: int


class ReceiveState(msgspec.Struct, frozen=True, kw_only=True, tag="receive_state"):
    """Copy the state of the same rank of another replica."""

    peers: tuple[str, str]
    """Addresses of the stores of the other replica and of this one."""
    group: str


class TakeState(msgspec.Struct, frozen=True, kw_only=True, tag="take_state"):
    """Copy the present state into host memory."""

    version: int


class WriteState(msgspec.Struct, frozen=True, kw_only=True, tag="write_state"):
    """Write the copied state. Executed while other commands are."""

    path: str
    """Of the folder of its tensors, on the file system of the states."""


class TakeExport(msgspec.Struct, frozen=True, kw_only=True, tag="take_export"):
    """Copy the weights of an export into host memory."""

    merged: bool
    """See `ExportFiles`."""


class WriteExport(msgspec.Struct, frozen=True, kw_only=True, tag="write_export"):
    """Write the copied weights into files that rank 0 has created. Executed while other commands are."""

    folder: str
    shard_mb: int
    merged: bool
    node: int
    """Whose ranks write; those of others have nothing to do."""


Command = (
    Load
    | Serve
    | Train
    | Snapshot
    | Offer
    | AddRoots
    | Roots
    | Sleep
    | Wake
    | Resume
    | SendState
    | ReceiveState
    | TakeState
    | WriteState
    | TakeExport
    | WriteExport
)
LayoutParts = dict[str, LayoutPart]
"""By key of the layout."""


class PolicyRank:
    """The model of one rank, with its publisher."""

    def __init__(
        self,
        settings: PolicyProcess,
        arguments: ServiceArguments,
        path: Path,
        transport: tuple[Transport, bool],
        *,
        rank: int = 0,
        files: SharedFiles | None = None,
        host: RankHost | None = None,
    ) -> None:
        """Connect with the other ranks, and load the model.

        Args:
            settings: of the policy.
            arguments: its command line.
            path: of the model's folder.
            transport: of the weights, and whether it encrypts them.
            rank: of this process.
            files: of all ranks of this host; None for a policy of one rank.
            host: this one, of several; None for the only one.

        Raises:
            ConfigError: the model cannot be loaded, or the ranks do not fit it.
        """
        self._transport = transport
        self._settings, self._name, self._rank = settings, arguments.name, rank
        self._folder, self.node = arguments.folder, 0 if host is None else host.node
        self.trains = KINDS[settings.run.kind].trains
        self._mesh: Mesh | None = None
        if files is not None:
            self._mesh = join_ranks(settings.policy.parallel, rank, settings.model.device, files, host)
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
        self.tokenizer = load_tokenizer(
            path, self.learner.model.config, trust_remote_code=settings.model.trust_remote_code
        )
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


def serve_rank(
    settings: PolicyProcess,
    arguments: ServiceArguments,
    path: Path,
    transport: tuple[Transport, bool],
    files: SharedFiles | None,
    rank: int,
    first_rank: int,
    link: RankLink,
) -> None:
    """Be a rank until rank 0, at the other end of `link`, ends.

    Args:
        settings: of the policy.
        arguments: its command line.
        path: of the model's folder.
        transport: of the weights, and whether it encrypts them.
        files: of all ranks of this host.
        rank: of this process.
        first_rank: of this host.
        link: to rank 0.
    """

    def load(command: Load) -> PolicyRank:
        host, nodes = None, arguments.nodes
        if nodes is not None:
            num_ranks = share_of(nodes, settings.policy.parallel.num_ranks)
            host = RankHost(nodes.number, first_rank, num_ranks, command.store)
        return PolicyRank(settings, arguments, path, transport, rank=rank, files=files, host=host)

    work = _RankWork(load)
    decoder = msgspec.msgpack.Decoder(Command)
    while (request := link.receive()) is not None:
        number, encoded = request
        command = decoder.decode(encoded)
        if isinstance(command, Offer):
            work.offers.submit(_answer, link, number, work.offer(command))
        elif isinstance(command, Roots):
            work.offers.submit(_answer, link, number, work.roots(command))
        elif isinstance(command, WriteState | WriteExport):
            work.writer.submit(_answer, link, number, partial(work.write, command))
        else:
            link.answer(number, partial(work.execute, command))
    work.close()


def _answer(link: RankLink, number: int, work: Callable[[], bytes]) -> None:
    """Answer a request in a background thread, where nothing else would notice an unexpected error."""
    try:
        link.answer(number, work)
    except Exception:  # the edge of the thread: the traceback is the report, and the process ends
        log.exception("failed")
        end_process(EXIT_FAILED)


class _RankWork:
    """Executes commands on a rank that is not rank 0."""

    def __init__(self, load: Callable[[Load], PolicyRank]) -> None:
        self._load = load
        self._rank: PolicyRank | None = None
        self._snapshot: PublishedSnapshot | None = None
        self._state: StateSnapshot | None = None
        self._export: dict[str, Part] = {}
        self.offers, self.writer = ThreadPoolExecutor(1, "offers"), ThreadPoolExecutor(1, "writer")

    def execute(self, command: Command) -> bytes:
        """Return the answer to a command. Raises StarlingError, or any error of a collective operation."""
        if isinstance(command, Load):
            self._rank = self._load(command)
            gc.freeze()
            gc.enable()
            return encode(self._rank.layout())
        rank = self._rank
        assert rank is not None, "rank 0 ends where a model cannot be loaded"
        match command:
            case Serve():
                rank.serve(decode_layout(command.layout))
                log.info("ready", transport=rank.publisher.transport)
            case Train():
                rank.train(command.message, command.buffers)
            case Snapshot():
                self._snapshot = rank.snapshot(command.version, command.layouts, command.plans)
            case AddRoots():
                rank.add_layout_roots(command.layouts, command.plans)
            case Sleep():
                rank.sleep()
            case Wake():
                rank.learner.wake()
            case Resume():
                rank.resume(rank.open_state(command.url), command.next_kind)
            case SendState():
                rank.send_state(command.peers, command.group, command.version)
            case ReceiveState():
                rank.receive_state(command.peers, command.group)
            case TakeState():
                self._state = rank.learner.take_state(command.version)
            case TakeExport():
                self._export = rank.learner.exported_parts(merged=command.merged)
        return b""

    def offer(self, command: Offer) -> Callable[[], bytes]:
        """Return a function that waits for the offer of the present snapshot."""
        snapshot = self._snapshot

        def wait() -> bytes:
            assert snapshot is not None, "a snapshot comes before its offer"
            return encode(snapshot.offer(command.timeout_s).ranks[0])

        return wait

    def roots(self, command: Roots) -> Callable[[], bytes]:
        """Return a function that waits for the parts of the layout roots; there are none of an older version."""
        snapshot = self._snapshot

        def wait() -> bytes:
            is_newest = snapshot is not None and snapshot.version == command.version
            return msgspec.msgpack.encode(snapshot.layout_parts(command.timeout_s) if is_newest and snapshot else {})

        return wait

    def write(self, command: WriteState | WriteExport) -> bytes:
        """Write this rank's parts of the state, or of the export, that was copied."""
        assert self._rank is not None
        if isinstance(command, WriteExport):
            if command.node != self._rank.node:
                return b""
            files = self._rank.export_files(command.shard_mb, merged=command.merged)
            files.write(Path(command.folder), self._export)
            return b""
        assert self._state is not None, "a state is copied before it is written"
        self._rank.write_state(self._state, self._rank.storage, command.path)
        return b""

    def close(self) -> None:
        """End everything."""
        if self._rank is not None:
            self._rank.publisher.close()
            self._rank.leave()
