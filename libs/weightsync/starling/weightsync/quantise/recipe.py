"""Quantisation recipe: rules on canonical names that select the format of each tensor; the first match wins."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.plan.layout import TensorSpec
from starling.weightsync.quantise.formats import FORMATS, QuantFormat


class QuantRule(msgspec.Struct, frozen=True, kw_only=True):
    """Format of the tensors whose names match."""

    pattern: str
    """A regular expression; it may match anywhere in the name."""
    format: QuantFormat | None
    """None: they are not quantised."""


class QuantRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """Rules in order. Tensors that no rule matches, scalars and vectors are not quantised.

    Raises:
        WeightsError: a pattern that is not a regular expression, or one of `together` without one group.
    """

    rules: tuple[QuantRule, ...]
    together: tuple[str, ...] = ()
    """Patterns with one group each: tensors whose names differ only in that group share the scale of the whole tensor,
    if their format has one. Engines that fuse them keep a single scale."""

    def __post_init__(self) -> None:
        for pattern in (*(rule.pattern for rule in self.rules), *self.together):
            try:
                _compiled(pattern)
            except re.error as error:
                raise WeightsError(f"The pattern {pattern!r} is not a regular expression: {error}.") from error
        for pattern in self.together:
            if _compiled(pattern).groups != 1:
                raise WeightsError(f"The pattern {pattern!r} must have one group, of what differs between the names.")

    def format_of(self, spec: TensorSpec) -> QuantFormat | None:
        """Return the format of `spec`, or None if it is not quantised."""
        if len(spec.shape) < 2:
            return None
        return next((rule.format for rule in self.rules if _compiled(rule.pattern).search(spec.name)), None)

    def scale_of(self, name: str) -> str:
        """Return a key that is equal for tensors that share the scale of the whole tensor."""
        for pattern in self.together:
            found = _compiled(pattern).search(name)
            if found is not None and found.group(1) is not None:
                return f"{name[: found.start(1)]}*{name[found.end(1) :]}"
        return name


NOT_QUANTISED: Final = (
    r"embed|(^|\.)w[tp]e\.",  # looked up, not multiplied
    r"(^|\.)(lm_head|output|score|classifier)\.",  # their errors become errors of the logits
    r"norm",
    r"(^|\.)(gate|router|shared_expert_gate)\.",  # a small error sends a token to another expert
    r"(^|\.)conv",
)
"""Patterns of tensors that engines do not quantise in the formats of linear layers."""
FUSED_BY_VLLM: Final = (
    r"\.(q|k|v)_proj\.weight$",
    r"\.(gate|up)_proj\.weight$",
    r"\.(q_a_proj|kv_a_proj_with_mqa)\.weight$",
)
"""Linear layers that vLLM fuses, with one scale of the whole tensor: for `together`."""


def linear_weights(form: QuantFormat | str, together: tuple[str, ...] = ()) -> QuantRecipe:
    """Return the recipe that quantises the weights of linear layers, including routed experts.

    Embeddings, heads, norms, routers and biases are not quantised, as in vLLM and in published checkpoints.

    Args:
        form: a format, or the name of one in `FORMATS`.
        together: as in `QuantRecipe`; `FUSED_BY_VLLM` for NVFP4 in vLLM.

    Raises:
        WeightsError: an unknown format.
    """
    if isinstance(form, str):
        if form not in FORMATS:
            raise WeightsError(f"There is no format {form!r}; choose one of {', '.join(FORMATS)}.")
        form = FORMATS[form]
    kept = tuple(QuantRule(pattern=pattern, format=None) for pattern in NOT_QUANTISED)
    return QuantRecipe(rules=(*kept, QuantRule(pattern=r"\.weight$", format=form)), together=together)


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
