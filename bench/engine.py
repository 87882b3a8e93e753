"""Tokens per second of the embedded engine beside transformers' `model.generate`, at 1, 8 and 64 rows.

    OMP_NUM_THREADS=1 python bench/engine.py [--quick] [--rows 1,8,64]

Both sides sample the same groups at temperature 1: prompts of ragged lengths, several completions of each, which end at
any of some tokens, so that their lengths are ragged, too. The engine runs at most so many rows at a time and returns
log-probabilities; `generate` gets batches of sequences sorted by the length of their prompts, padded on the left. Its
batch size and cache are those that are fastest in a trial before. The sides alternate in one run; time is processor
time of one thread, and a token counts if it belongs to a completion. A figure is the median of the ratios.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from figure import machine, print_figure, progress, rounded, versions
from transformers import AutoConfig, AutoModelForCausalLM

from starling.common.wire.messages import Sampling
from starling.rollout.engine.base import GroupRequest, GroupResult
from starling.rollout.engine.embedded.engine import TransformersEngine

VOCABULARY: Final = 8192
PAD: Final = 0
GOALS: Final = {64: 2.0}
"""Least ratio over `generate`, by rows."""


@dataclass(frozen=True)
class Scale:
    """Size of the model and of a measurement."""

    num_layers: int
    hidden_size: int
    mean_tokens: int
    """Of a completion; the longest has four times as many."""
    rounds: int


FULL = Scale(num_layers=8, hidden_size=512, mean_tokens=96, rounds=5)
QUICK = Scale(num_layers=4, hidden_size=128, mean_tokens=32, rounds=3)


@dataclass(frozen=True)
class Load:
    """Groups to generate."""

    prompts: list[list[int]]
    group_size: int
    max_tokens: int
    stops: tuple[int, ...]
    seed: int


def load_of(rows: int, scale: Scale, seed: int) -> Load:
    """Return two batches of completions, whose prompts have 16 to 512 tokens."""
    draw = np.random.default_rng(seed)
    group_size = min(8, rows)
    lengths = np.clip(draw.lognormal(4.5, 0.8, 2 * rows // group_size), 16, 512).astype(int)
    stops = tuple(range(1, 1 + VOCABULARY // scale.mean_tokens))
    prompts = [draw.integers(len(stops) + 1, VOCABULARY, length).tolist() for length in lengths]
    return Load(prompts, group_size, 4 * scale.mean_tokens, stops, seed)


def make_model(scale: Scale) -> Any:
    """Return a random model."""
    heads = scale.hidden_size // 64
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCABULARY,
        hidden_size=scale.hidden_size,
        intermediate_size=3 * scale.hidden_size,
        num_hidden_layers=scale.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


class EngineSide:
    """The embedded engine."""

    def __init__(self, scale: Scale, rows: int) -> None:
        """Create it."""
        self._engine = TransformersEngine(make_model(scale), eos_token_ids=(), max_rows=rows)
        self.cache_shares: list[float] = []
        """Bytes of the KV cache over those of the rows' tokens, each prompt counted for each row; every 16th step."""
        config = self._engine._model.config
        self._token_bytes = 8 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim

    def run(self, load: Load) -> int:
        """Generate the groups; return the number of tokens."""
        engine = self._engine
        for number, prompt in enumerate(load.prompts):
            sampling = Sampling(max_tokens=load.max_tokens, stop_token_ids=load.stops, seed=load.seed)
            engine.add(GroupRequest(str(number), prompt, load.group_size, sampling))
        num_tokens = num_steps = 0
        while engine.num_running or engine.num_waiting:
            for ended in engine.step():
                assert isinstance(ended, GroupResult), ended
                num_tokens += sum(len(one.token_ids) for one in ended.completions)
            num_steps += 1
            if num_steps % 16 == 0 and engine.num_running:
                held = int(engine._rows.table["position"].sum()) * self._token_bytes
                self.cache_shares.append(engine.cache_size_bytes / held)
        return num_tokens


