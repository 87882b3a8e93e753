"""Check that a recipe with [diffusion] has nothing that only language models have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from starling.common.setting_fields import field_at
from starling.common.settings import shown
from starling.rollout.settings import check_diffusion

if TYPE_CHECKING:
    from starling.algo.diffusion.settings import SamplerSettings
    from starling.cli.recipe.schema import Recipe

OF_LANGUAGE_MODELS: Final = (
    "model.trust_remote_code",
    "weights.quantise",
    "policy.weights_from",
    "policy.attention",
    "policy.liger",
    "policy.router_aux_coefficient",
    "policy.router_bias_rate",
    "policy.precision.kind",
    "policy.memory.compile",
    "policy.memory.offload_activations",
    "policy.algorithm.entropy_coefficient",
    "sampling.top_p",
    "sampling.top_k",
    "sampling.min_p",
    "sampling.logprobs",
    "sampling.routing",
    "sampling.stop_token_ids",
    "rollout.max_model_len",
    "rollout.kv_cache_mb",
)
"""Settings without a meaning for denoising trajectories: only their defaults are taken."""
_TEMPERATURES: Final = (0.0, 1.0)
"""Those of evaluations: without noise, or with the sampler of training."""


def check_diffusion_recipe(recipe: Recipe) -> None:
    """Check the settings of a recipe against its model, also of one without [diffusion].

    Raises:
        ValueError: naming the setting and the remedy.
    """
    if recipe.generates:
        for key, rollout in recipe.rollout_variants:
            check_diffusion(rollout, recipe.diffusion, key)
    if recipe.diffusion is None:
        return
    _check_kind(recipe)
    _check_sampling(recipe, recipe.diffusion)
    for key in OF_LANGUAGE_MODELS:
        field, value = field_at(type(recipe), key.split(".")), _value(recipe, key)
        assert field is not None, key
        if value != field.default:
            raise ValueError(
                f"{key} = {shown(value)} is for language models, and [diffusion] is for a diffusion model; remove it"
            )


def _check_kind(recipe: Recipe) -> None:
    if recipe.run.kind != "rl":
        raise ValueError(
            f"run.kind = {recipe.run.kind!r} is for language models, and [diffusion] is for a diffusion model, which "
            "is trained by reinforcement learning; set run.kind = 'rl'"
        )
    if recipe.sft.num_steps:
        raise ValueError(
            f"sft.num_steps = {recipe.sft.num_steps} are steps on texts, and [diffusion] is for a diffusion model; "
            "remove [sft]"
        )
    if recipe.launch.num_policies > 1:
        raise ValueError(
            f"launch.num_policies = {recipe.launch.num_policies}, and the model of [diffusion] is trained by one "
            "policy; set it to 1"
        )
    if recipe.policy.parallel.has_mesh:
        raise ValueError(
            "policy.parallel has more than one rank, or elastic = true, and the model of [diffusion] is trained by a "
            "single rank; remove it"
        )
    if recipe.teacher is not None:
        raise ValueError(
            "[teacher] scores tokens, and the completions of [diffusion] are denoising trajectories; remove it"
        )


def _check_sampling(recipe: Recipe, diffusion: SamplerSettings) -> None:
    sampling, evaluation = recipe.sampling, recipe.evaluation
    if sampling.temperature != 1.0:
        raise ValueError(
            f"sampling.temperature = {sampling.temperature:g}, and trajectories of [diffusion] are drawn at 1; remove "
            "it, and set diffusion.noise_level for more or less noise"
        )
    if evaluation.temperature not in _TEMPERATURES:
        raise ValueError(
            f"evaluation.temperature = {evaluation.temperature:g} with [diffusion]; set 0 to draw without noise, or 1 "
            "to draw as in training"
        )
    if sampling.max_tokens < diffusion.num_steps:
        raise ValueError(
            f"sampling.max_tokens = {sampling.max_tokens} is less than diffusion.num_steps = {diffusion.num_steps}, "
            "the steps of each trajectory; raise it"
        )


def _value(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return value
