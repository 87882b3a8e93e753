"""Translation of a training file of Cosmos-RL: reinforcement learning, supervised fine-tuning, or pairs."""

from __future__ import annotations

import math
import re
from typing import Final, Literal

from starling.cli.migrate.algorithm import add_algorithm
from starling.cli.migrate.draft import Draft
from starling.cli.migrate.optimizer import add_optimizer
from starling.cli.migrate.replicas import add_policies, add_rollouts, note_hosts
from starling.cli.migrate.rewards import add_evaluation, add_rewards, add_teacher
from starling.cli.migrate.source import Source
from starling.common.settings import shown

Kind = Literal["rl", "sft", "dpo"]
DEFAULT_STEPS: Final = 100
TRAIN: Final = "train.train_policy"
_MARKS_OF_GRPO: Final = ("temperature", "epsilon_low", "epsilon_high", "kl_beta", "use_remote_reward")
"""By which Cosmos-RL tells a [train.train_policy] without a type."""
_ROBOTS: Final = ("grpo_vla", "grpo_pi05", "pi_sft", "cosmos_policy")
_DIFFUSION: Final = ("diffusers_sft", "diffusion_nft")
_NO_ROBOTS: Final = (
    "it trains a vision-language-action model or one of a simulator, which Starling does not have; stay with Cosmos-RL"
)
NO_GENERATORS: Final = (
    "it trains a generator of images or videos, which Starling does not; it can score for such a trainer: see "
    "docs/how-to/reward-cosmos-rl.md"
)
STEPS: Final[dict[Kind, str]] = {"rl": "rl", "sft": "sft", "dpo": "preference"}
"""Section with the number of steps of each kind."""
_SUPERVISED: Final = (
    "type",
    "trainer_type",
    "mini_batch",
    "dataset",
    "dataloader_shuffle",
    "dataloader_seed",
    "dataloader_batch_size",
    "enable_dataset_cache",
    "dataloader_num_workers",
    "dataloader_prefetch_factor",
    "dataloader_drop_last",
    "data_dispatch_as_rank_in_mesh",
    "conversation_column_name",
    "system_prompt",
    "balance_dp_token",
    "enable_dp_load_balancing",
    "load_balanced_pool_size",
    "load_balanced_max_tokens_for_batch",
    "load_balanced_batching_strategy",
    "load_balanced_batches_per_optimizer_step",
    "dataloader_broadcast",
)
"""Settings of [train.train_policy] that supervised fine-tuning has."""
_SUPERVISED_ONLY: Final = ("conversation_column_name", "system_prompt", "load_balanced_max_tokens_for_batch")
_GENERATION: Final = ("rollout.", "validation.", "distillation.")
"""Sections that mean something where completions are generated."""


def refusal(source: Source) -> str:
    """Return why nothing can be made of a training file; empty if something can."""
    trainer, backend = source[f"{TRAIN}.trainer_type"], source["rollout.backend"]
    if trainer in _ROBOTS or backend == "vla":
        return _NO_ROBOTS
    if trainer in _DIFFUSION or backend == "diffusion_nft_rollout" or source["policy.is_diffusers"]:
        return NO_GENERATORS
    if backend == "gym":
        return "it trains a network that is no language model in an environment of gym, which Starling does not"
    return ""


def kind_of(source: Source) -> Kind:
    """Return the kind of run."""
    given = source.section(TRAIN)
    if source[f"{TRAIN}.trainer_type"] == "dpo":
        return "dpo"
    if source.has(f"{TRAIN}.type"):
        return "sft" if source[f"{TRAIN}.type"] == "sft" else "rl"
    if given is None or set(_MARKS_OF_GRPO) & set(given):
        return "rl"
    return "sft"


