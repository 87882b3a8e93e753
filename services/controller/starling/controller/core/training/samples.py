"""Samples: a few completions of a step for people to read, chosen by the seed of the run and the step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

from starling.common.wire.messages import Prompt
from starling.controller.core.groups.group import Group

MAX_CHARACTERS: Final = 4000
"""Of a prompt, and of a completion; the middle of a longer one is left out."""
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
    }


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
