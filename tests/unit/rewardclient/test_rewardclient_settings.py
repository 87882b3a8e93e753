"""Endpoints of the reward client, and its settings from the environment."""

from __future__ import annotations

import pytest

from starling.common.errors import ConfigError
from starling.rewardclient.combine import RewardFunction, RewardRule
from starling.rewardclient.environment import settings_from_environment
from starling.rewardclient.schedule import Timeouts
from starling.rewardclient.settings import ClientSettings, Endpoint, shown

ENQUEUE, FETCH = "https://gateway/api/reward/enqueue", "https://gateway/api/reward/pull"
RULE = RewardRule(functions=(RewardFunction(name="dance_grpo", score_key="overall_reward"),))


@pytest.mark.parametrize(
    ("url", "fetch_url", "protocol", "expected"),
    [
        ("http://host:8080", "", None, ("http://host:8080/v1/rewards", "http://host:8080/v1/rewards", "v1")),
        ("http://host:8080/", "", None, ("http://host:8080/v1/rewards", "http://host:8080/v1/rewards", "v1")),
        ("http://host/v1/rewards/", "", None, ("http://host/v1/rewards", "http://host/v1/rewards", "v1")),
        ("http://host/a/v1/rewards", "", None, ("http://host/a/v1/rewards", "http://host/a/v1/rewards", "v1")),
        ("http://[::1]:80", "", None, ("http://[::1]:80/v1/rewards", "http://[::1]:80/v1/rewards", "v1")),
        (ENQUEUE, "", None, (ENQUEUE, FETCH, "cosmos")),
        (ENQUEUE, "http://other/pull/", None, (ENQUEUE, "http://other/pull", "cosmos")),
        ("http://host/mine", "", "v1", ("http://host/mine", "http://host/mine", "v1")),
        (
            "http://host/put?key=1",
            "http://host/get?key=1",
            None,
            ("http://host/put?key=1", "http://host/get?key=1", "cosmos"),
        ),
    ],
)
def test_endpoint_completes_what_the_url_says(
    url: str, fetch_url: str, protocol: str | None, expected: tuple[str, str, str]
) -> None:
    endpoint = Endpoint(url, fetch_url, protocol=protocol)  # type: ignore[arg-type]
    assert (endpoint.enqueue_url, endpoint.fetch_url, endpoint.protocol) == expected


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (("host:8080",), "has the URL .*; give one as http://host:8080/v1/rewards"),
        (("ftp://host",), "has the URL 'ftp://host'"),
        (("http://host:port",), "has the URL 'http://host:port'"),
        (("http://ho st",), "has the URL"),
        (("http://host\n/v1/rewards",), "has the URL"),
        (("http://[host",), r"has the URL '\(not a URL\)'"),
        (
            ("http://host/other",),
            "has the path of no known API; end it with /v1/rewards or /api/reward/enqueue, or say",
        ),
        ((ENQUEUE, "pull"), "has the URL 'pull'"),
        (("http://host", "", "two\nlines"), "the token .* has characters that a header cannot have"),
        (("http://host", "", "tökën"), "the token .* has characters that a header cannot have"),
        (("http://host", "", "", "v2"), "is 'v2'; give 'v1' or 'cosmos'"),
    ],
)
def test_endpoint_that_cannot_be_used_is_refused(fields: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Endpoint(*fields)  # type: ignore[arg-type]


def test_url_is_shown_without_secrets() -> None:
    assert shown("https://user:secret@host:1/path?key=secret#secret") == "https://host:1/path"
    assert "secret" not in repr(Endpoint("http://host", token="secret"))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"endpoints": ()}, "no reward service is given; give its URL"),
        ({"endpoints": (Endpoint(ENQUEUE),)}, "/api/reward asks for scorers by name, and none is given"),
        ({"endpoints": (Endpoint(ENQUEUE), Endpoint("http://host"))}, "speak different protocols"),
        ({"endpoints": (Endpoint("http://host"),), "extras": {"a": 1}}, "/v1/rewards has no extras"),
        ({"endpoints": (Endpoint("http://host"),), "timeout_s": 0.0}, "timeout_s is 0.0"),
        ({"endpoints": (Endpoint("http://host"),), "max_polls": 0}, "max_polls is 0; give a number from 1"),
        ({"endpoints": (Endpoint("http://host"),), "min_valid_rate": 1.5}, "min_valid_rate is 1.5; give a share"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ClientSettings(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"REMOTE_REWARD_ENQUEUE_URL": ENQUEUE, "REMOTE_REWARD_FETCH_URL": FETCH, "REMOTE_REWARD_TOKEN": "a"},
            [(ENQUEUE, FETCH, "a")],
        ),
        (
            {"WFM_REWARD_ENQUEUE_URL": ENQUEUE, "WFM_REWARD_FETCH_URL": FETCH, "WFM_REWARD_TOKEN": "b"},
            [(ENQUEUE, FETCH, "b")],
        ),
        (
            {
                "REMOTE_REWARD_ENQUEUE_URL": ENQUEUE,
                "WFM_REWARD_ENQUEUE_URL": "http://old/enqueue",
                "REMOTE_REWARD_TOKEN": "",
                "WFM_REWARD_TOKEN": "b",
            },
            [(ENQUEUE, FETCH, "b")],
        ),
        (
            {
                "REMOTE_REWARD_ENQUEUE_URL": f"{ENQUEUE}, http://b/enqueue",
                "REMOTE_REWARD_FETCH_URL": f"{FETCH},http://b/x",
            },
            [(ENQUEUE, FETCH, ""), ("http://b/enqueue", "http://b/x", "")],
        ),
    ],
    ids=["names", "aliases", "names-win", "replicas"],
)
def test_environment_names_the_service(variables: dict[str, str], expected: list[tuple[str, str, str]]) -> None:
    found = settings_from_environment(variables, rule=RULE)
    assert [(one.enqueue_url, one.fetch_url, one.token) for one in found.endpoints] == expected
    assert found.timeouts == Timeouts()
    assert found.use_replica


