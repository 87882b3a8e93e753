"""Encoder of prompts for a diffusion model: the embeddings of a prompt's text, from a file or by the text encoders.

A prompt whose metadata names a file, as `text_embedding`, has the embeddings in it; others are embedded by the text
encoders of the pipeline, which are loaded when the first prompt needs them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt

from starling.algo.diffusion.folder import read_pipeline
from starling.algo.diffusion.settings import SamplerSettings
from starling.algo.diffusion.text.families import TEXT_FAMILIES
from starling.algo.diffusion.text.precomputed import read_embeddings
from starling.algo.text import plain_text
from starling.common.errors import ConfigError
from starling.common.wire.messages import Prompt
from starling.rollout.engine.base import RequestError
from starling.rollout.engine.diffusion.build import device_of, pipeline_embedder

EMBEDDING: Final = "text_embedding"
"""Entry of a prompt's metadata with the path of a file of embeddings."""
PROMPT_IDS: Final = (0,)
"""Token ids of every prompt: a diffusion model reads the embeddings, and a prompt has at least one token."""


class DiffusionPrompts:
    """Converts prompts into what a diffusion engine takes; may be called in any thread."""

    def __init__(self, path: Path, settings: SamplerSettings, device: str) -> None:
        """Find the text encoders of the pipeline in `path`, if it has any. `device`: as `model.device`.

        Raises:
            ConfigError: the pipeline, its text encoders or the cache cannot be used.
        """
        self._folder = read_pipeline(path, settings.text_length)
        encoders = TEXT_FAMILIES[self._folder.transformer_class].encoders
        has_encoders = any(name in self._folder.parts for name in encoders)
        self._embedder = pipeline_embedder(self._folder, settings, device_of(device)) if has_encoders else None
        self._lock = threading.Lock()
        self._num_releases = 0

    def encode(self, prompt: Prompt) -> tuple[list[int], Mapping[str, npt.NDArray[Any]]]:
        """Return the token ids of a prompt, and the tensors that its trajectories are conditioned on.

        Raises:
            ConfigError: the embeddings cannot be read or computed.
            RequestError: the prompt has images or videos, or names no file.
        """
        if prompt.media:
            raise RequestError(
                "it has images or videos, and the text encoders of a diffusion model read text: leave them out"
            )
        if EMBEDDING in prompt.metadata:
            path = prompt.metadata[EMBEDDING]
            if not isinstance(path, str) or not path or "\0" in path:
                raise RequestError(f"its {EMBEDDING} is {path!r:.100}: give the path of a file of embeddings")
            return [*PROMPT_IDS], read_embeddings(Path(path), self._folder.text_length)
        if self._embedder is None:
            raise ConfigError(
                f"{str(self._folder.path)!r} has no text encoders, and the prompt no {EMBEDDING}: save the pipeline "
                f"with them, or give each prompt the path of its embeddings as {EMBEDDING}"
            )
        with self._lock:
            before = self._num_releases
            (tensors,) = self._embedder.embed([plain_text(prompt)])
            if self._num_releases != before:
                self._embedder.unload()
        return [*PROMPT_IDS], tensors

    def release(self) -> None:
        """Free the memory of the text encoders, which are loaded again when a prompt needs them.

        It does not wait for a prompt that is being embedded, after which the memory is freed, too.
        """
        self._num_releases += 1
        if self._embedder is not None:
            self._embedder.unload()
