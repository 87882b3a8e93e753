"""Canonical tensors of a model with their properties for parallel layouts, and builders for the tables of families."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.plan.layout import TensorSpec

Config: TypeAlias = Mapping[str, Any]
"""Contents of a model's `config.json`."""

Cut: TypeAlias = Literal["whole", "rows", "columns", "vocabulary", "key_value"]
"""How tensor parallelism divides a tensor.

`rows`: along dim 0, the outputs of a projection; `columns`: along dim 1, its inputs; `vocabulary`: along dim 0, after
padding; `key_value`: as `rows`, but ranks beyond the number of heads share a head; `whole`: not at all.
"""

Stage: TypeAlias = Literal["first", "layer", "last"]


class Weight(msgspec.Struct, frozen=True, kw_only=True):
    """One canonical tensor and its properties for parallel layouts."""

    spec: TensorSpec
    cut: Cut = "whole"
    units: int = 0
    """Number of equal pieces that must not be cut (attention heads); 0 if a share may begin at any element."""
    blocks: int = 1
    """Number of projections that the checkpoint itself concatenates along dim 0."""
    stage: Stage = "layer"
    """Pipeline stage that holds it: the first, the one of its layer, or the last."""
    layer: int = -1
    """Index of its layer; -1 outside the layers."""
    expert: int = -1
    """Index of its routed expert; -1 for none."""
    tower: bool = False
    """Part of a vision tower: it runs before the first layer, and is held by the first stage."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """All canonical tensors of one configuration."""

    family: str
    num_layers: int
    num_experts: int
    """Routed experts per layer, 0 for a dense model."""
    weights: tuple[Weight, ...]

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model, tied tensors counted once."""
        return sum(math.prod(weight.spec.shape) for weight in self.weights if not weight.spec.same_as)


MAX_SIZE: Final = 1 << 30
"""Largest number of a configuration. The largest vocabularies have a thousandth of that."""


class Entries:
    """Typed access to a configuration, with one error sentence for a missing entry."""

    def __init__(self, config: Config) -> None:
        """Read from `config`."""
        self._config = config

    def size(self, name: str, default: int | None = None) -> int:
        """Return a number from 0 to `MAX_SIZE`. Raises WeightsError if there is none."""
        value = self._config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_SIZE:
            raise WeightsError(
                f"The model's configuration needs a number in {name!r}, at most {MAX_SIZE}, it has {value!r:.100}."
            )
        return value

    def num_experts(self, name: str) -> int:
        """Return the number of routed experts, which files store under one of two names."""
        other = self._config.get("num_local_experts")
        return self.size(name, other if isinstance(other, int) else None)

    def flag(self, name: str) -> bool:
        """Return whether an entry is present and true."""
        return bool(self._config.get(name))

    def indices(self, name: str) -> tuple[int, ...]:
        """Return a list of numbers, empty when it is missing."""
        return tuple(int(index) for index in self._config.get(name) or ())


class Tensors:
    """Builder of weights of one element type."""

    def __init__(self, dtype: str, *, tower: bool = False) -> None:
        """Build weights of element type `dtype`, of a vision `tower` or of the decoder."""
        self._dtype, self._tower = dtype, tower

    def __call__(
        self,
        name: str,
        *shape: int,
        cut: Cut = "whole",
        units: int = 0,
        blocks: int = 1,
        stage: Stage = "layer",
        layer: int = -1,
        expert: int = -1,
        dtype: str = "",
        same_as: str = "",
    ) -> Weight:
        """Return one weight of the given name and shape; further arguments as in `Weight` and `TensorSpec`."""
        spec = TensorSpec(name=name, shape=shape, dtype=dtype or self._dtype, same_as=same_as)
        return Weight(
            spec=spec,
            cut=cut,
            units=units,
            blocks=blocks,
            stage="first" if self._tower else stage,
            layer=layer,
            expert=expert,
            tower=self._tower,
        )

    def linear(
        self, name: str, rows: int, columns: int, *, cut: Cut, layer: int, bias: bool = False, units: int = 0
    ) -> Iterator[Weight]:
        """Yield a projection's weight, and its bias: cut as its rows are, whole where the columns are cut."""
        yield self(f"{name}.weight", rows, columns, cut=cut, units=units, layer=layer)
        if bias:
            yield self(f"{name}.bias", rows, cut="whole" if cut == "columns" else cut, units=units, layer=layer)

    def gated(self, name: str, hidden: int, inner: int, *, layer: int, bias: bool = False) -> Iterator[Weight]:
        """Yield the three projections of a gated feed-forward block."""
        yield from self.linear(f"{name}.gate_proj", inner, hidden, cut="rows", layer=layer, bias=bias)
        yield from self.linear(f"{name}.up_proj", inner, hidden, cut="rows", layer=layer, bias=bias)
        yield from self.linear(f"{name}.down_proj", hidden, inner, cut="columns", layer=layer, bias=bias)

    def experts(self, name: str, hidden: int, inner: int, count: int, *, layer: int) -> Iterator[Weight]:
        """Yield the three projections of every routed expert."""
        for e in range(count):
            at = f"{name}.experts.{e}"
            yield self(f"{at}.gate_proj.weight", inner, hidden, cut="rows", layer=layer, expert=e)
            yield self(f"{at}.up_proj.weight", inner, hidden, cut="rows", layer=layer, expert=e)
            yield self(f"{at}.down_proj.weight", hidden, inner, cut="columns", layer=layer, expert=e)

    def ends(self, vocabulary: int, hidden: int, tied: bool) -> tuple[Weight, tuple[Weight, Weight]]:
        """Return the weights before the layers and after them."""
        embedding = self("model.embed_tokens.weight", vocabulary, hidden, cut="vocabulary", stage="first")
        norm = self("model.norm.weight", hidden, stage="last")
        same_as = embedding.spec.name if tied else ""
        head = self("lm_head.weight", vocabulary, hidden, cut="vocabulary", stage="last", same_as=same_as)
        return embedding, (norm, head)
