"""The learner of a diffusion model: groups of the wire become versions, which are saved, restored and exported."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tiny_diffusion import CHANNELS, NUM_TEXT_TOKENS, TEXT_WIDTH
from tiny_pipelines import saved

from starling.algo.diffusion.folder import PipelineFolder, load_transformer, pipeline_sampler, read_pipeline
from starling.algo.diffusion.settings import SamplerSettings
from starling.common.errors import ConfigError
from starling.common.settings import ModelSettings
from starling.common.wire.messages import GroupGenerated, Sampling, ScoredTrajectory, TensorMeta, TrainGroup
from starling.common.wire.tensors import LATENTS, STATES
from starling.controller.core.groups.validation.limits import GroupLimits
from starling.controller.core.groups.validation.validation import (
    InvalidResultError,
    check_partial_tensors,
    contents_problem,
)
from starling.policy.settings.diffusion import DiffusionSettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.checkpoint.header import find_state
from starling.policy.train.checkpoint.huggingface import export_hf, export_state
from starling.policy.train.checkpoint.pipeline import PipelineFiles
from starling.policy.train.checkpoint.state import SavedState, StateStore
from starling.policy.train.checkpoint.storage import Storage
from starling.policy.train.data.groups import groups_from_wire
from starling.policy.train.diffusion.learner import DiffusionLearner
from starling.policy.train.errors import RejectedGroupsError
from starling.rollout.engine.base import GroupRequest, GroupResult
from starling.rollout.engine.diffusion.engine import DiffusionEngine
from starling.rollout.shell.results import generated_message

DIFFUSION = SamplerSettings(num_steps=4, height=64, width=64, num_frames=5)
SHAPE = (CHANNELS, 2, 8, 8)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> PipelineFolder:
    return read_pipeline(saved(tmp_path_factory.mktemp("pipeline"), "wan").path, NUM_TEXT_TOKENS)


def learner_of(
    folder: PipelineFolder, diffusion: SamplerSettings = DIFFUSION, method: str = "policy_gradient"
) -> DiffusionLearner:
    settings = PolicySettings(
        diffusion=DiffusionSettings(method=method),
        optimizer=OptimizerSettings(learning_rate=1e-3),  # type: ignore[arg-type]
    )
    return DiffusionLearner(lambda: load_transformer(folder, dtype=torch.float32), settings, folder, diffusion)


def generated(
    folder: PipelineFolder, diffusion: SamplerSettings = DIFFUSION, seed: int = 1
) -> tuple[GroupGenerated, tuple[bytes, ...]]:
    """Return a group of three trajectories as a rollout sends it."""
    model = load_transformer(folder, dtype=torch.float32).requires_grad_(False)
    text = np.random.default_rng(seed).standard_normal((NUM_TEXT_TOKENS, TEXT_WIDTH), np.float32)
    engine = DiffusionEngine(model, pipeline_sampler(folder, diffusion), SHAPE, text_length=NUM_TEXT_TOKENS)
    with closing(engine):
        sampling = Sampling(max_tokens=8, seed=seed)
        engine.add(GroupRequest(f"generate:train/{seed}", [0], 3, sampling, {"text_embeddings": text}))
        for _ in range(diffusion.num_steps + 1):
            for result in engine.step():
                assert isinstance(result, GroupResult), result
                return generated_message(result, lambda _: "", 1.0)
    raise AssertionError("the group does not end")


def scored(message: GroupGenerated) -> TrainGroup:
    trajectories = tuple(
        ScoredTrajectory(num_tokens=one.num_tokens, oldest_version=0, reward=float(index), status=one.status)
        for index, one in enumerate(message.trajectories)
    )
    return TrainGroup(prompt_id="train/0/0", trajectories=trajectories, tensors=message.tensors)


def problem_of(message: GroupGenerated, buffers: tuple[bytes, ...], learner: DiffusionLearner) -> str:
    """Return why the controller refuses a group; empty if it takes it."""
    found = contents_problem(message, buffers, GroupLimits(num_completions=3), learner.limits)
    return "" if found is None else found.reason


def train(learner: DiffusionLearner, folder: PipelineFolder, step: int, diffusion: SamplerSettings = DIFFUSION) -> None:
    message, buffers = generated(folder, diffusion, seed=step)
    groups = groups_from_wire([scored(message)], buffers, learner.limits)
    learner.reinforce(groups, step=step, num_steps=4)


@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_what_a_rollout_sends_passes_the_controller_and_is_trained(folder: PipelineFolder, stored: Any) -> None:
    diffusion = DIFFUSION.model_copy(update={"stored": stored})
    learner = learner_of(folder, diffusion)
    message, buffers = generated(folder, diffusion)
    assert problem_of(message, buffers, learner) == ""
    before = {name: tensor.clone() for name, tensor in learner.tensors.items()}
    metrics = learner.reinforce(
        groups_from_wire([scored(message)], buffers, learner.limits), step=1, num_steps=4, max_tokens=256
    )
    assert metrics["num_tokens"] == 3 * len(pipeline_sampler(folder, diffusion).actions)
    assert metrics["ratio_error/0"] < (1e-4 if stored == "float32" else 1e-2)
    assert metrics["grad_norm"] > 0
    assert learner.batch_digest
    assert any(not torch.equal(before[name], tensor) for name, tensor in learner.tensors.items())


def test_samples_alone_are_trained_by_nft(folder: PipelineFolder) -> None:
    diffusion = DIFFUSION.model_copy(update={"dynamics": "ode"})
    learner = learner_of(folder, diffusion, "nft")
    assert learner.limits.denoising is not None
    assert learner.limits.denoising.num_states == 0
    message, buffers = generated(folder, diffusion)
    assert problem_of(message, buffers, learner) == ""
    assert STATES not in {tensor.name for tensor in message.tensors}
    metrics = learner.reinforce(groups_from_wire([scored(message)], buffers, learner.limits), step=1, num_steps=4)
    assert metrics["grad_norm"] > 0


def _changed(message: GroupGenerated, buffers: tuple[bytes, ...], name: str, change: Any) -> tuple[Any, Any]:
    """Return a group with another tensor in the place of the one called `name`; None removes it."""
    index = [tensor.name for tensor in message.tensors].index(name)
    meta = message.tensors[index]
    array = np.frombuffer(buffers[index], meta.dtype).reshape(meta.shape)
    made = change(array)
    new: tuple[TensorMeta, ...] = ()
    if made is not None:
        new = (TensorMeta(dtype=made.dtype.name, shape=made.shape, nbytes=made.nbytes, name=name),)
    tensors = (*message.tensors[:index], *new, *message.tensors[index + 1 :])
    own = () if made is None else (made.tobytes(),)
    changed = GroupGenerated(
        lease=message.lease, trajectories=message.trajectories, tensors=tensors, temperature=message.temperature
    )
    return changed, (*buffers[:index], *own, *buffers[index + 1 :])


def _with_nan(array: Any) -> Any:
    copied = array.copy()
    copied.reshape(-1)[-1] = np.nan
    return copied


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        (STATES, lambda array: array[:, :-1], "its states are float32[3, 3, 4, 2, 8, 8] instead of"),
        (STATES, lambda array: array.astype(np.float16), "its states are float16[3, 4, 4, 2, 8, 8] instead of"),
        (STATES, lambda _: None, "its states are nothing instead of"),
        (STATES, _with_nan, "its states have numbers that are not finite"),
        (STATES, lambda array: 2e4 * array, "its states have numbers that are not finite, or beyond 10000"),
        (STATES, lambda array: array[0, 0], "of states is float32[4, 2, 8, 8]"),
        (LATENTS, lambda array: array[:2], "its latents are"),
        (LATENTS, lambda array: array.astype(np.int32), "of latents is int32"),
        ("text_embeddings", lambda _: None, "the prompt has no text_embeddings"),
        ("text_embeddings", lambda array: np.concatenate([array, array]), "has 10 tokens, and the model reads 1 to 5"),
        ("text_embeddings", lambda array: array[:, :-1], "its text_embeddings have 11 numbers, and the model reads 12"),
        ("text_embeddings", _with_nan, "text_embeddings has numbers that are not finite"),
    ],
)
def test_other_tensors_are_refused_by_controller_and_policy(
    folder: PipelineFolder, name: str, change: Any, reason: str
) -> None:
    learner = learner_of(folder)
    message, buffers = _changed(*generated(folder), name, change)
    assert reason in problem_of(message, buffers, learner)
    with pytest.raises(RejectedGroupsError):
        groups_from_wire([scored(message)], buffers, learner.limits)


@pytest.mark.parametrize(
    ("name", "array", "reason"),
    [
        ("pooled_embeddings", np.zeros(7, np.float32), "its pooled_embeddings have 7 numbers, and the model reads 0"),
        ("given_frames", np.zeros((4, 1, 8, 8), np.float32), "it has given_frames, and the model takes none"),
        ("loss_mask", np.ones(9, np.uint8), "it has loss_mask, which is for the tokens of a language model"),
    ],
)
def test_further_tensors_are_refused_by_controller_and_policy(
    folder: PipelineFolder, name: str, array: Any, reason: str
) -> None:
    learner = learner_of(folder)
    message, buffers = generated(folder)
    tensor = TensorMeta(dtype=array.dtype.name, shape=array.shape, nbytes=array.nbytes, name=name)
    message = msgspec.structs.replace(message, tensors=(*message.tensors, tensor))
    buffers = (*buffers, array.tobytes())
    assert reason in problem_of(message, buffers, learner)
    with pytest.raises(RejectedGroupsError):
        groups_from_wire([scored(message)], buffers, learner.limits)


@pytest.mark.parametrize("change", [lambda array: array[:2], lambda _: None, _with_nan])
def test_latents_of_an_evaluation_that_no_scorer_could_read_are_refused(folder: PipelineFolder, change: Any) -> None:
    learner = learner_of(folder)
    message, buffers = generated(folder)
    message = msgspec.structs.replace(message, lease="generate:e0:0")
    assert problem_of(message, buffers, learner) == ""
    assert "its latents " in problem_of(*_changed(message, buffers, LATENTS, change), learner)
    texts = msgspec.structs.replace(learner.limits, denoising=None)
    found = contents_problem(message, buffers, GroupLimits(num_completions=3), texts)
    assert found is not None
    assert "the model is no diffusion model" in found.reason


def test_densities_of_little_noise_pass_the_controller(folder: PipelineFolder) -> None:
    diffusion = DIFFUSION.model_copy(update={"noise_level": 0.02})
    message, buffers = generated(folder, diffusion)
    assert np.frombuffer(buffers[2], np.float32).max() > 1.0
    assert problem_of(message, buffers, learner_of(folder, diffusion)) == ""


def test_groups_whose_prompts_are_conditioned_otherwise_are_rejected(folder: PipelineFolder) -> None:
    learner, read = learner_of(folder), []
    for seed in (1, 2, 3):
        message, buffers = generated(folder, seed=seed)
        groups = groups_from_wire([scored(message)], buffers, learner.limits)
        read.append(dataclasses.replace(groups[0], prompt_id=f"train/{seed}"))
    frames = {**read[1].denoising, "given_frames": np.zeros((4, 1, 8, 8), np.float32)}
    read[1] = dataclasses.replace(read[1], denoising=frames)
    with pytest.raises(RejectedGroupsError) as found:
        learner.reinforce(read, step=1, num_steps=4)
    assert list(found.value.prompts) == ["train/2"]


def test_partial_trajectories_are_refused(folder: PipelineFolder) -> None:
    learner = learner_of(folder)
    message, buffers = generated(folder)
    total = sum(one.num_tokens for one in message.trajectories)
    with pytest.raises(InvalidResultError, match="cannot be resumed"):
        check_partial_tensors(total, message.tensors[1:4], buffers[1:4], learner.limits)


def test_a_sampler_of_other_steps_is_refused(folder: PipelineFolder) -> None:
    message, buffers = generated(folder, DIFFUSION.model_copy(update={"num_steps": 3}))
    assert "its trajectories have other steps than 3 from number 0 on" in problem_of(
        message, buffers, learner_of(folder)
    )


def test_a_resumed_learner_makes_the_same_versions(folder: PipelineFolder, tmp_path: Path) -> None:
    whole, store = learner_of(folder), StateStore(Storage(str(tmp_path)))
    train(whole, folder, 1)
    store.write(whole.take_state(1))
    train(whole, folder, 2)
    other = learner_of(folder)
    found = find_state(str(tmp_path))
    assert other.resume(SavedState.of(found)) == 1
    train(other, folder, 2)
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name


def test_exports_of_a_run_and_of_a_state_are_pipelines(folder: PipelineFolder, tmp_path: Path) -> None:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel

    learner = learner_of(folder)
    train(learner, folder, 1)
    store = StateStore(Storage(str(tmp_path / "states")))
    store.write(learner.take_state(1))
    export_hf(
        learner.model,
        PipelineFiles(folder.path),
        Storage(str(tmp_path)),
        "step-1",
        weights=learner.exported(),
        shard_mb=1,
    )
    export_state(find_state(str(tmp_path / "states")), tmp_path / "of-state", ModelSettings(path=str(folder.path)))
    for name in ("step-1", "of-state"):
        found = WanTransformer3DModel.from_pretrained(tmp_path / name / "transformer").state_dict()
        for key, tensor in learner.model.state_dict().items():
            assert torch.equal(found[key], tensor), (name, key)
        AutoencoderKLWan.from_pretrained(tmp_path / name / "vae")
        assert (tmp_path / name / "model_index.json").read_bytes() == (folder.path / "model_index.json").read_bytes()


def test_a_state_of_bfloat16_with_modules_in_float32_is_exported(folder: PipelineFolder, tmp_path: Path) -> None:
    settings = PolicySettings()
    learner = DiffusionLearner(lambda: load_transformer(folder, dtype=torch.bfloat16), settings, folder, DIFFUSION)
    assert {tensor.dtype for tensor in learner.tensors.values()} == {torch.bfloat16, torch.float32}
    StateStore(Storage(str(tmp_path / "states"))).write(learner.take_state(0))
    export_state(find_state(str(tmp_path / "states")), tmp_path / "out", ModelSettings(path=str(folder.path)))
    assert (tmp_path / "out" / "model_index.json").is_file()


@pytest.mark.parametrize(
    ("diffusion", "policy", "message"),
    [
        ({"dynamics": "ode"}, {}, "no step has a density: set dynamics = 'sde'"),
        ({}, {"diffusion": {"data_coefficient": 0.1}}, "needs samples of a dataset"),
        ({}, {"parallel": {"elastic": True}}, "by a single rank"),
        ({"height": 60}, {}, "60 x 64 pixels are no multiple of 8"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    folder: PipelineFolder, diffusion: Any, policy: Any, message: str
) -> None:
    settings = PolicySettings(**policy)
    with pytest.raises(ConfigError, match=message):
        DiffusionLearner(
            lambda: load_transformer(folder, dtype=torch.float32),
            settings,
            folder,
            DIFFUSION.model_copy(update=diffusion),
        )


def test_steps_of_examples_are_refused_and_change_nothing(folder: PipelineFolder) -> None:
    learner = learner_of(folder)
    train(learner, folder, 1)
    trainer = learner.trainer
    with pytest.raises(ConfigError, match=r"by run\.kind = 'rl' only"):
        learner.supervise([], num_steps=1)
    assert learner.trainer is trainer
