"""Recipes of diffusion models: what follows from [diffusion], and settings that only language models have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from starling.cli.recipe.schema import load_recipe, to_toml
from starling.common.errors import ConfigError
from starling.common.settings import load
from starling.rollout.settings import RolloutProcess

RECIPE = """
[data]
source = "prompts.jsonl"
[model]
path = "{path}"
[diffusion]
num_steps = 6
height = 64
width = 64
[rollout]
engine = "diffusion"
[[reward.scorers]]
name = "exact_match"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "pipeline"
    for part in ("transformer", "vae"):
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text("{}")
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"")
    (folder / "model_index.json").write_text(json.dumps({"transformer": ["diffusers", "A"], "vae": ["diffusers", "B"]}))
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(path=folder))
    return path


def test_a_recipe_of_a_diffusion_model_is_what_its_services_read(recipe: Path, tmp_path: Path) -> None:
    found = load_recipe([recipe], [])
    assert found.controller.denoising
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(to_toml(found))
    settings = load(RolloutProcess, [resolved], [], others=tuple(type(found).model_fields))
    assert settings.diffusion is not None
    assert settings.diffusion.num_steps == 6
    assert settings.rollout.engine == "diffusion"


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_evaluations_are_drawn_with_or_without_noise(recipe: Path, temperature: str) -> None:
    load_recipe([recipe], ["--evaluation.temperature", temperature])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rollout.engine=transformers"], r"rollout.engine = 'transformers' generates with language models, and"),
        (["--rollout.engine=vllm"], r"rollout.engine = 'vllm' .*; set rollout.engine = 'diffusion', or remove"),
        (["--rollout.environment.kind=tools"], r"rollout.environment.kind = 'tools' plays turns of text"),
        (["--rollout.api.enabled=true"], r"rollout.api.enabled = true serves completions of text"),
        (['--rollout.pools=[{engine = "vllm"}]'], r"rollout.pools.0.engine = 'vllm' generates with language models"),
        (["--run.kind=serve"], r"run.kind = 'serve' is for language models"),
        (
            ["--launch.num-policies=2"],
            r"launch.num_policies = 2, and the model of \[diffusion\] is trained by one policy",
        ),
        (["--policy.parallel.elastic=true"], r"policy.parallel has more than one rank, or elastic = true"),
        (["--teacher.path=somewhere"], r"\[teacher\] scores tokens, and the completions of \[diffusion\]"),
        (["--sampling.top-p=0.9"], r"sampling.top_p = 0.9 is for language models"),
        (["--sampling.top-k=5"], r"sampling.top_k = 5 is for language models"),
        (["--sampling.min-p=0.1"], r"sampling.min_p = 0.1 is for language models"),
        (["--sampling.routing=replayed"], r"sampling.routing = 'replayed' is for language models"),
        (
            ["--sampling.logprobs=truncated", "--sampling.top-k=5"],
            r"sampling.(logprobs|top_k) = .* is for language models",
        ),
        (["--sampling.stop-token-ids=[3]"], r"sampling.stop_token_ids = \(3,\) is for language models"),
        (["--sampling.temperature=0.7"], r"sampling.temperature = 0.7, and trajectories of \[diffusion\] are drawn at"),
        (["--sampling.temperature=0"], r"sampling.temperature = 0, and"),
        (["--evaluation.temperature=0.5"], r"evaluation.temperature = 0.5 with \[diffusion\]; set 0"),
        (["--weights.quantise=fp8_row"], r"weights.quantise = 'fp8_row' is for language models"),
        (["--model.path=", "--model.scratch.max-length=24"], r"\[model.scratch\] makes a language model"),
        (["--model.path=/no/such"], r"the model folder /no/such does not exist; give the folder of a pipeline"),
    ],
)
def test_what_only_language_models_have_is_refused(recipe: Path, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe([recipe], flags)


def test_the_engine_of_diffusion_models_needs_one(recipe: Path) -> None:
    text = recipe.read_text()
    recipe.write_text(text.replace("[diffusion]\nnum_steps = 6\nheight = 64\nwidth = 64\n", ""))
    with pytest.raises(
        ConfigError, match=r"rollout.engine = 'diffusion' draws the samples of \[diffusion\], and there"
    ):
        load_recipe([recipe], [])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rollout.engine=diffusion"], r"there is none; add \[diffusion\], or choose the engine of a language model"),
        (["--diffusion.num-steps=3"], "rollout.engine = 'transformers' generates with language models"),
        (
            ["--rollout.engine=diffusion", "--diffusion.num-steps=3", "--rollout.api.enabled=true"],
            "rollout.api.enabled = true serves completions of text",
        ),
        (
            ["--rollout.engine=diffusion", "--diffusion.num-steps=3", "--rollout.environment.kind=gym"],
            "rollout.environment.kind = 'gym' plays turns of text",
        ),
    ],
)
def test_a_rollout_refuses_the_same_at_its_start(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(RolloutProcess, [], flags)


def test_an_engine_of_ones_own_draws_the_samples_of_a_diffusion_model() -> None:
    settings = load(RolloutProcess, [], ["--rollout.engine=mine:Engine", "--diffusion.num-steps=3"])
    assert settings.diffusion is not None
