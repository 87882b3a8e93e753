"""The other side of `train_step.py`: training steps of TRL's trainers, run by the Python of TRL's own environment.

    python train_step_trl.py FOLDER

Reads one JSON object per line, {"kind": "sft" | "grpo" | "grpo_long_prompts", "size": sequences of a microbatch},
makes one optimizer step of all sequences, and answers with {"seconds": ..., "loss": ..., "grad_norm": ...}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

SHARED: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch_fused",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "max_steps": 1000,
}


def tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that trainers want to have; the sequences are tokens already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"w{index}": index for index in range(vocab_size)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w0", unk_token="w0"
    )


class Sft:
    """SFT steps, through `transformers.Trainer.training_step` and TRL's collator."""

    def __init__(self, folder: Path, work: dict[str, Any]) -> None:
        rows = [
            {
                "input_ids": one["prompt"] + one["response"],
                "labels": [-100] * len(one["prompt"]) + one["response"],
            }
            for one in work["sft"]
        ]
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        self.trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=str(folder / "sft"),
                learning_rate=work["learning_rate"],
                max_length=None,
                dataset_kwargs={"skip_prepare_dataset": True},
                **SHARED,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(model.config.vocab_size),
        )
        self.rows = rows
        self.num_tokens = sum(len(one["response"]) for one in work["sft"])

    def microbatches(self, size: int) -> list[dict[str, Any]]:
        """Return padded microbatches, made by TRL's collator of sequences sorted by length."""
        ordered = sorted(self.rows, key=lambda row: len(row["input_ids"]))
        return [self.trainer.data_collator(ordered[start : start + size]) for start in range(0, len(ordered), size)]

    def loss(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Compute one microbatch's part of the mean over all response tokens."""
        return self.trainer.compute_loss(self.trainer.model, dict(inputs), num_items_in_batch=self.num_tokens)


class Grpo:
    """GRPO steps, through `GRPOTrainer._compute_loss` on samples that are there already."""

    def __init__(self, folder: Path, work: dict[str, Any], kind: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        self.trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=str(folder / kind),
                learning_rate=work["learning_rate"],
                loss_type="dapo",
                epsilon=work["clip"],
                beta=0.0,
                num_generations=2,
                per_device_train_batch_size=2,
                **SHARED,
            ),
            train_dataset=Dataset.from_list([{"prompt": "w1"}] * 4),
            processing_class=tokenizer(model.config.vocab_size),
        )
        self.trainer.current_gradient_accumulation_steps = 1
        self.rows = [
            (one["prompt"], ids, advantage, logprobs)
            for one in work[kind]
            for ids, advantage, logprobs in zip(one["completions"], one["advantages"], one["logprobs"], strict=True)
        ]
        self.num_tokens = sum(len(row[1]) for row in self.rows)

    def microbatches(self, size: int) -> list[dict[str, Any]]:
        """Return padded microbatches of sequences sorted by length: prompts to the left, completions to the right."""
        ordered = sorted(self.rows, key=lambda row: len(row[0]) + len(row[1]))
        return [self._padded(ordered[start : start + size]) for start in range(0, len(ordered), size)]

    def _padded(self, rows: list[Any]) -> dict[str, Any]:
        prompt, completion = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)

        def table(values: list[list[Any]], width: int, dtype: torch.dtype, *, left: bool = False) -> torch.Tensor:
            filled = torch.zeros(len(values), width, dtype=dtype)
            for line, row in zip(filled, values, strict=True):
                line[width - len(row) if left else 0 : width if left else len(row)] = torch.tensor(row, dtype=dtype)
            return filled

        return {
            "prompt_ids": table([row[0] for row in rows], prompt, torch.int64, left=True),
            "prompt_mask": table([[1] * len(row[0]) for row in rows], prompt, torch.int64, left=True),
            "completion_ids": table([row[1] for row in rows], completion, torch.int64),
            "completion_mask": table([[1] * len(row[1]) for row in rows], completion, torch.int64),
            "old_per_token_logps": table([row[3] for row in rows], completion, torch.float32),
            "advantages": torch.tensor([row[2] for row in rows], dtype=torch.float32),
            "num_items_in_batch": torch.tensor(float(self.num_tokens)),
        }

    def loss(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Compute one microbatch's part of the mean over all completion tokens."""
        return self.trainer._compute_loss(self.trainer.model, inputs)


def step(side: Sft | Grpo, size: int) -> dict[str, float]:
    """Make one optimizer step."""
    trainer, batches = side.trainer, side.microbatches(size)
    if trainer.optimizer is None:
        trainer.create_optimizer()
    trainer.model.train()
    begin = time.process_time()
    trainer.optimizer.zero_grad()
    total = 0.0
    for inputs in batches:
        loss = side.loss(inputs)
        loss.backward()
        total += float(loss.detach())
    norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    return {"seconds": time.process_time() - begin, "loss": total, "grad_norm": float(norm)}


def main() -> None:
    """Answer until nothing more is asked."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    work = json.loads((folder / "work.json").read_text())
    sides = {"sft": Sft(folder, work), **{kind: Grpo(folder, work, kind) for kind in ("grpo", "grpo_long_prompts")}}
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(step(sides[asked["kind"]], asked["size"])), flush=True)


if __name__ == "__main__":
    main()
