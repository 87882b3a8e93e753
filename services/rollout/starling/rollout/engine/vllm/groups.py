"""State of the groups that vLLM generates: one vLLM request for each completion."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from starling.algo.routing import Experts, fill, join_experts, no_experts
from starling.algo.truncation import KeptTokens, is_truncated, join_kept, join_nats
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
"""By vLLM's finish reason; any other reason is an interruption."""
MIN_TEMPERATURE = 0.01
"""vLLM raises temperatures between 0 and this to it."""
OUTPUT_TOKENS = 8
"""Tokens of a completion in one output of vLLM, unless a client streams them; the first token is sent at once."""
RECORDS_EXPERTS = "starling_experts"
"""Extra argument of a request whose experts are recorded: see `worker/experts.py`."""
NO_LOGPROBS, WITH_LOG_MASS, WITH_KEPT_TOKENS = 0, 1, -1
"""Log-probabilities to ask for besides that of the sampled token: see `worker/sampler.py`."""


@dataclass(slots=True, eq=False)
class VllmCompletion:
    """One completion: its resumed part, and what vLLM has sampled since."""

    index: int
    resumed: PartialCompletion | None
    budget: int
    """Maximum number of tokens still to sample."""
    num_logprobs: int = NO_LOGPROBS
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[npt.NDArray[np.int32]] = field(default_factory=list)
    """The kept tokens of each of `token_ids`; empty without `WITH_KEPT_TOKENS`."""
    log_masses: list[float] = field(default_factory=list)
    """Logarithm of the kept tokens' probability at each of `token_ids`; empty for `NO_LOGPROBS`."""
    experts: Experts | None = None
    """Of the resumed tokens and `token_ids`, as vLLM has computed them for this request; None if not recorded."""
    spans: Any = None
    status: Status | None = None
    collector: Any = None
    """vLLM's output queue of the request; None before the request is made."""
    prompt_logprobs: Any = None
    """vLLM's log-probabilities of the prompt, if requested."""
    aborted: bool = False
    """The request is to be aborted."""
    restart: bool = False
    """Another request is to be made for the remaining tokens."""

    @property
    def num_resumed(self) -> int:
        """Tokens of the resumed part."""
        return 0 if self.resumed is None else len(self.resumed.token_ids)

    def add_output(self, output: Any) -> int:
        """Add one `RequestOutput`; return its number of tokens."""
        (sampled,) = output.outputs
        self.token_ids += sampled.token_ids
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs
        # Two entries if the most likely token is another one; the sampled one comes first.
        flat = sampled.logprobs
        if flat is not None:
            self._add_logprobs(flat)
        if output.finished:
            self.spans = sampled.weight_versions
            self.status = STATUS.get(sampled.finish_reason)
        return len(sampled.token_ids)

    def _add_logprobs(self, flat: Any) -> None:
        """Add vLLM's log-probabilities of the newest tokens."""
        starts = flat.start_indices
        logprobs = [flat.logprobs[start] for start in starts]
        if self.num_logprobs != NO_LOGPROBS:
            masses = [flat.logprobs[start + 1] for start in starts]
            self.log_masses += masses
        if self.num_logprobs == WITH_KEPT_TOKENS:
            logprobs = [logprob - mass for logprob, mass in zip(logprobs, masses, strict=True)]
            for start, end in zip(starts, flat.end_indices, strict=True):
                ids = np.array(flat.token_ids[start:end], np.int32)
                self.kept.append(np.sort(ids[ids >= 0]))
        self.logprobs += logprobs

    def prepare_restart(self) -> None:
        """Reset for another request, for the remaining tokens."""
        before = self.partial()
        self.resumed = before if len(before.token_ids) else None
        self.budget -= len(self.token_ids)
        self.token_ids, self.logprobs, self.kept, self.log_masses = [], [], [], []
        self.spans = self.collector = self.experts = None
        self.aborted = self.restart = False

    def partial(self) -> PartialCompletion:
        """Return all tokens so far."""
        token_ids = np.array(self.token_ids, np.int32)
        logprobs = np.array(self.logprobs, np.float32)
        versions = token_versions(self.spans, len(token_ids))
        kept = KeptTokens.from_rows(self.kept) if self.num_logprobs == WITH_KEPT_TOKENS else None
        nats = -np.array(self.log_masses, np.float32) if self.log_masses else None
        routing = self.experts
        if self.resumed is not None:
            nats = join_nats(((self.resumed.truncation_nats, self.num_resumed), (nats, len(self.token_ids))))
            token_ids = np.concatenate((self.resumed.token_ids, token_ids), dtype=np.int32)
            logprobs = np.concatenate((self.resumed.logprobs, logprobs), dtype=np.float32)
            versions = np.concatenate((self.resumed.versions, versions), dtype=np.int32)
            kept = join_kept(((self.resumed.kept, self.num_resumed), (kept, len(self.token_ids))))
            routing = _with_resumed(self.resumed.routing, routing, self.num_resumed, len(self.token_ids))
        return PartialCompletion(token_ids, logprobs, versions, self.status, kept, nats, routing)


