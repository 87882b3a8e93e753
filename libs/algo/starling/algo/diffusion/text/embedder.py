"""Embedder of prompts: the text encoders of a pipeline on disk, loaded when the first prompt needs them.

Prompts are embedded one by one, so that the embeddings of a prompt do not depend on those beside it, and a trajectory
that starts from them neither. Embeddings are float32 arrays: numpy has no bfloat16, float16 would round or overflow,
and each number of a text encoder in bfloat16, float16 or float32 is one of float32. Files of the cache have the shorter
type.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import structlog
import torch

from starling.algo.denoising import conditions_problem
from starling.algo.diffusion.folder import PipelineFolder, transformer_width
from starling.algo.diffusion.text.families import TEXT_FAMILIES, TextParts, default_instruction
from starling.common.errors import ConfigError
from starling.common.folder_digests import model_digest
from starling.common.model_folder import check_indexes, check_named_files

log = structlog.get_logger(__name__)

Embeddings = Mapping[str, npt.NDArray[Any]]
"""Tensors of a prompt, as `starling.algo.diffusion.conditions` names them, without padding that is zero."""
_REVISION: Final = 1
"""Of the computation; another one gives other keys."""


class Embedder(Protocol):
    """Gives the embeddings of prompts."""

    def embed(self, prompts: Sequence[str], *, unconditional: bool = False) -> list[Embeddings]:
        """Return the embeddings of each prompt, float32.

        Args:
            prompts: may be empty texts.
            unconditional: they are texts that guidance leads away from: without the instruction that some families put
                before each prompt.

        Raises:
            ConfigError: the embeddings cannot be computed.
        """
        ...


class PipelineEmbedder:
    """An `Embedder` by the text encoders of a pipeline, one prompt at a time."""

    def __init__(
        self,
        folder: PipelineFolder,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        instruct: bool = True,
    ) -> None:
        """Find the parts of the pipeline; none is loaded yet.

        Args:
            folder: of the pipeline.
            dtype: of the text encoders' weights.
            device: of the text encoders.
            instruct: put the instruction of the pipeline before each prompt, in the families that have one.

        Raises:
            ConfigError: a part is missing, or is of another class than its family has.
        """
        self._folder, self._dtype, self._device = folder, dtype, device
        self._family = TEXT_FAMILIES[folder.transformer_class]
        self._names = _encoders_of(folder)
        is_t5_left_out = self._family.optional.difference(self._names)
        self._width = transformer_width(folder, "joint_attention_dim") if is_t5_left_out else None
        has_instruction = bool(instruct and self._family.instructed_by)
        self._instruction = default_instruction(self._family.instructed_by) if has_instruction else ""
        self._parts: TextParts | None = None
        self._is_cut_reported = False

    @property
    def is_loaded(self) -> bool:
        """Whether the text encoders are in memory."""
        return self._parts is not None

    def unload(self) -> None:
        """Drop the text encoders, if they are loaded; the next prompt loads them again. Called from any thread."""
        self._parts = None

    def source(self) -> str:
        """Return a digest of the files that embeddings are computed from, and of the settings; it reads the files.

        Raises:
            ConfigError: a file cannot be read.
        """
        names = [name for encoder in self._names for name in (encoder, self._family.tokenizers[encoder])]
        digests = {name: model_digest(self._folder.path / name) for name in names}
        settings = [_REVISION, self._folder.transformer_class, self._folder.text_length, str(self._dtype), self._width]
        return hashlib.sha256(json.dumps([settings, digests]).encode()).hexdigest()

    def text_of(self, prompt: str, *, unconditional: bool) -> tuple[str, str]:
        """Return the instruction and the text that are tokenised for a prompt."""
        return "" if unconditional else self._instruction, self._family.clean(prompt)

    def embed(self, prompts: Sequence[str], *, unconditional: bool = False) -> list[Embeddings]:
        """See `Embedder`; the first call loads the text encoders."""
        return [self._embedded(prompt, unconditional) for prompt in prompts]

    def _embedded(self, prompt: str, unconditional: bool) -> Embeddings:
        parts = self._parts
        if parts is None:
            parts = self._parts = self._loaded()
        instruction, text = self.text_of(prompt, unconditional=unconditional)
        try:
            with torch.no_grad():
                found = self._family.encode(parts, text, instruction)
        except ConfigError:
            raise
        except Exception as error:  # the user's folder: a tokenizer without a chat template, or for another encoder
            raise ConfigError(
                f"the text encoders in {str(self._folder.path)!r} cannot embed {prompt!r:.100}: {_first_line(error)}"
            ) from error
        if found.num_cut and not self._is_cut_reported:
            self._is_cut_reported = True
            log.warning("prompt_cut_off", prompt=prompt[:100], num_tokens=found.num_cut, more="are not reported")
        tensors = {
            name: np.ascontiguousarray(tensor.to("cpu", torch.float32).numpy())
            for name, tensor in found.tensors.items()
        }
        problem = conditions_problem(tensors, self._folder.text_length)
        if problem:
            raise ConfigError(
                f"the text encoders in {str(self._folder.path)!r} cannot embed {prompt!r:.100} in {self._dtype}: "
                f"{problem}; for numbers that are not finite use bfloat16 or float32"
            )
        return tensors

    def _loaded(self) -> TextParts:
        modules: dict[str, Any] = {}
        for name in self._names:
            tokenizer = self._family.tokenizers[name]
            modules[tokenizer] = _load(self._folder, tokenizer, {})
            loaded = _load(self._folder, name, {"dtype": self._dtype, "use_safetensors": True})
            modules[name] = loaded.to(self._device).eval().requires_grad_(False)
        return TextParts(modules, self._folder.text_length, self._width)


def _encoders_of(folder: PipelineFolder) -> list[str]:
    """Return the names of a pipeline's text encoders. Raises ConfigError if one is missing or of another class."""
    family, found = TEXT_FAMILIES[folder.transformer_class], []
    for name, cls in family.encoders.items():
        tokenizer = family.tokenizers[name]
        if name not in folder.parts and name in family.optional:
            continue
        for part in (name, tokenizer):
            if part not in folder.parts or not (folder.path / part).is_dir():
                raise ConfigError(
                    f"{str(folder.path)!r} has no {part}, which computes the embeddings of prompts: save the pipeline "
                    "with it, or compute the embeddings before the run"
                )
        if folder.parts[name] != cls:
            raise ConfigError(
                f"{str(folder.path)!r} has the {name} {folder.parts[name]!r}, and {folder.transformer_class} was "
                f"trained with {cls}: give the pipeline that the model was published in"
            )
        found.append(name)
    return found


def _load(folder: PipelineFolder, name: str, settings: Mapping[str, Any]) -> Any:
    """Load a part by its class in transformers, from its own files only. Raises ConfigError."""
    path = folder.path / name
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("transformers is not installed: install this service with its dependencies") from error
    cls = getattr(transformers, folder.parts[name], None)
    if cls is None or not hasattr(cls, "from_pretrained"):
        raise ConfigError(
            f"{str(folder.path)!r} has the {name} {folder.parts[name]!r}, which transformers "
            f"{transformers.__version__} does not have: install a newer one"
        )
    check_named_files(path)
    check_indexes(path)
    try:
        return cls.from_pretrained(str(path), local_files_only=True, trust_remote_code=False, **settings)
    except Exception as error:  # the user's folder: transformers, tokenizers, safetensors and torch raise many
        raise ConfigError(f"the {name} in {str(path)!r} cannot be loaded: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return f"{(str(error).strip() or type(error).__name__).splitlines()[0]:.300}"