def test_environment_has_time_limits_and_arguments_win() -> None:
    variables = {
        "REMOTE_REWARD_ENQUEUE_URL": "http://host",
        "REMOTE_REWARD_ENQUEUE_CONNECT_TIMEOUT_S": "1",
        "REMOTE_REWARD_ENQUEUE_TIMEOUT_BASE_S": "2",
        "REMOTE_REWARD_ENQUEUE_TIMEOUT_PER_MB_S": "3.5",
        "REMOTE_REWARD_ENQUEUE_TIMEOUT_MIN_S": "4",
        "REMOTE_REWARD_ENQUEUE_TIMEOUT_MAX_S": "5",
        "REMOTE_REWARD_ENQUEUE_TIMEOUT_S": "6",
        "COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA": "1",
    }
    found = settings_from_environment(variables)
    assert found.timeouts == Timeouts(connect_s=1.0, base_s=2.0, per_mb_s=3.5, min_s=4.0, max_s=5.0, fixed_s=6.0)
    assert not found.use_replica
    given = settings_from_environment(variables, timeouts=Timeouts(), endpoints=(Endpoint("http://a"),), timeout_s=9.0)
    assert (given.timeouts, given.endpoints, given.timeout_s) == (Timeouts(), (Endpoint("http://a"),), 9.0)


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({}, "no reward service is named; set REMOTE_REWARD_ENQUEUE_URL"),
        ({"REMOTE_REWARD_ENQUEUE_URL": " "}, "no reward service is named"),
        (
            {"REMOTE_REWARD_ENQUEUE_URL": "http://a,http://b", "REMOTE_REWARD_FETCH_URL": "http://a"},
            "there are 2 URLs to send samples to and 1 to fetch results from",
        ),
        (
            {"REMOTE_REWARD_ENQUEUE_URL": "http://a", "REMOTE_REWARD_ENQUEUE_TIMEOUT_S": "1m"},
            "REMOTE_REWARD_ENQUEUE_TIMEOUT_S is '1m'; give seconds",
        ),
        ({"REMOTE_REWARD_ENQUEUE_URL": "http://a", "REMOTE_REWARD_ENQUEUE_TIMEOUT_S": "0"}, "fixed_s is 0.0"),
    ],
)
def test_environment_that_cannot_be_used_is_refused(variables: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        settings_from_environment(variables)
