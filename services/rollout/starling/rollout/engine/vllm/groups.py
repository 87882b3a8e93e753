"""What the engine remembers of the groups that vLLM works on: one request for each completion."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from starling.common.wire.messages import Sampling, Status
from starling.rollout.engine.base import (
    Completion,
    GroupFailed,
    GroupRequest,
    GroupResult,
    PartialCompletion,
    PromptLogprobs,
    RequestError,
)

STATUS = {"stop": Status.OK, "length": Status.TRUNCATED}
"""By vLLM's reason for an end; others are no end, but an interruption."""
LEAST_TEMPERATURE = 0.01
"""What vLLM makes of anything between this and 0."""


@dataclass(slots=True, eq=False)
class VllmCompletion:
    """One completion: what was there of it, and what vLLM has sampled since."""

    index: int
    before: PartialCompletion | None
    budget: int
    """Tokens still to sample, at most."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: Any = None
    status: Status | None = None
    collector: Any = None
    """vLLM's queue of what comes; None before the request is made."""
    prompt_logprobs: Any = None
    """What vLLM says of the prompt, where it is asked to."""
    unwanted: bool = False
    """Give the request up."""
    again: bool = False
    """Make another request of what is missing."""

    @property
    def num_before(self) -> int:
        """Tokens that were there."""
        return 0 if self.before is None else len(self.before.token_ids)

    def take(self, output: Any) -> int:
        """Take one `RequestOutput` in; return how many tokens it brought."""
        (completion,) = output.outputs
        self.token_ids += completion.token_ids
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs
        # Two entries where the likeliest token is another one; the sampled one comes first.
        flat = completion.logprobs
        if flat is not None:
            self.logprobs += [flat.logprobs[start] for start in flat.start_indices]
        if output.finished:
            self.spans = completion.weight_versions
            self.status = STATUS.get(completion.finish_reason)
        return len(completion.token_ids)

    def begin_again(self) -> None:
        """Make ready for another request, for what is missing."""
        before = self.partial()
        self.before = before if len(before.token_ids) else None
        self.budget -= len(self.token_ids)
        self.token_ids, self.logprobs, self.spans, self.collector = [], [], None, None
        self.unwanted = self.again = False

    def partial(self) -> PartialCompletion:
        """Return what is there now."""
        token_ids = np.array(self.token_ids, np.int32)
        logprobs = np.array(self.logprobs, np.float32)
        versions = token_versions(self.spans, len(token_ids))
        if self.before is not None:
            token_ids = np.concatenate((self.before.token_ids, token_ids), dtype=np.int32)
            logprobs = np.concatenate((self.before.logprobs, logprobs), dtype=np.float32)
            versions = np.concatenate((self.before.versions, versions), dtype=np.int32)
        return PartialCompletion(token_ids, logprobs, versions, self.status)


