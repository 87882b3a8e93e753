"""Publisher of a rollout: offers the engine's weights to other replicas, from a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import structlog

from starling.common.errors import ConfigError, WeightsError
from starling.common.offers import AnswerLease, OfferSender
from starling.common.wire.messages import PublishWeights, Wait
from starling.weightsync.transports.endpoints import ServingOptions

if TYPE_CHECKING:
    from starling.rollout.settings import RolloutProcess
    from starling.weightsync.memory.digests import DigestMode
    from starling.weightsync.plan.layout import Layout
    from starling.weightsync.publisher.publisher import Publisher

log = structlog.get_logger(__name__)


def serving_of(settings: RolloutProcess) -> ServingOptions:
    """Return how a rollout serves weights to other replicas.

    Raises:
        ConfigError: weights must be encrypted, and the transport cannot.
    """
    from starling.weightsync.transports.registry import choose_for_host

    network = settings.network
    try:
        transport, encrypted, unused_rdma = choose_for_host(
            settings.rollout.transport, network.host, encrypt=network.encrypt_weights
        )
    except WeightsError as error:
        raise ConfigError(f"rollout.transport with network.encrypt_weights = true: {error}") from error
    if unused_rdma:
        log.warning("rdma_is_not_used", reason=unused_rdma)
    return ServingOptions(transport, network.host, encrypted)


class RolloutPublisher:
    """Publishes versions. It costs nothing until the first one: most rollouts never publish.

    The engine waits only for the copy: while both snapshots are being read, a version is not published, and another
    replica may be asked. It makes no deltas, since replicas that join have no version to start from.

    Args:
        layout: layout of the engine's weights.
        serving: how other replicas read them.
        digests: which bytes they are verified by.
        answer: see `OfferSender`.
        broken: see `OfferSender`.
        changed: see `OfferSender`.
    """

    def __init__(
        self,
        layout: Layout,
        serving: ServingOptions,
        digests: DigestMode,
        answer: AnswerLease,
        broken: Callable[[Future[None]], None],
        changed: Callable[[], None],
    ) -> None:
        self._layout, self._serving, self._digests = layout, serving, digests
        self._offers = OfferSender(answer, broken, changed)
        self._publisher: Publisher | None = None

    @property
    def offered(self) -> int:
        """Newest version that was offered; -1 for none."""
        return self._offers.offered

    def publish(self, message: PublishWeights, tensors: Mapping[str, Any]) -> None:
        """Copy the engine's `tensors` into a snapshot, between two tokens; answer `message` when the offer is known.

        Raises:
            WeightsError: no memory for snapshots, no such transport here, or both snapshots are being read.
        """
        if self._offers.resend(message.lease, message.version):
            return
        if self._publisher is None:
            self._publisher = self._make()
        self._offers.send(message.lease, self._publisher.snapshot(message.version, tensors))

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Return the waits for the release of offers at `now`."""
        return self._offers.waits(now)

    def close(self) -> None:
        """Stop publishing."""
        if self._publisher is not None:
            self._publisher.close()
        self._offers.close()

    def _make(self) -> Any:
        from starling.weightsync.publisher.publisher import Publisher

        return Publisher(
            self._layout,
            transport=self._serving.transport,
            encrypt=self._serving.encrypt,
            host=self._serving.host,
            when_busy="skip",
            digests=self._digests,
            delta_versions=0,
            snapshots="host",  # the engine has taken the memory of the device, and most rollouts publish once
        )
