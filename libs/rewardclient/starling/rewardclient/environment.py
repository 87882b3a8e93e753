"""Settings of the reward client from the environment.

The names are those of clients of `/api/reward`: `REMOTE_REWARD_TOKEN`, `REMOTE_REWARD_ENQUEUE_URL` and
`REMOTE_REWARD_FETCH_URL`, or `WFM_REWARD_...` where that is not set; and the time limits of
`REMOTE_REWARD_ENQUEUE_...`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, Final

from starling.common.errors import ConfigError
from starling.rewardclient.schedule import Timeouts
from starling.rewardclient.settings import ClientSettings, Endpoint

PREFIXES: Final = ("REMOTE_REWARD_", "WFM_REWARD_")
TIME_LIMITS: Final = {
    "REMOTE_REWARD_ENQUEUE_CONNECT_TIMEOUT_S": "connect_s",
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_S": "fixed_s",
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_BASE_S": "base_s",
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_PER_MB_S": "per_mb_s",
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_MIN_S": "min_s",
    "REMOTE_REWARD_ENQUEUE_TIMEOUT_MAX_S": "max_s",
}
WITHOUT_REPLICA: Final = "COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA"


def settings_from_environment(environment: Mapping[str, str] | None = None, **settings: Any) -> ClientSettings:
    """Return the settings of a client.

    Several replicas of a service are several URLs with commas between them.

    Args:
        environment: variables; those of the process by default. A variable that is empty counts as not set.
        settings: fields of `ClientSettings`, which win over the environment.

    Raises:
        ConfigError: no service is named, or a value cannot be used.
    """
    variables = os.environ if environment is None else environment
    found: dict[str, Any] = {
        "endpoints": settings.get("endpoints") or endpoints_from_environment(variables),
        "timeouts": settings.get("timeouts") or _timeouts(variables),
        "use_replica": variables.get(WITHOUT_REPLICA, "") != "1",
    }
    return ClientSettings(**(found | settings))


def endpoints_from_environment(variables: Mapping[str, str]) -> tuple[Endpoint, ...]:
    """Return the replicas of the service that the variables name. Raises ConfigError when they name none."""
    enqueue_urls = _variable(variables, "ENQUEUE_URL").split(",")
    fetch_urls = _variable(variables, "FETCH_URL").split(",")
    if enqueue_urls == [""]:
        raise ConfigError(
            "no reward service is named; set REMOTE_REWARD_ENQUEUE_URL, for example to http://host:8080/v1/rewards"
        )
    if fetch_urls != [""] and len(fetch_urls) != len(enqueue_urls):
        raise ConfigError(
            f"there are {len(enqueue_urls)} URLs to send samples to and {len(fetch_urls)} to fetch results from; give "
            "one REMOTE_REWARD_FETCH_URL for each REMOTE_REWARD_ENQUEUE_URL, or none"
        )
    token = _variable(variables, "TOKEN")
    pairs = zip_longest(enqueue_urls, fetch_urls, fillvalue="")
    return tuple(Endpoint(enqueue_url.strip(), fetch_url.strip(), token) for enqueue_url, fetch_url in pairs)


def _timeouts(variables: Mapping[str, str]) -> Timeouts:
    limits: dict[str, float] = {}
    for variable, name in TIME_LIMITS.items():
        if text := variables.get(variable, "").strip():
            try:
                limits[name] = float(text)
            except ValueError:
                raise ConfigError(f"{variable} is {text!r}; give seconds") from None
    return Timeouts(**limits)


def _variable(variables: Mapping[str, str], name: str) -> str:
    return next((found for prefix in PREFIXES if (found := variables.get(prefix + name, "").strip())), "")
