"""Peak memory of log-probabilities and of a training step, compared with all logits at once, and the time it costs.

    OMP_NUM_THREADS=1 python bench/memory.py [--quick]

Memory is counted by tensors and therefore exact: the most bytes that exist together after any operation, of what the
computation itself makes. Time is processor time of the one thread, both sides by turns; a figure is the median of the
ratios.

The step of log-probabilities is the output layer, the log-probabilities and the entropy, and their backward pass, in
bf16. Its peak does not count the gradients that it returns. Beside it: all logits, in float32, through
`torch.log_softmax` and autograd. The training step is forward and backward of a Qwen3 over one microbatch.

The formula is the one of `starling run --dry-run`, compared with all tensors of a policy: a supervised step on one
sequence with all blocks recomputed, from the loading of its weights to the update. A figure is how far one is from the
other.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from figure import machine, print_figure, progress, rounded, versions
from torch import Tensor

from starling.policy.settings.memory import MemorySettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.budget import estimate_memory
from starling.policy.train.data.examples import SftExample
from starling.policy.train.data.packing import MicrobatchInputs, PromptBlock, pack_sequences, to_tensors
from starling.policy.train.loss.logprobs import head_logprobs, token_logprobs
from starling.policy.train.memory.peak import PeakMemory
from starling.policy.train.memory.setup import apply_memory_settings
from starling.policy.train.model.lm_head import LmHead, LogitTransform, trained_logits
from starling.policy.train.sft import SftTrainer

BENCH = "memory"
GOAL = 1.3
MIB = 1 << 20
LENGTHS = [(4096, 32), (8192, 32), (16384, 32), (32768, 32), (131072, 16)]
"""Tokens of the sequences for which the formula is checked, and the size of the model's head."""
VARIANTS: dict[str, dict[str, Any]] = {
    "chunks": {},
    "chunks, selective checkpointing": {"checkpointing": "selective"},
    "chunks, full checkpointing of every second block": {"checkpointing": "full", "checkpoint_every": 2},
    "chunks, full checkpointing": {"checkpointing": "full"},
}


def plain_logprobs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropy of all tokens at once."""
    logs = torch.log_softmax(logits.float(), dim=-1)
    with torch.no_grad():
        entropy = -(logs.exp() * logs).sum(dim=-1)
    return logs.gather(-1, targets[:, None]).squeeze(-1), entropy


def seconds(work: Callable[[], Any]) -> float:
    """Return the processor time that the calling thread spends on `work`."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def peak(work: Callable[[], Any]) -> int:
    """Return the most bytes that `work` holds at a time, what it returns included."""
    with PeakMemory() as memory:
        work()
    return memory.peak_bytes


def by_turns(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the processor times of each, measured by turns after one turn that does not count."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            spent = seconds(work)
            if number:
                times[name].append(spent)
    return times


def bench_logprobs(num_tokens: int, vocabulary: int, rounds: int) -> None:
    """Print the figures of the log-probabilities alone."""
    progress("log-probabilities ...")
    generator = torch.Generator().manual_seed(0)
    hidden_size, chunk_tokens = 256, num_tokens // 8
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).bfloat16().requires_grad_()
    weight = (0.1 * torch.randn(vocabulary, hidden_size, generator=generator)).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (num_tokens,), generator=generator)

    def chunked() -> Tensor:
        return head_logprobs(hidden, LmHead(weight, None, LogitTransform()), targets, chunk_tokens=chunk_tokens)[0]

    def plain() -> Tensor:
        return plain_logprobs(torch.nn.functional.linear(hidden, weight), targets)[0]

    def both(forward: Callable[[], Tensor]) -> Any:
        return torch.autograd.grad(forward().sum(), (hidden, weight))

    def peak_but_gradients(forward: Callable[[], Tensor]) -> int:
        # The gradients are there at the peak of the backward pass only.
        return max(peak(forward), peak(lambda: both(forward)) - hidden.nbytes - weight.nbytes)

    chunk_bytes = 2 * chunk_tokens * vocabulary
    ours, beside = peak_but_gradients(chunked), peak_but_gradients(plain)
    times = by_turns({"chunked": lambda: both(chunked), "plain": lambda: both(plain)}, rounds)
    detail = {
        "num_tokens": num_tokens,
        "vocabulary": vocabulary,
        "hidden_size": hidden_size,
        "chunk_tokens": chunk_tokens,
        "chunk_mib": rounded(chunk_bytes / MIB),
        "peak_mib": rounded(ours / MIB),
        "peak_plain_mib": rounded(beside / MIB),
        "chunked_s": rounded(median(times["chunked"])),
        "plain_s": rounded(median(times["plain"])),
        "rounds": rounds,
        "machine": machine(),
        "versions": versions("torch"),
    }
    show = {"unit": "ratio", "better": "lower", "detail": detail}
    print_figure(
        BENCH, "peak of the log-probabilities over a bf16 chunk of logits", ours / chunk_bytes, goal=GOAL, **show
    )
    print_figure(
        BENCH, "peak of the log-probabilities over that of all logits at once", ours / beside, goal=None, **show
    )
    ratios = [one / other for one, other in zip(times["chunked"], times["plain"], strict=True)]
    print_figure(
        BENCH, "time of the log-probabilities over that of all logits at once", median(ratios), goal=None, **show
    )


