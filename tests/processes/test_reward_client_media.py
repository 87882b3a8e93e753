"""The reward client with images, videos and latents, over `/v1/rewards` and over `/api/reward`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tcp_proxy import PASS, Fault, Proxy, Seen, in_turn, proxy
from test_reward_cosmos import TOKEN, variables
from test_reward_cosmos import service as run_service

from starling.rewardclient.blocking import RewardClient
from starling.rewardclient.client import AsyncRewardClient
from starling.rewardclient.combine import RewardFunction, RewardRule
from starling.rewardclient.environment import settings_from_environment
from starling.rewardclient.errors import RequestRefusedError, RewardsLateError, ServiceUnreachableError
from starling.rewardclient.media import latents, pixels
from starling.rewardclient.samples import RewardSample
from starling.rewardclient.schedule import Polling, Retries
from starling.rewardclient.settings import ClientSettings, Endpoint

SCORERS = """
import time

class Judge:
    keys = ("bright", "rate")
    media = "pixels"

    def score(self, batch):
        if "hang" in batch.prompts:
            time.sleep(3600.0)
        if "raise" in batch.prompts:
            raise RuntimeError("no such video")
        return {"bright": [float(one.mean()) for one in batch.pixels], "rate": [rate / 10 for rate in batch.fps]}

def exact(completion, reference, prompt_text, metadata):
    return float(completion == reference)

class Mean:
    media = "latents"

    def score(self, batch):
        return {"score": [float(one.mean()) for one in batch.latents]}
"""
RECIPE = """
[reward]
num_workers = 4

[[reward.scorers]]
name = "{folder}/judges.py:Judge"
label = "judge"
key = "bright"
tasks = ["video"]
retries = 0
timeout_s = 15.0

[[reward.scorers]]
name = "{folder}/judges.py:Mean"
label = "mean"
tasks = ["latent"]

[[reward.scorers]]
name = "{folder}/judges.py:exact"
tasks = ["text"]

