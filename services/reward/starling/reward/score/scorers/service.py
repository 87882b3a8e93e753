"""The scorer `service`: asks a reward service elsewhere, over HTTP, for the rewards of texts or latents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final, Literal, cast
from urllib.parse import urlsplit

from starling.common.errors import ConfigError, StarlingError
from starling.common.settings import environment_variables
from starling.reward.score.scorers.batch import SCORE, Batch
from starling.reward.score.scorers.options import check_choices, check_positive
from starling.rewardclient.blocking import RewardClient
from starling.rewardclient.combine import RewardFunction, RewardRule
from starling.rewardclient.environment import (
    PREFIXES,
    TIME_LIMITS,
    WITHOUT_REPLICA,
    endpoints_from_environment,
    settings_from_environment,
)
from starling.rewardclient.media import latents
from starling.rewardclient.rewards import Column, Rewards
from starling.rewardclient.samples import RewardSample
from starling.rewardclient.schedule import Retries
from starling.rewardclient.settings import ClientSettings, Endpoint

_TITLE: Final = "Scorer 'service'"
_PREFIX: Final = PREFIXES[0]
_URLS: Final = tuple(map("".join, product(PREFIXES, ("ENQUEUE_URL", "FETCH_URL"))))
_TOKENS: Final = tuple(f"{prefix}TOKEN" for prefix in PREFIXES)
MAX_FUNCTIONS: Final = 64
MAX_TOKEN_BYTES: Final = 1 << 16
MAX_NAMED: Final = 10
"""Scores that a sentence names."""
_UNBOUNDED: Final = {"clip_min": float("-inf"), "clip_max": float("inf")}
"""The recipe's `clip_min` and `clip_max` bound scores; those of a function are none unless it has some."""


class Service:
    """Scores completions by another reward service, which gets all those of a prompt in one request.

    Args:
        url: where samples are sent, `http://host:8080/v1/rewards` or `https://host/api/reward/enqueue`; replicas of one
            service with commas between them. Without it, `REMOTE_REWARD_ENQUEUE_URL` or `WFM_REWARD_ENQUEUE_URL` of the
            environment.
        fetch_url: where results are, if not at the place that belongs to `url`.
        token_variable: environment variable with the token, which `needs.variables` must have, too; without it and
            `token_file`, `REMOTE_REWARD_TOKEN` or `WFM_REWARD_TOKEN` of the environment, or none.
        token_file: file with the token, which `needs.paths` must have, too.
        media: what is sent: ``text`` or ``latents``.
        keys: names of the scores: ``score`` is the reward, others are scores of the service by their labels, and by
            ``label/key`` of scorers with several.
        functions: scorers of the service from whose scores the reward is computed here, each with the fields of
            `RewardFunction`: `name`, and `weight`, `score_key`, `clip_min`, `clip_max`. `/api/reward` needs some.
        whole_groups: whether the completions of a prompt stay in one request, as scorers that compare want it.
        fps: frames per second of the decoded video, where the sample does not say.
        retries: how often a request is sent again that failed on its way.
        time_limit_s: until the rewards are there; by default nine tenths of the scorer's `timeout_s`.

    Raises:
        ConfigError: an option is not valid; on `setup`, no service is named, or the token is not there.
    """

    scope = "groupwise"
    """The service may compare the completions of a prompt. A failed request is not divided and sent again, either:
    the client has made all tries."""

    def __init__(
        self,
        url: str = "",
        fetch_url: str = "",
        token_variable: str = "",
        token_file: str = "",
        media: str = "text",
        keys: Sequence[str] = (SCORE,),
        functions: Sequence[Mapping[str, Any]] = (),
        whole_groups: bool = True,
        fps: float = 16.0,
        retries: int = 4,
        time_limit_s: float = 9.0,
    ) -> None:
        check_choices("service", media=(media, ("text", "latents")))
        check_positive("service", fps=fps, time_limit_s=time_limit_s)
        if token_variable and token_file:
            raise ConfigError(f"{_TITLE}: token_variable and token_file are both set; leave one out.")
        if isinstance(keys, str) or not keys or not all(isinstance(key, str) for key in keys):
            raise ConfigError(f'{_TITLE}: keys must be a list of names, as ["{SCORE}"], not {keys!r}.')
        self.media, self.keys = cast(Literal["text", "latents"], media), tuple(keys)
        self._urls, self._token_variable, self._token_file = (url, fetch_url), token_variable, token_file
        self._whole_groups, self._fps, self._time_limit_s = whole_groups, float(fps), float(time_limit_s)
        try:
            self._rule, self._retries = _rule(functions), Retries(max_retries=retries)
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"{_TITLE}: {str(error).rstrip('.')}.") from None
        if url:
            self._check_urls()

    def setup(self) -> None:
        """Read the token, and prepare the client."""
        self._client = RewardClient(self._settings(self._variables()))

    def score(self, batch: Batch) -> dict[str, Sequence[float | str | None]]:
        """Return the scores of the completions of a prompt by key; of each that is missing the reason."""
        try:
            found = self._client.score(self._samples(batch), timeout_s=self._time_limit_s)
        except StarlingError as error:  # none has a reward
            return {key: [str(error).rstrip(".")] * len(batch) for key in self.keys}
        return {key: _column(key, found) for key in self.keys}

    def _samples(self, batch: Batch) -> list[RewardSample]:
        return [
            RewardSample(
                completion=batch.completions[index],
                prompt=batch.prompts[index],
                reference=batch.references[index],
                metadata=batch.metadata[index],
                num_tokens=batch.num_tokens[index],
                truncated=batch.statuses[index] == "truncated",
                environment_reward=batch.rewards[index],
                group="group" if self._whole_groups else str(index),
                media=latents(batch.latents[index], batch.fps[index] or self._fps) if batch.latents else None,
            )
            for index in range(len(batch))
        ]

    def _variables(self) -> dict[str, str]:
        """Return the variables that the client reads, with the options in place of those that they replace."""
        found = environment_variables((*_URLS, *_TOKENS, *TIME_LIMITS, WITHOUT_REPLICA))
        if self._urls[0]:
            found = {name: value for name, value in found.items() if name not in _URLS}
            found |= dict(zip((f"{_PREFIX}ENQUEUE_URL", f"{_PREFIX}FETCH_URL"), self._urls, strict=True))
        if token := self._token():
            found[f"{_PREFIX}TOKEN"] = token
        return found

    def _token(self) -> str:
        """Return the token that an option names; empty if none does. Raises ConfigError."""
        if self._token_variable:
            token = environment_variables([self._token_variable]).get(self._token_variable, "").strip()
            if not token:
                raise ConfigError(
                    f"{_TITLE}: the environment has no {self._token_variable}: set it where the service starts, and "
                    "name it in `needs.variables`."
                )
            return token
        if not self._token_file:
            return ""
        try:
            with Path(self._token_file).expanduser().open(encoding="utf-8") as file:
                token = file.read(MAX_TOKEN_BYTES).strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", "") or "it is no text"
            raise ConfigError(
                f"{_TITLE}: token_file {self._token_file!r} cannot be read ({reason}): name it in `needs.paths`."
            ) from None
        if not token:
            raise ConfigError(f"{_TITLE}: token_file {self._token_file!r} is empty: write the token into it.")
        return token

    def _settings(self, variables: Mapping[str, str]) -> ClientSettings:
        """Return the settings of the client. Raises ConfigError."""
        try:
            endpoints = endpoints_from_environment(variables)
            self._check_protocol(endpoints)
            return settings_from_environment(
                variables, endpoints=endpoints, rule=self._rule, timeout_s=self._time_limit_s, retries=self._retries
            )
        except ConfigError as error:
            where = "" if self._urls[0] else ", and name the variables in `needs.variables`"
            raise ConfigError(f"{_TITLE}: {str(error).rstrip('.')}{where}.") from None

    def _check_urls(self) -> None:
        """Raise ConfigError unless the client could use the URLs of the options; a recipe has no password."""
        urls = [url.strip() for both in self._urls for url in both.split(",")]
        try:
            has_password = any("@" in urlsplit(url).netloc for url in urls)
        except ValueError:  # the client says what is wrong
            has_password = False
        if has_password:
            raise ConfigError(f"{_TITLE}: a URL has a user or password before its host: give a token_variable instead.")
        self._settings(dict(zip((f"{_PREFIX}ENQUEUE_URL", f"{_PREFIX}FETCH_URL"), self._urls, strict=True)))

    def _check_protocol(self, endpoints: Sequence[Endpoint]) -> None:
        """Raise ConfigError where an API does not score what is sent, or wants scorers to be named."""
        if all(endpoint.protocol == "v1" for endpoint in endpoints):
            return
        if self.media == "text":
            raise ConfigError(
                "/api/reward scores media, and texts are sent; set media = 'latents', or give a URL with /v1/rewards"
            )
        if not self._rule.functions:
            raise ConfigError("/api/reward asks for scorers by name, and none is given; set the option functions")


