"""Vectorised sampling from logits, and log-probabilities of given prompt tokens.

A sampled token does not depend on which rows share its batch: its uniform is a function of the sampling seed, the
completion's index and the token's position (a counter-based stream), and each row's distribution is truncated and
inverted independently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from starling.algo.truncation import is_truncated
from starling.rollout.engine.base import PromptLogprobs

GOLDEN_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
MIX_2: Final = np.uint64(0x94D049BB133111EB)
SCORED_ROWS_AT_ONCE: Final = 1024
"""Prompt tokens whose logits are converted to float32 together: bounds the memory beyond the logits themselves."""


def completion_key(seed: int, index: int) -> int:
    """Return the 64-bit key of completion `index` of a group sampled with `seed`."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")


def uniforms(keys: npt.NDArray[np.uint64], counters: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return element `counters[i]` of stream `keys[i]`, for all i: numbers in [0, 1 - 2**-52].

    SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) read at a position:
    its state is an arithmetic progression, so the t-th output can be computed without the earlier ones.
    """
    z = keys + (counters.astype(np.uint64) + np.uint64(1)) * GOLDEN_GAMMA
    z = (z ^ (z >> np.uint64(30))) * MIX_1
    z = (z ^ (z >> np.uint64(27))) * MIX_2
    z = z ^ (z >> np.uint64(31))
    # 52 bits: u * total then stays below total in float64, so that the inversion always hits a token of the support.
    result: npt.NDArray[np.float64] = (z >> np.uint64(12)).astype(np.float64) * 2.0**-52
    return result


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of the rows of a batch, on the device; None if no row needs the parameter."""

    temperature: torch.Tensor | None
    """float32 [rows, 1]; 1 where a row is greedy."""
    greedy: torch.Tensor | None
    """bool [rows]."""
    all_greedy: bool
    truncated: torch.Tensor | None
    """int64 [m]: the rows with a top_p, a top_k or a min_p."""
    top_p: torch.Tensor | None
    """float64 [m, 1]; infinite where a row has none."""
    top_k: torch.Tensor | None
    """int64 [m, 1]; larger than any vocabulary where a row has none."""
    min_p: torch.Tensor | None
    """float32 [m, 1]; 0 where a row has none."""
    recorded: torch.Tensor | None
    """int64 [r]: which of the m rows have their kept tokens recorded; None if no row has."""

    @property
    def is_plain(self) -> bool:
        """Whether every row is drawn from the model's own distribution; any of them make the same `SamplingRows`."""
        return self.temperature is None and self.greedy is None and self.truncated is None


class Drawn(NamedTuple):
    """The drawn tokens of a batch."""

    tokens: torch.Tensor
    """int64 [rows]."""
    logprobs: torch.Tensor
    """float32 [rows]: over the kept tokens of a row that records them, else over the whole vocabulary."""
    log_mass: torch.Tensor | None
    """float32 [rows]: logarithm of the probability of a row's kept tokens; None if no row is truncated."""
    kept_rows: torch.Tensor | None
    """int64 [K]: the row of each kept token that is recorded, ascending; None if no row records them."""
    kept_ids: torch.Tensor | None
    """int64 [K]: its id, ascending in each row."""


def sampling_rows(
    temperature: npt.NDArray[np.float64],
    top_p: npt.NDArray[np.float64],
    top_k: npt.NDArray[np.int64],
    device: torch.device,
    *,
    min_p: npt.NDArray[np.float64] | None = None,
    records: npt.NDArray[np.bool_] | None = None,
) -> SamplingRows:
    """Build the sampling parameters for `draw`; each argument has one element per row.

    Args:
        temperature, top_p, top_k: as in `Sampling`.
        device: of the logits.
        min_p: as in `Sampling`; None for 0 everywhere.
        records: whether to record a row's kept tokens, which must be truncated then; None for no row.
    """
    greedy = temperature == 0.0
    divisor = np.where(greedy, 1.0, temperature)
    least = np.zeros(len(temperature)) if min_p is None else min_p
    chosen = np.flatnonzero(is_truncated(temperature, top_p, top_k, least))
    recorded = np.flatnonzero(records[chosen]) if records is not None else np.zeros(0, np.int64)

    def on_device(values: npt.NDArray[np.generic], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype)

    p = np.where(top_p < 1.0, top_p, np.inf)[chosen, None]
    k = np.where(top_k > 0, top_k, np.iinfo(np.int64).max)[chosen, None]
    return SamplingRows(
        temperature=on_device(divisor[:, None], torch.float32) if (divisor != 1.0).any() else None,
        greedy=on_device(greedy, torch.bool) if greedy.any() else None,
        all_greedy=bool(greedy.all()),
        truncated=on_device(chosen, torch.int64) if chosen.size else None,
        top_p=on_device(p, torch.float64) if chosen.size else None,
        top_k=on_device(k, torch.int64) if chosen.size else None,
        min_p=on_device(least[chosen, None], torch.float32) if least[chosen].any() else None,
        recorded=on_device(recorded, torch.int64) if recorded.size else None,
    )


