"""Scorers that compare characters: `exact_match`, `prefix_match`, `format`, `regex`, `choice`."""

from __future__ import annotations

import re
from collections import deque
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


def make_regex(pattern: str, ignore_case: bool = False) -> Scorer:
    """Make the scorer `regex`: 1 when what the last match of `pattern` says is the reference, else 0.

    What it says is its first group, or the whole match without one, such as ``Answer: (.*)``; white space around it and
    around the reference does not count. A dot does not match a newline.

    Args:
        pattern: a regular expression.
        ignore_case: whether letters count as equal to their capitals, in the pattern and in the comparison.

    Raises:
        ConfigError: `pattern` is not a regular expression.
    """
    try:
        compiled = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except (re.error, TypeError) as error:
        raise ConfigError(f"Scorer 'regex': {pattern!r} is not a regular expression: {error}.") from None

    def matches(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
        found = deque(compiled.finditer(completion), maxlen=1)
        if not found:
            return 0.0
        said = ((found[0][1] if compiled.groups else found[0][0]) or "").strip()
        expected = reference.strip()
        return float(said.casefold() == expected.casefold() if ignore_case else said == expected)

    return matches


# The last of these that is in a completion, in this order, says which letter was chosen.
_CHOICES: Final = (
    r"\\boxed\{{\s*(?:\\text\{{)?\(?([{0}])\)?\s*\}}",
    r"(?i:answer|choice|option)(?i:\s+is)?\s*[:=]?\s*\**\(?([{0}])\b",
    r"\(([{0}])\)",
    r"(?<![A-Za-z'])([{0}])(?![A-Za-z'])",
)


def make_choice(letters: str = "ABCD") -> Scorer:
    """Make the scorer `choice`: 1 when a completion chooses the reference's letter of several, else 0.

    The letter is read from the last ``\\boxed{B}``, else from the last ``answer is B`` (or choice, option), else from
    the last ``(B)``, else from the last capital letter that stands alone. The reference is read in the same way.

    Args:
        letters: the capital letters that may be chosen.

    Raises:
        ConfigError: they are not different capital letters.
    """
    if not isinstance(letters, str) or not re.fullmatch("[A-Z]{2,26}", letters) or len(set(letters)) < len(letters):
        raise ConfigError(f"Scorer 'choice': letters must be two or more different capital letters, not {letters!r}.")
    patterns = [re.compile(pattern.format(letters)) for pattern in _CHOICES]

    def chosen(text: str) -> str | None:
        for pattern in patterns:
            if found := pattern.findall(text):
                last: str = found[-1]
                return last
        return None

    def matches(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
        expected = chosen(reference)
        if expected is None:
            raise ValueError(f"the reference answer {reference[:60]!r} has none of the letters {letters}")
        return float(chosen(completion) == expected)

    return matches
