"""Weights of a Hugging Face folder, of which any part of a tensor is read without the rest of it.

A parameter is a tensor of a file, or is made of several: transformers names and joins them by the rules of
`get_model_conversion_mapping`, which are read here and not repeated.

    tensor       a tensor of a file: only the part is read
    experts      one tensor for each expert, or two that are joined, such as gate and up: of each only its part
    converted    anything else: the whole parameter is made by the rules, and cut
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from safetensors import safe_open
from torch import Tensor

from starling.common.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module

WHOLE_FILE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"


def has_slices(folder: Path, config: Any) -> bool:
    """Return whether the weights in `folder` can be read in parts: in safetensors, of no quantised model or adapter."""
    others = (getattr(config, name, None) for name in ("quantization_config", "transformers_weights"))
    is_plain = not any(others) and not (folder / "adapter_config.json").exists()
    return is_plain and any((folder / name).is_file() for name in (WHOLE_FILE, INDEX))


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor of a file."""

    file: Path
    key: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Recipe:
    """The tensors of files that make up a parameter."""

    kind: str
    """``tensor``, ``experts`` or ``converted``."""
    sources: tuple[tuple[_Saved, ...], ...]
    """By pattern of the rule, in the order of the files' keys; one of one for ``tensor``."""
    converter: Any = None
    """Of ``converted``: the rule, the first tensor of the model that it makes, and the pattern of each key."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of the parameter; None where only a conversion knows."""
        first = self.sources[0][0].shape
        if self.kind == "tensor":
            return first
        if self.kind == "experts":
            return (len(self.sources[0]), sum(part[0].shape[0] for part in self.sources), *first[1:])
        return None