class VllmGroup:
    """One group that was added, and how far its completions are."""

    def __init__(self, number: int, request: GroupRequest, max_model_len: int, items: Sequence[Any] = ()) -> None:
        """Make one that waits.

        Args:
            number: tells it from every other, as leases may come again.
            request: what is asked for.
            max_model_len: most tokens of a sequence.
            items: the prompt's images and videos, as `media.items_of` makes them.
        """
        self.number, self.request, self.items = number, request, items
        self.submitted = False
        self.failure = ""
        """Why it cannot be finished."""
        budget = min(request.sampling.max_tokens, max_model_len - len(request.prompt_ids))
        partial = request.partial or (None,) * request.num_completions
        self.rows = [
            VllmCompletion(index, before, budget - (0 if before is None else len(before.token_ids)))
            for index, before in enumerate(partial)
        ]
        for row in self.rows:
            if row.before is not None and row.before.status is not None:
                row.status = row.before.status
            elif row.budget <= 0:
                row.status = Status.TRUNCATED

    @property
    def unfinished(self) -> list[VllmCompletion]:
        """The rows that have not ended."""
        return [row for row in self.rows if row.status is None]

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values the engine has, of rows that go on; a shared prompt counts for each."""
        prompt = len(self.request.prompt_ids)
        return sum(prompt + row.num_before + len(row.token_ids) for row in self.unfinished if row.token_ids)

    def prompt_of(self, row: VllmCompletion) -> list[int]:
        """Return all tokens before the first one that vLLM is to sample."""
        if row.before is None:
            return self.request.prompt_ids
        return [*self.request.prompt_ids, *row.before.token_ids.tolist()]

    def result(self) -> GroupResult | GroupFailed:
        """Return what became of a group that has ended."""
        lease = self.request.lease
        if self.failure:
            return GroupFailed(lease, self.failure)
        completions = []
        for row in self.rows:
            whole = row.partial()
            if not np.isfinite(whole.logprobs).all():
                version = int(whole.versions[~np.isfinite(whole.logprobs)][0])
                reason = f"the model's logits are not finite at weight version {version}; check the weights"
                return GroupFailed(lease, reason)
            assert whole.status is not None
            completions.append(Completion(whole.token_ids, whole.logprobs, whole.versions, whole.status))
        prompt_ids = np.array(self.request.prompt_ids, np.int32)
        return GroupResult(lease, prompt_ids, tuple(completions), self.request.tensors, self._prompt_scores())

    def _prompt_scores(self) -> PromptLogprobs | None:
        """Return what the first row's request was told of the prompt, with the version that sampled behind it."""
        if not self.request.score_prompt:
            return None
        row = self.rows[0]
        flat, version = row.prompt_logprobs, int(row.partial().versions[row.num_before])
        # Two entries for each token but the first: its own, and that of the likeliest one. What was sampled before the
        # request was made again stands behind the prompt.
        starts = np.array(flat.start_indices[1 : len(self.request.prompt_ids)], np.int64)
        logprobs, ids = np.array(flat.logprobs, np.float32), np.array(flat.token_ids, np.int32)
        return PromptLogprobs(logprobs[starts], ids[starts + 1], logprobs[starts + 1], version)


def check_temperature(request: GroupRequest) -> None:
    """Raise a `RequestError` where vLLM would sample at another temperature than it is asked for."""
    temperature = request.sampling.temperature
    if 0.0 < temperature < LEAST_TEMPERATURE:
        raise RequestError(
            f"{request.lease}: temperature is {temperature}; vLLM samples at 0 or at {LEAST_TEMPERATURE} and more"
        )


def completion_seed(sampling: Sampling, row: VllmCompletion) -> int:
    """Return the seed of one completion's random numbers; one that goes on draws others than at its beginning."""
    text = f"{sampling.seed}/{row.index}/{row.num_before}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def sampling_arguments(group: VllmGroup, row: VllmCompletion, eos_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams` for one completion."""
    sampling = group.request.sampling
    assert math.isfinite(sampling.temperature)
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": row.budget,
        "stop_token_ids": sorted({*eos_token_ids, *sampling.stop_token_ids}),
        "ignore_eos": True,  # those of the tokenizer are listed; others would be those of the model's defaults
        "seed": completion_seed(sampling, row),
        "logprobs": 0,
        "prompt_logprobs": 1 if group.request.score_prompt and row.index == 0 else None,
        "flat_logprobs": True,
        "detokenize": False,
        "skip_clone": True,
    }


# JOINED from starling.rollout.engine.vllm.versions: From vLLM's spans of weight versions to the version of
# each token.


def token_versions(spans: Iterable[Any] | None, num_tokens: int) -> npt.NDArray[np.int32]:
    """Return the weight version of each of `num_tokens` sampled tokens, int32.

    vLLM's engine stamps what it puts out with the version in force, so that spans are exact: it changes only while
    nothing is being computed.

    Args:
        spans: each with `version`, the name given at an adoption, and `start` and `end` in tokens; None for no tokens.
        num_tokens: tokens that arrived; what comes after the last span is of its version.
    """
    versions = np.full(num_tokens, -1, np.int32)
    last = -1
    for span in spans or ():
        last = int(span.version)
        versions[span.start : span.end] = last
    versions[versions < 0] = last
    return versions
