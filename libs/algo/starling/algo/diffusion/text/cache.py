"""Cache of embeddings on disk, shared by processes and hosts: one file of safetensors for each prompt.

    ab/cdef....safetensors      abcdef... is the key: a digest of the text encoders' files, the family, its length, the
                                type of the weights, the instruction, and the cleaned prompt

A file has the embeddings without loss in the shortest type that holds them (bfloat16 for an encoder in bfloat16), and a
digest of its key and its content. It gets its name when it is complete, so that readers never see a part of it; where
several write the same prompt, the last one stays, and they are equal. A file that is damaged all the same, by a power
cut or a bad disk, is computed anew and replaced. Nothing in a file is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch import Tensor

from starling.algo.denoising import RANKS
from starling.algo.diffusion.text.embedder import Embeddings, PipelineEmbedder
from starling.common.errors import ConfigError
from starling.common.files import open_regular

log = structlog.get_logger(__name__)

ENDING: Final = ".safetensors"
_PARTIAL: Final = ".partial"
_DIGEST: Final = "digest"
"""Name of the digest in the metadata of a file."""
_LEFTOVER_S: Final = 24 * 3600.0
"""Age of an incomplete file whose writer has died."""


class CachedEmbedder:
    """An `Embedder` that computes the embeddings of a prompt once for all runs that share a folder.

    Its pipeline's text encoders are loaded when a prompt is not in the cache.
    """

    def __init__(self, embedder: PipelineEmbedder, folder: Path) -> None:
        """Open the cache; the digest of the text encoders' files is computed here, at the speed of their disk.

        Args:
            embedder: for prompts that are not in the cache.
            folder: of the cache, which is made if there is none.

        Raises:
            ConfigError: the folder cannot be made, or a file of the text encoders cannot be read.
        """
        self._embedder, self._folder = embedder, folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(folder)
        except OSError as error:
            raise ConfigError(
                f"the cache of embeddings {str(folder)!r} cannot be used ({error.strerror}): give a folder that can be "
                "written"
            ) from error
        self._source = embedder.source()
        self._is_damage_reported = self._is_failure_reported = False

    def embed(self, prompts: Sequence[str], *, unconditional: bool = False) -> list[Embeddings]:
        """See `Embedder`."""
        found: dict[str, Embeddings] = {}
        for prompt in prompts:
            if prompt not in found:
                found[prompt] = self._found(prompt, unconditional)
        return [found[prompt] for prompt in prompts]

    def unload(self) -> None:
        """Drop the text encoders, if they are loaded; a prompt that is not in the cache loads them again."""
        self._embedder.unload()

    def path_of(self, prompt: str, *, unconditional: bool = False) -> Path:
        """Return the file of a prompt, whether or not it is there."""
        key = self._key(prompt, unconditional)
        return self._folder / key[:2] / f"{key[2:]}{ENDING}"

    def _key(self, prompt: str, unconditional: bool) -> str:
        texts = self._embedder.text_of(prompt, unconditional=unconditional)
        return hashlib.sha256(json.dumps([self._source, *texts]).encode()).hexdigest()

    def _found(self, prompt: str, unconditional: bool) -> Embeddings:
        key, path = self._key(prompt, unconditional), self.path_of(prompt, unconditional=unconditional)
        try:
            with open_regular(path) as file:
                content = file.read()
            return _unpacked(key, content)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            if not self._is_damage_reported:
                self._is_damage_reported = True
                log.warning("embeddings_computed_anew", path=str(path), reason=str(error), more="are not reported")
        tensors = self._embedder.embed([prompt], unconditional=unconditional)[0]
        try:
            _write(path, _packed(key, tensors))
        except OSError as error:
            if not self._is_failure_reported:
                self._is_failure_reported = True
                log.warning("embeddings_not_cached", path=str(path), reason=str(error), more="are not reported")
        return tensors


def _packed(key: str, tensors: Embeddings) -> bytes:
    """Return the content of a file. Tensors are float32."""
    from safetensors.torch import save

    stored = {name: _shortest(array) for name, array in tensors.items()}
    return save(stored, {_DIGEST: _digest(key, stored)})


def _unpacked(key: str, content: bytes) -> Embeddings:
    """Return the tensors in a file, float32. Raises ValueError: it is damaged, or of another prompt."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        stored = load(content)
        size = int.from_bytes(content[:8], "little")
        is_right = json.loads(content[8 : 8 + size])["__metadata__"][_DIGEST] == _digest(key, stored)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"it is damaged: {error!r:.200}") from None
    if not is_right:
        raise ValueError("its content does not match its digest")
    if any(tensor.ndim != RANKS.get(name) for name, tensor in stored.items()):
        raise ValueError("it has other tensors than the embeddings of a prompt")
    return {name: tensor.float().numpy() for name, tensor in stored.items()}


def _digest(key: str, tensors: dict[str, Tensor]) -> str:
    """Return a digest of a prompt's key, and of the names, types, shapes and bytes of its tensors."""
    found = hashlib.sha256(key.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        found.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _shortest(array: npt.NDArray[Any]) -> Tensor:
    """Return a float32 array in the shortest type that has exactly its numbers."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    for dtype in (torch.bfloat16, torch.float16):
        shorter = tensor.to(dtype)
        if torch.equal(shorter.float(), tensor):
            return shorter
    return tensor


def _write(path: Path, content: bytes) -> None:
    """Write a file that others may write at the same time, so that readers see all of it or none. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.stem}.{secrets.token_hex(8)}{_PARTIAL}")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _remove_leftovers(folder: Path) -> None:
    """Remove incomplete files whose writers have died. Raises OSError."""
    for path in folder.glob(f"*/.*{_PARTIAL}"):
        try:
            if time.time() - path.stat().st_mtime > _LEFTOVER_S:
                path.unlink(missing_ok=True)
        except FileNotFoundError:  # its writer has finished meanwhile, or another process has removed it
            continue
