"""Training on a GPU by precision of the matrix products: tokens per second, and peak memory.

    python bench/precision_gpu.py [--quick]

Supervised steps of a decoder of 2.2 billion parameters (10 blocks, hidden size 4,096, as in Qwen3-8B, bfloat16, random
weights, full checkpointing) on ragged documents in a row of 16,384 tokens, with and without compiled blocks. One step
before those that are timed compiles and fills caches; a figure is the median of five, over that of bfloat16 with the
same compilation. Without a CUDA device each figure is null. `--quick` is the same on two small blocks and a row of 512
tokens, not compiled, on whatever device there is, to see that it works.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median
from typing import Any

import structlog
import torch
from attention_gpu import documents
from figure import machine, print_figure, progress, rounded, versions

from starling.common.errors import ConfigError
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.memory.setup import apply_memory_settings
from starling.policy.train.precision.layers import use_precision
from starling.policy.train.sft import SftTrainer

BENCH = "precision_gpu"
MODEL: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 10,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
}
QUICK: dict[str, Any] = MODEL | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
KINDS = ("none", "fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp", "mxfp8", "mxfp4")
ROUNDS = 5


def measure(model: dict[str, Any], num_tokens: int, kind: str, device: str, *, compiled: bool) -> tuple[float, float]:
    """Return the seconds of a step, and the peak of the device's memory in bytes (0 on a CPU)."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    built = AutoModelForCausalLM.from_config(Qwen3Config(**model), dtype=dtype).eval().to(device)
    settings = PolicySettings.model_validate(
        {
            "tokens_per_microbatch": num_tokens,
            "precision": {"kind": kind},
            "memory": {"checkpointing": "full", "compile": compiled},
        }
    )
    apply_memory_settings(built, settings.memory)
    use_precision(built, settings)
    trainer = SftTrainer(built, settings, total_steps=1000)
    examples, seconds = documents(num_tokens, model["vocab_size"]), list[float]()
    for number in range(ROUNDS + 1):
        begin = time.perf_counter()
        trainer.step(examples)
        if device == "cuda":
            torch.cuda.synchronize()
        if number:
            seconds.append(time.perf_counter() - begin)
        elif device == "cuda":
            torch.cuda.reset_peak_memory_stats()
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return median(seconds), float(peak)


def show(kind: str, mode: str, figure: str, value: float | None, detail: dict[str, Any], better: str) -> None:
    """Print a figure."""
    print_figure(
        BENCH, f"{figure} over bfloat16: {kind}, {mode}", value, unit="ratio", goal=None, better=better, detail=detail
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a decoder of two small blocks and a row of 512 tokens")
    quick: bool = parser.parse_args().quick
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, num_tokens = (QUICK, 512) if quick else (MODEL, 16384)
    for compiled in (False,) if quick else (False, True):
        mode, base = "compiled" if compiled else "not compiled", None
        for kind in KINDS:
            progress(f"{kind}, {mode} ...")
            reason = None if quick or device == "cuda" else "there is no CUDA device"
            found = None
            if reason is None:
                try:
                    found = measure(model, num_tokens, kind, device, compiled=compiled)
                except ConfigError as error:
                    reason = str(error)
            base = found if kind == "none" else base
            if kind == "none":
                continue
            if found is None or base is None:
                for figure, better in (("tokens per second", "higher"), ("peak memory", "lower")):
                    show(kind, mode, figure, None, {"reason": reason}, better)
                continue
            detail = {
                "seconds": [rounded(base[0]), rounded(found[0])],
                "peak_bytes": [base[1], found[1]],
                "num_tokens": num_tokens,
                "device": torch.cuda.get_device_name() if device == "cuda" else device,
                **machine(),
                "versions": versions("torch", "torchao", "transformers"),
            }
            show(kind, mode, "tokens per second", base[0] / found[0], detail, "higher")
            show(kind, mode, "peak memory", found[1] / base[1] if base[1] else None, detail, "lower")


if __name__ == "__main__":
    main()
