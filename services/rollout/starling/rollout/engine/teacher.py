"""Log-probabilities of given tokens under a teacher model (prefill only, batched by a token budget).

Completions of one prompt are padded at their end to the longest of their batch. Attention is causal, so the padding
does not change the logits before it, and no mask is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from starling.algo.architecture import context_length
from starling.algo.tokenizer import load_tokenizer
from starling.common.errors import ConfigError, StarlingError
from starling.rollout.engine.model_config import read_config

ROWS_AT_ONCE: Final = 1024
"""Tokens whose logits are converted to float32 together: bounds the memory beyond the logits themselves."""


class TeacherRequestError(StarlingError, ValueError):
    """These tokens cannot be scored by this teacher, nor by another instance of it."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the T tokens of all completions of a group, in their order."""

    logprobs: npt.NDArray[np.float32]
    """[T]: natural logarithm of each token's probability under softmax(logits / temperature), over the whole
    vocabulary."""
    top_ids: npt.NDArray[np.int32]
    """[T, k]: the k most likely tokens at each position, the most likely first."""
    top_logprobs: npt.NDArray[np.float32]
    """[T, k]: their log-probabilities."""


class TokenScorer:
    """A teacher model that computes log-probabilities of given tokens. Not thread safe."""

    def __init__(
        self, model: PreTrainedModel, *, tokens_per_forward: int, top_k: int = 0, num_ids: int | None = None
    ) -> None:
        """Create a scorer that owns `model`.

        Args:
            model: in eval mode, without gradients, as `build_model` returns it.
            tokens_per_forward: maximum number of tokens of one forward pass, padding included.
            top_k: how many of the most likely tokens to return for each position.
            num_ids: return only tokens with ids below this, which the policy shares; None for all.

        Raises:
            ConfigError: `top_k` is larger than the number of such tokens.
        """
        self._model, self._tokens_per_forward, self._top_k = model, tokens_per_forward, top_k
        self._vocab_size = int(model.get_input_embeddings().num_embeddings)
        self._num_ids = self._vocab_size if num_ids is None else min(num_ids, self._vocab_size)
        if top_k > self._num_ids:
            raise ConfigError(
                f"teacher.top_k = {top_k}, but teacher and policy share {self._num_ids} tokens; set at most that"
            )
        self._context = context_length(model.config)
        self._device = next(model.parameters()).device
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def score(
        self,
        prompt_ids: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32],
        lengths: Sequence[int],
        temperature: float,
    ) -> TokenLogprobs:
        """Return the log-probabilities of the completions of one prompt.

        Args:
            prompt_ids: [prompt]; at least one.
            token_ids: [sum of lengths]: the concatenated completions.
            lengths: tokens of each completion.
            temperature: divisor of the logits; 0 means 1, as for greedy sampling.

        Raises:
            TeacherRequestError: an id is not in the vocabulary, the prompt is empty, the lengths do not add up, or a
                sequence is longer than the model's context.
        """
        self._check(prompt_ids, token_ids, lengths)
        num, k = len(token_ids), self._top_k
        scores = TokenLogprobs(np.empty(num, np.float32), np.empty((num, k), np.int32), np.empty((num, k), np.float32))
        ends = np.cumsum(lengths)
        for batch in batches_by_budget(lengths, len(prompt_ids), self._tokens_per_forward):
            completions = [token_ids[ends[index] - lengths[index] : ends[index]] for index in batch]
            logits = self._logits(prompt_ids, completions)
            for row, index in enumerate(batch):
                place = slice(int(ends[index]) - lengths[index], int(ends[index]))
                self._read(logits[row, : lengths[index]], completions[row], temperature or 1.0, scores, place)
        return scores

    def _check(
        self, prompt_ids: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32], lengths: Sequence[int]
    ) -> None:
        if not len(prompt_ids):
            raise TeacherRequestError("the prompt is empty; the first token needs at least one token before it")
        if sum(lengths) != len(token_ids) or any(length < 0 for length in lengths):
            raise TeacherRequestError(
                f"completions of {list(lengths)} tokens were announced, but {len(token_ids)} tokens arrived"
            )
        ids = np.concatenate([prompt_ids, token_ids])
        outside = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(outside):
            raise TeacherRequestError(
                f"token {outside[0]} is not in the teacher's vocabulary of {self._vocab_size}; "
                "give a teacher that has the policy's tokenizer"
            )
        longest = len(prompt_ids) + max(lengths, default=0)
        if self._context is not None and longest > self._context:
            raise TeacherRequestError(
                f"a prompt with its completion has {longest} tokens, and the teacher's context {self._context}"
            )

    def _logits(self, prompt_ids: npt.NDArray[np.int32], completions: Sequence[npt.NDArray[np.int32]]) -> torch.Tensor:
        """Return logits [completions, longest, vocab]: those of each completion's tokens come first in its row."""
        longest = max(len(tokens) for tokens in completions)
        width = len(prompt_ids) + longest - 1  # the last token is predicted, never fed
        ids = np.zeros((len(completions), width), np.int64)
        ids[:, : len(prompt_ids)] = prompt_ids
        for row, tokens in zip(ids, completions, strict=True):
            fed = tokens[:-1]
            row[len(prompt_ids) : len(prompt_ids) + len(fed)] = fed
        positions = torch.arange(width, device=self._device).expand(len(completions), width)
        keep = {"logits_to_keep": longest} if self._takes_logits_to_keep else {}
        output = self._model(
            input_ids=torch.from_numpy(ids).to(self._device), position_ids=positions, use_cache=False, **keep
        )
        logits: torch.Tensor = output.logits[:, -longest:]
        return logits

    def _read(
        self,
        logits: torch.Tensor,
        tokens: npt.NDArray[np.int32],
        temperature: float,
        scores: TokenLogprobs,
        place: slice,
    ) -> None:
        """Write the log-probabilities of `tokens` under `logits` [tokens, vocab] into `place` of `scores`."""
        for begin in range(0, len(tokens), ROWS_AT_ONCE):
            some = slice(begin, begin + ROWS_AT_ONCE)
            scaled = logits[some].float() / temperature
            total = scaled.logsumexp(dim=-1, keepdim=True)
            chosen = torch.from_numpy(tokens[some].astype(np.int64)).to(self._device)[:, None]
            at = slice(place.start + begin, min(place.start + begin + ROWS_AT_ONCE, place.stop))
            scores.logprobs[at] = (scaled.gather(-1, chosen) - total)[:, 0].cpu().numpy()
            if self._top_k:
                values, ids = scaled[:, : self._num_ids].topk(self._top_k, dim=-1)
                scores.top_logprobs[at] = (values - total).cpu().numpy()
                scores.top_ids[at] = ids.to(torch.int32).cpu().numpy()


