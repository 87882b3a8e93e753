"""Training on a GPU by attention backend: tokens per second and share of the device's peak (MFU).

    python bench/attention_gpu.py [--quick]

Supervised steps of a decoder of 0.6 billion parameters (28 blocks, hidden size 1,024, 16 heads of 128 with 8 key heads,
bfloat16, random weights, full checkpointing) on rows of 8,192 and 32,768 tokens: ragged documents, and a prompt of
half the row with 16 completions. One step before those that are timed compiles and fills caches; a figure is the median
of five. Without a CUDA device each figure is null. `--quick` is the same on two blocks and rows of 512 tokens,
on whatever device there is, to see that it works.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import numpy as np
import torch
from figure import machine, print_figure, progress, rounded, versions

from starling.common.errors import ConfigError
from starling.policy.settings.memory import MemorySettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.examples import SftExample
from starling.policy.train.metrics.flops import peak_of, utilisation
from starling.policy.train.sft import SftTrainer

BENCH = "attention_gpu"
MODEL: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
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
    "head_dim": 16,
}
NUM_COMPLETIONS = 16
ROUNDS = 5


def documents(num_tokens: int, vocab_size: int) -> list[SftExample]:
    """Return documents of ragged lengths, `num_tokens` together."""
    generator = np.random.default_rng(0)
    cuts = np.sort(generator.choice(np.arange(8, num_tokens - 8, 8), size=num_tokens // 1024 + 1, replace=False))
    lengths = np.diff(cuts, prepend=0, append=num_tokens).tolist()
    drawn = [generator.integers(vocab_size, size=length + 1).astype(np.int32) for length in lengths]
    return [SftExample(tokens[:1], tokens[1:]) for tokens in drawn]


def group(num_tokens: int, vocab_size: int) -> list[SftExample]:
    """Return completions of a prompt of half the row."""
    generator = np.random.default_rng(0)
    prompt = generator.integers(vocab_size, size=num_tokens // 2).astype(np.int32)
    size = num_tokens // 2 // NUM_COMPLETIONS
    return [
        SftExample(prompt, generator.integers(vocab_size, size=size).astype(np.int32)) for _ in range(NUM_COMPLETIONS)
    ]


ROWS = {"documents": documents, "a prompt with 16 completions": group}


def measure(model: dict[str, Any], num_tokens: int, backend: Any, device: str) -> None:
    """Print tokens per second and MFU of both kinds of row."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    built = AutoModelForCausalLM.from_config(Qwen3Config(**model), dtype=dtype).to(device)
    settings = PolicySettings(
        attention=backend, tokens_per_microbatch=num_tokens, memory=MemorySettings(checkpointing="full")
    )
    trainer = SftTrainer(built, settings, total_steps=1000)
    peak = peak_of(torch.device(device))
    for kind, rows in ROWS.items():
        progress(f"{backend}, {num_tokens} tokens, {kind} ...")
        examples = rows(num_tokens, model["vocab_size"])
        seconds = []
        for number in range(ROUNDS + 1):
            begin = time.perf_counter()
            found = trainer.step(examples)
            if device == "cuda":
                torch.cuda.synchronize()
            if number:
                seconds.append(time.perf_counter() - begin)
        used = utilisation(found["model_flops"], median(seconds), peak)
        detail = {
            "seconds": [rounded(one) for one in seconds],
            "unshared_tokens": sum(len(one.prompt_ids) + len(one.response_ids) for one in examples),
            "shared_token_fraction": rounded(found["shared_token_fraction"]),
            "tflops": rounded(used["tflops"]),
            "device": torch.cuda.get_device_name() if device == "cuda" else device,
            **machine(),
            "versions": versions("torch", "transformers"),
        }
        name = f"{backend}, {num_tokens} tokens, {kind}"
        show: dict[str, Any] = {"goal": None, "better": "higher", "detail": detail}
        print_figure(BENCH, f"tokens per second: {name}", num_tokens / median(seconds), unit="tokens/s", **show)
        print_figure(BENCH, f"MFU: {name}", used.get("mfu"), unit="ratio", **show)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a decoder of two blocks and rows of 512 tokens")
    quick: bool = parser.parse_args().quick
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, sizes = (QUICK, [512]) if quick else (MODEL, [8192, 32768])
    for num_tokens in sizes:
        for backend in ("segments", "varlen", "flex"):
            reason = None if quick or device == "cuda" else "there is no CUDA device"
            if reason is None:
                try:
                    measure(model, num_tokens, backend, device)
                except ConfigError as error:
                    reason = str(error)
            if reason is not None:
                for figure, unit in (("tokens per second", "tokens/s"), ("MFU", "ratio")):
                    name = f"{figure}: {backend}, {num_tokens} tokens"
                    detail = {"reason": reason}
                    print_figure(BENCH, name, None, unit=unit, goal=None, better="higher", detail=detail)


if __name__ == "__main__":
    main()
