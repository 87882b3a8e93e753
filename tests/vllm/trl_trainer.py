"""Weight synchronisations of TRL's `AsyncGRPOTrainer`, in TRL's environment.

    python trl_trainer.py MODEL URL FOLDER

TRL's training step needs a kernel for GPUs. So the trainer is made, and does not train: its own callback sends the
weights when training would begin, and its own `_sync_weight` once more after they have changed. The last weights are
saved in FOLDER.
"""

import queue
import sys
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from starling.weightsync.vllm.backend.trl import StarlingWeightTransfer


class NoRollouts:
    """Generates nothing."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.versions: list[int] = []

    def start(self) -> None:
        """Begin to generate."""

    def stop(self) -> None:
        """End."""

    def update_model_version(self, version: int) -> None:
        """Take the number of a version."""
        self.versions.append(version)


def main() -> None:
    """Send two versions."""
    model, url, folder = sys.argv[1:]
    torch.cuda.get_device_name = lambda *_: "none"  # asked for a metric
    arguments = AsyncGRPOConfig(
        output_dir=folder, vllm_server_base_url=url, use_cpu=True, bf16=False, dtype="float32", report_to="none"
    )
    transfer, rollouts = StarlingWeightTransfer(url), NoRollouts()
    trainer = AsyncGRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "a"}]),
        processing_class=AutoTokenizer.from_pretrained(model),
        rollout_worker=rollouts,
        weight_transfer=transfer,
    )
    trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    trainer._sync_weight()
    assert rollouts.versions == [1, 2], rollouts.versions
    assert transfer.report is not None
    torch.save(trainer.model.state_dict(), f"{folder}/trained.pt")
    transfer.destroy()


main()
