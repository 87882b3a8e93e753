"""Translation of the loss and the advantage of GRPO, GSPO and DAPO."""

from __future__ import annotations

from typing import Any, Final

from starling.cli.migrate.draft import Draft
from starling.cli.migrate.source import Source
from starling.common.settings import shown

_TRAIN: Final = "train.train_policy"
_AGGREGATES: Final = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
}
_NO_BOUND: Final = {"clip_low": 1.0, "clip_high": 1000.0}
"""Bounds that clip nothing: a ratio is above 0, and its logarithm below 7 in all sound steps."""
_VARIANTS: Final = ("grpo", "gspo", "dapo")


def add_algorithm(source: Source, draft: Draft) -> None:
    """Set `policy.algorithm`."""
    name = _name(source)
    section = "policy.algorithm"
    draft.set(f"{section}.name", name)
    if source[f"{_TRAIN}.variant"] not in _VARIANTS:
        draft.note(f"{section}.name", f"it was {shown(source[f'{_TRAIN}.variant'])}, which is not known here")
    if source[f"{_TRAIN}.algo"] != "grpo":
        algo = shown(source[f"{_TRAIN}.algo"])
        draft.note(f"{section}.name", f"advantages of your own ({algo}): see docs/how-to/extend/algorithm.md")
    if name == "aipo":
        draft.set(f"{section}.max_ratio", source[f"{_TRAIN}.aipo_rho"])
    else:
        _add_clipping(source, draft, name)
    _add_aggregate(source, draft)
    if source[f"{_TRAIN}.unbiased_advantage"]:
        draft.set(f"{section}.advantage_scale", "none")
    if name != "decoupled_ppo":
        is_rollout = source[f"{_TRAIN}.use_rollout_logprobs_for_loss"]
        note = "as Cosmos-RL; `rollout`, the default here, also weighs how far a token's sampling weights are behind"
        draft.set(f"{section}.old", "rollout" if is_rollout else "proximal", "" if is_rollout else note)
    if corrections := _corrections(source):
        draft.set(f"{section}.corrections", corrections)
    _add_terms(source, draft)
    _add_updates(source, draft)


def _name(source: Source) -> str:
    variant: str = source[f"{_TRAIN}.variant"]
    if source[f"{_TRAIN}.aipo_rho"]:
        return "aipo"
    if source[f"{_TRAIN}.use_decoupled_loss"]:
        return "decoupled_ppo"
    return variant if variant in _VARIANTS else "grpo"


def _add_clipping(source: Source, draft: Draft, name: str) -> None:
    for theirs, ours in (("epsilon_low", "clip_low"), ("epsilon_high", "clip_high")):
        bound = source[f"{_TRAIN}.{theirs}"]
        if bound < 0:
            note = f"it was {bound}, which means no bound; no ratio reaches this one"
            draft.set(f"policy.algorithm.{ours}", _NO_BOUND[ours], note)
        else:
            draft.set(f"policy.algorithm.{ours}", bound)
    if name != "gspo" and source[f"{_TRAIN}.lower_bound_ratio"] > 1:
        draft.set("policy.algorithm.dual_clip", source[f"{_TRAIN}.lower_bound_ratio"])


def _add_aggregate(source: Source, draft: Draft) -> None:
    wanted, tokens = source[f"{_TRAIN}.loss_type"], source[f"{_TRAIN}.unbiased_loss_max_tokens"]
    section = "policy.algorithm"
    if wanted == "seq-mean-token-mean" and tokens:
        draft.set(f"{section}.aggregate", "constant")
        draft.set(f"{section}.aggregate_tokens", tokens)
        return
    note = "" if wanted in _AGGREGATES else f"it was {shown(wanted)}"
    draft.set(f"{section}.aggregate", _AGGREGATES.get(wanted, "token_mean"), note)


def _corrections(source: Source) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if source[f"{_TRAIN}.use_decoupled_loss"] and source[f"{_TRAIN}.behav_imp_weight_cap"]:
        found.append({"kind": "mask", "high": source[f"{_TRAIN}.behav_imp_weight_cap"]})
    if source[f"{_TRAIN}.off_policy_masking_delta"] is not None:
        found.append({"kind": "sequence_mask", "high": source[f"{_TRAIN}.off_policy_masking_delta"]})
    return found


def _add_terms(source: Source, draft: Draft) -> None:
    section = "policy.algorithm"
    if source[f"{_TRAIN}.kl_beta"]:
        draft.set(f"{section}.kl_coefficient", source[f"{_TRAIN}.kl_beta"])
        if source[f"{_TRAIN}.unbiased_kl_estimate"]:
            draft.set(f"{section}.kl_estimator", "unbiased")
        if source[f"{_TRAIN}.reference_reset_interval"]:
            draft.set(f"{section}.reference_reset_every", source[f"{_TRAIN}.reference_reset_interval"])
    for theirs, ours in (("entropy_coeff", "entropy_coefficient"), ("positive_nll_coef", "positive_nll_coefficient")):
        if source[f"{_TRAIN}.{theirs}"]:
            draft.set(f"{section}.{ours}", source[f"{_TRAIN}.{theirs}"])


def _add_updates(source: Source, draft: Draft) -> None:
    section = "policy.algorithm"
    if source[f"{_TRAIN}.mu_iterations"] > 1:
        draft.set(f"{section}.num_passes", source[f"{_TRAIN}.mu_iterations"])
    size, batch = source[f"{_TRAIN}.batch_size_per_optimize"], source["train.train_batch_per_replica"]
    if size and size < batch:
        wanted = round(batch / size)
        number = min(wanted, draft.get("rl.prompts_per_step", 1))
        note = f"it was {wanted}; a step has {number} groups, which are not divided" if number < wanted else ""
        draft.set(f"{section}.num_minibatches", number, note)
