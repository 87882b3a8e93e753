"""Conformance suite for generation engines; each engine's test module subclasses it.

    class TestMine(EngineConformance):
        rollout: ClassVar = {"engine": "module:Class"}

One engine serves all tests of a class, because some take long to start. A test leaves it empty, with any version;
the rig has a transformers model with the weights of each version as reference.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from starling.algo.truncation import KeptTokens, kept_problem
from starling.cli.model.scratch import ScratchSettings, make_model_folder
from starling.common.errors import WeightsError
from starling.common.settings import ModelSettings, WeightsSettings
from starling.common.wire.messages import Sampling, Status
from starling.rollout.engine.base import (
    AdoptionReport,
    CacheMode,
    Completion,
    Engine,
    EngineSpec,
    GroupFailed,
    GroupRequest,
    GroupResult,
    PartialCompletion,
    RequestError,
)
from starling.rollout.engine.embedded.model import live_tensors
from starling.rollout.engine.registry import make_engine
from starling.rollout.settings import RolloutSettings
from starling.weightsync.offers.offer import Offer, Transport
from starling.weightsync.plan.planner import Plan, make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.tensors.modules import layout_of

torch.set_num_threads(1)

CONTEXT = 512
MAX_ROWS = 16
EOS = 3
"""About one in thirty tokens of a random model ends its completion."""
DEADLINE_S = 120.0
CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
    # Wide initial weights: attention and positions then decide the logits, and an error in either shows.
    "initializer_range": 0.2,
}


@dataclass(frozen=True)
class Facts:
    """What an engine supports, and how exact it is."""

    tolerance: float = 1e-5
    """Tolerance of log-probabilities against a forward pass of transformers in float32."""
    has_cache: bool = True
    """Whether it has a KV cache; otherwise every adoption equals `recompute`."""
    scores_prompts: bool = True
    """Whether it returns prompt log-probabilities."""
    records_kept: bool = True
    """Whether it records the kept tokens of truncated sampling."""
    resumes_draws: bool = True
    """Whether a resumed completion equals the uninterrupted one."""
    long: int = 60
    """Tokens of a completion that must not end during a test; an engine in its own processes needs more."""
    transport: Transport = "tcp"
    """The weight transport of these tests."""


@dataclass
class TokenRecorder:
    """A listener that records the tokens that it gets."""

    wake: Callable[[], None]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)

    def __call__(self, index: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        assert len(token_ids) == len(logprobs) > 0
        self.logprobs.setdefault(index, []).extend(logprobs)
        self.tokens.setdefault(index, []).extend(token_ids)
        self.wake()

    def has(self, num_tokens: int, num_completions: int = 1) -> Callable[[], bool]:
        """Return a condition: so many completions have at least so many tokens."""
        return lambda: sum(len(tokens) >= num_tokens for tokens in list(self.tokens.values())) >= num_completions


class Rig:
    """An engine, reference models of its versions, and a publisher of their weights."""

    def __init__(self, folder: Path, rollout: dict[str, Any], facts: Facts) -> None:
        self.facts, self.folder = facts, folder
        self._woken = threading.Event()
        self.models: dict[int, Any] = {0: make_reference(folder)}
        self._layout_roots: dict[int, str] = {}
        self.engine: Engine = make_engine(spec_of(folder, rollout, self._woken.set))
        self.vocab_size = int(self.models[0].config.vocab_size)
        self.results: dict[str, GroupResult | GroupFailed] = {}
        self._pulls = ThreadPoolExecutor(1)
        tensors = live_tensors(self.models[0])
        self.publisher = Publisher(layout_of(tensors, "policy-0"), transport=facts.transport, delta_versions=0)
        self._num_leases = 0

    @property
    def model(self) -> Any:
        """The reference model of the current version."""
        return self.models[self.engine.version]

    def close(self) -> None:
        self.engine.close()
        self.publisher.close()
        self._pulls.shutdown()

    def recorder(self) -> TokenRecorder:
        """Create a listener; new tokens wake `until`."""
        return TokenRecorder(self._woken.set)

    def request(self, prompt: list[int], count: int = 1, listener: Any = None, **sampling: Any) -> GroupRequest:
        """Return a request with a new lease; `sampling` are the fields of `Sampling`."""
        self._num_leases += 1
        asked = Sampling(**{"max_tokens": 8, **sampling})
        return GroupRequest(f"generate:t{self._num_leases}:0", prompt, count, asked, listener=listener)

    def prompt(self, seed: int, length: int) -> list[int]:
        """Return `length` token ids without end tokens."""
        drawn = np.random.default_rng(seed).integers(EOS + 1, self.vocab_size, length)
        return [int(token) for token in drawn]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Step the engine until `there()`, within a deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {DEADLINE_S} s"
            if not self.engine.ready:
                self._woken.wait(0.1)
                self._woken.clear()
            for ended in self.engine.step():
                assert ended.lease not in self.results, "the group ended twice"
                self.results[ended.lease] = ended

    def finish(self, *requests: GroupRequest) -> list[GroupResult]:
        """Step until these groups have ended; return their results."""
        self.until(lambda: all(request.lease in self.results for request in requests), "result")
        found = [self.results.pop(request.lease) for request in requests]
        assert all(isinstance(result, GroupResult) for result in found), found
        return found  # type: ignore[return-value]

    def run(self, *requests: GroupRequest) -> list[GroupResult]:
        """Add groups and return their results."""
        for request in requests:
            self.engine.add(request)
        return self.finish(*requests)

    def offer(self) -> Offer:
        """Publish another version."""
        version = max(self.models) + 1
        self.models[version] = make_reference(self.folder, seed=version)
        snapshot = self.publisher.snapshot(version, live_tensors(self.models[version]), {"": self.root_plan()})
        self._layout_roots[version] = snapshot.layout_roots()[""]
        return snapshot.offer()

    def root_plan(self) -> Plan:
        """Return a plan whose boxes are smaller than those by which the engine pulls."""
        return make_plan(self.publisher.layout, self.engine.layout(), bucket_bytes=4096)

    def pull(self, offer: Offer, *, in_place: bool = False, cancelled: bool = False) -> None:
        """Make the engine pull in a thread while it generates."""
        plan = make_plan(self.publisher.layout, self.engine.layout())
        pull: Future[Any] = self._pulls.submit(
            self.engine.pull,
            offer,
            plan,
            root_plan=self.root_plan(),
            deadline_s=60.0,
            cancelled=lambda: cancelled,
            progress=lambda progress: None,
            in_place=in_place,
        )
        pull.add_done_callback(lambda _: self._woken.set())
        self.until(pull.done, "end of the pull")
        pull.result()

    def adopt(self, mode: CacheMode) -> AdoptionReport:
        """Make the engine adopt another version, as the shell does."""
        offer = self.offer()
        self.pull(offer)
        return self.switch(offer, mode)

    def switch(self, offer: Offer, mode: CacheMode) -> AdoptionReport:
        """Make the engine adopt the version that it has pulled."""
        adopted = self.engine.adopt(mode)
        assert adopted.proven
        assert adopted.root == offer.root
        assert adopted.layout_root == self._layout_roots[offer.version]
        assert adopted.version == self.engine.version == offer.version
        return adopted

    def check(self, asked: GroupRequest, result: GroupResult, versions: set[int] | None = None) -> None:
        """Check a result against its request."""
        assert result.lease == asked.lease
        assert result.prompt_ids.tolist() == asked.prompt_ids
        assert result.prompt_ids.dtype == np.int32
        assert len(result.completions) == asked.num_completions
        for completion in result.completions:
            self._check_form(asked, completion)
            if versions is None:
                assert set(completion.versions.tolist()) == {self.engine.version}
                expected = self.logprobs(self.model, asked, completion)
                self.close_to(completion.logprobs, expected)

    def _check_form(self, asked: GroupRequest, completion: Completion) -> None:
        tokens = completion.token_ids.tolist()
        assert (completion.token_ids.dtype, completion.logprobs.dtype, completion.versions.dtype) == (
            np.int32,
            np.float32,
            np.int32,
        )
        assert len(tokens) == len(completion.logprobs) == len(completion.versions) > 0
        stops = {EOS, *asked.sampling.stop_token_ids}
        assert not stops & set(tokens[:-1]), "the completion continued after its end"
        bound = min(asked.sampling.max_tokens, CONTEXT - len(asked.prompt_ids))
        if tokens[-1] in stops:
            assert completion.status is Status.OK
        else:
            assert (len(tokens), completion.status) == (bound, Status.TRUNCATED)

    def logprobs(self, model: Any, asked: GroupRequest, completion: Completion | PartialCompletion) -> Any:
        """Return the log-probabilities of a completion's tokens by one forward pass over the whole sequence."""
        tokens = completion.token_ids.tolist()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*asked.prompt_ids, *tokens]]), use_cache=False).logits[0]
        scaled = (logits / (asked.sampling.temperature or 1.0))[len(asked.prompt_ids) - 1 : -1]
        if completion.kept is not None:
            self._check_kept(asked.sampling, completion)
            scaled = only_kept(scaled, completion.kept)
        return scaled.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)].numpy()

    def _check_kept(self, sampling: Sampling, completion: Completion | PartialCompletion) -> None:
        """Check the form of the kept tokens."""
        assert completion.kept is not None
        assert kept_problem(completion.kept, completion.token_ids, None) == ""
        assert (completion.kept.counts.dtype, completion.kept.ids.dtype) == (np.int32, np.int32)
        assert completion.kept.counts.min(initial=1) >= 1
        assert completion.kept.counts.max(initial=1) <= sampling.top_k

    def close_to(self, found: Any, expected: Any) -> None:
        """Compare log-probabilities."""
        np.testing.assert_allclose(found, expected, rtol=self.facts.tolerance, atol=self.facts.tolerance)


