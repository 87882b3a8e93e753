"""The diffusion engine as a run builds it: from the folder of a pipeline and the settings of the rollout."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_pipelines import SIZE, save_whole, without_texts

from starling.algo.diffusion.conditions import conditions_of
from starling.algo.diffusion.flow import guided
from starling.algo.diffusion.folder import PipelineFolder, load_transformer, pipeline_sampler
from starling.algo.diffusion.models import velocity
from starling.algo.diffusion.settings import SamplerSettings
from starling.algo.diffusion.text.embedder import PipelineEmbedder
from starling.common.errors import ConfigError
from starling.common.settings import LoraSettings, ModelSettings, WeightsSettings
from starling.common.wire.messages import Prompt, Sampling
from starling.rollout.engine.base import EngineSpec, GroupRequest, GroupResult
from starling.rollout.engine.diffusion.engine import DiffusionEngine
from starling.rollout.engine.diffusion.prompts import DiffusionPrompts
from starling.rollout.engine.registry import make_engine
from starling.rollout.settings import RolloutSettings
from starling.weightsync.tensors.adapters import add_adapters, base_digest, is_adapter

torch.set_num_threads(1)
CPU = torch.device("cpu")
LORA = LoraSettings(rank=2, alpha=8.0, targets=("to_v", "net.2", "proj_out"))


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> PipelineFolder:
    return save_whole(tmp_path_factory.mktemp("wan"), "wan")


def settings_of(**changes: Any) -> SamplerSettings:
    return SamplerSettings(**{"num_steps": 4, "num_frames": 5, "text_dtype": "float32", **SIZE, **changes})


def spec_of(
    folder: PipelineFolder, settings: SamplerSettings | None, model: dict[str, Any] | None = None, **rollout: Any
) -> EngineSpec:
    return EngineSpec(
        path=folder.path,
        model=ModelSettings(**{"path": str(folder.path), "device": "cpu", **(model or {})}),
        rollout=RolloutSettings(**{"engine": "diffusion", "load_weights": True, "max_rows": 4, **rollout}),
        weights=WeightsSettings(),
        name="rollout-3",
        eos_token_ids=(),
        max_model_len=None,
        wake=lambda: None,
        diffusion=settings,
    )


def built(spec: EngineSpec) -> DiffusionEngine:
    engine = make_engine(spec)
    assert isinstance(engine, DiffusionEngine)
    return engine


def generate(engine: DiffusionEngine, spec: EngineSpec, text: str = "a cat", count: int = 2) -> GroupResult:
    assert spec.diffusion is not None
    ids, tensors = DiffusionPrompts(spec.path, spec.diffusion, "cpu").encode(Prompt(id="p", text=text))
    engine.add(GroupRequest("a", ids, count, Sampling(max_tokens=8, seed=5), tensors))
    for _ in range(spec.diffusion.num_steps):
        for result in engine.step():
            assert isinstance(result, GroupResult), result
            return result
    raise AssertionError("the group does not end")


def first_density(
    folder: PipelineFolder, settings: SamplerSettings, result: GroupResult, model: Any, empty: Any = None
) -> float:
    """Compute the density of the first action of the first trajectory again, as a policy does."""
    sampler, numbers = pipeline_sampler(folder, settings), torch.tensor([0])
    states = torch.from_numpy(result.tensors["states"])[0]
    prompt = {name: array for name, array in result.tensors.items() if name in ("text_embeddings", "pooled_embeddings")}
    with torch.no_grad():
        conditions = conditions_of(prompt, folder.text_length, CPU)
        speed = velocity(model, states[:1], sampler.sigma(numbers), conditions)
        if empty is not None:
            speed = guided(speed, velocity(model, states[:1], sampler.sigma(numbers), empty), settings.guidance)
    return float(sampler.log_density(sampler.transition(states[:1], speed, numbers), states[1:2]))


@pytest.mark.parametrize("name", ["wan", "sd3"])
def test_the_engine_draws_with_the_model_of_the_folder(name: str, tmp_path: Path) -> None:
    folder, settings = save_whole(tmp_path, name), settings_of(num_frames=5 if name == "wan" else 1)
    spec = spec_of(folder, settings)
    with closing(built(spec)) as engine:
        assert (engine.version, engine.layout().replica) == (0, "rollout-3")
        result = generate(engine, spec)
        model = load_transformer(folder, dtype=torch.float32)
        assert engine.tensors().keys() == model.state_dict().keys()
        assert not any(tensor.requires_grad for tensor in engine.tensors().values())
    assert result.prompt_ids.tolist() == [0]
    assert result.tensors["latents"].shape == (2, *folder.latent_shape(64, 64, settings.num_frames))
    expected = first_density(folder, settings, result, model)
    np.testing.assert_allclose(result.completions[0].logprobs[0], expected, atol=2e-5)


def test_weights_that_a_policy_sends_are_not_read(wan: PipelineFolder) -> None:
    with closing(built(spec_of(wan, settings_of(), {"dtype": "bfloat16"}, load_weights=False))) as engine:
        assert engine.version == -1
        live = engine.tensors()
        model = load_transformer(wan, dtype=torch.bfloat16)
        forms = {name: (tensor.shape, tensor.dtype) for name, tensor in model.named_parameters()}
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in live.items()} == forms
        assert torch.bfloat16 in {tensor.dtype for tensor in live.values()}
        assert not torch.equal(live["proj_out.weight"], model.state_dict()["proj_out.weight"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_what_is_adopted_and_draws(wan: PipelineFolder, dtype: str) -> None:
    spec = spec_of(wan, settings_of(), {"dtype": dtype, "lora": LORA}, load_weights=False)
    policy = load_transformer(wan, dtype=getattr(torch, dtype))
    add_adapters(policy, LORA, seed=3)
    with closing(built(spec)) as engine:
        live = engine.tensors()
        trained = {name: tensor for name, tensor in policy.named_parameters() if is_adapter(name)}
        assert live.keys() == trained.keys()
        assert {tensor.dtype for tensor in live.values()} == {torch.float32}
        assert engine.layout().base == base_digest(policy, LORA) != ""
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, tensor in trained.items():
                tensor.add_(0.3 * torch.randn(tensor.shape, generator=generator))
                live[name].copy_(tensor)
        result = generate(engine, spec)
    found, base = result.completions[0].logprobs[0], load_transformer(wan, dtype=getattr(torch, dtype))
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(found, first_density(wan, settings_of(), result, policy), atol=tolerance)
    assert abs(found - first_density(wan, settings_of(), result, base)) > 3 * tolerance, "the adapters count"


def test_guidance_leads_away_from_the_negative_prompt(wan: PipelineFolder) -> None:
    settings = settings_of(guidance=100.0, negative_prompt="blurred")
    spec = spec_of(wan, settings)
    with closing(built(spec)) as engine:
        result = generate(engine, spec, count=1)
    (negative,) = PipelineEmbedder(wan, dtype=torch.float32).embed(["blurred"], unconditional=True)
    empty, model = conditions_of(negative, wan.text_length, CPU), load_transformer(wan, dtype=torch.float32)
    found = result.completions[0].logprobs[0]
    np.testing.assert_allclose(found, first_density(wan, settings, result, model, empty), atol=2e-4)
    assert abs(found - first_density(wan, settings, result, model)) > 1e-3


def test_what_cannot_be_built_is_refused(wan: PipelineFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"draws the samples of \[diffusion\], and there is none"):
        make_engine(spec_of(wan, None))
    with pytest.raises(ConfigError, match="60 x 64 pixels are no multiple of 8"):
        make_engine(spec_of(wan, settings_of(height=60)))
    with pytest.raises(ConfigError, match=r"\[model.lora\] does not fit the model|lists 'no_such'"):
        make_engine(spec_of(wan, settings_of(), {"lora": LoraSettings(targets=("no_such",))}))
    save_whole(tmp_path, "wan")
    bare = without_texts(tmp_path)
    with pytest.raises(ConfigError, match="has no text_encoder, which computes the embeddings of prompts"):
        make_engine(spec_of(bare, settings_of(guidance=2.0)))
    make_engine(spec_of(bare, settings_of())).close()
