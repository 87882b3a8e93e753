"""Trajectories with and without noise in one batch, and sampling parameters that are for tokens."""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_diffusion_engine import ACTIONS, SIGMAS, engine_of, request, run, sampler_of, shape_of

from starling.algo.diffusion.conditions import conditions_of
from starling.algo.diffusion.models import velocity
from starling.common.wire.messages import Sampling
from starling.rollout.engine.base import GroupRequest, RequestError
from starling.rollout.engine.diffusion.noise import INITIAL, normal

torch.set_num_threads(1)


def at(temperature: float, one: GroupRequest, **sampling: Any) -> GroupRequest:
    found = Sampling(max_tokens=8, seed=one.sampling.seed, temperature=temperature, **sampling)
    return replace(one, sampling=found)


def test_temperature_0_follows_the_probability_flow() -> None:
    """Each step is that of Euler's method, from the noise that the trajectory begins with."""
    with closing(engine_of()) as engine:
        (result,) = run(engine, at(0.0, request("a", count=2, seed=3)))
        model = engine._model
    assert "states" not in result.tensors
    for completion in result.completions:
        assert completion.token_ids.tolist() == [0, 1, 2, 3]
        assert completion.versions.tolist() == [0, 0, 0, 0]
        assert completion.logprobs.tolist() == [0.0] * 4
    conditions = conditions_of({"text_embeddings": result.tensors["text_embeddings"]}, 5, torch.device("cpu"))
    state = torch.stack([normal(3, index, INITIAL, shape_of("wan")) for index in range(2)])
    for sigma, following in itertools.pairwise(SIGMAS):
        with torch.no_grad():
            speed = velocity(model, state, torch.full((2,), sigma), conditions.rows([0, 0]))
        state = state + (following - sigma) * speed
    np.testing.assert_allclose(result.tensors["latents"], state.numpy(), atol=1e-4)


@given(
    groups=st.lists(
        st.tuples(st.sampled_from([0.0, 1.0]), st.integers(1, 3), st.integers(0, 5), st.integers(0, 3)),
        min_size=2,
        max_size=4,
    ),
    dynamics=st.sampled_from(["sde", "cps", "ode"]),
)
def test_a_batch_mixes_trajectories_with_and_without_noise(
    groups: list[tuple[float, int, int, int]], dynamics: str
) -> None:
    """Groups of both temperatures join at any step, and each is that of an engine of its own."""
    sampler = sampler_of(dynamics=dynamics)
    requests = [
        at(temperature, request(f"l{number}", count=count, seed=seed))
        for number, (temperature, count, seed, _) in enumerate(groups)
    ]
    with closing(engine_of(sampler=sampler)) as engine:
        found = dict[str, Any]()
        for one, (_, _, _, steps_before) in zip(requests, groups, strict=True):
            found |= {ended.lease: ended for _ in range(steps_before) for ended in engine.step()}
            engine.add(one)
        while engine.ready:
            found |= {ended.lease: ended for ended in engine.step()}
        for one in requests:
            (alone,) = run(engine, replace(one, lease=f"{one.lease} alone"))
            together = found[one.lease]
            has_noise = one.sampling.temperature == 1.0 and dynamics != "ode"
            assert together.tensors.keys() == alone.tensors.keys()
            assert ("states" in together.tensors) == has_noise
            np.testing.assert_allclose(together.tensors["latents"], alone.tensors["latents"], atol=2e-4)
            for mine, its in zip(together.completions, alone.completions, strict=True):
                assert mine.token_ids.tolist() == its.token_ids.tolist()
                assert mine.token_ids.tolist()[: len(ACTIONS)] == list(ACTIONS)
                np.testing.assert_allclose(mine.logprobs, its.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("temperature", "sampling", "message"),
    [
        (0.5, {}, "temperature is 0.5; give 1 to draw trajectories with the sampler, or 0"),
        (float("nan"), {}, "temperature is nan; give 1"),
        (1.0, {"top_p": 0.9}, "top_p is 0.9, which is for tokens"),
        (1.0, {"top_k": 4}, "top_k is 4, which is for tokens"),
        (0.0, {"min_p": 0.1}, "min_p is 0.1, which is for tokens"),
        (1.0, {"logprobs": "truncated"}, "logprobs is 'truncated', which is for tokens"),
        (1.0, {"routing": "replayed"}, "routing is 'replayed', which is for tokens"),
    ],
)
def test_sampling_of_tokens_is_refused(temperature: float, sampling: dict[str, Any], message: str) -> None:
    with closing(engine_of()) as engine:
        with pytest.raises(RequestError, match=message):
            engine.add(at(temperature, request("a"), **sampling))
        assert engine.num_waiting == 0


def test_an_exclusive_engine_runs_one_group_at_a_time() -> None:
    with closing(engine_of(exclusive=True)) as engine:
        engine.add(request("a", count=1))
        engine.add(request("b", count=1))
        engine.step()
        assert (engine.num_running, engine.num_waiting) == (1, 1)
        ended = [result.lease for _ in range(8) for result in engine.step()]
    assert ended == ["a", "b"]


def test_prompts_that_the_model_cannot_read_fail_alone() -> None:
    """Embeddings of another width cannot be computed beside others; they wait, and fail by themselves."""
    with closing(engine_of()) as engine:
        engine.add(request("a", count=1))
        engine.add(request("wrong", count=1, tensors={"text_embeddings": np.zeros((3, 5), np.float32)}))
        engine.add(request("b", count=1))
        ended = {result.lease: result for _ in range(10) for result in engine.step()}
    assert "the model reads [1, tokens, 12]" in ended["wrong"].reason  # type: ignore[union-attr]
    assert all(hasattr(ended[lease], "completions") for lease in "ab")


def test_pooled_embeddings_of_another_encoder_fail_their_group() -> None:
    tensors = {"text_embeddings": np.zeros((3, 12), np.float32), "pooled_embeddings": np.zeros(5, np.float32)}
    with closing(engine_of("sd3")) as engine:
        engine.add(request("a", "sd3", tensors=tensors))
        (failed,) = engine.step()
    assert "the pooled embeddings have 5 numbers, and the model reads 6" in failed.reason  # type: ignore[union-attr]


def test_given_frames_of_another_size_fail_their_group() -> None:
    tensors = {"text_embeddings": np.zeros((3, 12), np.float32), "given_frames": np.zeros((4, 1, 8, 4), np.float32)}
    with closing(engine_of("cosmos")) as engine:
        engine.add(request("a", "cosmos", tensors=tensors))
        (failed,) = engine.step()
    assert "give frames of the same channels, height and width" in failed.reason  # type: ignore[union-attr]
