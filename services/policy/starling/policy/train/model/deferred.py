"""A model without memory for its weights, and where these are: what a rank of a mesh starts from.

    outline      the model on `meta`, with its buffers, which are small or computed
    sample       a model of the same code with few blocks, on which everything is tried that runs the whole model
    division     of the outline, over the ranks
    weights      each rank reads the parts that it holds, from the files

So a rank never has more than its parts and one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import torch
from torch import Tensor

from starling.policy.train.model.load import check_complete, check_folder, outline, unequal_ties, unloadable
from starling.policy.train.model.lora import load_adapters
from starling.policy.train.model.tensors import all_named, replace_tensors
from starling.policy.train.model.weight_files import WeightFiles, has_slices
from starling.weightsync.tensors.adapters import add_adapters, base_name, is_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from starling.common.settings import LoraSettings
else:
    PreTrainedModel = torch.nn.Module

_IN_FULL: Final = ".modules_to_save.default."
"""Part of the name of a tensor of a module that is trained in full."""


class Boxes(Protocol):
    """A part of a tensor that is to be filled."""

    def boxes(self) -> Mapping[tuple[int, ...], Tensor]:
        """Return views of its memory, by the index of the first element in the whole tensor."""


class DeferredModel:
    """A model on `meta`, and its weights."""

    def __init__(self, model: PreTrainedModel, files: WeightFiles, folder: Path, device: torch.device) -> None:
        """Take them.

        Args:
            model: its tensors on the CPU have their values already.
            files: of the others.
            folder: of the files, for errors.
            device: of the model, once it has memory.
        """
        self.model, self.device = model, device
        self._files, self._folder = files, folder
        self._values: dict[str, Tensor] = {}
        """Of tensors that are in no file, or in another one, by name."""

    @property
    def bytes_read(self) -> int:
        """Of tensors of the files, so far."""
        return self._files.bytes_read

    def add_adapters(self, spec: LoraSettings, seed: int) -> None:
        """Add adapters, whose first values are kept; see `starling.weightsync.tensors.adapters.add_adapters`.

        Their values are drawn for the device of their layer, so the parameters are on the CPU meanwhile, as one number
        that is repeated.
        """
        model = self.model
        stand_ins: dict[Tensor, Tensor] = {
            one: torch.nn.Parameter(torch.zeros((), dtype=one.dtype).expand(one.shape), one.requires_grad)
            for one in model.parameters()
        }
        replace_tensors(model, stand_ins)
        add_adapters(model, spec, seed=seed)
        if spec.adapter:
            load_adapters(model, Path(spec.adapter))
        named = dict(model.named_parameters())
        for name, tensor in named.items():
            # Modules that are trained in full begin with the values of the files.
            if is_adapter(name) and (spec.adapter or _IN_FULL not in name):
                self._values[name] = tensor.detach()
        replace_tensors(model, {tensor: _on_meta(tensor) for tensor in named.values()})

    def keep_values(self, names: Sequence[str]) -> None:
        """Put tensors that have values already on `meta`, too, and keep the values."""
        found: dict[Tensor, Tensor] = {}
        for name, tensor in all_named(self.model):
            if name in names:
                self._values[name] = tensor.detach()
                found[tensor] = _on_meta(tensor)
        replace_tensors(self.model, found)

    def fill(self, parts: Mapping[str, Boxes], dtypes: Mapping[str, torch.dtype]) -> None:
        """Read the parts of tensors, in place; one tensor at a time is in memory besides.

        Args:
            parts: by the model's own name.
            dtypes: of the tensors by the same names, to which a value is rounded first.

        Raises:
            ConfigError: a file cannot be read, or has two different tensors for one that is tied.
        """
        names = sorted(parts, key=lambda name: (self._file_of(name), name))
        for name in names:
            for start, box in parts[name].boxes().items():
                if box.numel():
                    value = self._read(name, start, box.shape)
                    box.copy_(value.to(dtypes[name]))
                    self._check_tied(name, start, value)

    def base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the model that belong to no adapter, sorted by name, whole, one at a time."""
        for name, tensor in sorted(self.model.state_dict().items()):
            if not is_adapter(name):
                yield name, self._read(name, (0,) * tensor.dim(), tensor.shape)

    def _file_of(self, name: str) -> str:
        return "" if name in self._values else self._files.file_of(_source(name))

    def _read(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        if name in self._values:
            ranges = tuple(slice(one, one + length) for one, length in zip(start, size, strict=True))
            return self._values[name][ranges]
        try:
            return self._files.read(_source(name), start, size)
        except Exception as error:  # The files are the user's, and their library raises anything.
            raise unloadable(self._folder, error) from error

    def _check_tied(self, name: str, start: Sequence[int], value: Tensor) -> None:
        for target, source in self._files.tied:
            if _source(name) in (target, source):
                other = source if _source(name) == target else target
                if not torch.equal(value, self._files.read(other, start, value.shape)):
                    raise unequal_ties(self._folder, target, source)


@contextmanager
def defer_model(
    folder: Path, device: torch.device, *, seed: int, dtype: str, trust_remote_code: bool = False, scores: bool = False
) -> Iterator[DeferredModel | None]:
    """Lend the model of a Hugging Face folder without its weights; see `load_model` for what it is and its arguments.

    Lends None where its weights cannot be read in parts: it is loaded whole then.

    Raises:
        ConfigError: the folder is missing or unusable.
    """
    check_folder(folder, "pretrained")
    model = outline(folder, dtype=dtype, trust_remote_code=trust_remote_code, scores=scores).eval()
    if not has_slices(folder, model.config):
        yield None
        return
    try:
        files = WeightFiles(folder, model)
    except Exception as error:  # The files are the user's, and their library raises anything.
        raise unloadable(folder, error, trust_remote_code) from error
    with files:
        drawn = {name for name in files.missing if scores and name.startswith("score.")}
        ignored = {name for name in files.missing if _is_optional(model, name)}
        check_complete(folder, files.missing - drawn - ignored, files.mismatched)
        if ignored:
            yield None
            return
        _compute_missing(model, files.missing, seed)
        _read_generation(model, folder, trust_remote_code)
        deferred = DeferredModel(model, files, folder, device)
        deferred.keep_values(sorted(drawn))
        yield deferred


def _on_meta(tensor: Tensor) -> torch.nn.Parameter:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)