class VllmGroup:
    """A group and the state of its completions."""

    def __init__(
        self,
        number: int,
        request: GroupRequest,
        max_model_len: int,
        items: Sequence[Any] = (),
        *,
        num_logprobs: int = NO_LOGPROBS,
    ) -> None:
        """Create a waiting group.

        Args:
            number: identifies the group, as leases can be reused.
            request: the request.
            max_model_len: maximum number of tokens of a sequence.
            items: the prompt's images and videos, from `multimodal.items_of`.
            num_logprobs: to ask for, see `num_logprobs`.
        """
        self.number, self.request, self.items = number, request, items
        self.submitted = False
        self.prompt_routing = request.partial[0].prompt_routing if request.partial else None
        """As `GroupResult.prompt_routing`."""
        self.failure = ""
        """Why the group cannot be finished; empty otherwise."""
        budget = min(request.sampling.max_tokens, max_model_len - len(request.prompt_ids))
        partial = request.partial or (None,) * request.num_completions
        self.completions = [
            VllmCompletion(index, before, budget - (0 if before is None else len(before.token_ids)), num_logprobs)
            for index, before in enumerate(partial)
        ]
        for completion in self.completions:
            if completion.resumed is not None and completion.resumed.status is not None:
                completion.status = completion.resumed.status
            elif completion.budget <= 0:
                completion.status = Status.TRUNCATED

    @property
    def is_routed(self) -> bool:
        """Whether the experts of its tokens are recorded."""
        return self.request.sampling.routing == "replayed"

    @property
    def unfinished(self) -> list[VllmCompletion]:
        """The completions that have not ended."""
        return [completion for completion in self.completions if completion.status is None]

    @property
    def num_cached(self) -> int:
        """Tokens in the KV cache of running completions; a shared prompt counts for each of them.

        The newest tokens of a completion, fewer than `OUTPUT_TOKENS`, may be missing.
        """
        prompt = len(self.request.prompt_ids)
        return sum(
            prompt + completion.num_resumed + len(completion.token_ids)
            for completion in self.unfinished
            if completion.token_ids
        )

    def prompt_of(self, completion: VllmCompletion) -> list[int]:
        """Return all tokens before the first one that vLLM samples."""
        if completion.resumed is None:
            return self.request.prompt_ids
        return [*self.request.prompt_ids, *completion.resumed.token_ids.tolist()]

    def add_experts(self, completion: VllmCompletion, experts: Experts) -> None:
        """Add the experts of the tokens that vLLM has computed for a completion, from the first one of its prompt.

        Those of the last token are left out, though vLLM may have computed it: what follows it was not sampled.
        """
        num_prompt, num_own = len(self.request.prompt_ids), completion.num_resumed + len(completion.token_ids)
        if not num_own:
            return
        computed = experts[: num_prompt + num_own - 1]
        whole = np.concatenate((computed, no_experts(num_prompt + num_own - len(computed), experts)))
        prompt = whole[:num_prompt]  # in part, if the request was aborted before its prefill ended
        self.prompt_routing = prompt if self.prompt_routing is None else fill(self.prompt_routing, prompt)
        completion.experts = whole[num_prompt:]

    def partials(self) -> tuple[PartialCompletion, ...]:
        """Return all tokens so far of each completion."""
        return tuple(replace(one.partial(), prompt_routing=self.prompt_routing) for one in self.completions)

    def result(self) -> GroupResult | GroupFailed:
        """Return the result of a group that has ended."""
        lease = self.request.lease
        if self.failure:
            return GroupFailed(lease, self.failure)
        results = []
        for completion in self.completions:
            whole = completion.partial()
            if not np.isfinite(whole.logprobs).all():
                version = int(whole.versions[~np.isfinite(whole.logprobs)][0])
                reason = f"the model's logits are not finite at weight version {version}; check the weights"
                return GroupFailed(lease, reason)
            assert whole.status is not None
            results.append(
                Completion(
                    *(whole.token_ids, whole.logprobs, whole.versions, whole.status, whole.kept),
                    *(whole.truncation_nats, whole.routing),
                )
            )
        prompt_ids = np.array(self.request.prompt_ids, np.int32)
        scores, tensors = self._prompt_scores(), self.request.tensors
        return GroupResult(lease, prompt_ids, tuple(results), tensors, scores, self.prompt_routing)

    def _prompt_scores(self) -> PromptLogprobs | None:
        """Return the prompt's log-probabilities, with the version that sampled the first token after it."""
        if not self.request.score_prompt:
            return None
        completion = self.completions[0]
        flat, version = completion.prompt_logprobs, int(completion.partial().versions[completion.num_resumed])
        # Two entries for each token but the first: its own, and that of the most likely token. Tokens sampled before a
        # restart follow the prompt.
        starts = np.array(flat.start_indices[1 : len(self.request.prompt_ids)], np.int64)
        logprobs, ids = np.array(flat.logprobs, np.float32), np.array(flat.token_ids, np.int32)
        return PromptLogprobs(logprobs[starts], ids[starts + 1], logprobs[starts + 1], version)


