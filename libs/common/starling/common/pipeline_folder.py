"""Check of the folder of a diffusion pipeline, before torch and diffusers are imported.

What holds for the folder of a language model (see `model_folder`) holds for each part of a pipeline.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from starling.common.errors import ConfigError
from starling.common.files import open_regular
from starling.common.folder_digests import check_digests
from starling.common.model_folder import check_indexes, check_links, check_named_files

INDEX: Final = "model_index.json"
"""Names the parts of a pipeline."""
WEIGHTS: Final = ("*.safetensors", "*.bin")
"""Names of files of weights."""
NEEDED: Final = ("transformer", "vae")
"""Parts without whose configuration nothing can be drawn: the model, and what says the shapes of its latents."""


def check_pipeline_folder(
    path: str, *, weights: bool, key: str = "model.path", may_draw: bool = True, reads_weights: bool = True
) -> Path:
    """Return the folder of a pipeline at `path`, the value of the setting `key`.

    Args:
        path: a folder that diffusers' `save_pretrained` wrote.
        weights: whether its transformer must have weights.
        key: named in errors.
        may_draw: whether a policy could initialise the weights at random instead.
        reads_weights: whether this process is about to read the weights, whose digests are compared then.

    Raises:
        ConfigError: it is no such folder, its transformer has no weights, a file differs from its digest, or a part
            names other files, models or kernels to load, or has links to other files.
    """
    remedy = "give the folder of a pipeline, as diffusers' `save_pretrained` writes it"
    if not path:
        raise ConfigError(f"{key} is missing; {remedy}")
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"the model folder {path} does not exist; {remedy}")
    if not (folder / INDEX).is_file():
        raise ConfigError(f"the model folder {path} has no {INDEX}, and [diffusion] needs a pipeline; {remedy}")
    for name in NEEDED:
        if not (folder / name / "config.json").is_file():
            raise ConfigError(f"the model folder {path} has no {name}/config.json; {remedy}")
    transformer = folder / "transformer"
    if weights and not any(True for pattern in WEIGHTS for _ in transformer.glob(pattern)):
        other = ', or set policy.init = "random" to begin with random weights' if may_draw else ""
        raise ConfigError(f"{transformer} has a config.json and no weights; add its .safetensors{other}")
    check_digests(folder, leave_out=() if weights and reads_weights else WEIGHTS)
    check_links(folder)
    for subfolder in _parts(folder):
        check_links(subfolder, root=folder)
        check_named_files(subfolder)
        check_indexes(subfolder)
    return folder


def _parts(folder: Path) -> list[Path]:
    """Return the subfolders of a pipeline's parts. Raises ConfigError if the index is damaged."""
    try:
        with open_regular(folder / INDEX) as file:
            names = set(json.load(file))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is no object of JSON"
        raise ConfigError(f"{folder / INDEX} cannot be read ({reason}): restore the file") from None
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name in {*names, *NEEDED})
