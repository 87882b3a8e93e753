"""Options of the scorer `service`: what is refused before the start, and where its token may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from starling.common.errors import ConfigError
from starling.reward.score.scorers.registry import check_scorer, load_scorer
from starling.reward.score.scorers.service import Service
from starling.reward.settings import RewardSettings
from starling.rewardclient.environment import PREFIXES

URL = "http://127.0.0.1:9/v1/rewards"
MEDIA_URL = "https://host/api/reward/enqueue"
TOKEN = "secret-of-the-test"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix in PREFIXES:
        for name in ("TOKEN", "ENQUEUE_URL", "FETCH_URL"):
            monkeypatch.delenv(prefix + name, raising=False)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"url": "ftp://host/v1/rewards"}, "has the URL 'ftp://host/v1/rewards'; give one as http://"),
        ({"url": "http://host/other"}, "has the path of no known API; end it with /v1/rewards"),
        ({"url": f"http://user:{TOKEN}@host/v1/rewards"}, "a URL has a user or password before its host: give a token"),
        ({"url": "http://a/v1/rewards", "fetch_url": f"http://u:{TOKEN}@a/v1/rewards"}, "user or password"),
        ({"url": MEDIA_URL}, "/api/reward scores media, and texts are sent; set media = 'latents'"),
        (
            {"url": MEDIA_URL, "media": "latents"},
            "asks for scorers by name, and none is given; set the option functions",
        ),
        ({"media": "pixels"}, "media must be one of text, latents, not 'pixels'"),
        ({"keys": "score"}, r"keys must be a list of names, as \[\"score\"\], not 'score'"),
        ({"keys": []}, "keys must be a list of names"),
        ({"functions": {"name": "a"}}, "functions must be a list of tables with a name"),
        ({"functions": [{"weight": 1.0}]}, "has no name; its fields are name, weight, score_key"),
        ({"functions": [{"name": "a", "wait": 1.0}]}, "has 'wait'; its fields are name"),
        ({"functions": [{"name": "a", "weight": 0.0}]}, r"\['a'\] have the weight 0"),
        ({"functions": [{"name": "a", "weight": "b"}]}, "must be real number"),
        ({"functions": [{"name": str(number)} for number in range(65)]}, "65 tables; give at most 64"),
        ({"retries": -1}, "max_retries is -1; give a number from 0"),
        ({"time_limit_s": 0}, "time_limit_s must be a number above 0, not 0"),
        ({"token_variable": "A", "token_file": "/b"}, "token_variable and token_file are both set; leave one out"),
        ({"token": TOKEN}, "has no option 'token'; its options are: url, fetch_url, token_variable, token_file"),
    ],
)
def test_options_are_checked_before_the_start(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        check_scorer("service", {"url": URL, **options})
    assert str(refused.value).startswith("Scorer 'service'")
    assert str(refused.value).endswith(".")
    assert TOKEN not in str(refused.value)


def test_service_of_media_and_names_of_scores_are_accepted() -> None:
    functions = [{"name": "dance_grpo", "score_key": "overall_reward"}]
    scorer = Service(url=MEDIA_URL, media="latents", functions=functions, keys=["score", "dance_grpo/vq_reward"])
    assert (scorer.media, scorer.scope, scorer.keys) == ("latents", "groupwise", ("score", "dance_grpo/vq_reward"))
    check_scorer("service", {"url": "http://a:8080, http://b:8080"})
    check_scorer("service", {})


@pytest.mark.parametrize(
    ("options", "needs", "declared"),
    [
        ({"url": URL}, {}, "{ network = true }"),
        ({"url": URL, "token_variable": "T"}, {"network": True}, '{ network = true, variables = ["T"] }'),
        ({}, {"network": True}, '{ network = true, variables = ["REMOTE_REWARD_ENQUEUE_URL"] }'),
    ],
)
def test_network_and_variables_must_be_declared(options: dict[str, Any], needs: dict[str, Any], declared: str) -> None:
    with pytest.raises(ValueError, match="asks another service over the network") as refused:
        RewardSettings.model_validate({"scorers": [{"name": "service", "options": options, "needs": needs}]})
    assert f"declare `needs = {declared}`" in str(refused.value)


def test_variables_of_either_name_are_enough() -> None:
    for prefix in PREFIXES:
        needs = {"network": True, "variables": [f"{prefix}ENQUEUE_URL", f"{prefix}TOKEN"]}
        RewardSettings.model_validate({"scorers": [{"name": "service", "needs": needs}]})


def test_url_and_token_are_read_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"no reward service is named; set REMOTE_REWARD_ENQUEUE_URL.*`needs.variables`"
    ):
        load_scorer("service", {})
    with pytest.raises(ConfigError, match=r"the environment has no NO_SUCH_TOKEN.*`needs.variables`"):
        load_scorer("service", {"url": URL, "token_variable": "NO_SUCH_TOKEN"})
    with pytest.raises(ConfigError, match=r"token_file '/no/token' cannot be read \(No such file.*`needs.paths`"):
        load_scorer("service", {"url": URL, "token_file": "/no/token"})
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ConfigError, match="is empty: write the token into it"):
        load_scorer("service", {"url": URL, "token_file": str(tmp_path / "token")})
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"cannot be read \(it is no text\)"):
        load_scorer("service", {"url": URL, "token_file": str(tmp_path / "token")})
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    monkeypatch.setenv("WFM_REWARD_FETCH_URL", "http://elsewhere/v1/rewards")
    monkeypatch.setenv("WFM_REWARD_TOKEN", "another")
    scorer = Service(url=URL, token_file=str(tmp_path / "token"))
    (endpoint,) = scorer._settings(scorer._variables()).endpoints
    assert (endpoint.enqueue_url, endpoint.fetch_url, endpoint.token) == (URL, URL, TOKEN)
    monkeypatch.setenv("WFM_REWARD_ENQUEUE_URL", URL)
    scorer = Service()
    (endpoint,) = scorer._settings(scorer._variables()).endpoints
    assert (endpoint.enqueue_url, endpoint.token) == (URL, "another")
    assert endpoint.fetch_url == "http://elsewhere/v1/rewards"
