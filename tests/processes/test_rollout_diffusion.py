"""Rollout processes of a diffusion model: they answer groups with denoising trajectories that a policy can train on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from fake_hub import FakeHub
from replica_processes import exit_code, replica
from tiny_diffusion import TEXT_WIDTH, tiny
from tiny_pipelines import save_whole

from starling.algo.denoising import group_problem
from starling.algo.diffusion.folder import PipelineFolder, pipeline_sampler
from starling.algo.diffusion.settings import SamplerSettings
from starling.common.wire import messages as wire
from starling.weightsync.plan.layout import Layout, decode, encode
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.tensors.modules import layout_of

SETTINGS = SamplerSettings(num_steps=4, height=64, width=64, num_frames=5, stored="float16")
FLAGS = (
    *("--model.device", "cpu", "--rollout.engine", "diffusion", "--rollout.max-rows", "4"),
    *("--diffusion.num-steps", "4", "--diffusion.num-frames", "5", "--diffusion.stored", "float16"),
    *("--diffusion.height", "64", "--diffusion.width", "64"),
)


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> PipelineFolder:
    return save_whole(tmp_path_factory.mktemp("wan"), "wan")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> PipelineFolder:
    return save_whole(tmp_path_factory.mktemp("bare"), "wan", texts=False)


def form_of(folder: PipelineFolder) -> wire.DenoisingForm:
    """Return what a policy with the same settings is trained on."""
    actions = pipeline_sampler(folder, SETTINGS).actions
    return wire.DenoisingForm(
        first_step=actions.start,
        num_steps=len(actions),
        num_states=len(actions) + 1,
        dtype=SETTINGS.stored,
        latents=folder.latent_shape(SETTINGS.height, SETTINGS.width, SETTINGS.num_frames),
        text_length=folder.text_length,
        text_width=TEXT_WIDTH,
    )


def group(hub: FakeHub, prompt: wire.Prompt, temperature: float = 1.0, min_version: int = 0) -> wire.GenerateGroup:
    return wire.GenerateGroup(
        lease=hub.lease("generate"),
        purpose="train" if temperature else "evaluate",
        prompt=prompt,
        num_completions=2,
        sampling=wire.Sampling(max_tokens=8, temperature=temperature, seed=7),
        min_version=min_version,
    )


def generated(
    hub: FakeHub, message: wire.GenerateGroup
) -> tuple[wire.GroupGenerated, list[npt.NDArray[Any]], dict[str, npt.NDArray[Any]]]:
    """Return the answer to a group, its arrays by position, and its named tensors."""
    answer, buffers = hub.ask("rollout-0", message, wire.GroupGenerated)
    arrays = [
        np.frombuffer(buffer, meta.dtype).reshape(meta.shape)
        for meta, buffer in zip(answer.tensors, buffers, strict=True)
    ]
    named = {meta.name: array for meta, array in zip(answer.tensors, arrays, strict=True) if meta.name}
    return answer, arrays[:4], named


def problem_of(
    folder: PipelineFolder, answer: wire.GroupGenerated, steps: npt.NDArray[Any], named: dict[str, Any]
) -> str:
    return group_problem(named, [one.num_tokens for one in answer.trajectories], steps, form_of(folder))


def test_groups_are_answered_with_trajectories_of_the_published_weights(
    hub: FakeHub, wan: PipelineFolder, tmp_path: Path
) -> None:
    """Random weights at first, then those of an adopted version: with noise, without, and after it slept."""
    model = tiny("wan", seed=5)
    weights = model.state_dict()
    with (
        Publisher(layout_of(weights, "policy-0"), transport="tcp") as publisher,
        replica(hub, "rollout-0", tmp_path, "--model.path", str(wan.path), *FLAGS) as process,
    ):
        hello, (layout,) = hub.hello("rollout-0")
        assert (hello.serves, hello.version, hello.checkpoint) == (True, -1, "")
        offer = publisher.publish(3, weights)
        plan = encode(make_plan(publisher.layout, decode(Layout, layout)))
        order = wire.AdoptWeights(lease=hub.lease("adopt"), version=3, source="policy-0")
        adopted, _ = hub.ask("rollout-0", order, wire.WeightsAdopted, (encode(offer), plan))
        assert adopted.root == offer.root

        answer, (prompt, steps, _, versions), named = generated(hub, group(hub, wire.Prompt(id="p", text="a cat")))
        assert prompt.tolist() == [0]
        assert [one.text for one in answer.trajectories] == ["", ""]
        assert problem_of(wan, answer, steps, named) == ""
        assert set(versions.tolist()) == {3}
        assert named["states"].dtype == np.float16

        message = group(hub, wire.Prompt(id="q", text="a cat"), temperature=0.0)
        evaluated, (_, steps, logprobs, _), named = generated(hub, message)
        assert [one.num_tokens for one in evaluated.trajectories] == [SETTINGS.num_steps] * 2
        assert steps.tolist() == [0, 1, 2, 3] * 2
        assert not logprobs.any()
        assert named.keys() == {"text_embeddings", "latents"}

        hub.ask("rollout-0", wire.Sleep(lease=hub.lease("sleep")), wire.Slept)
        hub.ask("rollout-0", wire.Wake(lease=hub.lease("wake")), wire.Woken)
        again = group(hub, wire.Prompt(id="r", text="a cat"), temperature=0.0)
        _, _, after = generated(hub, again)
        np.testing.assert_array_equal(after["latents"], named["latents"])
        process.terminate()
        assert exit_code(process) == 0


def test_a_rollout_without_text_encoders_reads_embeddings(hub: FakeHub, bare: PipelineFolder, tmp_path: Path) -> None:
    """A prompt without any fails, not to be tried again, and the others go on."""
    embeddings = tmp_path / "p.npy"
    np.save(embeddings, np.random.default_rng(0).standard_normal((3, TEXT_WIDTH), np.float32))
    own = ("--model.path", str(bare.path), "--rollout.load-weights", "true")
    with replica(hub, "rollout-0", tmp_path, *own, *FLAGS) as process:
        hello, _ = hub.hello("rollout-0")
        assert hello.version == 0
        failed, _ = hub.ask("rollout-0", group(hub, wire.Prompt(id="p", text="a cat")), wire.LeaseFailed)
        assert "prompt p: " in failed.reason
        assert "has no text encoders, and the prompt no text_embedding" in failed.reason
        assert failed.fatal
        prompt = wire.Prompt(id="q", metadata={"text_embedding": str(embeddings)})
        answer, (_, steps, _, _), named = generated(hub, group(hub, prompt))
        assert problem_of(bare, answer, steps, named) == ""
        np.testing.assert_array_equal(named["text_embeddings"], np.load(embeddings))
        process.terminate()
        assert exit_code(process) == 0


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
