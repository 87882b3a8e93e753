"""Validation of group requests, shared by all engines."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from starling.algo.media import media_problem, placeholders_in
from starling.algo.routing import experts_problem
from starling.algo.truncation import kept_problem
from starling.common.counts import counted
from starling.common.wire.messages import MediaInputs, ModelExperts
from starling.common.wire.tensors import MAX_KEPT_BYTES, MAX_KEPT_PER_TOKEN, MAX_ROUTING_BYTES
from starling.rollout.engine.base import GroupRequest, RequestError

MOST_TOP_K: Final = (1 << 31) - 1
"""Engines store top_k in 32 bits."""


def check_request(request: GroupRequest, vocab_size: int, max_model_len: int, max_rows: int) -> None:
    """Raise a `RequestError` if the prompt or the sampling parameters of `request` are invalid."""
    lease, prompt, sampling = request.lease, request.prompt_ids, request.sampling
    if not prompt:
        raise RequestError(f"{lease}: the prompt is empty; give at least one token")
    if len(prompt) >= max_model_len:
        raise RequestError(
            f"{lease}: the prompt of {counted(len(prompt), 'token')} leaves no room in the context of {max_model_len}; "
            "shorten it or raise max_model_len"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = min(prompt) if min(prompt) < 0 else max(prompt)
        raise RequestError(
            f"{lease}: prompt token id {wrong} is outside the model's vocabulary of {vocab_size}; "
            "use the model's own tokenizer"
        )
    if not 1 <= request.num_completions <= max_rows:
        raise RequestError(
            f"{lease}: num_completions is {request.num_completions}; give 1 to {max_rows}, or raise max_rows"
        )
    if request.score_prompt and (request.partial or request.tensors):
        raise RequestError(f"{lease}: score_prompt is for new groups with text prompts; leave score_prompt out")
    if sampling.max_tokens < 1:
        raise RequestError(f"{lease}: max_tokens is {sampling.max_tokens}; give at least 1")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0.0):
        raise RequestError(f"{lease}: temperature is {sampling.temperature}; give 0 or a positive number")
    if not 0.0 < sampling.top_p <= 1.0:
        raise RequestError(f"{lease}: top_p is {sampling.top_p}; give a number above 0, at most 1")
    if not 0 <= sampling.top_k <= MOST_TOP_K:
        raise RequestError(
            f"{lease}: top_k is {sampling.top_k}; give 0 to keep all, or a positive number of at most {MOST_TOP_K}"
        )
    if not 0.0 <= sampling.min_p <= 1.0:
        raise RequestError(f"{lease}: min_p is {sampling.min_p}; give a number from 0 to 1")
    if sampling.logprobs == "truncated" and (
        sampling.temperature == 0.0 or not 1 <= sampling.top_k <= MAX_KEPT_PER_TOKEN
    ):
        raise RequestError(
            f"{lease}: logprobs is 'truncated' at temperature {sampling.temperature} and top_k {sampling.top_k}; give "
            f"a temperature above 0 and a top_k from 1 to {MAX_KEPT_PER_TOKEN}, or logprobs 'full'"
        )
    for token in sampling.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{lease}: stop token id {token} is outside the model's vocabulary of {vocab_size}; "
                "use the model's own tokenizer"
            )


def kept_size_problem(num_bytes: int) -> str:
    """Return why a group whose kept tokens take `num_bytes` cannot be sent; empty if it can."""
    if num_bytes <= MAX_KEPT_BYTES:
        return ""
    return (
        f"the kept tokens of the group take {num_bytes} bytes, and {MAX_KEPT_BYTES} can be sent; lower sampling.top_k, "
        "sampling.max_tokens or rl.group_size"
    )


def routing_size_problem(num_bytes: int) -> str:
    """Return why a group whose recorded experts take `num_bytes` cannot be sent; empty if it can."""
    if num_bytes <= MAX_ROUTING_BYTES:
        return ""
    return (
        f"the experts of the group's tokens take {num_bytes} bytes, and {MAX_ROUTING_BYTES} can be sent; lower "
        "sampling.max_tokens or rl.group_size"
    )


def check_routing(request: GroupRequest, sizes: ModelExperts | None) -> None:
    """Raise a `RequestError` if the experts of a group's tokens cannot be recorded, or its partial completions have
    others than those of a model of `sizes`; None if no experts of the model can be.
    """
    if sizes is None:
        raise RequestError(
            f"{request.lease}: routing is 'replayed', and the model has no experts whose choice is recorded; set "
            "sampling.routing = 'own'"
        )
    for index, partial in enumerate(request.partial):
        if partial.routing is not None and (problem := experts_problem(partial.routing, len(partial.token_ids), sizes)):
            raise RequestError(f"{request.lease}: partial completion {index} cannot be resumed: {problem}")


def check_partial(request: GroupRequest, vocab_size: int, inputs: MediaInputs | None) -> None:
    """Raise a `RequestError` if the partial completions of `request` cannot be resumed."""
    if request.partial and len(request.partial) != request.num_completions:
        raise RequestError(
            f"{request.lease}: {len(request.partial)} partial completions for a group of {request.num_completions}; "
            "give one for each, empty where nothing was sampled"
        )
    for index, partial in enumerate(request.partial):
        ids = partial.token_ids
        if not len(ids) == len(partial.logprobs) == len(partial.versions):
            raise RequestError(
                f"{request.lease}: partial completion {index} has {len(ids)} tokens, {len(partial.logprobs)} "
                f"log-probabilities and {len(partial.versions)} versions; give one of each for every token"
            )
        if partial.kept is not None and (problem := kept_problem(partial.kept, ids, None)):
            raise RequestError(f"{request.lease}: partial completion {index} cannot be resumed: {problem}")
        if partial.routing is not None and (problem := experts_problem(partial.routing, len(ids), None)):
            raise RequestError(f"{request.lease}: partial completion {index} cannot be resumed: {problem}")
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
            raise RequestError(
                f"{request.lease}: partial completion {index} has a token id outside the model's vocabulary of "
                f"{vocab_size}; use the model's own tokenizer"
            )
        if placeholders_in(ids, inputs).any():
            raise RequestError(f"{request.lease}: partial completion {index} has a placeholder token of images")


def check_tensors(request: GroupRequest, inputs: MediaInputs | None) -> None:
    """Raise a `RequestError` unless the images and videos of the prompt are those that the model takes.

    Otherwise the model would reject the whole batch, or mix up the images of different prompts.

    Args:
        request: with the token ids and the tensors of the prompt.
        inputs: the form that the model takes; None for a text model.
    """
    if request.tensors and inputs is None:
        raise RequestError(f"{request.lease}: the prompt has images or videos, and the model takes text only")
    problem = media_problem(request.tensors, np.array(request.prompt_ids, np.int32), inputs)
    if problem:
        raise RequestError(f"{request.lease}: {problem}; leave the model's own image tokens out of the text")
