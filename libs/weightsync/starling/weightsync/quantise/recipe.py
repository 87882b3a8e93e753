"""Which tensors of a model are quantised, and how: rules on canonical names, the first that matches wins."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.plan.layout import TensorSpec
from starling.weightsync.quantise.formats import FORMATS, QuantFormat


class QuantRule(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of the tensors whose names match."""

    pattern: str
    """A regular expression; it may match anywhere in the name."""
    format: QuantFormat | None
    """None: they travel as they are."""


class QuantRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """Rules in order. A tensor that none matches travels as it is, and so does every scalar and every vector.

    Raises:
        WeightsError: a pattern that is no regular expression, or one of `together` without one group.
    """

    rules: tuple[QuantRule, ...]
    together: tuple[str, ...] = ()
    """Patterns with one group each: tensors whose names differ only in what the group matches get one scale of the
    tensor, if their format has such a scale. Engines that fuse them keep one for all, and so it must be the same."""

    def __post_init__(self) -> None:
        for pattern in (*(rule.pattern for rule in self.rules), *self.together):
            try:
                _compiled(pattern)
            except re.error as error:
                raise WeightsError(f"The pattern {pattern!r} is no regular expression: {error}.") from error
        for pattern in self.together:
            if _compiled(pattern).groups != 1:
                raise WeightsError(f"The pattern {pattern!r} must have one group, of what differs between the names.")

    def format_of(self, spec: TensorSpec) -> QuantFormat | None:
        """Return the format that `spec` travels in, or None if it travels as it is."""
        if len(spec.shape) < 2:
            return None
        return next((rule.format for rule in self.rules if _compiled(rule.pattern).search(spec.name)), None)

    def scale_of(self, name: str) -> str:
        """Return what is equal for tensors that get one scale of the tensor together."""
        for pattern in self.together:
            found = _compiled(pattern).search(name)
            if found is not None and found.group(1) is not None:
                return f"{name[: found.start(1)]}*{name[found.end(1) :]}"
        return name


KEPT: Final = (
    r"embed|(^|\.)w[tp]e\.",  # looked up, not multiplied
    r"(^|\.)(lm_head|output|score|classifier)\.",  # their errors become errors of the logits
    r"norm",
    r"(^|\.)(gate|router|shared_expert_gate)\.",  # a small error sends a token to another expert
    r"(^|\.)conv",
)
"""Names that engines do not quantise in the linear layers' formats."""
FUSED_BY_VLLM: Final = (
    r"\.(q|k|v)_proj\.weight$",
    r"\.(gate|up)_proj\.weight$",
    r"\.(q_a_proj|kv_a_proj_with_mqa)\.weight$",
)
"""Linear layers that vLLM makes one of, with one scale of the tensor: for `together`."""


def linear_weights(form: QuantFormat | str, together: tuple[str, ...] = ()) -> QuantRecipe:
    """Return the recipe that quantises the weights of linear layers, routed experts among them.

    Embeddings, heads, norms, routers and biases stay as they are, as in vLLM and in published checkpoints.

    Args:
        form: a format, or the name of one in `FORMATS`.
        together: as in `QuantRecipe`; `FUSED_BY_VLLM` for NVFP4 in vLLM.

    Raises:
        WeightsError: a name that is none of a format.
    """
    if isinstance(form, str):
        if form not in FORMATS:
            raise WeightsError(f"There is no format {form!r}; choose one of {', '.join(FORMATS)}.")
        form = FORMATS[form]
    kept = tuple(QuantRule(pattern=pattern, format=None) for pattern in KEPT)
    return QuantRecipe(rules=(*kept, QuantRule(pattern=r"\.weight$", format=form)), together=together)


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
