"""Judging completions one by one, or in pairs within their group."""

from __future__ import annotations

import itertools
import math
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, cast, get_args

from starling.common.errors import ConfigError
from starling.common.settings import environment_variables
from starling.reward.score.scorers.judge.answers import Answer, AnswerError, Questions
from starling.reward.score.scorers.judge.cache import AnswerCache, digest
from starling.reward.score.scorers.judge.client import (
    JudgeClient,
    JudgeError,
    RetryableError,
    has_time,
    pause_before,
)
from starling.reward.score.scorers.judge.ranking import Rank, bradley_terry, win_rates
from starling.reward.score.scorers.options import check_choices, check_positive

_TITLE: Final = "Scorer 'judge'"
_MODES: Final = ("pointwise", "pairwise")
_SCORE: Final = "score"
_RESERVED: Final = frozenset(("model", "messages", "stream", "response_format", "n"))
_ANSWER: Final = 1
"""Version of the cache's keys: raised when the same request is read otherwise."""


class Judge:
    """Scores completions with a language model behind an OpenAI-compatible API, each from 0 to 1.

    Args:
        base_url: of the API, as `http://127.0.0.1:8000/v1`.
        model: its name there.
        rubric: what the judge is to look at, and with `answer = "regex"` how it is to answer.
        rubric_file: file with the rubric, in place of `rubric`.
        mode: ``pointwise``: a number for each completion. ``pairwise``: all pairs of a group, each in both orders.
        answer: ``json_schema``: JSON that the server enforces. ``json``: JSON in a text. ``regex``: `pattern`.
        pattern: regular expression whose first group is the number, or ``A``, ``B`` or ``tie``; its last match counts.
        criteria: names of several numbers, each a score of its own; pointwise, and not with ``regex``.
        low, high: range of the numbers; `low` becomes the score 0 and `high` 1.
        rank: pairwise: ``win_rate``, or ``bradley_terry``, the probability to win against an average completion.
        show_reference: whether the judge sees the reference answer.
        temperature, max_tokens: of the answer.
        parameters: further fields of the request, as `{ seed = 1 }`.
        api_key_variable: environment variable with the key, which `needs.variables` must have, too; empty for none.
        concurrency: most questions at a time, of each worker.
        retries: how often a question without an answer is asked again.
        request_timeout_s: limit of one question.
        time_limit_s: limit of a batch or group; by default nine tenths of the scorer's `timeout_s`.
        cache_size: answers kept in memory.
        cache_file: file of SQLite that keeps answers over restarts; its folder must be in `needs.writable_paths`.
        cache_file_mb: limit on its size, in MiB.

    Raises:
        ConfigError: an option is not valid; on `setup`, a file or the key is not there.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        rubric: str = "",
        rubric_file: str = "",
        mode: str = "pointwise",
        answer: str = "json_schema",
        pattern: str = "",
        criteria: Sequence[str] = (),
        low: float = 0.0,
        high: float = 10.0,
        rank: str = "win_rate",
        show_reference: bool = True,
        temperature: float = 0.0,
        max_tokens: int = 512,
        parameters: dict[str, Any] | None = None,
        api_key_variable: str = "",
        concurrency: int = 8,
        retries: int = 3,
        request_timeout_s: float = 60.0,
        time_limit_s: float = 9.0,
        cache_size: int = 10_000,
        cache_file: str = "",
        cache_file_mb: int = 1024,
    ) -> None:
        if not re.match(r"https?://[^/]", base_url):
            raise ConfigError(f"{_TITLE}: base_url must begin with http:// or https://, not {base_url!r}.")
        check_choices("judge", mode=(mode, _MODES), answer=(answer, get_args(Answer)), rank=(rank, get_args(Rank)))
        _check_numbers(
            max_tokens=(max_tokens, 1), concurrency=(concurrency, 1), retries=(retries, 0), cache_size=(cache_size, 0),
            cache_file_mb=(cache_file_mb, 1),
        )  # fmt: skip
        check_positive("judge", request_timeout_s=request_timeout_s, time_limit_s=time_limit_s)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError(f"{_TITLE}: low must be below high, not {low!r} and {high!r}.")
        if bool(rubric) == bool(rubric_file):
            raise ConfigError(f"{_TITLE} needs either rubric or rubric_file.")
        taken = sorted(_RESERVED & set(parameters or ()))
        if taken:
            raise ConfigError(f"{_TITLE}: parameters has {taken[0]!r}, which the scorer sets itself: leave it out.")
        self._is_pairwise = mode == "pairwise"
        names = _criteria(criteria, is_allowed=not self._is_pairwise and answer != "regex")
        self.keys = names
        self.scope = "groupwise" if self._is_pairwise else "pointwise"
        self.batch_size = min(1024, concurrency)
        self._rubric, self._rubric_file = rubric, rubric_file
        self._question = partial(
            Questions, answer=cast(Answer, answer), pattern=_pattern(pattern, is_wanted=answer == "regex"),
            criteria=names, low=float(low), high=float(high), pairwise=self._is_pairwise,
        )  # fmt: skip
        self._rank = bradley_terry if rank == "bradley_terry" else win_rates
        self._shows_reference = show_reference
        self._base_url, self._model, self._key_variable = base_url, model, api_key_variable
        self._request = {"temperature": temperature, "max_tokens": max_tokens, **(parameters or {})}
        self._concurrency, self._retries = concurrency, retries
        self._request_timeout_s, self._time_limit_s = float(request_timeout_s), float(time_limit_s)
        self._cache_size, self._cache_file, self._cache_file_mb = cache_size, cache_file, cache_file_mb

    def setup(self) -> None:
        """Read the rubric and the key, and open the cache."""
        rubric = self._rubric
        if self._rubric_file:
            try:
                rubric = Path(self._rubric_file).expanduser().read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"{_TITLE}: rubric_file {self._rubric_file!r} cannot be read ({error}): name it in `needs.paths`."
                ) from None
        self._questions = self._question(rubric)
        key = environment_variables([self._key_variable]).get(self._key_variable, "") if self._key_variable else ""
        if self._key_variable and not key:
            raise ConfigError(
                f"{_TITLE}: the environment has no {self._key_variable}: set it where the service starts, and name it "
                "in `needs.variables`."
            )
        try:
            path = Path(self._cache_file).expanduser() if self._cache_file else None
            self._cache = AnswerCache(self._cache_size, path, self._cache_file_mb)
        except OSError as error:
            raise ConfigError(
                f"{_TITLE}: cache_file {self._cache_file!r} cannot be used ({error}): declare its folder in "
                "`needs.writable_paths`."
            ) from None
        self._client = JudgeClient(self._base_url, key, self._concurrency)
        self._threads = ThreadPoolExecutor(self._concurrency, "judge")

    def score(self, batch: Any) -> dict[str, Sequence[float | str | None]]:
        """Return the scores of a batch, or of a group; the reason where the judge gave no answer in time.

        Raises:
            JudgeError: it gave none at all.
        """
        until = time.monotonic() + self._time_limit_s
        references = batch.references if self._shows_reference else ("",) * len(batch)
        if self._is_pairwise:
            return {_SCORE: self._compare(batch.prompts[0], references[0], batch.completions, until)}
        asked = [
            (one, other, (text,)) for one, other, text in zip(batch.prompts, references, batch.completions, strict=True)
        ]
        found = self._ask_all(asked, until)
        return {
            key: [scores if isinstance(scores, str) else scores[number] for scores in found]
            for number, key in enumerate(self.keys)
        }

    def _compare(self, prompt: str, reference: str, texts: Sequence[str], until: float) -> list[float | None]:
        """Return the scores of a group by comparisons of all pairs, each in both orders. Equal texts are a tie."""
        if len(texts) == 1:
            return [0.5]
        pairs = list(itertools.combinations(range(len(texts)), 2))
        wins = {pair: 0.5 for pair in pairs if texts[pair[0]] == texts[pair[1]]}
        open_pairs = [pair for pair in pairs if pair not in wins]
        orders = [(one, other) for pair in open_pairs for one, other in (pair, pair[::-1])]
        found = self._ask_all([(prompt, reference, (texts[a], texts[b])) for a, b in orders], until) if orders else []
        for number, pair in enumerate(open_pairs):
            forward, backward = found[2 * number], found[2 * number + 1]
            if not isinstance(forward, str) and not isinstance(
                backward, str
            ):  # one order alone would have the bias of a position
                wins[pair] = (forward[0] + 1.0 - backward[0]) / 2
        return self._rank(len(texts), wins)

    def _ask_all(
        self, asked: Sequence[tuple[str, str, tuple[str, ...]]], until: float
    ) -> list[tuple[float, ...] | str]:
        """Return the scores of each question, or why it failed. Raises JudgeError if all of them did."""
        futures = [self._threads.submit(self._ask, *one, until) for one in asked]
        found = [_result(future, until) for future in futures]
        problems = [one for one in found if isinstance(one, str)]
        if problems and len(problems) == len(asked):
            raise JudgeError(f"the judge gave no answer: {problems[-1]}")
        if problems:
            print(f"the judge gave no answer to {len(problems)} of {len(asked)}: {problems[-1]}", file=sys.stderr)
        return found

    def _ask(self, prompt: str, reference: str, texts: tuple[str, ...], until: float) -> tuple[float, ...]:
        """Return the scores of one question, of the cache or of the judge. Raises JudgeError."""
        questions = self._questions
        body: dict[str, Any] = {
            "model": self._model, "messages": questions.messages(prompt, reference, texts), **self._request,
        }  # fmt: skip
        if (form := questions.response_format()) is not None:
            body["response_format"] = form
        pattern = questions.pattern.pattern if questions.pattern is not None else ""
        key = digest(_ANSWER, self._base_url, body, questions.answer, pattern, questions.criteria)
        if (known := self._cache.get(key)) is not None:
            try:
                return questions.read(known)
            except AnswerError:  # a file that something else has written to, or another range of numbers
                pass
        for attempt in itertools.count():
            try:
                return self._ask_once(body, key, until)
            except RetryableError as error:
                pause_s = pause_before(attempt, error)
                if attempt >= self._retries or not has_time(until - pause_s):
                    raise
                time.sleep(pause_s)
        raise AssertionError("the loop ends by itself")

    def _ask_once(self, body: dict[str, Any], key: str, until: float) -> tuple[float, ...]:
        if not has_time(until):
            raise JudgeError("there was no time left to ask it")
        text = self._client.ask(body, min(self._request_timeout_s, until - time.monotonic()))
        try:
            scores = self._questions.read(text)
        except AnswerError as error:
            raise RetryableError(f"its answer cannot be read: {error}") from None
        self._cache.put(key, text)
        return scores


def _result(future: Future[tuple[float, ...]], until: float) -> tuple[float, ...] | str:
    """Return the scores of a question, or why there are none."""
    try:
        return future.result(max(0.0, until - time.monotonic()))
    except JudgeError as error:
        return str(error)
    except TimeoutError:
        future.cancel()
        return "its time is over"


def _check_numbers(**numbers: tuple[object, int]) -> None:
    for name, (number, least) in numbers.items():
        if type(number) is not int or number < least:
            raise ConfigError(f"{_TITLE}: {name} must be an integer from {least} on, not {number!r}.")


def _criteria(names: Sequence[str], *, is_allowed: bool) -> tuple[str, ...]:
    if names and (isinstance(names, str) or not is_allowed):
        raise ConfigError(f"{_TITLE}: criteria must be a list of names, and only for pointwise answers in JSON.")
    return tuple(names) or (_SCORE,)


def _pattern(text: str, *, is_wanted: bool) -> re.Pattern[str] | None:
    if bool(text) != is_wanted:
        raise ConfigError(f"{_TITLE}: pattern belongs to answer = 'regex', which needs it.")
    if not text:
        return None
    try:
        found = re.compile(text)
    except re.error as error:
        raise ConfigError(f"{_TITLE}: pattern {text!r} is no regular expression ({error}).") from None
    if not found.groups:
        raise ConfigError(f"{_TITLE}: pattern {text!r} has no group for the answer: put that between parentheses.")
    return found
