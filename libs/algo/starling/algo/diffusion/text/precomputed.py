"""Embeddings that were computed before the run, read from a file for each prompt.

    .safetensors            tensors with our names, or those of diffusers' pipelines, or a single one of any name
    .npy                    the text embeddings
    .pickle, .pkl           a list with the text embeddings, an array, or a dict of arrays; nothing in it is executed

Text embeddings may have a first axis of 1, and zeros for padding at their end, which are removed: everything that
computes a velocity puts them back.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from starling.algo.denoising import RANKS, conditions_problem
from starling.algo.diffusion.text.embedder import Embeddings
from starling.algo.diffusion.text.pickles import read_arrays
from starling.common.errors import ConfigError
from starling.common.files import open_regular
from starling.common.wire.tensors import POOLED, TEXT, TEXT_MASK

ENDINGS: Final = (".safetensors", ".npy", ".pickle", ".pkl")
MAX_BYTES: Final = 1 << 30
"""Of a file; the embeddings of Cosmos-Predict 2.5 have 205 MB in float32."""
_NAMES: Final = {
    "prompt_embeds": TEXT,
    "prompt_attention_mask": TEXT_MASK,
    "pooled_prompt_embeds": POOLED,
    **{name: name for name in (TEXT, TEXT_MASK, POOLED)},
}
"""Our name of each tensor in a file."""


def read_embeddings(path: Path, length: int) -> Embeddings:
    """Read the embeddings of a prompt: float32, and the mask uint8.

    Args:
        path: of the file, with one of `ENDINGS`.
        length: most tokens of a text.

    Raises:
        ConfigError: the file cannot be read, or contains anything else.
    """
    try:
        with open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_BYTES:
                raise ValueError(f"it has {size} bytes, more than the {MAX_BYTES} of any prompt")
            content = file.read()
        tensors = _named(_content_of(path.suffix, content))
    except OSError as error:
        raise ConfigError(f"the embeddings {str(path)!r} cannot be read ({error.strerror}): give their file") from None
    except ValueError as error:
        raise ConfigError(f"the embeddings {str(path)!r} cannot be read: {error}; compute them anew") from None
    tensors = _without_padding(tensors)
    problem = conditions_problem(tensors, length)
    if problem:
        raise ConfigError(f"the embeddings {str(path)!r} cannot be used: {problem}")
    return tensors


def _content_of(ending: str, content: bytes) -> Any:
    """Return what a file contains. Raises ValueError."""
    if ending == ".safetensors":
        return _safetensors(content)
    if ending == ".npy":
        try:
            return np.load(io.BytesIO(content), allow_pickle=False)
        except (EOFError, SyntaxError, MemoryError) as error:
            raise ValueError(str(error)) from None
    if ending in (".pickle", ".pkl"):
        return read_arrays(content)
    raise ValueError(f"files of embeddings end in {', '.join(ENDINGS)}")


def _safetensors(content: bytes) -> dict[str, npt.NDArray[Any]]:
    from safetensors import SafetensorError
    from safetensors.torch import load  # numpy has no bfloat16

    try:
        return {name: tensor.float().numpy() for name, tensor in load(content).items()}
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(str(error)) from None


def _named(found: Any) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of a file by our names. Raises ValueError."""
    if isinstance(found, list | tuple) and len(found) == 1:
        found = found[0]
    if isinstance(found, np.ndarray):
        found = {TEXT: found}
    if isinstance(found, Mapping) and len(found) == 1 and not found.keys() & _NAMES.keys():
        found = {TEXT: next(iter(found.values()))}
    if not isinstance(found, Mapping) or not all(isinstance(array, np.ndarray) for array in found.values()):
        raise ValueError("it has no array, no list with one, and no dict of arrays")
    other = next((name for name in found if name not in _NAMES), None)
    if other is not None:
        raise ValueError(f"it has a tensor {other!r:.100}, which is none of {', '.join(_NAMES)}")
    return {_NAMES[name]: _of_rank(_NAMES[name], array) for name, array in found.items()}


def _of_rank(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{name} has the type {array.dtype}, and no numbers")
    if array.ndim == RANKS[name] + 1 and len(array) == 1:
        array = array[0]
    return array.astype(np.uint8 if name == TEXT_MASK else np.float32)


def _without_padding(tensors: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors without the rows of zeros at the end of a text, at least one row of which stays."""
    text, mask = tensors.get(TEXT), tensors.get(TEXT_MASK)
    if text is None or text.ndim != 2 or not len(text) or (mask is not None and mask.shape != text.shape[:1]):
        return tensors  # what is wrong is said later
    used = np.flatnonzero(text.any(axis=1) if mask is None else mask)
    num_tokens = int(used[-1]) + 1 if len(used) else 1
    shorter = {name: array[:num_tokens] for name, array in tensors.items() if name in (TEXT, TEXT_MASK)}
    return {**tensors, **shorter}