def batches_by_budget(lengths: Sequence[int], prompt_length: int, budget: int) -> list[list[int]]:
    """Return the batches of completion indices: sorted by length, each within a budget of padded tokens.

    Empty completions are left out; a completion beyond the budget gets a batch of its own.
    """
    found: list[list[int]] = []
    for index in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: lengths[i], reverse=True):
        width = prompt_length + lengths[found[-1][0] if found else index] - 1
        if found and width * (len(found[-1]) + 1) <= budget:
            found[-1].append(index)
        else:
            found.append([index])
    return found


def num_shared_token_ids(teacher: str | Path, model: str | Path, *, trust_remote_code: bool = False) -> int:
    """Return the vocabulary size of the model in folder `model`, after checking that `teacher` has the same tokenizer.

    Args:
        teacher: the teacher's folder; its code is never run.
        model: the policy's folder.
        trust_remote_code: whether code in the policy's folder may be run.

    Raises:
        ConfigError: the two tokenizers differ, so that an id would mean another token to each, or a folder cannot be
            read.
    """
    theirs, ours = _vocabulary(teacher), _vocabulary(model, trust_remote_code=trust_remote_code)
    if len(theirs) != len(ours):
        raise ConfigError(
            f"the teacher's tokenizer in {teacher} has {len(theirs)} tokens and the model's in {model} {len(ours)}: "
            "the teacher must read what the model samples; give a teacher of the same vocabulary"
        )
    other = next((token for token, id_ in ours.items() if theirs.get(token) != id_), None)
    if other is not None:
        raise ConfigError(
            f"the teacher's tokenizer in {teacher} differs from the model's in {model}: token {other!r} has the id "
            f"{ours[other]} there and {theirs.get(other, 'none')} here; give a teacher of the same vocabulary"
        )
    config = read_config(Path(model), trust_remote_code=trust_remote_code)
    return int(config.get_text_config().vocab_size)


def _vocabulary(path: str | Path, *, trust_remote_code: bool = False) -> dict[str, int]:
    vocabulary: dict[str, int] = load_tokenizer(Path(path), trust_remote_code=trust_remote_code).get_vocab()
    return vocabulary