def meaningless(path: str, kind: Kind) -> str:
    """Return why a setting has no meaning in a run of this kind; empty if it may have one."""
    name = path.removeprefix(f"{TRAIN}.").partition(".")[0]
    if kind == "rl":
        is_other = path.startswith(f"{TRAIN}.") and name in _SUPERVISED_ONLY
        return "It is for supervised fine-tuning, and this is reinforcement learning." if is_other else ""
    if path.startswith(_GENERATION) or (path.startswith(f"{TRAIN}.") and name not in _SUPERVISED):
        return f"This run (`run.kind = {kind!r}`) generates no completions."
    return ""


def translate(source: Source, name: str) -> Draft:
    """Return the recipe of a training file for which `refusal` is empty. `name`: of the run, if the file has none."""
    kind, draft = kind_of(source), Draft()
    _add_run(source, draft, kind, name)
    _add_model(source, draft)
    _add_data(source, draft, kind)
    _add_steps(source, draft, kind)
    add_policies(source, draft, generates=kind == "rl")
    add_optimizer(source, draft, kind, draft.get(f"{STEPS[kind]}.num_steps"))
    if kind == "rl":
        add_rollouts(source, draft)
        add_rewards(source, draft)
        add_algorithm(source, draft)
        add_teacher(source, draft)
        add_evaluation(source, draft)
    elif source["validation.enable"] or source["train.enable_validation"]:
        draft.note("run.kind", "no evaluation takes place during this run; use `starling evaluate --model` afterwards")
    if kind == "dpo":
        _add_pairs(source, draft)
    note_hosts(draft)
    _add_checkpoints(source, draft)
    _add_logging(source, draft)
    return draft


def _add_run(source: Source, draft: Draft, kind: Kind, name: str) -> None:
    given = source["logging.experiment_name"]
    if given in (None, "", "None"):
        given = name
    cleaned = run_name(given)
    note = "" if cleaned == given else f"Cosmos-RL's name is {shown(given)}; a name here is that of a folder"
    draft.set("run.name", cleaned, note)
    draft.set("run.kind", kind)
    if source["train.seed"] is not None:
        seed = source["train.seed"]
        draft.set("run.seed", max(seed, 0), "" if seed >= 0 else f"it was {seed}; a seed is at least 0")
    draft.set("run.folder", source["train.output_dir"])
    trainer = source[f"{TRAIN}.trainer_type"]
    if trainer not in ("grpo", "sft", "dpo"):
        draft.note(
            "run.kind", f"{TRAIN}.trainer_type = {shown(trainer)} is a trainer of your own, which is not carried over"
        )


