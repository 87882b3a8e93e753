"""Engine of a rollout that lies about images: its first results have other pixels, and placeholders in a completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from starling.rollout.engine.base import Engine, EngineSpec, GroupFailed, GroupResult
from starling.rollout.engine.embedded.engine import transformers_engine

Tensors = Mapping[str, npt.NDArray[Any]]


def lying_engine(spec: EngineSpec) -> Engine:
    """Return an engine whose first results with images are false, each in another way."""
    engine: Any = transformers_engine(spec)
    step, lies = engine.step, [fewer_pixels, other_grid, placeholders_in_a_completion]

    def false_step() -> list[GroupResult | GroupFailed]:
        ended = step()
        for at, result in enumerate(ended):
            if lies and isinstance(result, GroupResult) and "pixel_values" in result.tensors:
                ended[at] = lies.pop(0)(result)
        return list(ended)

    engine.step = false_step
    made: Engine = engine
    return made


def fewer_pixels(result: GroupResult) -> GroupResult:
    """Leave out the last row of the pixels."""
    return replace(result, tensors={**result.tensors, "pixel_values": result.tensors["pixel_values"][:-1]})


def other_grid(result: GroupResult) -> GroupResult:
    """Claim twice as many patches for each image as there are."""
    grid = result.tensors["image_grid_thw"].copy()
    grid[:, 0] *= 2
    return replace(result, tensors={**result.tensors, "image_grid_thw": grid})


def placeholders_in_a_completion(result: GroupResult) -> GroupResult:
    """Replace the first sampled token by the prompt's most frequent one: that of the images."""
    placeholder = np.bincount(result.prompt_ids).argmax()
    first, *others = result.completions
    ids = first.token_ids.copy()
    ids[0] = placeholder
    return replace(result, completions=(replace(first, token_ids=ids), *others))