[reward.http]
enabled = true
port = 0
token = "secret"
"""
PATHS = {"v1": "/v1/rewards", "cosmos": "/api/reward/enqueue"}
SOON = Retries(max_retries=4, first_s=0.01, max_s=0.05)
JUDGE = RewardRule(
    functions=(RewardFunction(name="judge", score_key="bright+rate", weight=0.5, clip_max=100.0),), clip_max=40.0
)
MEAN = RewardRule(functions=(RewardFunction(name="mean", score_key="mean"),))


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("service")
    (folder / "judges.py").write_text(SCORERS)
    with run_service(folder, RECIPE, LEPTON_REPLICA_ID="replica-7") as port:
        yield port


@pytest.fixture(params=sorted(PATHS))
def path(request: pytest.FixtureRequest) -> str:
    return PATHS[request.param]


def settings(port: int, path: str, rule: RewardRule = JUDGE, **changes: Any) -> ClientSettings:
    task = "latent" if rule is MEAN else "video"
    fields: dict[str, Any] = {"rule": rule, "retries": SOON, "timeout_s": 60.0} | changes
    if path != PATHS["v1"]:
        fields = {"extras": {"task": task}} | fields
    return ClientSettings(endpoints=(Endpoint(f"http://127.0.0.1:{port}{path}", token=TOKEN),), **fields)


def video(shade: int, num_frames: int = 2, fps: float = 8.0, prompt: str = "a cat") -> RewardSample:
    array = np.full((num_frames, 4, 6, 3), shade, np.uint8)
    return RewardSample(prompt=prompt, media=pixels(array, fps), metadata={"task": "video"})


def latent(array: Any) -> RewardSample:
    return RewardSample(prompt="a cat", media=latents(array), metadata={"task": "latent"})


def test_videos_and_images_have_the_same_rewards_over_both_protocols(port: int, path: str) -> None:
    samples = [video(10), video(20), video(200), video(10, num_frames=3), video(10, fps=16.0), video(30, num_frames=1)]
    with RewardClient(settings(port, path)) as client:
        found = client.score(samples)
    image = 15.0 if path != PATHS["v1"] else 15.4  # the wire of /api/reward has no frame rate for images
    assert found.rewards == pytest.approx((5.4, 10.4, 40.0, 5.4, 5.8, image))
    assert found.statuses == ("ok",) * 6
    assert found.scores["judge/bright"] == (10.0, 20.0, 200.0, 10.0, 10.0, 30.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_latents_of_torch_have_the_same_rewards_over_both_protocols(port: int, path: str, dtype: torch.dtype) -> None:
    tensors = [torch.full((16, 1, 2, 3), value, dtype=dtype) for value in (0.5, -1.25)]
    broken = torch.full((16, 1, 2, 3), float("nan"), dtype=dtype)
    with RewardClient(settings(port, path, MEAN)) as client:
        found = client.score([latent(tensors[0]), latent(broken), latent(tensors[1])])
    assert found.rewards == (0.5, None, -1.25)
    assert found.statuses == ("ok", "reward_error", "ok")
    assert found.problems[1] == ("its latents have NaN or infinities, and were not sent.",)


def test_failure_of_a_scorer_is_known_at_once(port: int, path: str) -> None:
    with RewardClient(settings(port, path)) as client:
        found = client.score([video(10, prompt="raise")])
    assert (found.rewards, found.statuses) == ((None,), ("reward_error",))
    assert any("no such video" in text for text in found.problems[0])


def test_settings_of_the_environment_reach_the_wire(port: int) -> None:
    for era in ("REMOTE", "WFM"):
        found = settings_from_environment(variables(port, era), rule=JUDGE, extras={"task": "video"})
        with RewardClient(found) as client:
            assert client.score([video(10)]).rewards == pytest.approx((5.4,))


def test_wire_asks_again_while_it_is_not_ready_and_names_the_replica(port: int) -> None:
    polling = Polling(first_s=0.05, max_s=0.1)
    with (
        proxy(port) as between,
        RewardClient(settings(between.port, PATHS["cosmos"], polling=polling)) as client,
        pytest.raises(RewardsLateError, match="has no rewards after 2 s"),
    ):
        client.score([video(10, prompt="hang")], timeout_s=2.0)
    asked = [one for one in between.seen if one.path == "/api/reward/pull"]
    assert 3 <= len(asked) <= 42
    assert {one.headers["x-lepton-replica-target"] for one in asked} == {"replica-7"}


@pytest.mark.parametrize("end", ["enqueue", "pull"])
@pytest.mark.parametrize(
    "fault",
    [Fault("reset"), Fault("answer", 503), Fault("reset_after"), Fault("answer", 429, ("retry-after: 0",))],
    ids=["reset", "503", "reset_after", "429"],
)
def test_wire_repeats_what_failed_on_its_way(port: int, end: str, fault: Fault) -> None:
    faults = in_turn([fault] * 3)

    def rule(request: Seen) -> Fault:
        return faults(request) if request.path.endswith(end) else PASS

    with proxy(port, rule) as between, RewardClient(settings(between.port, PATHS["cosmos"])) as client:
        assert client.score([video(10)]).rewards == pytest.approx((5.4,))
        assert sum(one.path.endswith("enqueue") for one in between.seen) == (4 if end == "enqueue" else 1)


@pytest.mark.parametrize("status", [401, 404, 413, 422])
def test_wire_refusal_of_a_pull_is_final(port: int, status: int) -> None:
    def rule(request: Seen) -> Fault:
        refused = Fault("answer", status, body=b'{"detail": "not here"}')
        return refused if request.path.endswith("pull") else PASS

    with proxy(port, rule) as between, RewardClient(settings(between.port, PATHS["cosmos"])) as client:
        with pytest.raises(RequestRefusedError, match=f"was refused with status {status}: not here"):
            client.score([video(10)])
        assert sum(one.path.endswith("pull") for one in between.seen) == 1


def test_wire_that_fails_at_every_pull_says_so(port: int) -> None:
    def rule(request: Seen) -> Fault:
        return Fault("answer", 500) if request.path.endswith("pull") else PASS

    with proxy(port, rule) as between, RewardClient(settings(between.port, PATHS["cosmos"])) as client:
        with pytest.raises(ServiceUnreachableError, match=r"status 500: .*; this was the last of 5 tries"):
            client.score([video(10)])
        assert sum(one.path.endswith("pull") for one in between.seen) == 5


def test_scorer_that_the_service_does_not_know_is_refused_by_name(port: int) -> None:
    rule = RewardRule(functions=(RewardFunction(name="hpsv2"),))
    with (
        RewardClient(settings(port, PATHS["cosmos"], rule)) as client,
        pytest.raises(RequestRefusedError, match=r"status 422: there is no scorer 'hpsv2' here; `reward_fn` may have"),
    ):
        client.score([video(10)])


def test_many_tickets_are_pulled_together_within_a_bound(port: int, path: str) -> None:
    async def run(between: Proxy) -> None:
        async with AsyncRewardClient(settings(between.port, path, max_polls=3)) as client:
            shades = range(1, 21)
            tickets = await asyncio.gather(*(client.enqueue([video(shade)]) for shade in shades))
            found = await client.fetch_many(tickets, min_valid_rate=1.0)
            assert [one.scores["judge/bright"] for one in found] == [(float(shade),) for shade in shades]

    with proxy(port, lambda _: Fault("pass", delay_s=0.05)) as between:
        asyncio.run(run(between))
        assert 1 <= between.most_open["GET" if path == PATHS["v1"] else "/api/reward/pull"] <= 3


def test_texts_are_scored_beside_media_by_one_service(port: int) -> None:
    texts = [RewardSample(completion=text, reference="5", metadata={"task": "text"}) for text in "5x"]
    plain = ClientSettings(endpoints=(Endpoint(f"http://127.0.0.1:{port}", token=TOKEN),))
    with RewardClient(plain) as client:
        assert client.score(texts).rewards == (1.0, 0.0)