def run_name(given: str) -> str:
    """Return `given` as the name of a run."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", given).strip("-._") or "migrated"


def is_folder(path: str) -> bool:
    """Say whether a model is given by its folder and not by its name at Hugging Face."""
    return path.startswith(("/", "./", "../", "~"))


def download_note(name: str) -> str:
    """Return what to do with a model that is given by its name; empty for a folder."""
    return "" if is_folder(name) else f"a folder is needed: `hf download {name} --local-dir DIR`, and give DIR here"


def _add_model(source: Source, draft: Draft) -> None:
    path = source["policy.model_name_or_path"]
    draft.set("model.path", path, download_note(path))
    dtype = source["train.param_dtype"]
    draft.set("model.dtype", "float32" if dtype == "float32" else "bfloat16")
    if dtype == "float16":
        draft.note("model.dtype", "it was float16, which is not trained here")
    if source.has("policy.model_safetensor_path"):
        draft.set("policy.weights_from", source["policy.model_safetensor_path"])
    if source.section("policy.lora") is not None:
        _add_lora(source, draft)


def _add_lora(source: Source, draft: Draft) -> None:
    lora = "policy.lora"
    draft.set("model.lora.rank", source[f"{lora}.r"])
    draft.set("model.lora.alpha", source[f"{lora}.lora_alpha"])
    targets = source[f"{lora}.target_modules"]
    draft.set("model.lora.targets", "all-linear" if targets is None else targets)
    for theirs, ours in (("r_pattern", "rank_pattern"), ("alpha_pattern", "alpha_pattern")):
        if source[f"{lora}.{theirs}"]:
            draft.set(f"model.lora.{ours}", source[f"{lora}.{theirs}"])
    if source[f"{lora}.use_rslora"]:
        draft.set("model.lora.rslora", True)
    if source[f"{lora}.modules_to_save"]:
        draft.set("model.lora.modules_to_save", source[f"{lora}.modules_to_save"])
    if source[f"{lora}.lora_path"]:
        draft.set("model.lora.adapter", source[f"{lora}.lora_path"])
    init = source[f"{lora}.init_lora_weights"]
    if init == "gaussian":
        draft.set("model.lora.init", "gaussian")
    elif init is not True:
        draft.set("model.lora.init", "kaiming", f"it was {shown(init)}, which is not available")


def _add_data(source: Source, draft: Draft, kind: Kind) -> None:
    dataset = f"{TRAIN}.dataset"
    name, folder = source[f"{dataset}.name"], source[f"{dataset}.local_dir"]
    if folder:
        draft.set("data.source", f"hf:{folder}")
    elif name:
        is_file = name.endswith((".parquet", ".jsonl"))
        draft.set("data.source", name if is_file else f"hf:{name}")
    else:
        note = "the file names no data: they come from your launcher script; write a function that returns the rows"
        draft.set("data.source", "my_data.py:rows", note)
    split = source[f"{dataset}.split"]
    names = [split] if isinstance(split, str) else split
    if names and names[0]:
        more = f"Cosmos-RL also trains on {', '.join(map(shown, names[1:]))}; here a run has one split"
        draft.set("data.split", names[0], more if len(names) > 1 else "")
    if source[f"{dataset}.subset"]:
        draft.set("data.config", source[f"{dataset}.subset"])
    _add_columns(source, draft, kind)
    draft.set("data.shuffle", source[f"{TRAIN}.dataloader_shuffle"])
    draft.set("data.seed", source[f"{TRAIN}.dataloader_seed"])
    held_out = source[f"{dataset}.test_size"]
    if isinstance(held_out, int) and held_out:
        draft.set("data.held_out", held_out)
    elif held_out:
        draft.note("data", f"{dataset}.test_size = {held_out} is a share; set data.held_out to a number of rows")
    if source["train.non_text"]:
        draft.note("data", "train.non_text = true: set image_column or video_column")


def _add_columns(source: Source, draft: Draft, kind: Kind) -> None:
    """Set the columns. Those that a launcher script chooses in Cosmos-RL cannot be known."""
    if kind == "rl":
        prompt, answer = source[f"{TRAIN}.prompt_column_name"], source[f"{TRAIN}.response_column_name"]
        note = "the file names no column; this is the default here"
        draft.set("data.prompt_column", prompt or "question", "" if prompt else note)
        draft.set("data.reference_column", answer or "answer", "" if answer else note)
        return
    draft.set("data.prompt_column", source[f"{TRAIN}.conversation_column_name"])
    draft.set(
        "data.reference_column",
        "answer",
        "in Cosmos-RL one column has whole conversations; here the prompt (its messages up to the last of the user) "
        "and the answer to learn are two columns",
    )
    if kind == "dpo":
        draft.set("data.rejected_column", "rejected", "name the column of the rejected answers")
    if source[f"{TRAIN}.system_prompt"]:
        draft.set("data.system", source[f"{TRAIN}.system_prompt"])


def _add_steps(source: Source, draft: Draft, kind: Kind) -> None:
    """Set the steps and their sizes. Cosmos-RL counts completions per replica, Starling counts prompts."""
    section, num_steps, epochs = STEPS[kind], source["train.max_num_steps"], source["train.epoch"]
    note = ""
    if num_steps is None:
        note = f"Cosmos-RL trains {epochs} epoch(s): set it to {epochs} x rows / rows of a step"
    elif source.has("train.epoch"):
        note = f"Cosmos-RL also ends after {epochs} epoch(s); here the number of steps decides"
    draft.set(f"{section}.num_steps", num_steps or DEFAULT_STEPS, note)
    parallel = "policy.parallelism"
    batch = source["train.train_batch_per_replica"] * source[f"{parallel}.n_init_replicas"]
    if kind != "rl":
        ranks = max(source[f"{parallel}.dp_shard_size"], 1) * source[f"{parallel}.dp_replicate_size"]
        draft.set(f"{section}.examples_per_step", batch * ranks)
        return
    size = source["rollout.n_generation"]
    prompts = max(math.ceil(batch / size), 1)
    exact = f"Cosmos-RL trains {batch} completions a step, which are no whole groups of {size}"
    draft.set("rl.prompts_per_step", prompts, exact if prompts * size != batch else "")
    group_note = f"it was {size}; advantages need at least 2 completions" if size < 2 else ""
    draft.set("rl.group_size", max(size, 2), group_note)
    _add_staleness(source, draft)


def _add_staleness(source: Source, draft: Draft) -> None:
    interval = max(source["train.sync_weight_interval"], 1)
    staleness = max(source[f"{TRAIN}.allowed_outdated_steps"], interval - 1)  # as Cosmos-RL raises it
    if source[f"{TRAIN}.on_policy"]:
        staleness, interval = 0, 1
    draft.set("rl.max_staleness", staleness)
    if interval > 1:
        draft.set("rl.sync_every", interval)
    if source[f"{TRAIN}.variant"] == "dapo":
        draft.set("rl.dynamic_sampling", True)


def _add_pairs(source: Source, draft: Draft) -> None:
    loss = source["custom.dpo_loss_type"]
    wanted = [loss] if isinstance(loss, str) else loss or ["sigmoid"]
    note = f"it was {', '.join(map(shown, wanted))}; of these `sigmoid` exists here" if wanted != ["sigmoid"] else ""
    draft.set("policy.dpo.loss", "sigmoid", note)
    draft.set("policy.dpo.beta", 0.1 if source["custom.dpo_beta"] is None else source["custom.dpo_beta"])
    draft.set(
        "policy.dpo.use_reference", False, "as in Cosmos-RL, which compares with no reference; true is DPO's own loss"
    )


def _add_checkpoints(source: Source, draft: Draft) -> None:
    ckpt = "train.ckpt"
    saves, every = source[f"{ckpt}.enable_checkpoint"], source[f"{ckpt}.save_freq"]
    draft.set("controller.save_every", every if saves else 0)
    if not saves:
        return
    keep = source[f"{ckpt}.max_keep"]
    draft.set("policy.saving.max_keep", 1000 if keep < 0 else max(keep, 2))
    if source[f"{ckpt}.export_safetensors"]:
        draft.set("policy.saving.hf_every", every)
    upload, bucket, prefix = (source[f"{ckpt}.{name}"] for name in ("upload_s3", "s3_bucket", "s3_prefix"))
    if upload and bucket:
        note = "all states go there, and stay within policy.saving.max_keep" if upload != "all" else ""
        draft.set("policy.saving.folder", f"s3://{bucket}/{prefix}".rstrip("/"), note)


def _add_logging(source: Source, draft: Draft) -> None:
    named = [name for name in source["logging.logger"] if name != "console"]
    loggers = [name for name in named if name in ("wandb", "tensorboard", "trackio")]
    if loggers:
        draft.set("logging.loggers", loggers)
    if loggers or source.has("logging.project_name"):
        draft.set("logging.project", source["logging.project_name"])
    if others := [name for name in named if name not in loggers]:
        draft.set(
            "logging.loggers", loggers, f"{', '.join(map(shown, others))} is no logger here; write one as module:name"
        )
    if source["logging.multi_modal_log_interval"]:
        draft.set("logging.samples_every", source["logging.multi_modal_log_interval"])