class GenerateSide:
    """`model.generate` in batches."""

    def __init__(self, scale: Scale, batch_size: int, cache: str) -> None:
        """Create it, with a cache by its name in transformers."""
        self._model, self._batch_size, self._cache = make_model(scale), batch_size, cache

    def run(self, load: Load) -> int:
        """Generate the groups; return the number of tokens."""
        torch.manual_seed(load.seed)
        sequences = sorted((prompt for prompt in load.prompts for _ in range(load.group_size)), key=len)
        return sum(
            self._batch(sequences[begin : begin + self._batch_size], load)
            for begin in range(0, len(sequences), self._batch_size)
        )

    def _batch(self, prompts: Sequence[list[int]], load: Load) -> int:
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=(ids != PAD).long(),
                do_sample=True,
                top_k=0,
                max_new_tokens=load.max_tokens,
                eos_token_id=list(load.stops),
                pad_token_id=PAD,
                cache_implementation=self._cache,
            )
        # A token counts if no stop token is before it.
        stops = torch.isin(output[:, longest:], torch.tensor(load.stops)).long()
        return int((stops.cumsum(1) - stops == 0).sum())


def rate(work: Callable[[], int]) -> float:
    """Return the tokens per second of `work`."""
    begin = time.thread_time()
    num_tokens = work()
    return num_tokens / (time.thread_time() - begin)


def best_generate(scale: Scale, rows: int) -> tuple[GenerateSide, dict[str, float]]:
    """Return the fastest way to call `generate`, and the rate of each."""
    load, sides, rates = load_of(rows, scale, 1000), {}, {}
    for batch_size in sorted({max(1, rows // 2), rows, 2 * rows}):
        for cache in ("dynamic", "static"):
            name = f"{cache}, {batch_size} rows"
            sides[name] = GenerateSide(scale, batch_size, cache)
            rates[name] = rounded(rate(lambda side=sides[name]: side.run(load)))  # type: ignore[misc]
            progress(f"generate with {name}: {rates[name]} tokens/s")
    best = max(rates, key=lambda name: rates[name])
    return sides[best], rates


def measure(rows: int, scale: Scale) -> None:
    """Measure at `rows` rows, and print."""
    engine = EngineSide(scale, rows)
    generate, trials = best_generate(scale, rows)
    rates: dict[str, list[float]] = {"engine": [], "generate": []}
    for number in range(scale.rounds + 1):
        load = load_of(rows, scale, number)
        for name, side in (("engine", engine), ("generate", generate)):
            found = rate(lambda side=side: side.run(load))  # type: ignore[misc]  # noqa: B023
            if number:  # the first round warms up
                rates[name].append(found)
        progress(
            f"{rows} rows, round {number} of {scale.rounds}: { ({name: own[-1:] for name, own in rates.items()}) }"
        )
    detail = {
        "tokens_per_s": {name: rounded(median(own)) for name, own in rates.items()},
        "generate_trials": trials,
        "cache_bytes_over_bytes_of_tokens": rounded(median(engine.cache_shares)),
        "layers": scale.num_layers,
        "hidden_size": scale.hidden_size,
        "mean_tokens": scale.mean_tokens,
        "rounds": scale.rounds,
        **machine(),
        "versions": versions("torch", "transformers"),
    }
    ratio = median(ours / theirs for ours, theirs in zip(rates["engine"], rates["generate"], strict=True))
    name = f"tokens_per_s_over_generate_{rows}_rows"
    print_figure("engine", name, ratio, unit="ratio", goal=GOALS.get(rows), better="higher", detail=detail)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, shorter completions, fewer rounds")
    parser.add_argument("--rows", default="1,8,64", help="rows of the engine, with commas between")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for rows in arguments.rows.split(","):
        measure(int(rows), QUICK if arguments.quick else FULL)


if __name__ == "__main__":
    main()