def make_model(num_layers: int) -> Any:
    """Make a Qwen3 in bf16."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=16384,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def make_inputs(num_tokens: int) -> MicrobatchInputs:
    """Sequences of 32 prompt tokens and 96 trained ones, packed."""
    generator = np.random.default_rng(0)
    token_ids = generator.integers(16384, size=num_tokens).astype(np.int32)
    prompted = [
        PromptBlock(generator.integers(16384, size=32).astype(np.int32), ((start, start + 96),))
        for start in range(0, num_tokens, 96)
    ]
    batch = pack_sequences(prompted, token_ids, 10**6)
    (microbatch,) = batch.plan
    return to_tensors(batch, microbatch)


def bench_step(num_tokens: int, num_layers: int, rounds: int) -> None:
    """Print the figures of a training step, for each way to make it."""
    progress("training step ...")
    inputs, original = make_inputs(num_tokens), make_model(num_layers)
    chunk_tokens = num_tokens // 8

    def plain() -> None:
        logprobs, _ = plain_logprobs(trained_logits(original, inputs), inputs.targets)
        logprobs.sum().backward()
        original.zero_grad(set_to_none=True)

    works: dict[str, Callable[[], None]] = {"plain": plain}
    for name, changes in VARIANTS.items():
        model = copy.deepcopy(original)
        apply_memory_settings(model, MemorySettings(**changes))

        def step(model: Any = model) -> None:
            logprobs, _ = token_logprobs(model, inputs, chunk_tokens=chunk_tokens)
            logprobs.sum().backward()
            model.zero_grad(set_to_none=True)

        works[name] = step
    peaks = {name: peak(work) for name, work in works.items()}
    times = by_turns(works, rounds)
    for name in VARIANTS:
        ratios = [one / other for one, other in zip(times[name], times["plain"], strict=True)]
        detail = {
            "num_tokens": num_tokens,
            "num_layers": num_layers,
            "chunk_tokens": chunk_tokens,
            "gradients_mib": rounded(sum(parameter.nbytes for parameter in original.parameters()) / MIB),
            "peak_mib": rounded(peaks[name] / MIB),
            "peak_plain_mib": rounded(peaks["plain"] / MIB),
            "step_s": rounded(median(times[name])),
            "step_plain_s": rounded(median(times["plain"])),
            "rounds": rounds,
            "machine": machine(),
            "versions": versions("torch", "transformers"),
        }
        show = {"unit": "ratio", "goal": None, "better": "lower", "detail": detail}
        print_figure(
            BENCH, f"peak of a training step over all logits at once: {name}", peaks[name] / peaks["plain"], **show
        )
        print_figure(BENCH, f"time of a training step over all logits at once: {name}", median(ratios), **show)


def bench_formula(num_tokens: int, head_size: int) -> None:
    """Print how far the formula is from the peak of a step on one sequence."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    progress(f"formula, {num_tokens} tokens ...")
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=2 * head_size,
        intermediate_size=6 * head_size,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=head_size,
        max_position_embeddings=2 * num_tokens,
    )
    memory_settings = MemorySettings(checkpointing="full")
    settings = PolicySettings(tokens_per_microbatch=num_tokens, share_prompts=False, memory=memory_settings)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    expected = estimate_memory(outline, settings, "sft", torch.device("cpu"), num_tokens)
    tokens = np.random.default_rng(0).integers(2048, size=num_tokens + 1).astype(np.int32)
    with PeakMemory() as memory:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        apply_memory_settings(model, settings.memory)
        trainer = SftTrainer(model, settings, total_steps=1)
        memory.restart()
        trainer.step([SftExample(tokens[:1], tokens[1:])])
    detail = {
        "num_tokens": num_tokens,
        "head_size": head_size,
        "peak_mib": rounded(memory.peak_bytes / MIB),
        "formula_mib": rounded(expected.peak / MIB),
        "machine": machine(),
        "versions": versions("torch", "transformers"),
    }
    print_figure(
        BENCH,
        f"distance of the formula from the peak of a step, {num_tokens} tokens",
        abs(expected.peak / memory.peak_bytes - 1.0),
        unit="ratio",
        goal=0.1,
        better="lower",
        detail=detail,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the tokens, a third of the blocks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench_logprobs(*((512, 16384, 5) if arguments.quick else (2048, 32768, 5)))
    bench_step(*((768, 4, 5) if arguments.quick else (3072, 12, 5)))
    for num_tokens, head_size in [(4096, 32)] if arguments.quick else LENGTHS:
        bench_formula(num_tokens, head_size)


if __name__ == "__main__":
    main()
