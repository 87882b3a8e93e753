"""The object that TRL's trainer takes for its weight transfer, with workers of plain tensors."""

from __future__ import annotations

import torch
from plain_engines import PlainEngines, PlainWorker

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
