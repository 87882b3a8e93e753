"""Log-probabilities of the trained tokens, computed in chunks without materialising all logits.

The logits of a step, [trained tokens, vocabulary], often take more memory than all other activations together. They are
computed in chunks, twice:

    forward     by tokens: a chunk's logits, its log-probabilities, and two normalisation constants per token
    backward    by columns of the vocabulary: the logits of all tokens again, turned into their own gradient in place

By columns, because each row of the output layer's gradient is then one matrix product over all tokens, summed in
float32 inside it. By tokens it would be a sum over chunks, and a float32 sum needs a buffer of twice the layer's size;
the remaining sum, that of the hidden states' gradient, is much smaller: 4 bytes per trained token and hidden unit.

Where all of them are few, at most `KEPT_CHUNKS` chunks and `MOST_KEPT` bytes in float32, the forward pass keeps the
probabilities, and the backward pass turns these into the gradient instead of computing the logits again.

Softmax is computed in float32 on a few rows of a chunk at a time. Where sampling was truncated, it goes over the tokens
that were kept at each position: the others are masked in both passes. Legend of shapes: N trained tokens, H hidden
units, V vocabulary, K kept tokens of all positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from starling.algo.truncation import KeptTokens
from starling.policy.settings.memory import few_probabilities
from starling.policy.train.data.packing import MicrobatchInputs
from starling.policy.train.data.share import SlotShare
from starling.policy.train.model.lm_head import (
    LmHead,
    LogitTransform,
    VocabularyShard,
    find_lm_head,
    trained_hidden,
    trained_logits,
)

_PARTS: Final = 24
"""Number of parts in which a chunk's rows are computed in float32: at most three parts exist at a time, a quarter of a
bfloat16 chunk."""
_SMALL_PART: Final = 1 << 18
"""Numbers of a part, 1 MiB, that is not divided further: its operations would cost more than their arithmetic."""
_COLUMN_MULTIPLE: Final = 64
"""Columns per block are a multiple of this, for the matrix units of GPUs."""
_EXCLUDED: Final = -1e30
"""Scaled logit of a token that was not kept: its probability is exactly 0. Finite, because 0 * inf is not a number."""


class KeptSets:
    """The kept tokens of N trained ones, on a device."""

    def __init__(self, kept: KeptTokens, device: torch.device | str = "cpu") -> None:
        """Copy `kept`, in the order of the trained tokens, to `device`."""
        self._kept, self._device = kept, device
        counts = torch.from_numpy(kept.counts.astype("int64"))
        self._ends = [0, *accumulate(kept.counts.tolist())]
        self._rows = torch.arange(len(counts)).repeat_interleave(counts).to(device)
        self._ids = torch.from_numpy(kept.ids.astype("int64")).to(device)
        self._is_whole = (counts == 0).to(device) if (counts == 0).any() else None
        """Tokens for which the whole vocabulary was kept; None if there are none."""

    def take(self, tokens: Tensor) -> KeptSets:
        """Return those of some of the trained tokens."""
        return KeptSets(self._kept.take(tokens.cpu().numpy()), self._device)

    def exclude_(self, values: Tensor, rows: slice, columns: slice) -> Tensor:
        """Set the scaled logits of tokens that were not kept to `_EXCLUDED`, in place. Returns `values`.

        Args:
            values: float32 [rows, columns].
            rows: the trained tokens of its rows.
            columns: the range of the vocabulary of its columns.
        """
        some = slice(self._ends[rows.start], self._ends[rows.stop])
        width = columns.stop - columns.start
        place, row = self._ids[some] - columns.start, self._rows[some] - rows.start
        # What is outside of the columns goes to one more element: a choice by a mask would wait for the device.
        place = torch.where((place >= 0) & (place < width), row * width + place, values.numel())
        excluded = torch.ones(values.numel() + 1, dtype=torch.bool, device=values.device)
        excluded[place] = False
        excluded = excluded[:-1].view_as(values)
        if self._is_whole is not None:
            excluded.masked_fill_(self._is_whole[rows, None], False)
        return values.masked_fill_(excluded, _EXCLUDED)


def token_logprobs(
    model: torch.nn.Module,
    inputs: MicrobatchInputs,
    temperature: float | Tensor = 1.0,
    *,
    targets: Tensor | None = None,
    with_entropy_gradient: bool = False,
    kept: KeptSets | None = None,
    chunk_tokens: int,
    keeps_probabilities: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each trained token and the entropy of its distribution, both float32 [N].

    Both are of ``softmax(logits / temperature)``, over the vocabulary or over the tokens of `kept`.

    Args:
        model: a causal language model.
        inputs: one microbatch.
        temperature: one for all, or [N].
        targets: int64 [N, K], K tokens per position in place of the trained one; the log-probabilities are then [N, K].
        with_entropy_gradient: differentiate the entropy too; otherwise it is a metric.
        kept: tokens over which each distribution goes, the targets among them; None for the whole vocabulary.
        chunk_tokens: tokens whose logits exist at a time; it affects only the rounding of gradients.
        keeps_probabilities: keep them for the backward pass if they are few; not where other forward passes come first.
    """
    targets = inputs.targets if targets is None else targets
    options: dict[str, Any] = {
        "with_entropy_gradient": with_entropy_gradient,
        "chunk_tokens": chunk_tokens,
        "keeps_probabilities": keeps_probabilities,
    }
    if inputs.share is None:
        return _computed_logprobs(model, inputs, targets, temperature, kept=kept, **options)
    trained = inputs.share.trained
    own = _computed_logprobs(
        model,
        inputs,
        targets[trained.own],
        temperature[trained.own] if isinstance(temperature, Tensor) else temperature,
        kept=None if kept is None else kept.take(trained.own),
        **options,
    )
    return _joined(trained, *own)


