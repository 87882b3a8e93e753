"""Translation of the optimizer, its schedule, and the memory and precision of training."""

from __future__ import annotations

import re
from typing import Any, Final

from starling.cli.migrate.draft import Draft
from starling.cli.migrate.source import Source
from starling.common.settings import shown

_SECTIONS: Final = {"rl": "policy.optimizer", "sft": "policy.sft.optimizer", "dpo": "policy.dpo.optimizer"}


def add_optimizer(source: Source, draft: Draft, kind: str, num_steps: int) -> None:
    """Set the optimizer of a run of this kind, of `num_steps` steps, and what training does with memory."""
    section = _SECTIONS[kind]
    _add_rate(source, draft, section)
    decay = source["train.optm_weight_decay"]
    draft.set(f"{section}.kind", "adamw")
    if source["train.optm_name"] != "AdamW" and decay:
        name = shown(source["train.optm_name"])
        draft.note(f"{section}.weight_decay", f"with {name} it was part of the gradient; here it is decoupled")
    draft.set(f"{section}.weight_decay", decay)
    draft.set(f"{section}.betas", source["train.optm_betas"])
    draft.set(f"{section}.eps", source["train.epsilon"])
    draft.set(f"{section}.max_grad_norm", source["train.optm_grad_norm_clip"])
    warmup = source["train.optm_warmup_steps"]
    is_share = isinstance(warmup, float) and 0.0 <= warmup <= 1.0
    note = f"it was the share {warmup} of the steps" if is_share and warmup else ""
    draft.set(f"{section}.warmup_steps", round(warmup * num_steps) if is_share else int(warmup), note)
    _add_schedule(source, draft, section, num_steps)
    if source["train.ema_enable"]:
        draft.set(f"{section}.ema_decay", source["train.ema_decay"])
    _add_memory(source, draft)
    _add_frozen(source, draft)
    if draft.get("model.lora") is None:
        _add_precision(source, draft)
    elif source["train.fp8.enable_fp8"]:
        draft.note("model.lora", "train.fp8.enable_fp8: adapters are trained without FP8")


def _add_rate(source: Source, draft: Draft, section: str) -> None:
    rate: Any = source["train.optm_lr"]
    if isinstance(rate, list):
        draft.set(
            f"{section}.learning_rate", rate[0] if rate else 1e-6, f"it was {shown(rate)}, for several optimizers"
        )
    elif isinstance(rate, dict):
        base = rate.get("global", 1e-6)
        draft.set(f"{section}.learning_rate", base)
        others = {re.escape(name): value for name, value in rate.items() if name != "global"}
        if factors := {name: float(f"{value / base:.12g}") for name, value in others.items() if value and base}:
            draft.set(f"{section}.rates", factors)
        if frozen := [name for name, value in others.items() if not value]:
            draft.set("policy.frozen", frozen)
    else:
        draft.set(f"{section}.learning_rate", rate)


def _add_schedule(source: Source, draft: Draft, section: str, num_steps: int) -> None:
    """Set the decay: of the last share of the steps, which is `wsd` here unless it is all of them."""
    share, shape = source["train.optm_decay_ratio"], source["train.optm_decay_type"]
    least = source["train.optm_min_lr_factor"]
    if not share or shape in (None, "none"):
        draft.set(f"{section}.schedule", "constant")
        return
    if share >= 1.0 and shape in ("cosine", "linear"):
        draft.set(f"{section}.schedule", shape)
    else:
        draft.set(f"{section}.schedule", "wsd")
        note = f"{share} of {num_steps} steps; set it anew when you change their number"
        draft.set(f"{section}.decay_steps", max(round(share * num_steps), 1), note)
        is_known = shape in ("linear", "sqrt")
        text = "" if is_known else f"it was {shown(shape)}, which only decays over all steps here"
        draft.set(f"{section}.decay_shape", shape if is_known else "linear", text)
    draft.set(f"{section}.final_share", least)


def _add_memory(source: Source, draft: Draft) -> None:
    if source["policy.model_gradient_checkpointing"]:
        draft.set("policy.memory.checkpointing", "full")
    if source["train.fsdp_offload"]:
        draft.set("policy.memory.offload_optimizer", True)
    if source["train.activation_offload"]:
        draft.set("policy.memory.offload_activations", True)
    if source.has("train.compile") and source["train.compile"]:
        draft.set("policy.memory.compile", True)
    tokens = [source[f"train.train_policy.{name}"] for name in _TOKEN_LIMITS]
    if limit := next(filter(None, tokens), None):
        draft.set("policy.tokens_per_microbatch", limit)
    if source["policy.enable_liger_kernel"]:
        draft.set("policy.liger", True)
    if source["policy.aux_loss_coeff"]:
        draft.set("policy.router_aux_coefficient", source["policy.aux_loss_coeff"])


_TOKEN_LIMITS: Final = ("max_token_len_per_mini_batch", "load_balanced_max_tokens_for_batch")


def _add_frozen(source: Source, draft: Draft) -> None:
    """Set the parameters that are not trained, by expressions that are searched for in their names."""
    frozen = [*draft.get("policy.frozen", []), *(source["policy.freeze_pattern"] or [])]
    frozen += [re.escape(name) for name, trained in (source["policy.trainable_map"] or {}).items() if not trained]
    if trained := source["policy.trainable_pattern"]:
        frozen.append(f"^(?!.*(?:{'|'.join(trained)}))")
    if not frozen:
        return
    if draft.get("model.lora") is not None:
        draft.note("model.lora", "parameters that were frozen by name are so anyway: only adapters are trained")
        draft.get("policy", {}).pop("frozen", None)
        return
    draft.set("policy.frozen", frozen, "names are those of Hugging Face, and each expression has to match one")


def _add_precision(source: Source, draft: Draft) -> None:
    if not source["train.fp8.enable_fp8"]:
        return
    wanted = source["train.fp8.quant_recipe"]
    is_tensorwise = wanted == "tensorwise" and source["policy.parallelism.tp_size"] == 1
    note = "it was tensorwise, which tensor parallelism does not allow" if wanted == "tensorwise" else ""
    kind = "fp8_tensorwise" if is_tensorwise else "fp8_rowwise"
    draft.set("policy.precision.kind", kind, "" if is_tensorwise else note)
    if source["train.fp8.fp8_recipe"] != "dynamic_scaling":
        draft.note("policy.precision.kind", f"scales are computed anew, not {shown(source['train.fp8.fp8_recipe'])}")
