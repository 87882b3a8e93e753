"""Trainer side of the backend: publishes the shards of every rank, has all workers pull, and switches them.

It needs no vLLM. Every rank of the trainer makes a `WeightSender` and calls its methods at the same time. Rank 0 plans,
from the layouts of all ranks and those that the workers have recorded, and drives the client of vLLM. Workers pull from
all ranks while vLLM generates (`stage`), and vLLM is called only to switch (`switch`).
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.memory.digests import DigestMode
from starling.weightsync.offers.offer import Offer, RankOffer, TransportChoice, make_offer
from starling.weightsync.plan.layout import decode, decode_layout, encode, join_ranks
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.report import PullReport
from starling.weightsync.tensors.modules import layout_of, local_tensors
from starling.weightsync.transports.registry import choose_for_host
from starling.weightsync.vllm.backend import configs
from starling.weightsync.vllm.backend.messages import Switched
from starling.weightsync.vllm.backend.pulls import PullRound, WorkerPlans
from starling.weightsync.vllm.backend.ranks import TrainerRanks
from starling.weightsync.vllm.backend.rendezvous import JoinedWorker, Rendezvous
from starling.weightsync.vllm.backend.source import Source, config_of, converted, tensors_of

ANSWER_S: Final = 30.0
"""How long the answer of a worker may take after vLLM has said that the call is over."""
HINT: Final = (
    'See vLLM\'s log; it must be started with --weight-transfer-config \'{"backend": "starling"}\', and with '
    "starling-weightsync[vllm] in its environment."
)


class EngineClient(Protocol):
    """Calls to one engine of vLLM, or to several at once; vLLM's own clients have these methods."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have every worker join the trainer."""

    def start_weight_update(self) -> None:
        """Begin an update."""

    def update_weights(self, update_info: Any) -> None:
        """Have every worker switch."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, and label the tokens sampled from now on."""


@dataclass(frozen=True)
class SenderOptions:
    """How a trainer offers its weights."""

    host: str = "127.0.0.1"
    """Address of this rank's host, which workers connect to."""
    transport: TransportChoice = "auto"
    """How weights travel; `auto`: UCX on one host, else encrypted TCP. See `choose_transport`."""
    encrypt: bool | None = None
    """False says that the network is private: weights that leave the host are not encrypted, and may use RDMA."""
    digests: DigestMode = "full"
    """Which bytes are verified, in each pull and in what vLLM holds after the switch."""
    delta_versions: int | None = None
    """How many versions back deltas are kept; by default 2, but 0 on one host, where sending everything is faster."""
    staging: Literal["auto", "always", "never"] = "auto"
    """Whether workers pull into host memory while vLLM generates; `never`, and with `auto` where it does not fit, they
    pull into the live weights while vLLM is paused."""
    relay_from_mb: float = 64.0
    """From this size on, engines of equal layouts pull from each other in a chain."""
    deadline_s: float = 600.0
    """How long joining, a pull of all workers, and a switch may take each."""
    connect_s: float = 30.0
    """How long a worker tries to reach the trainer."""


@dataclass(frozen=True)
class SendReport:
    """Times and sizes of one version."""

    version: int
    snapshot_s: float
    """Until training can go on, on this rank."""
    stage_s: float = 0.0
    """From the snapshot until all workers have the version; vLLM generates meanwhile, unless they pull in place."""
    switch_s: float = 0.0
    """From the first call of vLLM until the last one: what a pause of generation has to cover."""
    pulls: dict[str, PullReport] = field(default_factory=dict)
    """By worker, on rank 0."""
    lost: dict[str, str] = field(default_factory=dict)
    """On rank 0, the workers that have gone while the version travelled, with all others of their engines, and why. The
    engines that are left have it."""