def draw(
    logits: torch.Tensor, rows: SamplingRows, uniform: torch.Tensor, banned_ids: torch.Tensor | None = None
) -> Drawn:
    """Draw one token per row by inverse transform sampling.

    Args:
        logits: [rows, vocabulary], any floating dtype.
        rows: the sampling parameters of the rows.
        uniform: float64 [rows], in [0, 1).
        banned_ids: int64 [tokens]: tokens that are never drawn, as if truncated.
    """
    log_mass = kept_rows = kept_ids = None
    scaled = logits.float()
    if rows.temperature is not None:
        scaled = scaled / rows.temperature
    logprobs = torch.log_softmax(scaled, dim=-1)
    if banned_ids is not None and rows.greedy is not None:
        logits = logits.index_fill(-1, banned_ids, -torch.inf)
    if rows.all_greedy:
        tokens = logits.argmax(dim=-1)
    else:
        probs = logprobs.exp()
        if banned_ids is not None:
            probs.index_fill_(-1, banned_ids, 0.0)
        if rows.truncated is not None:
            assert rows.top_p is not None
            assert rows.top_k is not None
            remaining = truncate(probs[rows.truncated], rows.top_p, rows.top_k, rows.min_p)
            probs[rows.truncated] = remaining
            log_mass = torch.zeros_like(logprobs[:, 0])
            log_mass[rows.truncated] = remaining.sum(dim=-1, dtype=torch.float64).log().float()
            if rows.recorded is not None:
                which, kept_ids = (remaining[rows.recorded] > 0.0).nonzero(as_tuple=True)
                kept_rows = rows.truncated[rows.recorded[which]]
        cdf = probs.cumsum(dim=-1, dtype=torch.float64)
        target = uniform[:, None] * cdf[:, -1:]
        # Only non-finite logits can exceed the vocabulary here; the caller detects them by the log-probability.
        tokens = torch.searchsorted(cdf, target, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
        if rows.greedy is not None:
            tokens = torch.where(rows.greedy, logits.argmax(dim=-1), tokens)
    own = logprobs.gather(-1, tokens[:, None])[:, 0]
    if log_mass is not None and rows.recorded is not None:
        assert rows.truncated is not None
        recorded = rows.truncated[rows.recorded]
        own[recorded] -= log_mass[recorded]
    return Drawn(tokens, own, log_mass, kept_rows, kept_ids)


def truncate(
    probs: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, min_p: torch.Tensor | None = None
) -> torch.Tensor:
    """Zero the probabilities that min-p, then top-k, and then top-p over the rest, exclude; do not renormalise.

    The result stays in vocabulary order, so that a row without truncation gets the same token as on the fast path.

    Args:
        probs: float32 [m, vocabulary]. `top_p`, `top_k`, `min_p`: [m, 1].
    """
    if min_p is not None:
        probs = probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0.0)
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    ordered = ordered.masked_fill(rank >= top_k, 0.0)
    cumulative = ordered.cumsum(dim=-1, dtype=torch.float64)
    before = cumulative - ordered
    ordered = ordered.masked_fill(before >= top_p * cumulative[:, -1:], 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, ordered)


def score_prompt_tokens(logits: torch.Tensor, prompt_ids: list[int], version: int) -> PromptLogprobs:
    """Return the log-probabilities of a prompt's tokens.

    Args:
        logits: [tokens - 1, vocabulary]: the predictions after each token but the last.
        prompt_ids: the tokens; at least one.
        version: the weight version that computed the logits.
    """
    wanted = torch.tensor(prompt_ids[1:], device=logits.device)[:, None]
    parts = []
    for begin in range(0, len(wanted), SCORED_ROWS_AT_ONCE):
        some = slice(begin, begin + SCORED_ROWS_AT_ONCE)
        scaled = logits[some].float()
        total = scaled.logsumexp(dim=-1, keepdim=True)
        best, ids = scaled.max(dim=-1, keepdim=True)
        # A single copy to the host waits for the device once; float64 holds all three exactly.
        columns = ((scaled.gather(-1, wanted[some]) - total).double(), ids.double(), (best - total).double())
        parts.append(torch.cat(columns, dim=-1).cpu().numpy())
    found = np.concatenate(parts) if parts else np.zeros((0, 3))
    return PromptLogprobs(
        found[:, 0].astype(np.float32), found[:, 1].astype(np.int32), found[:, 2].astype(np.float32), version
    )


def join_prompt_logprobs(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
    """Return the log-probabilities of a whole prompt from those of its consecutive parts."""
    return PromptLogprobs(
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top_logprobs for part in parts]),
        parts[-1].version,
    )