class WeightFiles:
    """Weights of a model's folder, by the names of its parameters and persistent buffers.

    A context: one file is open at a time, and none after it.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        """Find the tensors of `model`, an outline on `meta`, in the files of `folder`, for which `has_slices` holds.

        Raises:
            Exception: a file cannot be read; the text is that of its library.
        """
        self._open: tuple[Path, Any] | None = None
        self.bytes_read = 0
        """Of tensors, so far."""
        self._wanted = model.state_dict()
        self._model = model
        found, self._recipes = _all_saved(folder), dict[str, _Recipe]()
        self._find(found)
        tied = model.get_expanded_tied_weights_keys(all_submodels=True)
        self.tied = [(one, other) for one, other in tied.items() if {one, other} <= self._recipes.keys()]
        """Pairs of names of one parameter that both are in the files."""
        for one, other in tied.items():
            recipe = self._recipes.get(other) or self._recipes.get(one)
            if recipe is not None:
                self._recipes |= {one: recipe, other: recipe} if (one, other) not in self.tied else {}

    def __enter__(self) -> Self:
        """Open nothing yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the open file."""
        self._close()

    @property
    def missing(self) -> set[str]:
        """Names of the model that are in no file."""
        return set(self._wanted) - set(self._recipes)

    @property
    def mismatched(self) -> set[str]:
        """Names whose tensors are of another shape than the model's."""
        return {
            name
            for name, recipe in self._recipes.items()
            if recipe.shape is not None and recipe.shape != tuple(self._wanted[name].shape)
        }

    def file_of(self, name: str) -> str:
        """Return the file in which a tensor begins, to read tensors in their order."""
        return str(self._recipes[name].sources[0][0].file)

    def read(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """Return a part of a tensor, in the element type of the model's, on the CPU.

        The part may be memory of the file: copy it before the next one is read.

        Args:
            name: of the model's tensor.
            start: index of its first element.
            size: of the part.

        Raises:
            Exception: the file cannot be read.
        """
        recipe, wanted = self._recipes[name], self._wanted[name]
        if recipe.kind == "tensor":
            return self._slice(recipe.sources[0][0], start, size).to(wanted.dtype)
        if recipe.kind == "experts":
            return self._experts(recipe, start, size, wanted.dtype)
        whole = self._converted(name, recipe)
        if whole.shape != wanted.shape:
            raise ConfigError(f"{name} is of shape {list(whole.shape)} in the files and {list(wanted.shape)} here")
        return whole[tuple(slice(one, one + length) for one, length in zip(start, size, strict=True))]

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of the model that are in files, by name in their order, each whole, one at a time."""
        for name in sorted(self._recipes):
            shape = self._wanted[name].shape
            yield name, self.read(name, (0,) * len(shape), shape)

    def _find(self, found: Sequence[_Saved]) -> None:
        """Find the recipe of each tensor of the model, as transformers' `convert_and_load_state_dict_in_model` does."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        rules, prefix = get_model_conversion_mapping(self._model), self._model.base_model_prefix
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        joined: dict[str, tuple[Any, dict[str, list[_Saved]]]] = {}
        for saved in sorted(found, key=lambda one: dot_natural_key(one.key)):
            name, pattern = rename_source_key(saved.key, renamings, converters, prefix, self._wanted)
            if name not in self._wanted and saved.key in self._wanted:
                name, pattern = rename_source_key(saved.key, [], [], prefix, self._wanted)
            if name not in self._wanted:
                continue
            if pattern is None:
                self._recipes[name] = _Recipe("tensor", ((saved,),))
                continue
            _, sources = joined.setdefault(name, (by_pattern[pattern], {}))
            sources.setdefault(pattern, []).append(saved)
        for name, (rule, sources) in joined.items():
            for target, recipe in self._joined(name, rule, sources):
                self._recipes[target] = recipe
        # Which of the rules apply to the files, and are reverted when the model is saved.
        self._model._weight_conversions = [rule for rule in rules if rule.was_used()]

    def _joined(self, name: str, rule: Any, sources: dict[str, list[_Saved]]) -> Iterator[tuple[str, _Recipe]]:
        """Yield the tensors of the model that a rule makes of `sources`, with their recipes. `name`: the first one."""
        in_order = tuple(tuple(sources[pattern]) for pattern in rule.source_patterns if pattern in sources)
        if _joins_experts(rule) and len(in_order) == len(rule.source_patterns):
            yield name, _Recipe("experts", in_order)
            return
        patterns = {one.key: pattern for pattern, found in sources.items() for one in found}
        recipe = _Recipe("converted", in_order, (rule, name, patterns))
        first = rule.target_patterns[0]
        for pattern in rule.target_patterns:
            target = name.replace(first, pattern)
            if target in self._wanted:
                yield target, recipe

    def _slice(self, saved: _Saved, start: Sequence[int], size: Sequence[int]) -> Tensor:
        if self._open is None or self._open[0] != saved.file:
            self._close()
            handle: Any = safe_open(str(saved.file), framework="pt")
            handle.__enter__()
            self._open = saved.file, handle
        ranges = tuple(slice(one, one + length) for one, length in zip(start, size, strict=True))
        part: Tensor = self._open[1].get_slice(saved.key)[ranges if ranges else ...]
        self.bytes_read += part.nbytes
        return part

    def _close(self) -> None:
        if self._open is not None:
            self._open[1].__exit__(None, None, None)
            self._open = None

    def _experts(self, recipe: _Recipe, start: Sequence[int], size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a part of a tensor [experts, rows, ...] whose rows are those of one file tensor after another."""
        found, first = torch.empty(tuple(size), dtype=dtype), 0
        for experts in recipe.sources:
            last = first + experts[0].shape[0]
            low, high = max(start[1], first), min(start[1] + size[1], last)
            for place in range(size[0]) if low < high else ():
                part = self._slice(experts[start[0] + place], (low - first, *start[2:]), (high - low, *size[2:]))
                found[place, low - start[1] : high - start[1]] = part
            first = last
        return found

    def _converted(self, name: str, recipe: _Recipe) -> Tensor:
        """Return a whole tensor of the model, which the conversion of transformers makes."""
        rule, first, patterns = recipe.converter
        made, dtype = copy.deepcopy(rule), self._wanted[name].dtype
        for saved in (one for sources in recipe.sources for one in sources):
            whole = self._slice(saved, (0,) * len(saved.shape), saved.shape).to(dtype)
            made.add_tensor(first, saved.key, patterns[saved.key], lambda whole=whole: whole)
        values = made.convert(first, model=self._model, config=self._model.config)
        value = values[name]
        found: Tensor = value[0] if isinstance(value, list) else value
        return found


def _all_saved(folder: Path) -> list[_Saved]:
    """Return all tensors of the files of weights of a model's folder."""
    whole = folder / WHOLE_FILE
    files = [whole] if whole.is_file() else sorted(folder / name for name in _indexed(folder / INDEX))
    found = []
    for file in files:
        with safe_open(str(file), framework="pt") as handle:
            found += [_Saved(file, key, tuple(handle.get_slice(key).get_shape())) for key in handle.keys()]  # noqa: SIM118
    return found


def _indexed(index: Path) -> set[str]:
    """Return the names of the files in an index, which `check_folder` has checked."""
    with index.open("rb") as file:
        return set(json.load(file)["weight_map"].values())


def _joins_experts(rule: Any) -> bool:
    """Whether a rule stacks one tensor for each expert, and then joins their rows."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    kinds = [(type(one), getattr(one, "dim", None)) for one in rule.operations]
    stacked, joined = (MergeModulelist, 0), (Concatenate, 1)
    return kinds == [stacked, joined] or (kinds == [stacked] and len(rule.source_patterns) == 1)
