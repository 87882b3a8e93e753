"""How likely a model finds tokens that another one sampled: forward passes without a cache, batched by a token budget.

Completions of one prompt are padded at their end to the longest of their batch. A causal model reads no token before it
comes to it, so what stands behind a completion changes nothing in it, and no mask is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from starling.algo.architecture import remedy
from starling.common.errors import ConfigError, StarlingError
from starling.rollout.engine.embedded.model import context_length

ROWS_AT_ONCE: Final = 1024
"""Tokens whose logits are taken to float32 together: bounds the memory beside the logits themselves."""
TOKENIZER_FILES: Final = ("tokenizer*", "vocab*", "*.model")
"""What the files of a tokenizer are called."""


class TeacherRequestError(StarlingError, ValueError):
    """These tokens cannot be scored by this model, nor by another one like it."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What a model makes of the T tokens of all completions of a group, in their order."""

    logprobs: npt.NDArray[np.float32]
    """[T]: natural logarithm of each token's probability under softmax(logits / temperature), over the whole
    vocabulary."""
    top_ids: npt.NDArray[np.int32]
    """[T, k]: the likeliest tokens at each place, the likeliest first."""
    top_logprobs: npt.NDArray[np.float32]
    """[T, k]: theirs."""


class TokenScorer:
    """A model that scores tokens. Not thread safe."""

    def __init__(
        self, model: PreTrainedModel, *, tokens_per_forward: int, top_k: int = 0, num_ids: int | None = None
    ) -> None:
        """Take over a model.

        Args:
            model: in eval mode, without gradients (`build_model` makes such a one).
            tokens_per_forward: most tokens of one forward pass, padding included.
            top_k: how many of the likeliest tokens to tell at each place.
            num_ids: tell only tokens of ids below this, which the policy knows; None for all.

        Raises:
            ConfigError: there are not so many tokens to tell.
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
        """Score the completions of one prompt.

        Args:
            prompt_ids: [prompt]; at least one.
            token_ids: [sum of lengths]: the completions, one behind the other.
            lengths: tokens of each completion.
            temperature: divisor of the logits; 0 stands for 1, as where the likeliest token was taken.

        Raises:
            TokensError: an id is not in the vocabulary, the prompt is empty, the numbers do not agree, or a sequence is
                longer than the model's context.
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
            raise TeacherRequestError("the prompt has no tokens, so nothing says what the first token follows")
        if sum(lengths) != len(token_ids) or any(length < 0 for length in lengths):
            raise TeacherRequestError(
                f"completions of {list(lengths)} tokens were announced, and {len(token_ids)} tokens came"
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
        """Return the logits [rows, longest, vocab] of the tokens of each completion, each in its first places."""
        longest = max(len(tokens) for tokens in completions)
        width = len(prompt_ids) + longest - 1  # nothing follows the last token
        ids = np.zeros((len(completions), width), np.int64)
        ids[:, : len(prompt_ids)] = prompt_ids
        for row, tokens in zip(ids, completions, strict=True):
            known = tokens[:-1]
            row[len(prompt_ids) : len(prompt_ids) + len(known)] = known
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
        """Write what `logits` [tokens, vocab] say of `tokens` into `place` of `scores`."""
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
    """Return which completions go through the model together: alike in length, within a budget of padded tokens.

    Empty completions, of which there is nothing to say, are in none; one that is beyond the budget is alone.
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
    """Return how many token ids the model in folder `model` has, once it is known to read them as `teacher` does.

    Args:
        teacher: the teacher's folder; its own code is never run.
        model: the policy's folder.
        trust_remote_code: may the code in the policy's folder be run.

    Raises:
        ConfigError: the two folders hold other tokenizers, so that an id would mean another token to each, or one of
            them cannot be read.
    """
    theirs, ours = _vocabulary(teacher), _vocabulary(model, trust_remote_code=trust_remote_code)
    if len(theirs) != len(ours):
        raise ConfigError(
            f"the teacher's tokenizer in {teacher} knows {len(theirs)} tokens and the model's in {model} {len(ours)}: "
            "what one samples the other must read; give a teacher of the same vocabulary"
        )
    other = next((token for token, id_ in ours.items() if theirs.get(token) != id_), None)
    if other is not None:
        raise ConfigError(
            f"the teacher's tokenizer in {teacher} is another than the model's in {model}: token {other!r} has the id "
            f"{ours[other]} there and {theirs.get(other, 'none')} here; give a teacher of the same vocabulary"
        )
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # as in `build_model`, the folder is the user's
        reason = str(error).split("\n", 1)[0].rstrip(".") + remedy(Path(model), trust_remote_code)
        raise ConfigError(f"model folder {str(model)!r} cannot be loaded: {reason}") from error
    return int(config.get_text_config().vocab_size)


def _vocabulary(path: str | Path, *, trust_remote_code: bool = False) -> dict[str, int]:
    # Of a folder without a tokenizer transformers makes one that knows next to nothing.
    if not any(True for pattern in TOKENIZER_FILES for _ in Path(path).glob(pattern)):
        raise ConfigError(f"the model folder {path} has no tokenizer; add its tokenizer.json")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).split("\n", 1)[0].rstrip(".")
        raise ConfigError(f"the model folder {path} has no tokenizer that can be read: {reason}") from error
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary
