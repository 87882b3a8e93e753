"""Exports of a diffusion model: folders that diffusers loads.

Only the transformer is trained. The other parts of the pipeline are those of the folder that training began with; text
encoders can be larger than the transformer, so an export on the same disk has links to their files, where that is
possible.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from starling.algo.diffusion.folder import CONFIG, INDEX
from starling.policy.train.checkpoint.shared_export import ExportedWeights
from starling.policy.train.model.load import all_tensors

TRANSFORMER: Final = "transformer"
_OF_WEIGHTS: Final = (".safetensors", ".bin")
_FILE: Final = "diffusion_pytorch_model"
"""Beginning of the names of diffusers' files of weights."""


class PipelineFiles:
    """The parts of a pipeline that are not trained, which make an export a whole pipeline."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the pipeline that is trained."""
        self._folder = folder

    def save_pretrained(self, save_directory: str) -> None:
        """Write all parts but the transformer into `save_directory`."""
        target = Path(save_directory)
        for path in sorted(self._folder.iterdir()):
            if path.name == TRANSFORMER or path.name.startswith("."):
                continue
            if path.is_dir():
                shutil.copytree(path, target / path.name, copy_function=_link_or_copy, dirs_exist_ok=True)
            elif path.name.endswith(".json") and path.name != INDEX:
                shutil.copyfile(path, target / path.name)
        shutil.copyfile(self._folder / INDEX, target / INDEX)  # the last one: with it the folder is a pipeline


def is_of_diffusers(model: Any) -> bool:
    """Return whether a model is one of diffusers, whose folders have another form than those of transformers."""
    return hasattr(model, "save_config")


def save_transformer(model: Any, folder: Path, weights: ExportedWeights | None, shard_mb: int) -> None:
    """Write the transformer of a pipeline into the folder of an export, in the form that diffusers loads.

    Args:
        model: its configuration and, without `weights`, its weights.
        folder: of the export.
        weights: by the names of `version_tensors`.
        shard_mb: most MiB of one file of weights.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    assert weights is None or isinstance(weights, Mapping), "a diffusion model is on a single rank"
    tensors: Mapping[str, Tensor] = all_tensors(model) if weights is None else weights
    place = folder / TRANSFORMER
    place.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    split = split_torch_state_dict_into_shards(
        whole, filename_pattern=f"{_FILE}{{suffix}}.safetensors", max_shard_size=f"{shard_mb}MB"
    )
    for name, names in split.filename_to_tensors.items():
        save_file({one: whole[one] for one in names}, place / name, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(place / f"{_FILE}.safetensors.index.json", index)
    model.save_config(str(place))
    assert (place / CONFIG).is_file()


def write_json(path: Path, content: Any) -> None:
    """Write a small file of JSON."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _link_or_copy(source: str, target: str) -> str:
    """Make `target` another name of a file of weights, or a copy; returns it.

    Small files are copied: an edit of the export must not change the pipeline that training began with.
    """
    try:
        if not source.endswith(_OF_WEIGHTS):
            raise OSError
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)
    return target
