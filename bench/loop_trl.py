"""One run of TRL's GRPOTrainer for `loop.py`, in the Python environment of TRL.

    python loop_trl.py SETTINGS.json

Writes one JSON object per line to the settings' `out`: {"step": 0, "time": ...} when the first step begins, then
{"step": s, "time": ..., "reward": ...} when step s is done, times in seconds since 1970.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from loop_reward import score


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Writes a line when training begins and after each optimizer step."""

    def __init__(self, path: str) -> None:
        self._file = Path(path)
        self.reward = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Take the time before the first batch is generated."""
        self._write(0, None)

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """Take the time after an optimizer step."""
        self._write(state.global_step, self.reward)

    def _write(self, step: int, reward: float | None) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), "reward": reward}) + "\n")


def main() -> None:
    """Train with the settings of the command line."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["num_threads"])
    rows = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    recorder = Recorder(settings["out"])

    def reward(prompts: list[str], completions: list[str], reference: list[str], **_: Any) -> list[float]:
        rewards = [score(*given, {}) for given in zip(completions, reference, prompts, strict=True)]
        recorder.reward = sum(rewards) / len(rewards)
        return rewards

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments(settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[recorder],
    )
    trainer.train()


def arguments(settings: dict[str, Any]) -> GRPOConfig:
    """Return TRL's arguments for the same arithmetic as Starling's, without costly extras."""
    return GRPOConfig(
        output_dir=settings["folder"],
        seed=settings["seed"],
        # The machine: no accelerator, single precision, nothing recomputed, nothing reported or saved.
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        # The arithmetic: all completions of a step in one forward pass and one update.
        max_steps=settings["num_steps"],
        per_device_train_batch_size=settings["prompts_per_step"] * settings["group_size"],
        gradient_accumulation_steps=1,
        num_generations=settings["group_size"],
        num_iterations=1,
        shuffle_dataset=False,
        # The sampling.
        max_completion_length=settings["max_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        # The loss: clipped ratio, mean over the tokens of the whole step, rewards scaled by the group's deviation.
        loss_type="dapo",
        epsilon=settings["clip"],
        beta=0.0,
        scale_rewards="group",
        # The optimizer.
        optim="adamw_torch_fused",
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=settings["betas"][0],
        adam_beta2=settings["betas"][1],
        adam_epsilon=settings["eps"],
        weight_decay=0.0,
        max_grad_norm=settings["max_grad_norm"],
    )


if __name__ == "__main__":
    main()
