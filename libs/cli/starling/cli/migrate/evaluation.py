"""Translation of an evaluation file of Cosmos-RL, which has `num_gpus`."""

from __future__ import annotations

from typing import Final

from starling.cli.migrate.draft import Draft
from starling.cli.migrate.source import Source
from starling.cli.migrate.training import download_note, run_name
from starling.cli.run.gpus import num_instances
from starling.common.errors import ConfigError
from starling.common.settings import Tree, shown

_LETTERS: Final = ("letter", "reasoning")
_DATA_FILES: Final = (".jsonl", ".parquet")


def translate(source: Source, name: str) -> Draft:
    """Return the recipe of an evaluation. `name`: of the run, if the file has none. Raises ConfigError."""
    draft = Draft()
    draft.set("run.name", run_name(source["model.save_folder"] or name))
    draft.set("run.kind", "evaluate")
    draft.set("run.seed", max(source["evaluation.seed"], 0))
    if source["results_dir"]:
        draft.set("run.folder", source["results_dir"])
    _add_instances(source, draft)
    _add_model(source, draft)
    _add_task(source, draft)
    draft.set("sampling.max_tokens", source["generation.max_tokens"])
    draft.set("sampling.top_p", source["generation.top_p"])
    draft.set("sampling.top_k", max(source["generation.top_k"], 0))
    draft.set("evaluation.temperature", source["generation.temperature"])
    return draft


def _add_instances(source: Source, draft: Draft) -> None:
    """Set the instances of the engine: `num_gpus` / `tp_size`, as `starling evaluate --num-gpus` has them."""
    num_gpus, size = source["num_gpus"], source["model.tp_size"]
    try:
        num, _ = num_instances(num_gpus, size, 0)
    except ConfigError:
        raise ConfigError(
            f"num_gpus = {num_gpus} does not divide into instances of model.tp_size = {size}; make it a multiple"
        ) from None
    draft.set("launch.num_rollouts", num)
    draft.set("launch.gpus_per_rollout", size)
    draft.set("rollout.engine", "vllm")
    draft.set("rollout.vllm.tensor_parallel_size", size)
    if source["model.max_length"]:
        draft.set("rollout.max_model_len", source["model.max_length"])


def _add_model(source: Source, draft: Draft) -> None:
    path, base = source["model.model_name"], source["model.base_model_path"]
    if not path:
        raise ConfigError("model.model_name is missing, so there is nothing to evaluate; give the folder of a model")
    if source["model.enable_lora"]:
        if not base:
            raise ConfigError(
                "model.enable_lora = true without model.base_model_path; give the folder of its base model"
            )
        draft.set("model.lora.adapter", path)
        draft.note("model.lora", "set rank, alpha and targets to those of the adapter")
    used = base if source["model.enable_lora"] else path
    draft.set("model.path", used, download_note(used))
    dtype = source["model.dtype"]
    draft.set("model.dtype", "float32" if dtype == "float32" else "bfloat16")


def _add_task(source: Source, draft: Draft) -> None:
    """Set the only task of the evaluation, its data and its scorer."""
    given = source["dataset.annotation_path"]
    if not given:
        raise ConfigError("dataset.annotation_path is missing, so there is nothing to evaluate on; give a file of rows")
    is_usable = given.endswith(_DATA_FILES)
    path = given if is_usable else f"{given.rpartition('.')[0] if given.endswith('.json') else given}.jsonl"
    data: Tree = {"source": path}
    if source["dataset.system_prompt"]:
        data["system"] = source["dataset.system_prompt"]
    if source["vision.fps"]:
        data["video_fps"] = float(source["vision.fps"])
        data["video_column"] = "video"
    note = "" if is_usable else f"convert {shown(given)}: one JSON object per line, with `question` and `answer`"
    draft.set("data.source", path, note)
    if "video_column" in data:
        draft.note("evaluation.tasks.0", "frames are read at video_fps: name the column of videos, or remove both")
    draft.add("evaluation.tasks", {"name": source["task.type"] or "task", "data": data})
    kind = source["evaluation.answer_type"]
    scorer = "choice" if kind in _LETTERS else "exact_match"
    text = (
        f"answers were of the type {shown(kind)}; `starling evaluate` has no metric of free texts, so choose a scorer"
    )
    draft.add("reward.scorers", {"name": scorer}, "" if kind == "letter" else text)