def _source(name: str) -> str:
    """Return the name, in a model without adapters, of the tensor with the first values of `name`."""
    before, in_full, after = name.partition(_IN_FULL)
    return base_name(f"{before}.{after}" if in_full else name)


def _is_optional(model: PreTrainedModel, name: str) -> bool:
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _compute_missing(model: PreTrainedModel, missing: set[str], seed: int) -> None:
    """Give values to what is in no file, as `from_pretrained` does: buffers that the code computes, and `missing`."""
    for module in model.modules():
        vars(module).pop("_is_hf_initialized", None)
    saved, found = model.state_dict(keep_vars=True), dict[Tensor, Tensor]()
    for name, tensor in all_named(model):
        if name in saved and name not in missing:
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
            continue
        real = torch.empty(tensor.shape, dtype=tensor.dtype)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        found[tensor] = torch.nn.Parameter(real, requires_grad=tensor.requires_grad) if is_parameter else real
    replace_tensors(model, found)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.initialize_weights()


def _read_generation(model: PreTrainedModel, folder: Path, trust_remote_code: bool) -> None:
    """Take the settings of generation of the folder, which an export writes again."""
    if model.can_generate() and hasattr(model, "adjust_generation_fn"):
        hub = dict.fromkeys(("from_pipeline", "cache_dir", "proxies", "token"))
        cast("Any", model).adjust_generation_fn(
            None,
            from_auto_class=True,
            pretrained_model_name_or_path=str(folder),
            force_download=False,
            local_files_only=True,
            revision="main",
            subfolder="",
            trust_remote_code=trust_remote_code,
            **hub,
        )
