"""Deltas of weights: size, speed on one thread, and the share of weights that an AdamW step changes.

    OMP_NUM_THREADS=1 python bench/weightsync_delta.py [--quick]
    OMP_NUM_THREADS=1 python bench/weightsync_delta.py --change-rates [--quick]

The first makes a shard of 64 Mi bf16 elements of which a share changes at random places, encodes it against the
previous shard and applies it to a copy. Times are relative to one copy of the shard in the same round, in seconds of
the thread's processor time (other load on the machine still slows memory down, for both sides); a figure is the median
over the rounds. Writes go into memory that was written before, as with snapshots. The time on a slow link
is computed: encode, then bytes over bandwidth, then apply, one after the other; dense is bytes over bandwidth alone.
Publisher and puller do the three at once: `weightsync_fanout.py --only delta` measures them on such a link.

The second trains a small transformer (weights drawn with deviation 0.02) by likelihood, then continues with a new
AdamW over fp32 master weights at the learning rates of RL, and compares the bf16 weights of each step with those of
the previous one. It does so by likelihood and by policy gradient (advantages normalised within groups): Adam divides by
the noise of the gradient, so noisy gradients change fewer weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from figure import machine, print_figure, progress, rounded, versions
from torch import nn
from torch.nn import functional

from starling.weightsync.delta.chain import compose
from starling.weightsync.delta.codec import apply, encode, scan
from starling.weightsync.delta.format import total_of
from starling.weightsync.tensors.delta import apply_tensor, encode_tensor

BENCH = "weightsync_delta"
LINK_BYTES_PER_S = 125e6
SHARES = (0.0, 0.001, 0.01, 0.03, 0.1)
JUDGED_SHARE = 0.01
GROUP = 8
Shard = npt.NDArray[np.uint16]


# --- size and speed ------------------------------------------------------------------------------------------------


def seconds(work: Callable[[], Any]) -> float:
    """Return the processor time that the calling thread spends on `work`."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def with_changes(base: Shard, share: float, rows: int = 0) -> Shard:
    """Return a copy in which `share` of the elements, or of the rows of `rows` elements, differs."""
    rng = np.random.default_rng(1)
    new = base.copy()
    units = new.reshape(-1, rows) if rows else new
    units[rng.choice(len(units), round(share * len(units)), replace=False)] ^= 1
    return new


def measure(base: Shard, new: Shard, rounds: int) -> dict[str, float]:
    """Return the bytes of the shard over those of its delta, and times over that of a copy of the shard."""
    copy, out = np.zeros_like(base), np.zeros(base.nbytes + 64, np.uint8)
    encoded = encode(new, base, 2, out=out)
    times: dict[str, list[float]] = {"scan": [], "encode": [], "apply": [], "encode_and_apply": [], "copy_s": []}
    for _ in range(rounds):
        held = base.copy()
        copy_s = seconds(lambda: np.copyto(copy, base))
        scan_s = seconds(lambda: scan(new, base, 2))
        encode_s = seconds(lambda: encode(new, base, 2, out=out))
        apply_s = seconds(lambda held=held: apply(encoded.data, held))  # type: ignore[misc]
        if held.tobytes() != new.tobytes():
            raise AssertionError("the delta did not make the new shard of the old one")
        times["copy_s"].append(copy_s)
        times["scan"].append(scan_s / copy_s)
        times["encode"].append(encode_s / copy_s)
        times["apply"].append(apply_s / copy_s)
        times["encode_and_apply"].append((encode_s + apply_s) / copy_s)
    found = {name: median(values) for name, values in times.items()}
    dense_s = base.nbytes / LINK_BYTES_PER_S
    delta_s = len(encoded.data) / LINK_BYTES_PER_S + found["encode_and_apply"] * found["copy_s"]
    found["dense_over_delta_bytes"] = base.nbytes / len(encoded.data)
    found["faster_on_1_gbit_s"] = dense_s / delta_s
    return {name: rounded(value) for name, value in found.items()}