def _rule(functions: Sequence[Mapping[str, Any]]) -> RewardRule:
    """Return how the reward follows from scores. Raises ConfigError or TypeError."""
    if not isinstance(functions, Sequence) or not all(isinstance(one, Mapping) for one in functions):
        raise ConfigError("functions must be a list of tables with a name, as [{ name = 'motion', weight = 0.5 }]")
    if len(functions) > MAX_FUNCTIONS:
        raise ConfigError(f"functions has {len(functions)} tables; give at most {MAX_FUNCTIONS}")
    known = RewardFunction.__dataclass_fields__
    for one in functions:
        if "name" not in one or (unknown := sorted(set(one) - set(known))):
            wrong = f"has {unknown[0]!r}" if "name" in one else "has no name"
            raise ConfigError(f"a table of functions {wrong}; its fields are {', '.join(known)}")
    made = tuple(RewardFunction(**{**_UNBOUNDED, **one}) for one in functions)
    return RewardRule(functions=made, **_UNBOUNDED)


def _column(key: str, found: Rewards) -> list[float | str | None]:
    """Return a score of each sample, or the reason why it has none."""
    by_name = {**found.evaluation_scores, **found.scores}
    column: Column | None = found.rewards if key == SCORE else by_name.get(key)
    values: list[float | str | None] = []
    for index, problems in enumerate(found.problems):
        value = None if column is None else column[index]
        if value is not None:
            values.append(value)
        elif problems:
            values.append(" ".join(problems).rstrip("."))
        elif column is None:
            names = ", ".join(sorted(by_name)[:MAX_NAMED]) or "none"
            values.append(f"the service has no score {key!r}; it has {names}")
        else:
            values.append(f"the service gave none, with the status {found.statuses[index]}")
    return values