def _with_resumed(resumed: Experts | None, own: Experts | None, num_resumed: int, num_own: int) -> Experts | None:
    """Return the experts of resumed and own tokens: those of another engine where it has recorded them."""
    if own is None:
        return join_experts(((resumed, num_resumed), (None, num_own)))
    return own if resumed is None else np.concatenate((fill(resumed, own[:num_resumed]), own[num_resumed:]))


def check_temperature(request: GroupRequest) -> None:
    """Raise a `RequestError` for temperatures that vLLM would silently change."""
    temperature = request.sampling.temperature
    if 0.0 < temperature < MIN_TEMPERATURE:
        raise RequestError(
            f"{request.lease}: temperature is {temperature}; vLLM samples at 0 or at {MIN_TEMPERATURE} and more"
        )


def num_logprobs(request: GroupRequest, *, speculative: bool) -> int:
    """Return which log-probabilities to ask for.

    Args:
        request: whose sampling decides.
        speculative: whether drafted tokens are verified, where another sampler works than the one that measures.

    Raises:
        RequestError: vLLM cannot sample like this with speculative decoding.
    """
    sampling = request.sampling
    if speculative and sampling.routing == "replayed":
        raise RequestError(
            f"{request.lease}: routing is 'replayed', and the experts of drafted tokens are not recorded; set "
            "sampling.routing = 'own', or remove rollout.vllm.speculative"
        )
    if speculative and sampling.logprobs == "truncated":
        raise RequestError(
            f"{request.lease}: logprobs is 'truncated', and the kept tokens of drafted tokens are not recorded; set "
            "sampling.logprobs = 'full', or remove rollout.vllm.speculative"
        )
    if speculative and sampling.min_p:
        raise RequestError(
            f"{request.lease}: min_p is {sampling.min_p}, which vLLM does not apply to drafted tokens; set "
            "sampling.min_p = 0, or remove rollout.vllm.speculative"
        )
    if sampling.logprobs == "truncated":
        return WITH_KEPT_TOKENS
    truncated = is_truncated(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
    return WITH_LOG_MASS if truncated and not speculative else NO_LOGPROBS


def completion_seed(sampling: Sampling, completion: VllmCompletion) -> int:
    """Return the seed of one completion's random numbers; a resumed completion gets another seed than a new one."""
    text = f"{sampling.seed}/{completion.index}/{completion.num_resumed}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def sampling_arguments(group: VllmGroup, completion: VllmCompletion, eos_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams` for one completion."""
    sampling = group.request.sampling
    assert math.isfinite(sampling.temperature)
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": completion.budget,
        "stop_token_ids": sorted({*eos_token_ids, *sampling.stop_token_ids}),
        "ignore_eos": True,  # `stop_token_ids` has the tokenizer's; vLLM would add those of the model's defaults
        "seed": completion_seed(sampling, completion),
        "logprobs": completion.num_logprobs,
        "prompt_logprobs": 1 if group.request.score_prompt and completion.index == 0 else None,
        "flat_logprobs": True,
        "detokenize": False,
        "skip_clone": True,
        "stream_interval": 1 if group.request.listener is not None else OUTPUT_TOKENS,
        "extra_args": {RECORDS_EXPERTS: True} if group.is_routed else None,
    }


def token_versions(spans: Iterable[Any] | None, num_tokens: int) -> npt.NDArray[np.int32]:
    """Return the weight version of each of `num_tokens` sampled tokens, int32.

    vLLM labels its output with the current version, and the version changes only while nothing is computed, so the
    spans are exact.

    Args:
        spans: each with `version`, the name given at an adoption, and `start` and `end` in tokens; None for no tokens.
        num_tokens: tokens that arrived; tokens after the last span have its version.
    """
    versions = np.full(num_tokens, -1, np.int32)
    last = -1
    for span in spans or ():
        last = int(span.version)
        versions[span.start : span.end] = last
    versions[versions < 0] = last
    return versions