def measure_torch(base: Shard, new: Shard, device: str, rounds: int) -> dict[str, float]:
    """Return the times with torch, over that of a copy of the shard on the device."""
    old_tensor, new_tensor = (torch.from_numpy(piece.view(np.int16)).to(device) for piece in (base, new))
    copy, held = torch.zeros_like(old_tensor), old_tensor.clone()
    encoded = encode_tensor(new_tensor, old_tensor)

    def spent(work: Callable[[], Any]) -> float:
        if device == "cpu":
            return seconds(work)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    times = []
    for _ in range(rounds):
        copy_s = spent(lambda: copy.copy_(old_tensor))
        encode_s = spent(lambda: encode_tensor(new_tensor, old_tensor))
        times.append((encode_s / copy_s, spent(lambda: apply_tensor(encoded.data, held)) / copy_s))
    return {"encode": rounded(median(a for a, _ in times)), "apply": rounded(median(b for _, b in times))}


def bench_speed(num_elements: int, rounds: int) -> None:
    """Print the figures of size and speed."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 65536, num_elements, np.uint16)
    detail: dict[str, Any] = {"num_elements": num_elements, "rounds": rounds}
    for share in SHARES:
        progress(f"{share:.1%} changed ...")
        detail[f"changed_{share:g}"] = measure(base, with_changes(base, share), rounds)
    progress("1% of the rows changed ...")
    detail["rows_changed_0.01"] = measure(base, with_changes(base, 0.01, rows=4096), rounds)
    judged = with_changes(base, JUDGED_SHARE)
    last = with_changes(judged[::-1].copy(), JUDGED_SHARE)[::-1].copy()
    first, second = encode(judged, base, 2).data, encode(last, judged, 2).data
    progress("composing, and torch ...")
    copy = np.zeros_like(base)
    copies = [seconds(lambda: np.copyto(copy, base)) for _ in range(rounds)]
    composed = [seconds(lambda: compose(first, second)) for _ in range(rounds)]
    detail["compose"] = rounded(median(composed) / median(copies))
    detail["torch_cpu"] = measure_torch(base, judged, "cpu", 1)
    if torch.cuda.is_available():
        detail["torch_cuda"] = measure_torch(base, judged, "cuda", rounds)
    detail |= {"machine": machine(), "versions": versions("numpy", "torch")}
    figures = detail[f"changed_{JUDGED_SHARE:g}"]
    print_figure(
        BENCH,
        "bytes of the shard over bytes of its delta, 99 % unchanged",
        figures["dense_over_delta_bytes"],
        unit="ratio",
        goal=40,
        better="higher",
        detail=detail,
    )
    print_figure(
        BENCH,
        "encode + apply over one copy of the shard, one thread, 99 % unchanged",
        figures["encode_and_apply"],
        unit="ratio",
        goal=4.5,
        better="lower",
        detail={"copy_s": figures["copy_s"], "encode": figures["encode"], "apply": figures["apply"]},
    )
    print_figure(
        BENCH,
        "dense over delta on a 1 Gbit/s link (computed, one after the other), 99 % unchanged",
        figures["faster_on_1_gbit_s"],
        unit="ratio",
        goal=None,
        better="higher",
        detail={"link_bytes_per_s": LINK_BYTES_PER_S},
    )


# --- change rates --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """Sizes of the transformer, its batches and its training."""

    num_layers: int
    hidden: int
    num_heads: int
    num_tokens: int
    batch: int
    vocabulary: int
    num_first_steps: int
    num_steps: int


class Layer(nn.Module):
    """One layer: attention and a feed-forward part, each after a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.attention_norm, self.feed_norm = nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=False)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False)
        self.up = nn.Linear(size.hidden, 4 * size.hidden, bias=False)
        self.down = nn.Linear(4 * size.hidden, size.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activations after the layer, shape (batch, tokens, hidden)."""
        parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(functional.silu(self.up(self.feed_norm(x))))


class Transformer(nn.Module):
    """A causal language model with learned positions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.hidden)
        self.places = nn.Embedding(size.num_tokens, size.hidden)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.num_layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the log-probability of each token but the first, shape (batch, tokens - 1)."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.places.weight[: inputs.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def batch_of(size: Size, generator: torch.Generator) -> torch.Tensor:
    """Return sequences in which each token mostly follows from the one before it by a fixed rule."""
    tokens = torch.randint(size.vocabulary, (size.batch, size.num_tokens), generator=generator)
    follows = torch.rand(tokens.shape, generator=generator) < 0.8
    for place in range(1, size.num_tokens):
        rule = (tokens[:, place - 1] * 31 + 7) % size.vocabulary
        tokens[:, place] = torch.where(follows[:, place], rule, tokens[:, place])
    return tokens


