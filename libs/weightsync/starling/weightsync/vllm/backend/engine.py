"""Inference side of the backend: one object in every worker of vLLM.

vLLM reads the answers of its workers in order and stops at the first error, so that an error in one worker alone would
leave it with an answer that belongs to no call. So errors that only one worker may have go to the trainer over its own
connection, and errors that all have are raised by the last worker alone. Whether an engine takes part in a switch is
decided by what all its workers know, the call itself, so that all switch or none does.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

import psutil
import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from starling.common.errors import WeightsError
from starling.weightsync.memory.digests import DigestMode
from starling.weightsync.offers.offer import TransportChoice
from starling.weightsync.plan.layout import Layout, item_bytes
from starling.weightsync.transports.endpoints import ServingOptions
from starling.weightsync.transports.registry import choose_for_host
from starling.weightsync.vllm.backend import configs
from starling.weightsync.vllm.backend.link import Link
from starling.weightsync.vllm.backend.messages import Hello, shortened
from starling.weightsync.vllm.backend.session import ReaderOptions, TrainerSession, await_welcome
from starling.weightsync.vllm.recorded import PublishedModel
from starling.weightsync.vllm.versions import vllm_version
from starling.weightsync.vllm.worker import WorkerWeights, record_model, recorded_weights

log = logging.getLogger(__name__)

Staging = Literal["auto", "always", "never"]
T = TypeVar("T")
SPARE: Final = 1.25
"""How many times the staging areas of all workers must fit into the free memory of the host, for `auto`."""


@dataclass
class StarlingInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """How a worker joins its trainer; the trainer side makes it."""

    address: str
    """``host:port`` of the trainer's rank 0."""
    secret: str
    """Proves to the trainer that the worker may join, and the reverse."""
    transport: TransportChoice = "auto"
    encrypt: bool | None = None
    digests: DigestMode = "full"
    staging: Staging = "auto"
    connect_s: float = 30.0


@dataclass
class StarlingUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which version an engine switches to."""

    version: int
    engines: list[str] = field(default_factory=list)
    """The engines that take part, as `Hello` names them; workers of others refuse."""


class StarlingWeightTransferEngine(WeightTransferEngine[StarlingInitInfo, StarlingUpdateInfo]):  # type: ignore[misc]
    """Receives the versions of one trainer; see vLLM's base class."""

    init_info_cls = StarlingInitInfo
    update_info_cls = StarlingUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._session: TrainerSession | None = None
        self._engine, self._engine_size = _engine_of_all(vllm_config)
        self._name = f"worker {self._rank} of {socket.gethostname()}:{os.getpid()}-{uuid.uuid4().hex[:6]}"

    def parse_init_info(self, init_dict: dict[str, Any]) -> StarlingInitInfo | None:
        """Read what the trainer side sent; None where it is of another backend, and another worker raises that."""
        return self._parsed(StarlingInitInfo, init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> StarlingUpdateInfo | None:
        """Read which version to switch to; None as for `parse_init_info`."""
        return self._parsed(StarlingUpdateInfo, update_dict)

    def init_transfer_engine(self, init_info: StarlingInitInfo | None) -> None:
        """Record what this worker receives, and join the trainer. May be called again, by another trainer too."""
        self.shutdown()
        if init_info is None:
            return
        try:
            link = Link.dial(init_info.address, init_info.secret, init_info.connect_s)
        except WeightsError as error:
            self._raise_in_step(f"Worker {self._rank} cannot join its trainer: {error}.")
            return
        try:
            self._session = self._joined(link, init_info)
        except WeightsError as error:
            link.close()
            log.error("the trainer does not take this worker: %s", error)  # the trainer raises it

    def start_weight_update(self) -> None:
        """Do nothing: the weights have been pulled meanwhile."""

    def receive_weights(self, update_info: StarlingUpdateInfo | None) -> None:
        """Switch to a version that was pulled, and tell the trainer what is held."""
        if update_info is None:
            return
        if self._session is None:
            self._raise_in_step(
                "No trainer has joined vLLM's backend 'starling', so there are no weights to switch to; call "
                "init_weight_transfer_engine through the trainer side (StarlingTrainerInitInfo) first."
            )
            return
        if why := self._session.why_left_out(update_info.engines):
            self._raise_in_step(why)
            return
        try:
            self._session.switch(update_info.version)
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            log.error("version %d was not adopted: %s", update_info.version, error)

    def finish_weight_update(self) -> None:
        """Do nothing: the switch was complete."""

    def shutdown(self) -> None:
        """Leave the trainer."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    @property
    def _rank(self) -> int:
        return int(self.parallel_config.rank)

    def _joined(self, link: Link, info: StarlingInitInfo) -> TrainerSession:
        name = self._name
        try:
            published = PublishedModel.of(self.vllm_config)
            recorded = record_model(self.model, self.vllm_config, published, name)
            choice = choose_for_host(info.transport, link.host, encrypt=info.encrypt)
            live = recorded_weights(self.model, self.vllm_config, published, recorded)
            serving = ServingOptions(choice.transport, link.host, choice.encrypted)
            weights = WorkerWeights(live, recorded.layout, 0, info.digests, serving)
        except Exception as error:  # of the model's own loaders; raised again, once the trainer knows it
            reason = str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}"
            link.send(Hello(name=name, vllm=vllm_version(), problem=shortened(reason)))
            await_welcome(link)  # which is a refusal
            raise WeightsError(reason) from error
        options = ReaderOptions(info.transport, info.encrypt)
        stages = weights.stages or self._has_room(recorded.layout, info.staging)
        session = TrainerSession(link, weights, stages=stages, options=options)
        try:
            config = configs.plain(self.model_config.hf_config)
            session.join(name, vllm_version(), recorded.layout, config, self._engine, self._engine_size)
        except WeightsError:
            session.close()
            raise
        return session

    def _has_room(self, layout: Layout, staging: Staging) -> bool:
        """Whether pulls go into staging, in host memory."""
        if staging != "auto":
            return staging == "always"
        shards = layout.ranks[0].shards
        needed = sum(shard.box.volume * item_bytes(layout.tensors[shard.tensor]) for shard in shards)
        return bool(psutil.virtual_memory().available > SPARE * needed * self.parallel_config.world_size)

    def _parsed(self, kind: type[T], values: dict[str, Any]) -> T | None:
        try:
            return kind(**values)
        except TypeError as error:
            self._raise_in_step(
                f"What vLLM's backend 'starling' was sent is of another backend ({error}); make the trainer side with "
                "StarlingTrainerInitInfo, or give vLLM the trainer's backend in weight_transfer_config."
            )
        return None

    def _raise_in_step(self, reason: str) -> None:
        """Raise an error in the last worker; any other logs it.

        To be called where either all workers of the engine do so, or the trainer notices by itself that one has failed.
        """
        if self._rank == self.parallel_config.world_size - 1:
            raise WeightsError(reason)
        log.error("%s", reason)


def _engine_of_all(vllm_config: VllmConfig) -> tuple[str, int]:
    """Return what all workers of this engine call it, and how many they are. To be called by all at the same time."""
    parallel = vllm_config.parallel_config
    if parallel.enable_elastic_ep:  # workers that join later load alone; each executor hands its workers one config
        return vllm_config.instance_id, parallel.world_size
    group = get_world_group()
    # Where vLLM spans hosts, each has a config of its own, with another number.
    return str(group.broadcast_object(vllm_config.instance_id, src=0)), group.world_size
