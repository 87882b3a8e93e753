"""Samples: a few completions of a step for people to read, chosen by the seed of the run and the step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np

from starling.common.wire.messages import Prompt
from starling.common.wire.tensors import GROUP_TENSORS
from starling.controller.core.groups.group import Group

MAX_CHARACTERS: Final = 4000
"""Of a prompt, and of a completion; the middle of a longer one is left out."""
MAX_TOKENS: Final = 4096
"""Tokens of a completion that are listed; further ones are left out."""
TOKEN_BYTES: Final = 4
"""Of an id, a log-probability or a version."""
MAX_MEDIA: Final = 16
MAX_URI_CHARACTERS: Final = 4096
"""Of an image or a video: a longer address holds its content, and is left out."""
TOKEN_FIELDS: Final = frozenset({"token_ids", "logprobs", "versions", "media"})
"""Fields of a row that are lists: for `samples.jsonl`, and not for loggers, whose tables have a value in each field."""
DRAWS_PER_SAMPLE: Final = 8
"""Draws for each wanted sample, some of which may repeat an earlier one."""


def choose(groups: Sequence[Group], num: int, *, seed: int, step: int) -> list[tuple[Group, int]]:
    """Return up to `num` different completions of a step, each as its group and its index, in a fixed order.

    The cost does not depend on how many there are.
    """
    chosen: dict[tuple[int, int], None] = {}
    for draw in range(num * DRAWS_PER_SAMPLE if groups else 0):
        if len(chosen) == num:
            break
        number = int.from_bytes(hashlib.sha256(f"{seed}/{step}/{draw}".encode()).digest()[:8], "big")
        place, which = number % len(groups), number // len(groups)
        if groups[place].trajectories:
            chosen[place, which % len(groups[place].trajectories)] = None
    return [(groups[place], index) for place, index in sorted(chosen)]


def to_row(group: Group, index: int) -> dict[str, Any]:
    """Return one completion as JSON values, with texts of bounded length."""
    trajectory = group.trajectories[index]
    scores = {"score": group.components, "eval_score": group.evaluation_scores}
    components = {
        f"{kind}/{name}": values[index]
        for kind, by_name in scores.items()
        for name, values in by_name.items()
        if index < len(values)
    }
    return {
        "prompt_id": group.prompt.id,
        "prompt": shortened(text_of(group.prompt)),
        "completion": shortened(trajectory.text),
        "reward": group.rewards[index],
        **components,
        **{f"env/{name}": value for name, value in trajectory.metrics.items()},
        "status": str(trajectory.status),
        "num_turns": trajectory.num_turns,
        "num_tokens": trajectory.num_tokens,
        "oldest_version": trajectory.oldest_version,
        "newest_version": trajectory.newest_version,
        **_media(group.prompt),
        **_tokens(group, index),
    }


def _tokens(group: Group, index: int) -> dict[str, Any]:
    """Return id and log-probability of each token of a completion, and which versions sampled how many, in order.

    Empty where the group's tokens are not in memory, or are others than its trajectories say.
    """
    num_bytes = TOKEN_BYTES * sum(trajectory.num_tokens for trajectory in group.trajectories)
    if [len(buffer) for buffer in group.buffers[1 : len(GROUP_TENSORS)]] != [num_bytes] * (len(GROUP_TENSORS) - 1):
        return {}
    before = sum(trajectory.num_tokens for trajectory in group.trajectories[:index])
    part = slice(before, before + min(group.trajectories[index].num_tokens, MAX_TOKENS))
    _, ids, logprobs, versions = (
        np.frombuffer(buffer, form.dtype) for form, buffer in zip(GROUP_TENSORS, group.buffers, strict=False)
    )
    return {
        "token_ids": ids[part].tolist(),
        "logprobs": np.round(logprobs[part].astype(np.float64), 4).tolist(),
        "versions": [[version, len(list(same))] for version, same in groupby(versions[part].tolist())],
    }


def _media(prompt: Prompt) -> dict[str, Any]:
    """Return the images and videos of a prompt by their addresses."""
    listed = [{"kind": one.kind, "uri": one.uri} for one in prompt.media if len(one.uri) <= MAX_URI_CHARACTERS]
    return {"media": listed[:MAX_MEDIA]} if listed else {}


def text_of(prompt: Prompt) -> str:
    """Return the text of a prompt, or its conversation with the roles of the speakers."""
    if not prompt.messages:
        return prompt.text
    return "\n".join(f"{message.role}: {message.content}" for message in prompt.messages)


def shortened(text: str) -> str:
    """Return `text` without its middle when it is long."""
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"
