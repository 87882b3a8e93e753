"""Attention over packed rows: time and memory beside masks, one call per document, and transformers' packed path.

    OMP_NUM_THREADS=1 python bench/attention.py [--quick]

Forward and backward pass of one attention layer in single precision: 4 heads of 32, one thread. Time is processor
time, the sides by turns; a figure is the median of the ratios. Memory is counted by tensors, as in `memory.py`: the
most bytes that exist together, of what the computation makes.

- *Documents*: a row of ragged documents. The sides: ours, torch's causal attention for each document, a dense mask for
  the row, and transformers' packed path, which makes a mask from the positions. Masks are measured up to 16k tokens.
- *Trees*: 16 sequences of equal length whose common beginnings form a tree of depth 1 to 4, shared against each alone.
- *Peak*: a segment of 16k tokens over 32k of ancestors.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from figure import machine, print_figure, progress, rounded, versions
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from starling.algo.attention.forest import Forest
from starling.algo.attention.interface import attention
from starling.policy.train.memory.peak import PeakMemory

BENCH = "attention"
HEADS, SIZE = 4, 32
MASKED_TOKENS = 16384
"""Longest row for which masks are measured."""
MIB = 1 << 20
Work = Callable[[], Any]


def by_turns(works: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    """Return the processor times of each, measured by turns after one turn that does not count."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            begin = time.thread_time()
            work()
            if number:
                times[name].append(time.thread_time() - begin)
    return times


def peak(work: Work) -> int:
    """Return the most bytes that `work` holds at a time."""
    with PeakMemory() as memory:
        work()
    return memory.peak_bytes


def ratio(times: dict[str, list[float]], first: str, second: str) -> float:
    """Return the median of the ratios of two sides."""
    return median(one / other for one, other in zip(times[first], times[second], strict=True))


class Rows:
    """Random inputs of a row, and the gradient of its output."""

    def __init__(self, num_tokens: int) -> None:
        """Draw them."""
        generator = torch.Generator().manual_seed(num_tokens)
        drawn = [torch.randn(num_tokens, HEADS, SIZE, generator=generator) for _ in range(4)]
        self.inputs = [one.requires_grad_() for one in drawn[:3]]
        self.gradient = drawn[3]

    def both(self, forward: Callable[..., Tensor]) -> Work:
        """Return the forward and backward pass of `forward`, which takes query, key and value."""
        return lambda: torch.autograd.grad(forward(*self.inputs), self.inputs, self.gradient)


def segments(forest: Forest) -> Callable[..., Tensor]:
    """Return our attention over `forest`."""
    return lambda query, key, value: attention(query, key, value, forest, SIZE**-0.5)


def masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Return attention [T, H, D] with a mask, or causal without one."""
    rows = [one.transpose(0, 1)[None] for one in (query, key, value)]
    output = scaled_dot_product_attention(rows[0], rows[1], rows[2], attn_mask=mask, is_causal=mask is None)
    return output[0].transpose(0, 1)


def per_document(lengths: list[int]) -> Callable[..., Tensor]:
    """Return causal attention of each document by itself."""

    def forward(*rows: Tensor) -> Tensor:
        pieces = zip(*(one.split(lengths) for one in rows), strict=True)
        return torch.cat([masked(*piece, None) for piece in pieces])

    return forward


def dense(forest: Forest) -> Callable[..., Tensor]:
    """Return attention with one mask for the row, which is made once."""
    mask = torch.from_numpy(forest.visible(0, forest.num_tokens, None))[None, None]
    return lambda query, key, value: masked(query, key, value, mask)


def transformers_packed(forest: Forest) -> Callable[..., Tensor]:
    """Return attention as transformers packs rows for `sdpa`: a mask from the positions, in each forward pass."""
    from transformers import LlamaConfig
    from transformers.masking_utils import create_causal_mask

    config = LlamaConfig(num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    positions = torch.from_numpy(forest.positions)[None]
    embedded = torch.empty(1, forest.num_tokens, 1)

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = create_causal_mask(config, embedded, None, None, position_ids=positions)
        return masked(query, key, value, mask)

    return forward


def ragged(num_tokens: int, mean: int) -> list[int]:
    """Return lengths of documents, of `mean` tokens on average, that add up to `num_tokens`."""
    generator = np.random.default_rng(0)
    lengths: list[int] = []
    while (left := num_tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(np.clip(generator.lognormal(math.log(mean * 0.7), 0.8), 16, 8 * mean))))
    return lengths


def detail_of(rounds: int, **values: Any) -> dict[str, Any]:
    """Return the details of a figure."""
    shape = {"heads": HEADS, "head_size": SIZE, "dtype": "float32", "rounds": rounds}
    return {**shape, **values, "machine": machine(), "versions": versions("torch", "transformers")}


def bench_documents(sizes: list[int], rounds: int) -> None:
    """Print time over causal attention per document, over masks, and how memory grows."""
    peaks: list[int] = []
    for num_tokens in sizes:
        progress(f"documents, {num_tokens} tokens ...")
        lengths = ragged(num_tokens, 512)
        forest, rows = Forest.of_documents(lengths), Rows(num_tokens)
        works = {"segments": rows.both(segments(forest)), "documents": rows.both(per_document(lengths))}
        if num_tokens <= MASKED_TOKENS:
            works |= {"dense": rows.both(dense(forest)), "transformers": rows.both(transformers_packed(forest))}
        times = by_turns(works, rounds if num_tokens <= 4096 else 3)
        bytes_of = {name: peak(work) for name, work in works.items()}
        peaks.append(bytes_of["segments"])
        detail = detail_of(
            len(times["segments"]),
            num_documents=len(lengths),
            seconds={name: rounded(median(own)) for name, own in times.items()},
            peak_mib={name: rounded(own / MIB) for name, own in bytes_of.items()},
        )
        show: dict[str, Any] = {"unit": "ratio", "better": "lower", "detail": detail}
        name = f"{num_tokens} tokens of documents"
        goal = 1.15 if num_tokens >= 4096 else None
        print_figure(
            BENCH,
            f"time over causal attention per document, {name}",
            ratio(times, "segments", "documents"),
            goal=goal,
            **show,
        )
        for other in [other for other in ("dense", "transformers") if other in works]:
            print_figure(
                BENCH, f"time over {WITH_MASKS[other]}, {name}", ratio(times, "segments", other), goal=None, **show
            )
    slope = math.log(peaks[-1] / peaks[0]) / math.log(sizes[-1] / sizes[0])
    detail = detail_of(1, tokens=sizes, peak_mib=[rounded(one / MIB) for one in peaks])
    print_figure(
        BENCH, "exponent of peak memory in tokens", slope, unit="exponent", goal=1.1, better="lower", detail=detail
    )


WITH_MASKS = {"dense": "a dense mask", "transformers": "transformers' packed path"}


def tree(depth: int, tokens: int) -> Forest:
    """Return a tree with 16 leaves: `depth` levels of common beginnings of `tokens` tokens, and leaves of a quarter."""
    branches = {1: (16,), 2: (4, 4), 3: (2, 2, 4), 4: (2, 2, 2, 2)}[depth]
    lengths, parents = list[int](), list[int]()

    def add(level: int, parent: int) -> None:
        number = len(lengths)
        lengths.append(tokens if level < depth else tokens // 4)
        parents.append(parent)
        for _ in range(branches[level] if level < depth else 0):
            add(level + 1, number)

    add(0, -1)
    return Forest(tuple(lengths), tuple(parents))


def bench_trees(tokens: int, rounds: int) -> None:
    """Print the time of shared trees over that of their sequences alone, beside the ratio of their pairs."""
    for depth in range(1, 5):
        progress(f"tree of depth {depth} ...")
        forest = tree(depth, tokens)
        leaves = sorted(set(range(len(forest.lengths))) - set(forest.parents))
        lengths = [forest.depths[leaf] + forest.lengths[leaf] for leaf in leaves]
        alone = Forest.of_documents(lengths)
        shared_rows, rows = Rows(forest.num_tokens), Rows(alone.num_tokens)
        times = by_turns(
            {"shared": shared_rows.both(segments(forest)), "alone": rows.both(per_document(lengths))}, rounds
        )
        pairs = forest.num_pairs() / alone.num_pairs()
        detail = detail_of(
            rounds,
            tokens_shared=forest.num_tokens,
            tokens_alone=alone.num_tokens,
            ratio_of_pairs=rounded(pairs),
            ratio_of_times=rounded(ratio(times, "shared", "alone")),
        )
        print_figure(
            BENCH,
            f"time of a tree of depth {depth} with 16 leaves over its sequences alone, over the ratio of pairs",
            ratio(times, "shared", "alone") / pairs,
            unit="ratio",
            goal=1.3,
            better="lower",
            detail=detail,
        )


def bench_peak(segment: int) -> None:
    """Print the peak of a segment over ancestors of twice its tokens, over the bytes of its inputs."""
    progress(f"peak of {segment} tokens over {2 * segment} ...")
    rows = Rows(3 * segment)
    found = peak(rows.both(segments(Forest((segment, segment, segment), (-1, 0, 1)))))
    inputs = sum(one.nbytes for one in rows.inputs)
    detail = detail_of(1, tokens=3 * segment, peak_mib=rounded(found / MIB), inputs_mib=rounded(inputs / MIB))
    name = f"peak over the inputs' bytes, a segment of {segment} tokens over {2 * segment} of ancestors"
    print_figure(BENCH, name, found / inputs, unit="ratio", goal=None, better="lower", detail=detail)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="rows of up to 4k tokens, smaller trees and segments")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench_documents([1024, 4096] if arguments.quick else [1024, 4096, 16384, 65536], 5)
    bench_trees(*((256, 3) if arguments.quick else (1024, 3)))
    bench_peak(1024 if arguments.quick else 16384)


if __name__ == "__main__":
    main()
