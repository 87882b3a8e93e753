"""Weight transfer for TRL's `AsyncGRPOTrainer`, given to it as `weight_transfer`. Needs neither TRL nor vLLM itself.

The trainer calls `pause`, `send_weights` and `resume` for each version, on its main process. Here `pause` is deferred:
`send_weights` has all workers pull while vLLM generates, and pauses it for the switch only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from starling.common.errors import WeightsError
from starling.weightsync.vllm.backend.clients import HttpEngines
from starling.weightsync.vllm.backend.sender import EngineClient, SenderOptions, SendReport, WeightSender


class PausableEngines(EngineClient, Protocol):
    """A client that can also pause generation, as `HttpEngines` can."""

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until all engines answer."""

    def pause(self) -> None:
        """Pause generation. Where it fails, no engine may stay paused."""

    def resume(self) -> None:
        """Go on after `pause`."""


class StarlingWeightTransfer:
    """Sends the weights of TRL's trainer to servers of vLLM.

    Args:
        engines: the URLs of the servers, or their client.
        options: how weights are offered; by default as `SenderOptions` says.
        start_timeout_s: how long the servers may take to start.
    """

    def __init__(
        self,
        engines: str | Sequence[str] | PausableEngines,
        options: SenderOptions | None = None,
        *,
        start_timeout_s: float = 600.0,
    ) -> None:
        self._options = options or SenderOptions()
        self._engines: PausableEngines = (
            HttpEngines(engines, self._options.deadline_s) if isinstance(engines, str | Sequence) else engines
        )
        self._start_timeout_s = start_timeout_s
        self._sender: WeightSender | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def report(self) -> SendReport | None:
        """Times and sizes of the newest version."""
        return None if self._sender is None else self._sender.report

    def init_weight_transfer(self) -> None:
        """Wait until the servers answer. Raises WeightsError if they do not within `start_timeout_s`."""
        self._engines.wait_until_ready(self._start_timeout_s)

    def pause(self) -> None:
        """Do nothing: `send_weights` pauses generation when it has to."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Have all workers pull what the trainer yields, then pause generation and switch.

        Raises:
            WeightsError: see `WeightSender.stage` and `WeightSender.switch`; or an engine has gone meanwhile. Unless
                the switch itself fails, all others generate with the weights that they have.
        """
        self._keep(iterator)
        if self._sender is None:
            # TRL's other ranks do not call here: they only help to gather what this one sends.
            self._sender = WeightSender(lambda: self._tensors, self._engines, options=self._options, alone=True)
        version = self._sender.stage()
        lost = self._sender.report.lost if self._sender.report is not None else {}
        for name, why in lost.items():
            raise WeightsError(f"Version {version} was not adopted: {name} has gone: {why}")
        self._engines.pause()
        self._sender.switch()

    def resume(self) -> None:
        """Let vLLM generate again."""
        self._engines.resume()

    def destroy(self) -> None:
        """Free everything."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _keep(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Keep what the trainer yields until it is published: parameters as they are, gathered tensors as copies."""
        gathers = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        for name, tensor in iterator:
            if not gathers:
                self._tensors[name] = tensor
            elif name in self._tensors:
                self._tensors[name].copy_(tensor)
            else:
                self._tensors[name] = tensor.cpu().clone()
