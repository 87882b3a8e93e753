"""Diffusion engine: its trajectories, their densities and versions, and groups that it cannot generate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_diffusion import CHANNELS, FAMILIES, IMAGES, NUM_TEXT_TOKENS, TEXT_WIDTH, tiny

from starling.algo.denoising import RANKS
from starling.algo.diffusion.conditions import conditions_of
from starling.algo.diffusion.flow import guided
from starling.algo.diffusion.models import velocity
from starling.algo.diffusion.sampler import Sampler, make_sampler
from starling.common.errors import ConfigError
from starling.common.wire.messages import Sampling, Status
from starling.rollout.engine.base import GroupFailed, GroupRequest, GroupResult, RequestError
from starling.rollout.engine.diffusion.engine import DiffusionEngine
from starling.rollout.engine.diffusion.noise import INITIAL, normal
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.tensors.modules import layout_of

SIGMAS = (1.0, 0.8, 0.5, 0.2, 0.0)
ACTIONS = (0, 1, 2)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def shape_of(name: str) -> tuple[int, ...]:
    return (CHANNELS, 8, 8) if name in IMAGES else (CHANNELS, 2, 8, 8)


def sampler_of(**changes: Any) -> Sampler:
    return make_sampler(**{"sigmas": SIGMAS, "dynamics": "sde", "level": 0.7, **changes})


def engine_of(name: str = "wan", seed: int = 0, sampler: Sampler | None = None, **changes: Any) -> DiffusionEngine:
    model = tiny(name, seed).requires_grad_(False)
    return DiffusionEngine(model, sampler or sampler_of(), shape_of(name), text_length=NUM_TEXT_TOKENS, **changes)


def prompt(name: str = "wan", seed: int = 0, length: int = NUM_TEXT_TOKENS) -> dict[str, npt.NDArray[Any]]:
    random = np.random.default_rng(seed)
    tensors = {"text_embeddings": random.standard_normal((length, TEXT_WIDTH), np.float32)}
    return tensors | ({"pooled_embeddings": random.standard_normal(6, np.float32)} if name == "sd3" else {})


def request(
    lease: str, name: str = "wan", count: int = 2, seed: int = 0, tensors: dict[str, Any] | None = None, **changes: Any
) -> GroupRequest:
    sampling = Sampling(max_tokens=8, seed=seed)
    return replace(GroupRequest(lease, [0], count, sampling, tensors or prompt(name, seed)), **changes)


def drain(engine: DiffusionEngine) -> dict[str, GroupResult | GroupFailed]:
    found = dict[str, GroupResult | GroupFailed]()
    for _ in range(100):
        if not engine.ready:
            return found
        for ended in engine.step():
            assert ended.lease not in found
            found[ended.lease] = ended
    raise AssertionError("the engine does not end")


def run(engine: DiffusionEngine, *requests: GroupRequest) -> list[GroupResult]:
    for one in requests:
        engine.add(one)
    found = drain(engine)
    results = [found[one.lease] for one in requests]
    assert all(isinstance(result, GroupResult) for result in results), results
    return results  # type: ignore[return-value]


def prompt_of(result: GroupResult) -> dict[str, npt.NDArray[Any]]:
    return {name: array for name, array in result.tensors.items() if name in RANKS}


def densities(name: str, sampler: Sampler, result: GroupResult, model: Any = None) -> npt.NDArray[np.float32]:
    """Compute the densities of a group's actions again, as a policy does: [completions, actions]."""
    states = torch.from_numpy(result.tensors["states"])
    conditions = conditions_of(prompt_of(result), NUM_TEXT_TOKENS, CPU)
    found = []
    for trajectory in states:
        numbers = torch.tensor(sampler.actions)
        with torch.no_grad():
            repeated = conditions.rows([0] * len(numbers))
            speed = velocity(model or tiny(name), trajectory[:-1], sampler.sigma(numbers), repeated)
        found.append(sampler.log_density(sampler.transition(trajectory[:-1], speed, numbers), trajectory[1:]).numpy())
    return np.stack(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_densities_of_actions_follow_from_the_stored_states(name: str) -> None:
    with closing(engine_of(name)) as engine:
        first, second = run(engine, request("a", name, 2), request("b", name, 3, seed=5))
    for result in (first, second):
        for completion in result.completions:
            assert completion.token_ids.tolist() == list(ACTIONS)
            assert completion.status is Status.OK
            assert completion.versions.tolist() == [0, 0, 0]
        assert result.tensors["states"].shape == (len(result.completions), 4, *shape_of(name))
        assert result.tensors["latents"].shape == (len(result.completions), *shape_of(name))
        logprobs = np.stack([completion.logprobs for completion in result.completions])
        np.testing.assert_allclose(logprobs, densities(name, sampler_of(), result), atol=2e-5)


@given(
    groups=st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(0, 4), st.integers(2, NUM_TEXT_TOKENS)),
        min_size=1,
        max_size=4,
    ),
    max_rows=st.integers(3, 8),
)
def test_a_trajectory_is_the_same_whatever_else_runs(groups: list[tuple[int, int, int, int]], max_rows: int) -> None:
    """Groups join at any step, with prompts of other lengths; each is that of an engine of its own."""
    requests = [
        request(f"l{number}", count=count, seed=seed, tensors=prompt(seed=seed, length=length))
        for number, (count, seed, _, length) in enumerate(groups)
    ]
    with closing(engine_of(max_rows=max_rows)) as engine:
        found = dict[str, Any]()
        for one, (_, _, steps_before, _) in zip(requests, groups, strict=True):
            for _ in range(steps_before):
                found |= {ended.lease: ended for ended in engine.step()}
            engine.add(one)
        found |= drain(engine)
        for one in requests:
            (alone,) = run(engine, replace(one, lease=f"{one.lease} alone"))
            together = found[one.lease]
            for name in ("states", "latents"):
                np.testing.assert_allclose(together.tensors[name], alone.tensors[name], atol=2e-4)
            for mine, its in zip(together.completions, alone.completions, strict=True):
                np.testing.assert_allclose(mine.logprobs, its.logprobs, atol=1e-4)


