"""Scorers that compare characters: `exact_match`, `prefix_match`, `format`."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any, Final

from starling.common.errors import ConfigError
from starling.reward.score.scorers.registry import Scorer

# Tempered (no tag inside its own element), so that matching takes time linear in the completion.
DEFAULT_FORMAT: Final = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>"


def exact_match(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
    """Return 1 when completion and reference are the same but for white space around them, else 0."""
    return float(completion.strip() == reference.strip())


def prefix_match(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
    """Return the share of the answer that is right from its first character on, from 0 to 1.

    With white space around both removed: length of the common prefix / length of the longer of the two. It is 1 for
    the reference alone; each further right character raises it, each superfluous one lowers it. 1 when both are empty.
    """
    answer, expected = completion.strip(), reference.strip()
    longer = max(len(answer), len(expected))
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(answer, expected, strict=False)))
    return common / longer if longer else 1.0


def make_exact_match() -> Scorer:
    """Make the scorer `exact_match`; it has no options."""
    return exact_match


def make_prefix_match() -> Scorer:
    """Make the scorer `prefix_match`; it has no options."""
    return prefix_match


def make_format(pattern: str = DEFAULT_FORMAT) -> Scorer:
    """Make the scorer `format`: 1 when the whole completion, without white space around it, matches `pattern`.

    A dot matches a newline too. Without the option the form is ``<think>...</think> <answer>...</answer>``, each tag
    once. ConfigError when `pattern` is not a regular expression.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except (re.error, TypeError) as error:
        raise ConfigError(f"Scorer 'format': {pattern!r} is not a regular expression: {error}.") from None

    def matches(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
        return float(compiled.fullmatch(completion.strip()) is not None)

    return matches
