"""Translation of rewards, the teacher and evaluations during training."""

from __future__ import annotations

from typing import Any, Final

from starling.cli.migrate.draft import Draft
from starling.cli.migrate.source import Source
from starling.common.settings import Tree, shown

_TRAIN: Final = "train.train_policy"
SCORERS: Final = {
    "single_choice": ("choice", "the answer's letter is read in more forms than Cosmos-RL's"),
    "boxed_math": ("math", "it reads the last expression, boxed or not"),
    "direct_math": ("math", "scores are 0 and 1; in Cosmos-RL they are -1 and 1"),
    "gsm8k": ("gsm8k", ""),
    "format": ("format", "white space between the two parts may be any; in Cosmos-RL it is one empty line"),
}
"""Scorers of the reward functions that Cosmos-RL has, with what is different."""
_HELD_OUT: Final = 128


def add_rewards(source: Source, draft: Draft) -> None:
    """Set the scorers of training; none of them where a teacher alone is learned from."""
    if source[f"{_TRAIN}.bypass_reward"] and not source["distillation.enable"]:
        draft.note("reward", "train.train_policy.bypass_reward = true: without rewards nothing would be learned")
    if source["distillation.enable"] and not source["validation.enable"]:
        return
    if source[f"{_TRAIN}.use_remote_reward"]:
        _add_remote(source, draft)
    else:
        for name, weight in weights(source[f"{_TRAIN}.reward_function"]).items():
            add_scorer(source, draft, name, {"weight": weight})
    is_there = any(scorer["name"] == "overlong" for scorer in draft.get("reward.scorers", []))
    if source[f"{_TRAIN}.overlong_reward.enable_overlong_penalty"] and not is_there:
        _add_overlong(source, draft, {"weight": 1.0})


def weights(functions: Any) -> dict[str, float]:
    """Return the weights of the reward functions, which are a name, a list of names, or a table."""
    if isinstance(functions, str):
        return {functions: 1.0}
    return dict(functions) if isinstance(functions, dict) else dict.fromkeys(functions, 1.0)


def add_scorer(source: Source, draft: Draft, name: str, more: Tree) -> None:
    """Add the scorer of one reward function. `more`: its weight or use."""
    if name == "overlong":
        _add_overlong(source, draft, more)
        return
    own = "a function of your own: write it as docs/how-to/extend/scorer.md says, or name a scorer that is built in"
    ours, note = SCORERS.get(name, (f"my_rewards.py:{name}", own))
    label = {"label": name} if name == "direct_math" else {}
    draft.add("reward.scorers", {"name": ours, **label, **more}, note)


def _add_overlong(source: Source, draft: Draft, more: Tree) -> None:
    overlong, limit = f"{_TRAIN}.overlong_reward", draft.get("sampling.max_tokens")
    buffer = min(source[f"{overlong}.buffer_length"], limit)
    note = f"buffer was {source[f'{overlong}.buffer_length']}, more than a completion has"
    options = {"max_tokens": limit, "buffer": buffer, "scale": source[f"{overlong}.penalty_factor"]}
    is_same = buffer == source[f"{overlong}.buffer_length"]
    draft.add("reward.scorers", {"name": "overlong", **more, "options": options}, "" if is_same else note)


def _add_remote(source: Source, draft: Draft) -> None:
    """Add the scorers of a remote reward service, which are those of Starling's reward service."""
    remote = f"{_TRAIN}.remote_reward"
    for name in ("name", "weight", "score_key", "clip_min", "clip_max"):
        source.used.add(f"{remote}.reward_fns[].{name}")
    given = source.section(f"{remote}.reward_fns") or [{"name": "dance_grpo", "score_key": "overall_reward"}]
    for function in given:
        name = function.get("name", "")
        scorer: Tree = {"name": name, "weight": function.get("weight", 1.0)}
        if key := function.get("score_key", ""):
            scorer["key"] = key
        scorer |= {"clip_min": function.get("clip_min", -5.0), "clip_max": function.get("clip_max", 5.0)}
        scorer["batch_size"] = source[f"{remote}.batch_size"]
        draft.add(
            "reward.scorers", scorer, "it was scored by a service elsewhere; give its `options`, `needs`, `device`"
        )
    draft.set("reward.scale", source[f"{remote}.scale"])
    draft.set("reward.clip_min", source[f"{remote}.reward_clip_min"])
    draft.set("reward.clip_max", source[f"{remote}.reward_clip_max"])


def add_teacher(source: Source, draft: Draft) -> None:
    """Set the teacher of on-policy distillation."""
    if not source["distillation.enable"]:
        return
    path = source["distillation.model_name_or_path"]
    is_folder = path.startswith(("/", "./", "../", "~"))
    note = "" if is_folder else f"a folder is needed: `hf download {path} --local-dir DIR`, and give DIR here"
    draft.set("teacher.path", path, note)
    dtype = source["distillation.param_dtype"]
    draft.set("teacher.dtype", "float32" if dtype == "float32" else "bfloat16")
    draft.set("launch.num_teachers", source["distillation.parallelism.n_init_replicas"])
    if limit := source["distillation.max_token_len_per_mini_batch"]:
        draft.set("teacher.tokens_per_forward", limit)
    top_k = max(source["distillation.top_k"], 0)
    draft.set("teacher.top_k", top_k)
    draft.set("policy.distill.loss", "jsd" if top_k else "reverse_kl")
    draft.set("policy.distill.coefficient", source["distillation.kl_penalty_coef"])
    draft.set("policy.distill.reward_coefficient", 0.0)
    if top_k:
        draft.set("policy.distill.beta", source["distillation.jsd_beta"])
    else:
        draft.set("policy.distill.discount", source["distillation.kl_discount_factor"])
    if draft.get("rl.dynamic_sampling"):
        draft.set("rl.dynamic_sampling", False, "groups are not told apart by rewards, which do not count here")


def add_evaluation(source: Source, draft: Draft) -> None:
    """Set the evaluations during training, of rows that are held out of the training data."""
    if not source["validation.enable"]:
        return
    draft.set("evaluation.at_start", source["validation.val_before_train"])
    draft.set("evaluation.at_end", True)
    draft.set("evaluation.every", source["validation.freq"])
    draft.set("evaluation.num_completions", source["validation.n_generation"])
    draft.set("evaluation.temperature", source["validation.temperature"])
    size = source["validation.dataset.test_size"]
    if isinstance(size, int) and size:
        draft.set("data.held_out", size)
    elif draft.get("data.held_out") is None:
        text = f"a share of rows ({size})" if size else "a data set of its own"
        draft.set("data.held_out", _HELD_OUT, f"rows to evaluate on; in Cosmos-RL it was {text}")
    training = weights(source[f"{_TRAIN}.reward_function"])
    for name in weights(source["validation.reward_function"]):
        if name not in training:
            add_scorer(source, draft, name, {"use": "evaluation"})
    if source["validation.reward_function"] and set(weights(source["validation.reward_function"])) != set(training):
        text = f"Cosmos-RL evaluates by {', '.join(map(shown, weights(source['validation.reward_function'])))} alone"
        draft.note("evaluation", text)