class WeightSender:
    """The trainer side on one rank.

    Args:
        source: the trainer's weights; see `Source`. Read again at each version.
        client: of the engines; used by rank 0 only.
        rank: of this process in the trainer.
        options: how weights are offered; host and transport may differ between ranks.
        alone: other ranks of torch.distributed do not call here; this one has whole tensors.

    Raises:
        WeightsError: the host cannot be listened on, or the options contradict each other.
    """

    def __init__(
        self, source: Source, client: EngineClient, *, rank: int = 0, options: SenderOptions, alone: bool = False
    ) -> None:
        self._source, self._client, self._options = source, client, options
        # Other ranks wait while rank 0 does up to three things, each within its own deadline.
        self._ranks = TrainerRanks(rank, 3 * options.deadline_s + 4 * ANSWER_S, alone=alone)
        choice = choose_for_host(options.transport, options.host, encrypt=options.encrypt)
        self._transport, self._encrypted = choice.transport, choice.encrypted
        self._rendezvous = Rendezvous(options.host) if rank == 0 else None
        self._publisher: Publisher | None = None
        self._wanted: dict[str, str] = {}
        self._plans = WorkerPlans(options.relay_from_mb * 1e6)
        self._staged: Offer | None = None
        self.version = 0
        """The newest version that was staged; 0 before the first one."""
        self._attempted = 0
        self.report: SendReport | None = None
        """Of the newest version."""

    # --- joining -----------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Have the workers of all engines join; call it again after an engine was started or replaced.

        Raises:
            WeightsError: on every rank: no worker has joined, or one does not fit the trainer.
        """
        self._wanted = msgspec.json.decode(self._ranks.together(bytes, lambda _: self._meet()), type=dict[str, str])
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        self._ranks.together(self._describe, self._plan)

    def _meet(self) -> bytes:
        """Have vLLM tell its workers where to join; return the element types that they want, by name."""
        assert self._rendezvous is not None
        options, rendezvous = self._options, self._rendezvous
        rendezvous.forget_lost()
        info = {
            "address": rendezvous.address,
            "secret": rendezvous.secret,
            "transport": options.transport,
            "encrypt": options.encrypt,
            "digests": options.digests,
            "staging": options.staging,
            "connect_s": options.connect_s,
        }
        before = {*map(id, rendezvous.workers)}
        failure = _reason_of(lambda: self._client.init_weight_transfer_engine(info))
        problems = rendezvous.take_problems()
        if problems or failure:
            failure = f"vLLM's workers did not join the trainer: {failure} {HINT}"
            raise WeightsError(problems[0] if problems else failure)
        if not any(id(worker) not in before for worker in rendezvous.workers):
            raise WeightsError(f"No worker of vLLM has joined the trainer. {HINT}")
        _check_complete(rendezvous.workers)
        return msgspec.json.encode(_wanted(rendezvous.workers))

    def _describe(self) -> bytes:
        """Open this rank's publisher; return its layout."""
        tensors = converted(tensors_of(self._source), self._wanted)
        layout = layout_of(tensors, "the trainer")
        self._publisher = Publisher(
            layout,
            transport=self._transport,
            encrypt=self._encrypted,
            host=self._options.host,
            digests=self._options.digests,
            delta_versions=self._options.delta_versions,
        )
        return encode(layout)

    def _plan(self, layouts: Sequence[bytes]) -> bytes:
        """Plan for every worker, from the layouts of all ranks."""
        assert self._rendezvous is not None
        trained = join_ranks("the trainer", [decode_layout(layout) for layout in layouts])
        config = configs.plain(config_of(self._source))
        for worker in self._rendezvous.workers:
            found = configs.first_difference(worker.config, config)
            if found is not None:
                key, theirs, mine = found
                raise WeightsError(
                    f"{worker.name} computes with {key} = {theirs!r}, and the trainer's model has {mine!r}: start vLLM "
                    "with the trainer's checkpoint, unchanged."
                )
        self._plans.update(trained, self._rendezvous.workers)
        return b""

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, version: int | None = None) -> int:
        """Stage a version and switch to it; return its number, which is one more than the last by default.

        Raises:
            WeightsError: as `stage` and `switch`.
        """
        self.stage(version)
        return self.switch()

    def stage(self, version: int | None = None) -> int:
        """Publish a version and have all workers pull it, while vLLM generates; return its number.

        Training may go on, and change its tensors, as soon as this returns. Where an engine goes meanwhile, all others
        get the version (`SendReport.lost`). Take it out of the client then: `switch` and further versions succeed for
        the others, and fail while the client calls it.

        Raises:
            WeightsError: on every rank: a worker had gone before, or could not pull, or all have gone. All engines keep
                the version they have.
        """
        if self._publisher is None:
            self.join()
        number = self._attempted + 1 if version is None else version
        self._attempted = number
        begin = time.perf_counter()

        def publish() -> bytes:
            assert self._publisher is not None
            tensors = converted(tensors_of(self._source), self._wanted)
            snapshot = self._publisher.snapshot(number, local_tensors(tensors))
            self.report = SendReport(number, time.perf_counter() - begin)
            return encode(snapshot.offer().ranks[0])

        self._staged = None
        pulls: dict[str, PullReport] = {}
        lost: dict[str, str] = {}

        def pull(offers: Sequence[bytes]) -> bytes:
            assert self._rendezvous is not None
            ranks = [msgspec.structs.replace(decode(RankOffer, one), rank=rank) for rank, one in enumerate(offers)]
            offer = make_offer(number, ranks)
            pulling = PullRound(self._rendezvous, self._plans, offer, self._options.deadline_s)
            pulls.update(pulling.run())
            lost.update(pulling.lost)
            self._plans.forget(lost)
            self._staged = offer
            return b""

        self._ranks.together(publish, pull)
        assert self.report is not None
        stage_s = time.perf_counter() - begin - self.report.snapshot_s
        self.report = dataclasses.replace(self.report, stage_s=stage_s, pulls=pulls, lost=lost)
        self.version = number
        return number

    def switch(self, paused: AbstractContextManager[Any] | None = None) -> int:
        """Switch all engines to the version that was staged, and check what they hold; return its number.

        Args:
            paused: pauses generation while vLLM switches, on rank 0; by default nothing does.

        Raises:
            WeightsError: on every rank: nothing is staged, or an engine has gone, did not switch, or does not hold what
                was sent. Such an engine must not generate before it has switched successfully; others may have
                switched.
        """
        report, begin = self.report, time.perf_counter()

        def lead(_: Sequence[bytes]) -> bytes:
            if self._staged is None:
                raise WeightsError("No version is staged: call stage() first.")
            assert self._rendezvous is not None
            self._plans.check_present(self._rendezvous.workers)  # while all engines still hold one version
            with paused or nullcontext():
                self._switch(self._staged)
            return b""

        self._ranks.together(bytes, lead)
        if report is not None:
            self.report = dataclasses.replace(report, switch_s=time.perf_counter() - begin)
        return self.version

    def _switch(self, offer: Offer) -> None:
        assert self._rendezvous is not None
        failure = _reason_of(self._client.start_weight_update)
        if not failure:
            info = {"version": offer.version, "engines": sorted(self._plans.engines)}
            failure = _reason_of(lambda: self._client.update_weights(info))
        problem = self._await_switch(offer, failure)
        # Also after a failure: vLLM would refuse the next update while this one is open.
        finished = _reason_of(lambda: self._client.finish_weight_update(None if problem else str(offer.version)))
        if problem or finished:
            raise WeightsError(f"Version {offer.version} was not adopted: {problem or finished}")

    def _await_switch(self, offer: Offer, failure: str) -> str:
        """Wait until each worker that has pulled the version has attested it; return what is wrong, empty for nothing.

        `failure` is why the call of vLLM failed, also where all of them have switched. A worker may say it better.
        """
        assert self._rendezvous is not None
        left, deadline = set(self._plans.names), time.monotonic() + (0.0 if failure else ANSWER_S)
        while left:
            event = self._rendezvous.next_event(deadline)
            if event is None:
                return failure or f"{min(left)} did not switch"
            if event.worker.name not in self._plans.names:
                continue  # it was lost before
            if event.message is None:
                return f"{event.worker.name} has gone: {event.problem}"
            message = event.message
            if not isinstance(message, Switched) or message.version != offer.version:
                continue
            if message.problem:
                return f"{event.worker.name}: {message.problem}"
            if message.root != offer.root:
                return f"{event.worker.name} does not hold what was sent: send this version again"
            left.discard(event.worker.name)
        return failure

    def close(self) -> None:
        """End the connections, and free the snapshots. The engines keep what they have."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._ranks.close()


def _wanted(workers: Sequence[JoinedWorker]) -> dict[str, str]:
    """Return the element types that workers want, by name. Raises WeightsError if two want different ones."""
    found: dict[str, tuple[str, str]] = {}
    for worker in workers:
        needed = {shard.tensor for shard in worker.layout.ranks[0].shards}
        for spec in (worker.layout.tensors[index] for index in needed):
            dtype, other = found.setdefault(spec.name, (spec.dtype, worker.name))
            if dtype != spec.dtype:
                raise WeightsError(
                    f"{worker.name} computes {spec.name} in {spec.dtype}, and {other} in {dtype}: give all engines the "
                    "same dtype."
                )
    return {name: dtype for name, (dtype, _) in found.items()}


def _check_complete(workers: Sequence[JoinedWorker]) -> None:
    """Raise WeightsError if an engine lacks a worker: the others would switch without it."""
    num_joined = Counter(worker.engine for worker in workers)
    for worker in workers:
        if num_joined[worker.engine] < worker.engine_size:
            raise WeightsError(
                f"Only {num_joined[worker.engine]} of the {worker.engine_size} workers of {worker.name}'s engine have "
                f"joined the trainer. {HINT}"
            )


def _reason_of(call: Callable[[], None]) -> str:
    """Call an engine; return why it failed, empty if it did not."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - clients of vLLM, HTTP and Ray raise anything
        return f"{type(error).__name__}: {error}".strip().split("\n")[0].rstrip(".") + "."
    return ""
