"""Forms of scorers as workers report them, and what the values in a report mean by them.

A scorer may write into its worker's socket, so a worker is believed only what it can have sent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from starling.common.errors import ConfigError
from starling.reward.score.pool.call import Call
from starling.reward.score.scorers.batch import SCORE, BatchScores, ScorerForm, checked_form
from starling.reward.score.workers.protocol import WorkerReady
from starling.reward.settings import ScorerSettings

FORGED: Final = "sent a message in its worker's name"
"""What a scorer did whose worker cannot have sent a message, as the end of a sentence."""


class SampleResult(NamedTuple):
    """What a report says about one sample."""

    value: float | None
    """The score that counts; None if there is none."""
    problem: str
    """Why there is none, as the end of a sentence; empty if there is one."""
    parts: tuple[tuple[str, float | None], ...]
    """All scores by key, where the scorer names them."""


class ScorerForms:
    """How each scorer is called; known once a worker has loaded it.

    Args:
        scorers: of the pool, by the numbers that workers use for them.
    """

    def __init__(self, scorers: Sequence[ScorerSettings]) -> None:
        self._scorers = scorers
        self._forms: dict[int, ScorerForm] = {}
        self._columns: dict[int, tuple[int, ...]] = {}
        """Which of its keys each scorer's value is the sum of."""

    def get(self, scorer: int) -> ScorerForm | None:
        """Return the form of a scorer; None if it is not known."""
        return self._forms.get(scorer)

    def __getitem__(self, scorer: int) -> ScorerForm:
        return self._forms[scorer]

    def forget(self, scorer: int) -> None:
        """Forget the form of a scorer, since another scorer may have reported it."""
        self._forms.pop(scorer, None)

    def learn(self, scorers: Collection[int], message: WorkerReady) -> str:
        """Note what a worker with these scorers reports.

        Returns why the worker cannot be used, as the end of a sentence; empty if it can.
        """
        reported = dict(message.forms)
        if reported.keys() != set(scorers) or len(reported) != len(message.forms):
            return FORGED
        try:
            forms = {scorer: checked_form("", *form) for scorer, form in reported.items()}
        except ConfigError:
            return FORGED
        try:
            columns = {scorer: columns_of(self._scorers[scorer], form) for scorer, form in forms.items()}
        except ConfigError as error:
            return str(error).rstrip(".")
        if any(self._forms.get(scorer, form) != form for scorer, form in forms.items()):
            return FORGED
        self._forms |= forms
        self._columns |= columns
        return ""

    def is_report_of(self, call: Call, scores: BatchScores) -> bool:
        """Whether a worker could have reported these scores, all of which are finite."""
        num_keys = len(self._forms[call.scorer].keys)
        if not len(scores.values) == len(scores.problems) == len(call.positions):
            return False
        for values in scores.values:
            if len(values) != num_keys:
                return False
            for value in values:
                if value is not None and not math.isfinite(value):
                    return False
        return True

    def results_of(self, call: Call, scores: BatchScores) -> list[SampleResult]:
        """Return what a report, for which `is_report_of` holds, says about each sample of its call."""
        keys = self._forms[call.scorer].keys
        has_parts = keys not in ((SCORE,), (self._scorers[call.scorer].title,))
        results = []
        for values, problem in zip(scores.values, scores.problems, strict=True):
            value, lacking = self._value(call.scorer, values)
            parts = tuple(zip(keys, values, strict=True)) if has_parts else ()
            results.append(SampleResult(value, (problem or lacking) if value is None else "", parts))
        return results

    def _value(self, scorer: int, values: tuple[float | None, ...]) -> tuple[float | None, str]:
        """Return the sum of the scores that the recipe's `key` names, or None and why there is none."""
        if len(values) == 1:  # most scorers
            return values[0], "returned no score"
        terms = [values[column] for column in self._columns[scorer]]
        chosen = [term for term in terms if term is not None]
        if len(chosen) < len(terms):
            return None, "returned no score"
        total = sum(chosen)
        return (total, "") if math.isfinite(total) else (None, "returned scores whose sum is too large for a float")


def columns_of(scorer: ScorerSettings, form: ScorerForm) -> tuple[int, ...]:
    """Return which of a scorer's keys its value is the sum of.

    Raises:
        ConfigError: the recipe names no key, and there are several, or one that is not there.
    """
    if not scorer.key and len(form.keys) == 1:
        return (0,)
    known = ", ".join(form.keys)
    if not scorer.key:
        raise ConfigError(
            f"Scorer {scorer.title!r} has several scores, {known}: set `key` to one of them, or to a sum."
        )
    for key in scorer.key.split("+"):
        if key not in form.keys:
            raise ConfigError(
                f"Scorer {scorer.title!r} has no score {key!r}: set `key` to one of {known}, or to a sum."
            )
    return tuple(form.keys.index(key) for key in scorer.key.split("+"))