def test_noise_depends_on_seed_trajectory_and_step_alone() -> None:
    seen = {
        tuple(normal(seed, index, step, (3,)).tolist())
        for seed in range(4)
        for index in range(4)
        for step in (INITIAL, 0, 1, 2)
    }
    assert len(seen) == 64
    assert torch.equal(normal(1, 2, 3, (2, 2)), normal(1, 2, 3, (2, 2)))


@pytest.mark.parametrize("same_start", [False, True])
def test_trajectories_of_a_group_begin_with_the_same_noise_where_asked(same_start: bool) -> None:
    with closing(engine_of(same_start=same_start)) as engine:
        (result,) = run(engine, request("a", count=3))
    starts = result.tensors["states"][:, 0]
    assert (starts == starts[0]).all() == same_start
    assert not (result.tensors["states"][:, 1] == result.tensors["states"][0, 1]).all()


def test_a_window_stores_its_own_states_only() -> None:
    sampler = sampler_of(window=range(1, 3))
    with closing(engine_of(sampler=sampler)) as engine:
        (result,) = run(engine, request("a", count=2))
    assert result.tensors["states"].shape == (2, 3, *shape_of("wan"))
    assert [completion.token_ids.tolist() for completion in result.completions] == [[1, 2], [1, 2]]
    logprobs = np.stack([completion.logprobs for completion in result.completions])
    np.testing.assert_allclose(logprobs, densities("wan", sampler, result), atol=2e-5)


def test_a_trajectory_without_noise_has_versions_of_all_steps_and_no_states() -> None:
    with closing(engine_of(sampler=sampler_of(dynamics="ode"))) as engine:
        (result,) = run(engine, request("a", count=2))
    assert "states" not in result.tensors
    assert result.tensors["latents"].shape == (2, *shape_of("wan"))
    for completion in result.completions:
        assert completion.token_ids.tolist() == [0, 1, 2, 3]
        assert completion.versions.tolist() == [0, 0, 0, 0]
        assert completion.logprobs.tolist() == [0.0] * 4


def test_states_of_16_bits_are_those_whose_density_is_reported() -> None:
    sampler = sampler_of(stored="float16")
    with closing(engine_of(sampler=sampler)) as engine:
        (result,) = run(engine, request("a", count=2))
    assert result.tensors["states"].dtype == np.float16
    logprobs = np.stack([completion.logprobs for completion in result.completions])
    np.testing.assert_allclose(logprobs, densities("wan", sampler, result), atol=2e-5)


def test_guidance_weighs_the_prompt_against_an_empty_one() -> None:
    empty = conditions_of(prompt(seed=99, length=2), NUM_TEXT_TOKENS, CPU)
    model = tiny("wan")
    with closing(engine_of(guidance=3.0, unconditional=empty)) as engine:
        (result,) = run(engine, request("a", count=1))
    sampler, states = sampler_of(), torch.from_numpy(result.tensors["states"])[0]
    conditions, numbers = conditions_of(prompt_of(result), NUM_TEXT_TOKENS, CPU), torch.tensor([0])
    with torch.no_grad():
        both = [velocity(model, states[:1], sampler.sigma(numbers), one) for one in (conditions, empty)]
    found = sampler.transition(states[:1], guided(*both, 3.0), numbers)
    expected = float(sampler.log_density(found, states[1:2]))
    np.testing.assert_allclose(result.completions[0].logprobs[0], expected, atol=1e-5)
    with pytest.raises(ConfigError, match="guidance is 3, and there are no embeddings"):
        engine_of(guidance=3.0)