def only_kept(scaled: torch.Tensor, kept: KeptTokens) -> torch.Tensor:
    """Return logits, [tokens, vocabulary], with -inf for tokens that were not kept."""
    mask = torch.full_like(scaled, -torch.inf)
    for position, ids in enumerate(kept.rows()):
        mask[position, torch.from_numpy(ids).long()] = 0.0
    return scaled + mask


def make_reference(folder: Path, seed: int = 0) -> Any:
    """Return a model with the weights of `seed`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    return model.eval().requires_grad_(False)


def make_folder(folder: Path) -> Path:
    """Write a tiny model with a tokenizer and the weights of version 0."""
    make_model_folder(
        ScratchSettings(config=CONFIG, alphabet="abcdefghijklmnopqrstuvwxyz>", max_length=CONTEXT), folder
    )
    make_reference(folder).save_pretrained(folder)
    return folder


def spec_of(folder: Path, rollout: dict[str, Any], wake: Callable[[], None]) -> EngineSpec:
    """Return the spec of an engine for the model in `folder`."""
    return EngineSpec(
        path=folder,
        model=ModelSettings(path=str(folder), dtype="float32", device="cpu"),
        rollout=RolloutSettings(**{"load_weights": True, "max_rows": MAX_ROWS, "max_model_len": CONTEXT, **rollout}),
        weights=WeightsSettings(),
        name="rollout-0",
        eos_token_ids=(EOS,),
        max_model_len=CONTEXT,
        wake=wake,
    )


NOTHING = PartialCompletion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))
SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "truncated": {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.2, "temperature": 1.3},
}
RECORDED: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8, "top_k": 1024},
    "all": {"temperature": 0.7, "top_p": 0.9, "top_k": 6, "min_p": 0.05},
    "min_p": {"temperature": 1.4, "min_p": 0.1, "top_k": 29},
}


class EngineConformance:
    """The suite. A subclass sets the engine's rollout settings and its facts."""

    rollout: ClassVar[dict[str, Any]] = {}
    facts: ClassVar[Facts] = Facts()

    @pytest.fixture(scope="class")
    def rig(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
        rig = Rig(make_folder(tmp_path_factory.mktemp("model") / "tiny"), self.rollout, self.facts)
        yield rig
        rig.close()

    @pytest.fixture(autouse=True)
    def empty(self, rig: Rig) -> Iterator[None]:
        """Check that every test starts and ends with an empty engine."""
        assert (rig.engine.num_running, rig.engine.num_waiting) == (0, 0)
        yield
        assert (rig.engine.num_running, rig.engine.num_waiting) == (0, 0)
        assert not rig.results

    # --- tokens ----------------------------------------------------------------------------------------------------

    def test_engine_starts_with_the_weights_of_the_folder(self, rig: Rig) -> None:
        assert rig.engine.version >= 0
        assert rig.engine.max_model_len == CONTEXT

    @pytest.mark.parametrize("kind", SAMPLINGS)
    def test_logprobs_equal_a_forward_pass(self, rig: Rig, kind: str) -> None:
        asked = [
            rig.request(rig.prompt(n, length), 2, seed=n, max_tokens=20, **SAMPLINGS[kind])
            for n, length in enumerate((1, 9, 40))
        ]
        for one, result in zip(asked, rig.run(*asked), strict=True):
            rig.check(one, result)
            if kind == "greedy":
                assert result.completions[0].token_ids.tolist() == result.completions[1].token_ids.tolist()
            for completion in result.completions if one.sampling.top_k else ():
                self._check_top_k(rig, one, completion)

    def _check_top_k(self, rig: Rig, asked: GroupRequest, completion: Completion) -> None:
        sequence = torch.tensor([[*asked.prompt_ids, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits = rig.model(input_ids=sequence, use_cache=False).logits[0, len(asked.prompt_ids) - 1 : -1]
        best = logits.topk(asked.sampling.top_k).indices.tolist()
        assert all(token in among for token, among in zip(completion.token_ids.tolist(), best, strict=True))

    @pytest.mark.parametrize("kind", RECORDED)
    def test_logprobs_over_the_kept_tokens_equal_a_forward_pass(self, rig: Rig, kind: str) -> None:
        asked = [
            rig.request(rig.prompt(n, length), 2, seed=n, max_tokens=20, logprobs="truncated", **RECORDED[kind])
            for n, length in enumerate((1, 9, 40))
        ]
        if not self.facts.records_kept:
            with pytest.raises(RequestError, match="'full'"):
                rig.engine.add(asked[0])
            return
        # Rows with other parameters in the same batch.
        others = [rig.request(rig.prompt(7, 3), 2, max_tokens=20, **SAMPLINGS[kind]) for kind in SAMPLINGS]
        others.append(rig.request(rig.prompt(8, 3), max_tokens=20, temperature=0.0, top_p=0.5))  # nothing is drawn
        results = rig.run(*asked, *others)
        for one, result in zip([*asked, *others], results, strict=True):
            rig.check(one, result)
            for completion in result.completions:
                assert (completion.kept is not None) == (one in asked)
                self._check_truncation(rig, one, completion)

    def _check_truncation(self, rig: Rig, asked: GroupRequest, completion: Completion) -> None:
        """Compare the kept tokens and their probability with the definitions of min-p, top-k and top-p."""
        how, sequence = asked.sampling, torch.tensor([[*asked.prompt_ids, *completion.token_ids.tolist()]])
        if how.temperature == 0.0 or (how.top_p, how.top_k, how.min_p) == (1.0, 0, 0.0):
            assert completion.truncation_nats is None
            return
        if completion.truncation_nats is None:  # not every engine measures it
            assert not self.facts.records_kept
            return
        with torch.no_grad():
            logits = rig.model(input_ids=sequence, use_cache=False).logits[0, len(asked.prompt_ids) - 1 : -1]
        nats = []
        for position, probs in enumerate((logits.double() / how.temperature).softmax(-1).tolist()):
            order = sorted(range(len(probs)), key=lambda token: -probs[token])
            order = [token for token in order if probs[token] >= how.min_p * probs[order[0]]][: how.top_k or None]
            kept, mass, total = [], 0.0, sum(probs[token] for token in order)
            for token in order:
                if how.top_p < 1.0 and mass >= how.top_p * total:
                    break
                kept.append(token)
                mass += probs[token]
            nats.append(-math.log(mass))
            if completion.kept is not None:
                assert completion.kept.rows()[position].tolist() == sorted(kept)
        assert completion.truncation_nats.tolist() == pytest.approx(nats, abs=1e-4)

    def test_prompt_logprobs_equal_a_forward_pass(self, rig: Rig) -> None:
        lengths = (1, 2, 30, CONTEXT - 1)
        asked = [rig.request(rig.prompt(n, length), 2, max_tokens=6) for n, length in enumerate(lengths)]
        asked = [replace(one, score_prompt=True) for one in asked]
        other = rig.request(rig.prompt(9, 20), max_tokens=6)
        for _ in range(2):
            *results, plain = rig.run(*asked, other)
            assert plain.prompt_logprobs is None
            for one, result in zip(asked, results, strict=True):
                rig.check(one, result)
                self._check_scores(rig, one, result)
            rig.adopt("recompute")

    def _check_scores(self, rig: Rig, asked: GroupRequest, result: GroupResult) -> None:
        scores = result.prompt_logprobs
        if not self.facts.scores_prompts:
            assert scores is None
            return
        assert scores is not None
        assert scores.version == rig.engine.version
        sequence = torch.tensor([asked.prompt_ids])
        with torch.no_grad():
            found = rig.model(input_ids=sequence, use_cache=False).logits[0, :-1].log_softmax(-1)
        rig.close_to(scores.logprobs, found.gather(-1, sequence[0, 1:, None])[:, 0].numpy())
        rig.close_to(scores.top_logprobs, found.max(-1).values.numpy())
        rig.close_to(
            found[torch.arange(len(found)), torch.from_numpy(scores.top_ids).long()].numpy(), scores.top_logprobs
        )
        is_top = scores.top_ids == asked.prompt_ids[1:]
        assert (scores.logprobs[is_top] == scores.top_logprobs[is_top]).all(), (
            "the sampled token's log-probability must be among the top ones"
        )

    def test_num_tokens_counts_sampled_tokens(self, rig: Rig) -> None:
        before = rig.engine.num_tokens
        (result,) = rig.run(rig.request(rig.prompt(1, 4), 3, max_tokens=9))
        assert rig.engine.num_tokens - before == sum(len(c.token_ids) for c in result.completions)

    def test_listener_gets_every_token_once(self, rig: Rig) -> None:
        recorder = rig.recorder()
        (result,) = rig.run(rig.request(rig.prompt(2, 5), 3, recorder, max_tokens=12))
        for index, completion in enumerate(result.completions):
            assert recorder.tokens[index] == completion.token_ids.tolist()
            np.testing.assert_allclose(recorder.logprobs[index], completion.logprobs, rtol=1e-6)

    def test_seed_determines_the_tokens(self, rig: Rig) -> None:
        prompt = rig.prompt(3, 6)

        def tokens(*asked: GroupRequest) -> list[list[list[int]]]:
            return [[c.token_ids.tolist() for c in result.completions] for result in rig.run(*asked)]

        ((first, second),) = tokens(rig.request(prompt, 2, seed=1, max_tokens=12))
        assert first != second, "completions of a group must differ"
        crowd = [rig.request(rig.prompt(n, 3 + n), 2, seed=n, max_tokens=12) for n in range(3)]
        again, other, *_ = tokens(
            rig.request(prompt, 2, seed=1, max_tokens=12), rig.request(prompt, 2, seed=2, max_tokens=12), *crowd
        )
        assert again == [first, second], "results must not depend on the batch"
        assert other != again

    # --- ends ------------------------------------------------------------------------------------------------------

    def test_stop_token_ends_a_completion_and_is_included(self, rig: Rig) -> None:
        prompt = rig.prompt(4, 5)
        (plain,) = rig.run(rig.request(prompt, temperature=0.0, max_tokens=10))
        tokens = plain.completions[0].token_ids.tolist()
        stop = tokens[min(4, len(tokens) - 1)]
        asked = rig.request(prompt, temperature=0.0, max_tokens=10, stop_token_ids=(stop,))
        (stopped,) = rig.run(asked)
        rig.check(asked, stopped)
        assert stopped.completions[0].token_ids.tolist() == tokens[: tokens.index(stop) + 1]
        assert stopped.completions[0].status is Status.OK

    @pytest.mark.parametrize("room", [1, 3])
    def test_context_bounds_a_completion(self, rig: Rig, room: int) -> None:
        asked = rig.request(rig.prompt(5, CONTEXT - room), 2, max_tokens=50)
        (result,) = rig.run(asked)
        rig.check(asked, result)
        assert max(len(completion.token_ids) for completion in result.completions) <= room

    def test_groups_beyond_max_rows_wait(self, rig: Rig) -> None:
        asked = [rig.request(rig.prompt(n, 3), 7, seed=n, max_tokens=4 + n) for n in range(5)]
        for one, result in zip(asked, rig.run(*asked), strict=True):
            rig.check(one, result)

    # --- refusals --------------------------------------------------------------------------------------------------

    BAD: ClassVar[dict[str, tuple[Callable[[Rig], GroupRequest], str]]] = {
        "empty prompt": (lambda rig: rig.request([]), "empty"),
        "no room": (lambda rig: rig.request([5] * CONTEXT), "no room"),
        "negative id": (lambda rig: rig.request([5, -1]), "-1"),
        "id out of range": (lambda rig: rig.request([rig.vocab_size]), "outside"),
        "no completion": (lambda rig: rig.request([5], 0), "num_completions is 0"),
        "too many completions": (lambda rig: rig.request([5], MAX_ROWS + 1), f"num_completions is {MAX_ROWS + 1}"),
        "no token": (lambda rig: rig.request([5], max_tokens=0), "max_tokens is 0"),
        "temperature": (lambda rig: rig.request([5], temperature=-1.0), "temperature is -1"),
        "top_p": (lambda rig: rig.request([5], top_p=0.0), "top_p is 0"),
        "top_k": (lambda rig: rig.request([5], top_k=-1), "top_k is -1"),
        "huge top_k": (lambda rig: rig.request([5], top_k=1 << 63), "top_k is 9223372036854775808"),
        "min_p": (lambda rig: rig.request([5], min_p=1.5), "min_p is 1.5"),
        "kept tokens without top_k": (
            lambda rig: rig.request([5], logprobs="truncated", top_p=0.8),
            "give a temperature above 0 and a top_k from 1 to 1024",
        ),
        "kept tokens of greedy decoding": (
            lambda rig: rig.request([5], logprobs="truncated", top_k=5, temperature=0.0),
            "give a temperature above 0",
        ),
        "stop token": (lambda rig: rig.request([5], stop_token_ids=(6, rig.vocab_size)), "stop token id"),
        "scores of a resumed group": (
            lambda rig: replace(rig.request([5, 6]), score_prompt=True, partial=(NOTHING,)),
            "leave score_prompt out",
        ),
        "negative stop token": (lambda rig: rig.request([5], stop_token_ids=(-1,)), "stop token id -1"),
        "huge stop token": (lambda rig: rig.request([5], stop_token_ids=(1 << 63,)), "stop token id"),
    }

    @pytest.mark.parametrize("case", BAD)
    def test_invalid_request_is_rejected_alone(self, rig: Rig, case: str) -> None:
        make, text = self.BAD[case]
        good = rig.request(rig.prompt(6, 4), 2, max_tokens=6)
        rig.engine.add(good)
        with pytest.raises(RequestError, match=text):
            rig.engine.add(make(rig))
        rig.check(good, *rig.finish(good))

    def test_duplicate_lease_is_rejected(self, rig: Rig) -> None:
        asked = rig.request(rig.prompt(7, 4), max_tokens=self.facts.long)
        rig.engine.add(asked)
        with pytest.raises(RequestError, match="held already"):
            rig.engine.add(asked)
        rig.finish(asked)
        rig.run(asked)  # the lease is free again

    # --- interruptions ---------------------------------------------------------------------------------------------

    def test_cancel_leaves_other_groups_alone(self, rig: Rig) -> None:
        recorder = rig.recorder()
        runs = rig.request(rig.prompt(8, 4), 4, recorder, max_tokens=self.facts.long)
        stays = rig.request(rig.prompt(9, 5), 3, max_tokens=12)
        waits = rig.request(rig.prompt(10, 5), MAX_ROWS, max_tokens=self.facts.long)
        for one in (runs, stays, waits):
            rig.engine.add(one)
        rig.until(recorder.has(1), "token")
        assert rig.engine.cancel(waits.lease)
        assert rig.engine.cancel(runs.lease)
        assert not rig.engine.cancel(runs.lease)
        assert not rig.engine.cancel("unknown")
        rig.check(stays, *rig.finish(stays))

    def test_paused_engine_samples_nothing(self, rig: Rig) -> None:
        recorder = rig.recorder()
        asked = rig.request(rig.prompt(11, 4), 3, recorder, max_tokens=self.facts.long)
        rig.engine.add(asked)
        rig.until(recorder.has(2), "token")
        rig.engine.pause()
        rig.engine.pause()  # a second call changes nothing
        before = rig.engine.num_tokens
        late = rig.request(rig.prompt(12, 4), max_tokens=4)
        rig.engine.add(late)
        for _ in range(20):
            assert all(ended.lease == asked.lease for ended in self._step_and_keep(rig))
        assert rig.engine.num_tokens == before
        rig.engine.resume()
        for one, result in zip((asked, late), rig.finish(asked, late), strict=True):
            rig.check(one, result)

    def _step_and_keep(self, rig: Rig) -> list[GroupResult | GroupFailed]:
        """Step once, and keep the groups that ended before the pause."""
        ended = rig.engine.step()
        rig.results.update((one.lease, one) for one in ended)
        return ended

    def test_interrupted_group_resumes(self, rig: Rig) -> None:
        plain, whole = self._long_group(rig)
        recorder = rig.recorder()
        first = replace(plain, lease="generate:cut:0", listener=recorder)
        rig.engine.add(first)
        rig.until(recorder.has(3, num_completions=2), "token")
        partials = rig.engine.interrupt(first.lease)
        assert partials is not None
        assert rig.engine.interrupt(first.lease) is None, "the group must be removed"
        for index, partial in enumerate(partials):
            assert partial.token_ids.tolist() == recorder.tokens.get(index, [])
            assert len(partial.token_ids) == len(partial.logprobs) == len(partial.versions)
        again = rig.recorder()
        second = replace(first, partial=partials, listener=again)
        (result,) = rig.run(second)
        rig.check(second, result)
        for index, (completion, partial) in enumerate(zip(result.completions, partials, strict=True)):
            tokens, num = completion.token_ids.tolist(), len(partial.token_ids)
            assert tokens[:num] == partial.token_ids.tolist(), "the resumed group keeps all tokens"
            np.testing.assert_array_equal(completion.logprobs[:num], partial.logprobs)
            assert tokens[num:] == again.tokens.get(index, []), "no token is reported twice"
            if self.facts.resumes_draws:
                assert tokens == whole.completions[index].token_ids.tolist()

    def test_kept_tokens_of_an_interrupted_group_resume(self, rig: Rig) -> None:
        if not self.facts.records_kept:
            return
        recorder, how = rig.recorder(), {"logprobs": "truncated", **RECORDED["all"]}
        first = rig.request(rig.prompt(13, 6), 3, recorder, max_tokens=self.facts.long, **how)
        rig.engine.add(first)
        rig.until(recorder.has(3, num_completions=2), "token")
        partials = rig.engine.interrupt(first.lease)
        assert partials is not None
        second = replace(first, lease="generate:cut:1", partial=partials)
        (result,) = rig.run(second)
        rig.check(second, result)
        for completion, partial in zip(result.completions, partials, strict=True):
            assert completion.kept is not None
            assert partial.kept is not None
            num = len(partial.token_ids)
            assert len(completion.kept) == len(completion.token_ids)
            assert len(partial.kept) == num
            assert completion.kept.take(slice(0, num)).ids.tolist() == partial.kept.ids.tolist()

    def _long_group(self, rig: Rig) -> tuple[GroupRequest, GroupResult]:
        """Return a request with a completion that is long enough to be interrupted, and its result."""
        for seed in range(40):
            asked = rig.request(rig.prompt(13, 6), 3, seed=seed, max_tokens=self.facts.long)
            (result,) = rig.run(asked)
            if max(len(completion.token_ids) for completion in result.completions) > self.facts.long // 3:
                return asked, result
        raise AssertionError("every completion ends early")

    def test_ended_completions_stay_ended_after_a_resume(self, rig: Rig) -> None:
        prompt = rig.prompt(14, 5)
        (done,) = rig.run(rig.request(prompt, 2, max_tokens=6, stop_token_ids=()))
        ended = tuple(PartialCompletion(c.token_ids, c.logprobs, c.versions, c.status) for c in done.completions)
        asked = rig.request(prompt, 2, max_tokens=6)
        (result,) = rig.run(replace(asked, partial=ended))
        for before, after in zip(done.completions, result.completions, strict=True):
            assert before.token_ids.tolist() == after.token_ids.tolist()
            assert before.status is after.status

    def test_invalid_partial_completions_are_rejected(self, rig: Rig) -> None:
        nothing = PartialCompletion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))
        asked = rig.request(rig.prompt(15, 5), 2)
        with pytest.raises(RequestError, match="1 partial completions for a group of 2"):
            rig.engine.add(replace(asked, partial=(nothing,)))
        assert rig.engine.interrupt(asked.lease) is None

    # --- weights ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in_place"])
    @pytest.mark.parametrize("mode", ["keep", "recompute", "salt"])
    def test_adoption_between_two_tokens(self, rig: Rig, mode: CacheMode, in_place: bool) -> None:
        recorder, old, offer = rig.recorder(), rig.engine.version, rig.offer()
        if not in_place:
            other = rig.request(rig.prompt(15, 5), 2, max_tokens=self.facts.long)
            rig.engine.add(other)
            rig.pull(offer)
            rig.check(other, *rig.finish(other))
        asked = [rig.request(rig.prompt(16, 7), 3, recorder, seed=1, max_tokens=self.facts.long)]
        asked += [rig.request(rig.prompt(17 + n, 20 * n + 1), 2, seed=n, max_tokens=self.facts.long) for n in range(2)]
        for one in asked:
            rig.engine.add(one)
        rig.until(recorder.has(3), "token")
        if in_place:
            rig.engine.pause()
            rig.pull(offer, in_place=True)
        adopted = rig.switch(offer, mode)
        rig.engine.resume()
        assert bool(adopted.recomputed_tokens) == (mode == "recompute" and self.facts.has_cache)
        results = rig.finish(*asked)
        seen: set[int] = set()
        for one, result in zip(asked, results, strict=True):
            rig.check(one, result, {old, adopted.version})
            for completion in result.completions:
                seen |= set(completion.versions.tolist())
                self._check_versions(rig, one, completion, (old, adopted.version), mode)
        assert seen == {old, adopted.version}
        # Later groups use only the new weights; under `keep` they may share the old cache.
        later = rig.request(asked[0].prompt_ids if mode != "keep" else rig.prompt(99, 5), 2, seed=3, max_tokens=9)
        rig.check(later, *rig.run(later))

    def test_kept_tokens_across_an_adoption(self, rig: Rig) -> None:
        if not self.facts.records_kept:
            return
        recorder, old, offer = rig.recorder(), rig.engine.version, rig.offer()
        rig.pull(offer)
        # A mild truncation, so that few completions end before the switch.
        how = {"logprobs": "truncated", "top_p": 0.95, "top_k": 25, "temperature": 1.2}
        asked = rig.request(rig.prompt(16, 7), 8, recorder, seed=1, max_tokens=self.facts.long, **how)
        rig.engine.add(asked)
        rig.until(recorder.has(3), "token")
        adopted = rig.switch(offer, "recompute")
        (result,) = rig.finish(asked)
        rig.check(asked, result, {old, adopted.version})
        for completion in result.completions:
            assert completion.kept is not None
            self._check_versions(rig, asked, completion, (old, adopted.version), "recompute")
        assert {int(v) for one in result.completions for v in one.versions} == {old, adopted.version}

    def _check_versions(
        self, rig: Rig, asked: GroupRequest, completion: Completion, versions: tuple[int, int], mode: CacheMode
    ) -> None:
        """Compare each log-probability with a forward pass over the weights of its version."""
        old, new = versions
        num_old = int((completion.versions == old).sum())
        assert completion.versions.tolist() == [old] * num_old + [new] * (len(completion.versions) - num_old)
        before = rig.logprobs(rig.models[old], asked, completion)
        rig.close_to(completion.logprobs[:num_old], before[:num_old])
        if mode == "recompute" or not self.facts.has_cache or not num_old:
            after = rig.logprobs(rig.models[new], asked, completion)
            rig.close_to(completion.logprobs[num_old:], after[num_old:])
        elif num_old < len(completion.versions):
            rig.close_to(completion.logprobs[num_old:], self._on_old_cache(rig, asked, completion, num_old, versions))

    def _on_old_cache(
        self, rig: Rig, asked: GroupRequest, completion: Completion, num_old: int, versions: tuple[int, int]
    ) -> Any:
        """Return the log-probabilities of the new weights' tokens on the KV cache of the old ones."""
        tokens = completion.token_ids.tolist()
        sequence = torch.tensor([[*asked.prompt_ids, *tokens]])
        fed = len(asked.prompt_ids) + num_old - 1
        with torch.no_grad():
            past = rig.models[versions[0]](input_ids=sequence[:, :fed], use_cache=True).past_key_values
            logits = rig.models[versions[1]](
                input_ids=sequence[:, fed:-1], past_key_values=past, use_cache=True
            ).logits[0]
        found = torch.log_softmax(logits / (asked.sampling.temperature or 1.0), dim=-1)
        return found.gather(-1, torch.tensor(tokens[num_old:])[:, None])[:, 0].numpy()

    def test_adopted_tensors_equal_the_published_ones(self, rig: Rig) -> None:
        rig.adopt("keep")
        held = rig.engine.tensors()
        assert bool(held) == rig.engine.serves
        published = live_tensors(rig.model)
        assert not held or held.keys() == published.keys()
        assert all(torch.equal(tensor.cpu(), published[name]) for name, tensor in held.items())

    def test_adoption_without_a_pull_is_rejected(self, rig: Rig) -> None:
        version = rig.engine.version
        asked = rig.request(rig.prompt(20, 5), 2, max_tokens=9)
        rig.engine.add(asked)
        with pytest.raises(WeightsError):
            rig.engine.adopt("keep")
        assert rig.engine.version == version
        rig.check(asked, *rig.finish(asked))

    def test_failed_pull_changes_nothing(self, rig: Rig) -> None:
        asked = rig.request(rig.prompt(21, 5), 2, max_tokens=9)
        rig.engine.add(asked)
        version, offer = rig.engine.version, rig.offer()
        with pytest.raises(WeightsError):
            rig.pull(offer, cancelled=True)
        with pytest.raises(WeightsError):
            rig.engine.adopt("keep")
        assert rig.engine.version == version
        rig.check(asked, *rig.finish(asked))
        rig.adopt("keep")

    def test_engine_generates_after_sleep_and_wake_up(self, rig: Rig) -> None:
        rig.engine.pause()
        rig.engine.sleep()
        rig.engine.wake_up()
        rig.engine.resume()
        if rig.engine.version < 0:
            rig.adopt("recompute")
        asked = rig.request(rig.prompt(22, 5), 2, max_tokens=9)
        rig.check(asked, *rig.run(asked))