def _joined(share: SlotShare, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities and entropies of all ranks' tokens, from those of this rank's."""
    columns = logprobs.view(len(logprobs), math.prod(logprobs.shape[1:]))
    joined = share.join(torch.cat([columns, entropy[:, None]], dim=1))
    joined_entropy = joined[:, -1]
    if not entropy.requires_grad:
        joined_entropy = joined_entropy.detach()
    return joined[:, :-1].reshape(-1, *logprobs.shape[1:]), joined_entropy


def _computed_logprobs(
    model: torch.nn.Module,
    inputs: MicrobatchInputs,
    targets: Tensor,
    temperature: float | Tensor,
    *,
    with_entropy_gradient: bool,
    kept: KeptSets | None,
    chunk_tokens: int,
    keeps_probabilities: bool,
) -> tuple[Tensor, Tensor]:
    """Return the same as `token_logprobs`, of the tokens that this rank computes."""
    if find_lm_head(model) is None:
        logits = trained_logits(model, inputs)
        return logits_logprobs(logits, targets, temperature, with_entropy_gradient=with_entropy_gradient, kept=kept)
    hidden = trained_hidden(model, inputs)
    head = find_lm_head(model)  # Only now: a sharded weight is gathered by the forward pass.
    assert head is not None
    return head_logprobs(
        hidden,
        head,
        targets,
        temperature,
        with_entropy_gradient=with_entropy_gradient,
        kept=kept,
        chunk_tokens=chunk_tokens,
        keeps_probabilities=keeps_probabilities,
    )


def head_logprobs(
    hidden: Tensor,
    head: LmHead,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    with_entropy_gradient: bool = False,
    kept: KeptSets | None = None,
    chunk_tokens: int,
    keeps_probabilities: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the same as `token_logprobs`, from the hidden states [N, H] before the output layer."""
    task = _task(targets, temperature, with_entropy_gradient, head.transform, chunk_tokens, kept, head.shard)
    # Asked here, because gradients are always off inside of a function of autograd.
    if keeps_probabilities and torch.is_grad_enabled():
        task = replace(task, keeps_probabilities=_can_keep(task, hidden, head.weight))
    logprobs, entropy = _HeadLogprobs.apply(hidden, head.weight, head.bias, task)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def logits_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    with_entropy_gradient: bool = False,
    kept: KeptSets | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the same as `token_logprobs`, from logits [N, V]."""
    task = _task(targets, temperature, with_entropy_gradient, LogitTransform(), len(targets), kept)
    logprobs, entropy = _LogitsLogprobs.apply(logits, task)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def working_bytes(
    num_tokens: int,
    hidden_size: int,
    vocabulary: int,
    item_bytes: int,
    *,
    chunk_tokens: int,
    trains_head: bool = True,
    with_entropy_gradient: bool = False,
    keeps_probabilities: bool = True,
) -> int:
    """Return the memory that `head_logprobs` needs, forward or backward, beyond its arguments.

        forward     chunk x V logits, and two float32 parts of them
        backward    N x columns logits, one float32 part of them (three with the gradient of the entropy),
                    the gradients of the hidden states, N x H (float32 where there are several blocks of columns),
                    and of the layer, V x H

    Where probabilities are kept, both passes have all N x V of them, and the backward pass no part beside.

    Args:
        num_tokens: trained tokens, N.
        hidden_size: H.
        vocabulary: V.
        item_bytes: bytes of an element of hidden states and weights.
        chunk_tokens: see `token_logprobs`.
        trains_head: whether the output layer needs a gradient.
        with_entropy_gradient: see `token_logprobs`.
        keeps_probabilities: see `token_logprobs`.
    """
    chunk = min(chunk_tokens, num_tokens)
    gradient = vocabulary * hidden_size * item_bytes * trains_head
    can_keep = keeps_probabilities and item_bytes == 4 and not with_entropy_gradient
    if can_keep and few_probabilities(num_tokens, vocabulary, chunk_tokens):
        forward = 2 * 4 * _rows_at_a_time(chunk, vocabulary) * vocabulary
        return 4 * num_tokens * vocabulary + max(forward, 4 * num_tokens * hidden_size + gradient)
    forward = chunk * vocabulary * item_bytes + 2 * 4 * _rows_at_a_time(chunk, vocabulary) * vocabulary
    columns = _columns_at_a_time(num_tokens, hidden_size, item_bytes, num_columns=vocabulary, chunk_tokens=chunk_tokens)
    num_parts = 3 if with_entropy_gradient else 1
    sums = num_tokens * hidden_size * item_bytes
    if columns < vocabulary and item_bytes != 4:
        sums += num_tokens * hidden_size * 4
    part = 4 * _rows_at_a_time(num_tokens, columns)
    backward = columns * (num_tokens * item_bytes + num_parts * part) + sums + gradient
    return max(forward, backward)


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """Arguments without a gradient, shared by forward and backward."""

    targets: Tensor
    """int64 [N] or [N, K]"""
    divisor: Tensor | None
    """float32 [N]: the temperatures; None where all are 1."""
    with_entropy_gradient: bool
    transform: LogitTransform
    chunk_tokens: int
    kept: KeptSets | None
    shard: VocabularyShard | None = None
    """The part of the vocabulary that the logits are of."""
    keeps_probabilities: bool = False
    """From the forward to the backward pass."""

    def columns(self, part: slice) -> slice:
        """Return the range in the vocabulary of a range of logits."""
        first = 0 if self.shard is None else self.shard.first
        return slice(first + part.start, first + part.stop)


def _task(
    targets: Tensor,
    temperature: float | Tensor,
    with_entropy_gradient: bool,
    transform: LogitTransform,
    chunk_tokens: int,
    kept: KeptSets | None,
    shard: VocabularyShard | None = None,
) -> _Task:
    divisor = temperature if isinstance(temperature, Tensor) else None
    if not isinstance(temperature, Tensor) and temperature != 1.0:
        divisor = torch.full((len(targets),), temperature, dtype=torch.float32, device=targets.device)
    return _Task(targets, divisor, with_entropy_gradient, transform, chunk_tokens, kept, shard)


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: _Task) -> tuple[Tensor, Tensor]:
        normalised = _Normalised.empty_like(task.targets)
        keeps = any(ctx.needs_input_grad) and task.keeps_probabilities
        num_rows = len(hidden) if keeps else min(task.chunk_tokens, len(hidden))
        buffer = weight.new_empty(num_rows * len(weight))
        for chunk in _parts(0, len(hidden), task.chunk_tokens):
            place = buffer[chunk.start * len(weight) :] if keeps else buffer
            logits = _project(hidden[chunk], weight, bias, place)
            normalised.measure_(task.transform.apply_(logits), task, chunk.start, in_place=keeps)
        ctx.probabilities = buffer.view(num_rows, len(weight)) if keeps else None
        if task.shard is not None:
            normalised.join_(task, len(weight))
        return _save(ctx, task, normalised, hidden, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outer: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        task: _Task = ctx.task
        *normalised, hidden, weight, bias = ctx.saved_tensors
        differential = _Differential(task, _Normalised(*normalised), *outer)
        needed = ctx.needs_input_grad
        # They become the gradient, and are gone: another backward pass of this graph computes the logits again.
        probabilities, ctx.probabilities = ctx.probabilities, None
        if probabilities is not None:
            gradient = differential.replace_probabilities_(probabilities)
            return (
                gradient @ weight if needed[0] else None,
                gradient.t() @ hidden if needed[1] else None,
                gradient.sum(dim=0) if needed[2] else None,
                None,
            )
        num_tokens, hidden_size = hidden.shape
        columns = _columns_at_a_time(
            num_tokens, hidden_size, hidden.element_size(), num_columns=len(weight), chunk_tokens=task.chunk_tokens
        )
        sums = _Sums(hidden, single=columns == len(weight)) if needed[0] else None
        weight_gradient = torch.empty_like(weight) if needed[1] else None
        bias_gradient = torch.empty_like(bias) if needed[2] else None
        buffer = weight.new_empty(len(hidden) * columns)
        for block in _parts(0, len(weight), columns):
            logits = _project(hidden, weight[block], None if bias is None else bias[block], buffer)
            gradient = differential.replace_(task.transform.apply_(logits), task.columns(block))
            if sums is not None:
                sums.add(gradient, weight[block])
            if weight_gradient is not None:
                torch.mm(gradient.t(), hidden, out=weight_gradient[block])
            if bias_gradient is not None:
                bias_gradient[block] = gradient.sum(dim=0, dtype=torch.float32)
        return None if sums is None else sums.total(), weight_gradient, bias_gradient, None


class _LogitsLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, task: _Task) -> tuple[Tensor, Tensor]:
        normalised = _Normalised.empty_like(task.targets)
        normalised.measure_(logits, task, 0)
        return _save(ctx, task, normalised, logits)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outer: Tensor | None) -> tuple[Tensor, None]:
        *normalised, logits = ctx.saved_tensors
        differential = _Differential(ctx.task, _Normalised(*normalised), *outer)
        return differential.replace_(logits.clone(), slice(0, logits.shape[1])), None


def _save(ctx: Any, task: _Task, normalised: _Normalised, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Save the backward pass's inputs, and return the forward pass's results."""
    ctx.task = task
    ctx.save_for_backward(*(getattr(normalised, field.name) for field in fields(normalised)), *inputs)
    ctx.set_materialize_grads(False)
    if not task.with_entropy_gradient:
        ctx.mark_non_differentiable(normalised.entropy)
    return normalised.logprobs, normalised.entropy


@dataclass(frozen=True, slots=True, eq=False)
class _Normalised:
    """Normalisation and results of each trained token's distribution; float32 [N] unless stated otherwise."""

    logprobs: Tensor
    """Of the targets, in their shape."""
    entropy: Tensor
    largest: Tensor
    """Largest scaled logit."""
    log_sum: Tensor
    """``log(sum(exp(logit - largest)))``, so that ``logit - largest - log_sum`` is a log-probability, to the bit."""

    @classmethod
    def empty_like(cls, targets: Tensor) -> _Normalised:
        others = (targets.new_empty(len(targets), dtype=torch.float32) for _ in range(len(fields(cls)) - 1))
        return cls(torch.empty_like(targets, dtype=torch.float32), *others)

    def measure_(self, logits: Tensor, task: _Task, first: int, *, in_place: bool = False) -> None:
        """Fill in the tokens from `first` on, given their transformed logits, over these alone.

        The log-probability of a target that is in another part of the vocabulary is 0. With `in_place`, float32 logits
        are replaced by the probabilities.
        """
        columns = task.columns(slice(0, logits.shape[1]))
        for part in _parts(0, len(logits), _rows_at_a_time(*logits.shape)):
            rows = slice(first + part.start, first + part.stop)
            scaled = logits[part].to(torch.float32, copy=task.kept is not None)
            if task.divisor is not None:
                scaled = scaled / task.divisor[rows, None]
            if task.kept is not None:
                task.kept.exclude_(scaled, rows, columns)
            self.largest[rows] = scaled.amax(dim=-1)
            logs = torch.log_softmax(scaled, dim=-1)
            del scaled  # before the next temporary: the part counts in the peak
            # The largest logit's log-probability is 0 - log_sum, exactly.
            self.log_sum[rows] = -logs.amax(dim=-1)
            wanted = task.targets[rows]
            if task.shard is None:
                self.logprobs[rows] = logs.gather(-1, wanted.view(len(wanted), -1)).view_as(wanted)
            else:
                place = (wanted - columns.start).clamp_(0, logits.shape[1] - 1)
                found = logs.gather(-1, place.view(len(wanted), -1)).view_as(wanted)
                self.logprobs[rows] = torch.where(_is_inside(wanted, columns), found, 0.0)
            probabilities = torch.exp(logs, out=logits[part] if in_place else None)
            self.entropy[rows] = -logs.mul_(probabilities).sum(dim=-1)
            del logs, probabilities

    def join_(self, task: _Task, num_columns: int) -> None:
        """Turn distributions over the parts of the vocabulary, `num_columns` here, into the one over all of it.

        A part with the share w of all probability contributes w (H - log w) to the entropy, H being its own.
        """
        import torch.distributed as dist

        shard = task.shard
        assert shard is not None
        sum_here = self.largest + self.log_sum  # logarithm of this part's sum of exponentials
        dist.all_reduce(self.largest, dist.ReduceOp.MAX, group=shard.group)
        total = (sum_here - self.largest).exp()
        dist.all_reduce(total, group=shard.group)
        self.log_sum.copy_(total.log())
        log_share = sum_here - self.largest - self.log_sum
        entropy = log_share.exp() * (self.entropy - log_share)
        shares = log_share.view(-1, *(1 for _ in self.logprobs.shape[1:]))
        inside = _is_inside(task.targets, task.columns(slice(0, num_columns)))
        logprobs = torch.where(inside, self.logprobs + shares, 0.0)
        for values, result in ((entropy, self.entropy), (logprobs, self.logprobs)):
            dist.all_reduce(values, group=shard.group)
            result.copy_(values)


@dataclass(frozen=True, slots=True, eq=False)
class _Differential:
    """The gradient with respect to logits."""

    task: _Task
    normalised: _Normalised
    by_logprobs: Tensor | None
    """The gradient with respect to the log-probabilities, in their shape."""
    by_entropy: Tensor | None
    """float32 [N], likewise of the entropy."""

    def replace_(self, logits: Tensor, columns: slice) -> Tensor:
        """Turn transformed logits into the gradient with respect to raw ones, in place. Returns `logits`.

        Args:
            logits: [N, columns].
            columns: their range in the vocabulary.
        """
        for rows in _parts(0, len(logits), _rows_at_a_time(*logits.shape)):
            values = logits[rows]
            logs = self._divide_(values.to(torch.float32, copy=True), rows)
            logs.sub_(self.normalised.largest[rows, None]).sub_(self.normalised.log_sum[rows, None])
            if self.task.kept is not None:
                self.task.kept.exclude_(logs, rows, columns)
            gradient = self._divide_(self._by_scaled_(logs, rows, columns), rows)
            del logs
            values.copy_(self.task.transform.differentiate_(gradient, values))
            del gradient
        return logits

    def replace_probabilities_(self, probabilities: Tensor) -> Tensor:
        """Turn float32 probabilities [N, V] into the gradient with respect to raw logits, in place. Returns them."""
        if self.by_logprobs is None:
            return probabilities.zero_()
        scale = self._divide_(self.by_logprobs.reshape(len(probabilities), -1).clone(), slice(None))
        probabilities.mul_(-scale.sum(dim=1, keepdim=True))
        return probabilities.scatter_add_(1, self.task.targets.view(len(probabilities), -1), scale)

    def _divide_(self, values: Tensor, rows: slice) -> Tensor:
        return values if self.task.divisor is None else values.div_(self.task.divisor[rows, None])

    def _by_scaled_(self, logs: Tensor, rows: slice, columns: slice) -> Tensor:
        """Return the gradient with respect to scaled logits whose log-probabilities are `logs`, which it uses up."""
        by_entropy = None
        if self.by_entropy is not None:
            # Of the entropy H: -p (log p + H).
            by_entropy = logs.exp().mul_(logs + self.normalised.entropy[rows, None])
            by_entropy.mul_(-self.by_entropy[rows, None])
        if self.by_logprobs is None:
            return torch.zeros_like(logs) if by_entropy is None else by_entropy
        # Of a target's log-probability: 1 at the target, minus p everywhere.
        scale = self.by_logprobs[rows].reshape(len(logs), -1)
        gradient = logs.exp_().mul_(-scale.sum(dim=1, keepdim=True))
        place = self.task.targets[rows].view(len(logs), -1) - columns.start
        last = columns.stop - columns.start - 1
        inside = (place >= 0) & (place <= last)
        gradient.scatter_add_(1, place.clamp_(0, last), torch.where(inside, scale, 0.0))
        return gradient if by_entropy is None else gradient.add_(by_entropy)


class _Sums:
    """The gradient of the hidden states, summed over blocks of columns; in float32 where there are several."""

    def __init__(self, hidden: Tensor, *, single: bool) -> None:
        self._dtype, self._single = hidden.dtype, single
        self._total = torch.empty_like(hidden) if single else torch.zeros_like(hidden, dtype=torch.float32)

    def add(self, gradient: Tensor, weight: Tensor) -> None:
        if self._single:
            torch.mm(gradient, weight, out=self._total)
        elif self._dtype == torch.float32:
            self._total.addmm_(gradient, weight)
        else:
            for rows in _parts(0, len(gradient), _rows_at_a_time(*gradient.shape)):
                self._total[rows] += gradient[rows] @ weight

    def total(self) -> Tensor:
        return self._total.to(self._dtype)


def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    """Return the raw logits, in the memory of `buffer`."""
    shape = len(hidden), len(weight)
    out = buffer[: shape[0] * shape[1]].view(shape)
    return torch.mm(hidden, weight.t(), out=out) if bias is None else torch.addmm(bias, hidden, weight.t(), out=out)


def _can_keep(task: _Task, hidden: Tensor, weight: Tensor) -> bool:
    """Return whether the backward pass of `_HeadLogprobs` can do with probabilities, and these are few."""
    return (
        len(hidden) > 0
        and weight.dtype == hidden.dtype == torch.float32
        and task.shard is None
        and not task.with_entropy_gradient
        and task.transform == LogitTransform()
        and few_probabilities(len(hidden), len(weight), task.chunk_tokens)
    )


def _is_inside(targets: Tensor, columns: slice) -> Tensor:
    inside: Tensor = (targets >= columns.start) & (targets < columns.stop)
    return inside


def _rows_at_a_time(num_rows: int, columns: int) -> int:
    return max(1, min(num_rows, max(num_rows // _PARTS, _SMALL_PART // columns)))


def _columns_at_a_time(
    num_tokens: int, hidden_size: int, item_bytes: int, *, num_columns: int, chunk_tokens: int
) -> int:
    """Return the number of columns for which all tokens' logits and the float32 sum take no more than a chunk."""
    if num_tokens <= chunk_tokens:
        return num_columns
    most = num_columns * chunk_tokens // num_tokens
    sum_columns = 0 if item_bytes == 4 else hidden_size * 4 // item_bytes
    # Not less than half: where the sum alone is as large as a chunk, the hidden states dominate the memory.
    columns = max(most - sum_columns, most // 2, 1)
    return columns - columns % _COLUMN_MULTIPLE if columns > _COLUMN_MULTIPLE else columns


def _parts(start: int, stop: int, size: int) -> Iterator[slice]:
    """Yield [start, stop) in parts of `size`; the last part may be shorter."""
    for begin in range(start, stop, size):
        yield slice(begin, min(begin + size, stop))
