"""The object that TRL's trainer takes for its weight transfer, with workers of plain tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_engines import PlainEngines, PlainWorker

from starling.common.errors import WeightsError
from starling.weightsync.vllm.backend.sender import SenderOptions
from starling.weightsync.vllm.backend.trl import StarlingWeightTransfer


class PausedEngines(PlainEngines):
    """Plain engines that can be paused."""

    def wait_until_ready(self, timeout_s: float) -> None:
        """Answer at once."""
        self.calls.append("ready")

    def pause(self) -> None:
        """Pause generation."""
        self.calls.append("pause")

    def resume(self) -> None:
        """Go on."""
        self.calls.append("resume")


def test_pause_is_deferred_until_all_workers_have_pulled() -> None:
    model = torch.nn.Linear(16, 16)
    worker = PlainWorker("worker 0", {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()})
    engines = PausedEngines(worker)
    transfer = StarlingWeightTransfer(engines, SenderOptions(transport="tcp"))
    transfer.init_weight_transfer()
    for _ in range(2):
        engines.calls.clear()
        torch.nn.init.normal_(model.weight)
        transfer.pause()
        assert not engines.calls
        transfer.send_weights((name, parameter.detach()) for name, parameter in model.named_parameters())
        transfer.resume()
        assert engines.calls[-5:] == ["pause", "start", "update", "finish", "resume"]
        assert torch.equal(worker.tensors["weight"], model.weight)
    assert engines.label == "2"
    transfer.destroy()
    engines.close()


def test_engine_that_goes_is_told_before_the_others_pause() -> None:
    model = torch.nn.Linear(16, 16)
    workers = [
        PlainWorker(f"worker {number}", {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()})
        for number in range(2)
    ]
    engines = PausedEngines(*workers)
    transfer = StarlingWeightTransfer(engines, SenderOptions(transport="tcp"))
    transfer.init_weight_transfer()
    transfer.send_weights(iter(model.state_dict().items()))
    engines.calls.clear()
    assert workers[0].weights is not None
    pull = workers[0].weights.pull

    def pull_and_go(*arguments: Any, **named: Any) -> Any:
        workers[0].session._link.close()  # type: ignore[union-attr]
        return pull(*arguments, **named)

    workers[0].weights.pull = pull_and_go  # type: ignore[method-assign]
    with pytest.raises(WeightsError, match=r"^Version 2 was not adopted: worker 0 has gone: The connection has ended"):
        transfer.send_weights(iter(model.state_dict().items()))
    assert not engines.calls, "the others generate"
    transfer.destroy()
    engines.close()
