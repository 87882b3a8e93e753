"""Trainer side in vLLM's own terms: what its `WeightTransferTrainerFactory` makes for the backend `starling`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from starling.common.errors import WeightsError
from starling.weightsync.vllm.backend.sender import SenderOptions, SendReport, WeightSender


@dataclass
class StarlingTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """Which rank of the trainer this is, and how it offers its weights."""

    backend: ClassVar[str] = "starling"

    options: SenderOptions = field(default_factory=SenderOptions)


class StarlingTrainerEngine(TrainerWeightTransferEngine[StarlingTrainerInitInfo]):  # type: ignore[misc]
    """Sends the weights of a module; made and called on every rank of the trainer.

    `send_weights()` does everything. A trainer whose engines generate meanwhile calls `stage_weights()` first, then
    pauses them, calls `send_weights()`, which only switches, and resumes them.
    """

    init_info_cls = StarlingTrainerInitInfo

    def __init__(self, *, client: Any, source: Any, is_sender: bool, sender: WeightSender) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._sender, self._is_staged = sender, False

    @classmethod
    def trainer_init(
        cls, init_info: StarlingTrainerInitInfo, *, client: Any, source: Any = None
    ) -> StarlingTrainerEngine:
        """Have the workers of all engines of `client` join.

        Args:
            init_info: of this rank.
            client: vLLM's client of the engines, or any object with its four methods.
            source: a `torch.nn.Module`, vLLM's `ModuleSource`, or a mapping of tensors; of FSDP, the sharded module.

        Raises:
            WeightsError: there is no source, or a worker does not fit it.
        """
        if source is None:
            raise WeightsError("The backend 'starling' needs a source: give trainer_init the trainer's module.")
        sender = WeightSender(source, client, rank=init_info.rank, options=init_info.options)
        try:
            sender.join()
        except BaseException:  # whatever it is: free the ports, and re-raise
            sender.close()
            raise
        return cls(client=client, source=source, is_sender=init_info.is_sender, sender=sender)

    @property
    def version(self) -> int:
        """The newest version that was staged; 0 before the first one."""
        return self._sender.version

    @property
    def report(self) -> SendReport | None:
        """Times and sizes of the newest version."""
        return self._sender.report

    def stage_weights(self, version: int | None = None) -> int:
        """Have all workers pull the present weights while vLLM generates; return the version's number.

        Raises:
            WeightsError: see `WeightSender.stage`.
        """
        number = self._sender.stage(version)
        self._is_staged = True
        return number

    def send_weights(self, paused: AbstractContextManager[Any] | None = None) -> None:
        """Switch all engines to the version that is staged; stage the present weights first if none is.

        Args:
            paused: pauses generation for the switch alone, on rank 0; by default the caller has paused it.

        Raises:
            WeightsError: see `WeightSender.stage` and `WeightSender.switch`.
        """
        if not self._is_staged:
            self.stage_weights()
        self._is_staged = False
        self._sender.switch(paused)

    def join(self) -> None:
        """Have the workers join again, after an engine was started or replaced. Raises WeightsError as at first."""
        self._sender.join()

    def shutdown(self) -> None:
        """Free everything; the engines keep what they have."""
        self._sender.close()