def loss_of(model: nn.Module, tokens: torch.Tensor, objective: str) -> torch.Tensor:
    """Return the loss by likelihood, or by policy gradient with a reward for the share of small tokens."""
    logprobs: torch.Tensor = model(tokens)
    if objective == "likelihood":
        return -logprobs.mean()
    rewards = (tokens < tokens.max() // 2).float().mean(1).view(-1, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    return -(advantages.view(-1, 1) * logprobs).mean()


def train(
    model: nn.Module, size: Size, objective: str, learning_rate: float, steps: int, seen: Callable[[], None]
) -> None:
    """Train with AdamW and clipped gradients; call `seen` after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.999), weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch_of(size, generator), objective).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen()


def snapshot(model: nn.Module) -> list[npt.NDArray[np.int16]]:
    """Return the bf16 bits of every parameter."""
    return [parameter.detach().bfloat16().view(torch.int16).numpy().copy() for parameter in model.parameters()]


def change_rates(size: Size, start: dict[str, torch.Tensor], objective: str, learning_rate: float) -> dict[str, Any]:
    """Return the share of bf16 weights that a step changes, early and late, and the compression by a delta."""
    model = Transformer(size)
    model.load_state_dict(start)
    kept = [snapshot(model)]
    shares: list[float] = []
    ratios: list[float] = []

    def seen() -> None:
        kept.append(snapshot(model))
        del kept[:-17]
        pieces = [encode(new, base, 2).metrics for new, base in zip(kept[-1], kept[-2], strict=True)]
        total = total_of(pieces)
        changed = sum(int(np.count_nonzero(a != b)) for a, b in zip(kept[-1], kept[-2], strict=True))
        shares.append(changed / sum(piece.num_elements for piece in pieces))
        ratios.append(total.dense_bytes / total.encoded_bytes)

    train(model, size, objective, learning_rate, size.num_steps, seen)
    late = max(1, size.num_steps // 4)
    found: dict[str, Any] = {
        "changed_by_step_1": shares[0],
        "changed_by_step_10": shares[min(9, len(shares) - 1)],
        "changed_late": mean(shares[-late:]),
        "dense_over_delta_bytes_late": mean(ratios[-late:]),
    }
    for distance in (4, 16):
        if len(kept) > distance:
            pairs = list(zip(kept[-1], kept[-1 - distance], strict=True))
            changed = sum(int(np.count_nonzero(a != b)) for a, b in pairs)
            found[f"changed_by_last_{distance}_steps"] = changed / sum(a.size for a, _ in pairs)
    return {name: rounded(value, 3) for name, value in found.items()}


def bench_change_rates(size: Size, learning_rates: Sequence[float]) -> None:
    """Print the share of unchanged weights for each learning rate and objective."""
    torch.manual_seed(0)
    model = Transformer(size)
    progress(f"{sum(p.numel() for p in model.parameters()):,} weights; {size.num_first_steps} first steps ...")
    train(model, size, "likelihood", 1e-3, size.num_first_steps, lambda: None)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        loss = float(loss_of(model, batch_of(size, torch.Generator().manual_seed(2)), "likelihood"))
    matrices = torch.cat([p.detach().flatten() for p in model.parameters() if p.dim() > 1])
    for objective in ("policy gradient", "likelihood"):
        for learning_rate in learning_rates:
            progress(f"{objective} at {learning_rate:g}: {size.num_steps} steps ...")
            found = change_rates(size, start, objective, learning_rate)
            print_figure(
                BENCH,
                f"bf16 weights that an AdamW step at {learning_rate:g} leaves unchanged, {objective}",
                1 - found["changed_late"],
                unit="share",
                goal=None,
                better="higher",
                detail={
                    **found,
                    "num_weights": sum(p.numel() for p in model.parameters()),
                    "num_steps": size.num_steps,
                    "median_abs_weight": rounded(float(matrices.abs().median()), 3),
                    "loss_at_start": rounded(loss, 3),
                    "versions": versions("torch"),
                },
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="half the shard and fewer rounds; a tiny model")
    parser.add_argument("--change-rates", action="store_true", help="measure how many weights AdamW changes instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.change_rates:
        full = Size(4, 256, 4, 64, 32, 1024, 200, 200)
        quick = Size(2, 64, 2, 32, 16, 128, 30, 30)
        bench_change_rates(quick if arguments.quick else full, (1e-6, 1e-5))
    else:
        bench_speed((32 << 20) if arguments.quick else (64 << 20), 3 if arguments.quick else 9)


if __name__ == "__main__":
    main()