@pytest.fixture
def publisher() -> Iterator[tuple[Publisher, Any]]:
    model = tiny("wan", seed=3)
    tensors = dict(model.named_parameters())
    with Publisher(layout_of(tensors, "policy-0"), transport="local") as found:
        yield found, model


def test_weights_are_adopted_between_two_steps(publisher: tuple[Publisher, Any]) -> None:
    source, model = publisher
    with closing(engine_of()) as engine:
        engine.add(request("a", count=2))
        engine.step()
        offer = source.publish(4, dict(model.named_parameters()))
        plan = make_plan(source.layout, engine.layout())
        engine.pull(offer, plan, deadline_s=30.0, cancelled=lambda: False, progress=lambda _: None)
        report = engine.adopt("keep")
        assert (report.version, report.proven) == (4, True)
        result = drain(engine)["a"]
        assert isinstance(result, GroupResult)
        assert [completion.versions.tolist() for completion in result.completions] == [[0, 4, 4]] * 2
        before, after = (densities("wan", sampler_of(), result, one) for one in (tiny("wan"), model))
        logprobs = np.stack([completion.logprobs for completion in result.completions])
        np.testing.assert_allclose(logprobs[:, 0], before[:, 0], atol=2e-5)
        np.testing.assert_allclose(logprobs[:, 1:], after[:, 1:], atol=2e-5)
        assert np.abs(before - after).min() > 1e-3, "the two versions are apart"
        for name, tensor in model.named_parameters():
            assert torch.equal(engine.tensors()[name], tensor), name


def test_groups_wait_until_all_their_trajectories_fit() -> None:
    with closing(engine_of(max_rows=4)) as engine:
        for lease, count in (("a", 3), ("b", 2), ("c", 1)):
            engine.add(request(lease, count=count))
        engine.step()
        assert (engine.num_running, engine.num_waiting) == (3, 2), "c does not overtake b"
        found = drain(engine)
    assert list(found) == ["a", "b", "c"]
    assert engine.num_tokens == 6 * 4


def test_cancelled_and_interrupted_groups_leave() -> None:
    with closing(engine_of(max_rows=4)) as engine:
        for lease in "abc":
            engine.add(request(lease, count=2))
        engine.step()
        assert engine.interrupt("a") == ()
        assert engine.cancel("c")
        assert not engine.cancel("c")
        assert engine.num_running == 2
        engine.pause()
        assert not engine.ready
        assert engine.step() == []
        engine.resume()
        assert list(drain(engine)) == ["b"]
        engine.add(request("a", count=2))
        assert list(drain(engine)) == ["a"]


def test_broken_weights_fail_the_groups_with_a_reason() -> None:
    with closing(engine_of()) as engine:
        engine.add(request("a"))
        engine.step()
        with torch.no_grad():
            next(iter(engine.tensors().values())).fill_(float("nan"))
        (failed,) = engine.step()
        assert isinstance(failed, GroupFailed)
        assert "not finite at weight version 0" in failed.reason
        assert (engine.num_running, engine.ready) == (0, False)


def test_embeddings_of_another_encoder_fail_their_group() -> None:
    with closing(engine_of()) as engine:
        engine.add(request("a", tensors={"text_embeddings": np.zeros((3, 5), np.float32)}))
        (failed,) = engine.step()
        assert isinstance(failed, GroupFailed)
        assert "the model reads [2, tokens, 12]" in failed.reason
        assert len(run(engine, request("b"))) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 17}, "num_completions is 17; give 1 to 16"),
        ({"tensors": {"pooled_embeddings": np.zeros(6, np.float32)}}, "no text_embeddings"),
        ({"tensors": {"text_embeddings": np.zeros((2, 3, 4), np.float32)}}, "'text_embeddings' of 3 dimensions"),
        ({"tensors": {**prompt(), "pixels": np.zeros(3)}}, "'pixels' of 1 dimensions"),
        ({"tensors": {"text_embeddings": np.full((5, 12), np.nan, np.float32)}}, "not finite"),
        ({"tensors": {**prompt(), "text_mask": np.ones(4, np.uint8)}}, "text_mask has 4 elements for 5"),
        ({"tensors": prompt(length=6)}, "has 6 tokens, and the model reads 1 to 5"),
        ({"score_prompt": True}, "its prompt not be scored"),
    ],
)
def test_a_group_that_cannot_be_generated_is_refused(changes: dict[str, Any], message: str) -> None:
    with closing(engine_of()) as engine:
        with pytest.raises(RequestError, match=message):
            engine.add(request("a", **changes))
        engine.add(request("a"))
        with pytest.raises(RequestError, match="lease 'a' is held already"):
            engine.add(request("a"))
