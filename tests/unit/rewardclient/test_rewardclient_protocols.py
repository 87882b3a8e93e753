"""What the reward client sends, byte by byte, and how it reads replies."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from math import isfinite
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from starling.common.errors import ConfigError
from starling.reward.http.npy import read_npy
from starling.reward.http.schema import read_rewards
from starling.rewardclient.combine import RewardFunction, RewardRule
from starling.rewardclient.errors import AnswerInvalidError
from starling.rewardclient.media import latents, pixels
from starling.rewardclient.protocols.cosmos import CosmosProtocol
from starling.rewardclient.protocols.protocol import Ticket
from starling.rewardclient.protocols.v1 import V1Protocol
from starling.rewardclient.samples import RewardSample
from starling.rewardclient.settings import Endpoint

V1 = Endpoint("http://host", token="secret")
COSMOS = Endpoint("https://gateway/api/reward/enqueue", token="secret")
RULE = RewardRule(
    functions=(
        RewardFunction(name="dance_grpo", weight=0.5, score_key="vq_reward+mq_reward"),
        RewardFunction(name="pickscore", weight=-1.0),
        RewardFunction(name="unused", weight=0.0),
    )
)
VIDEO = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)


def cosmos(rule: RewardRule = RULE, **extras: Any) -> CosmosProtocol:
    return CosmosProtocol(rule, extras, use_replica=True)


def ticket(num: int, replica: str = "") -> Ticket:
    return Ticket(id="id-1", fetch_url="http://host", groups=(0,) * num, replica=replica)


def body_of(content: bytes) -> tuple[dict[str, Any], tuple[int, ...], str, bytes]:
    """Return the JSON, and the shape, dtype and elements of the file, of a body of `/api/reward/enqueue`."""
    line, _, rest = content.partition(b"\n")
    header, elements = read_npy(rest)
    return json.loads(line), header.shape, header.dtype, bytes(elements)


texts = st.text(st.characters(codec="utf-8"), max_size=10)


@given(
    texts=st.lists(st.tuples(texts, texts, texts), min_size=1, max_size=4),
    metadata=st.dictionaries(
        texts, st.none() | st.booleans() | st.integers(-9, 9) | texts | st.lists(texts), max_size=3
    ),
)
def test_service_reads_the_samples_that_the_client_sends(
    texts: list[tuple[str, str, str]], metadata: dict[str, Any]
) -> None:
    samples = [RewardSample(completion=a, prompt=b, reference=c, metadata=metadata) for a, b, c in texts]
    samples.append(RewardSample(completion="x", num_tokens=3, truncated=True, environment_reward=0.0, group="g"))
    found = read_rewards(V1Protocol(RewardRule()).enqueue(V1, samples).content).samples
    assert [(one.completion, one.prompt, one.reference) for one in found[:-1]] == texts
    assert all(one.metadata == metadata for one in found[:-1])
    last = found[-1]
    assert (last.num_tokens, last.truncated, last.environment_reward, last.group) == (3, True, 0.0, "g")


def test_v1_requests_have_the_token_and_the_urls() -> None:
    protocol = V1Protocol(RewardRule())
    sent = protocol.enqueue(V1, [RewardSample(completion="a")])
    assert (sent.method, sent.url) == ("POST", "http://host/v1/rewards")
    assert sent.headers == {"content-type": "application/json", "authorization": "Bearer secret"}
    assert json.loads(sent.content) == {"samples": [{"completion": "a"}], "wait_s": 0}
    asked = protocol.poll(V1, ticket(1), "", 1.5)
    assert (asked.method, asked.url, asked.wait_s) == ("GET", "http://host/v1/rewards/id-1?wait_s=1.500", 1.5)
    removed = protocol.remove(V1, ticket(1))
    assert removed is not None
    assert (removed.method, removed.url) == ("DELETE", "http://host/v1/rewards/id-1")
    with_key = Endpoint("http://host/v1/rewards?key=1", protocol="v1")
    assert protocol.poll(with_key, ticket(1), "", 0.0).url == "http://host/v1/rewards/id-1?key=1&wait_s=0.000"


@pytest.mark.parametrize(
    ("media", "dtype", "shape"),
    [
        (pixels(VIDEO, 8.0), "uint8", VIDEO.shape),
        (latents(np.ones((16, 1, 2, 2), np.float16)), "float16", (16, 1, 2, 2)),
        (latents(torch.ones(16, 1, 2, 2, dtype=torch.bfloat16)), "bfloat16", (16, 1, 2, 2)),
    ],
)
def test_v1_media_are_files_in_base64(media: Any, dtype: str, shape: tuple[int, ...]) -> None:
    sample = RewardSample(prompt="a cat", media=media)
    body = read_rewards(V1Protocol(RewardRule()).enqueue(V1, [sample]).content).samples[0].media
    assert body is not None
    assert (body.kind, body.fps) == (media.kind, media.fps)
    header, elements = read_npy(base64.b64decode(body.npy, validate=True))
    assert (header.dtype, header.shape) == (dtype, shape)
    assert bytes(elements) == media.data.tobytes()


def test_v1_refuses_what_json_cannot_hold() -> None:
    with pytest.raises(ConfigError, match="a sample cannot be written as JSON"):
        V1Protocol(RewardRule()).enqueue(V1, [RewardSample(completion="\ud800")])
    with pytest.raises(ConfigError, match="a sample cannot be written as JSON"):
        V1Protocol(RewardRule()).size_of(RewardSample(metadata={"a": object()}))


def test_cosmos_images_are_one_array_after_a_line() -> None:
    samples = [RewardSample(prompt=text, media=pixels(VIDEO[:1])) for text in ("a\ncat", "ein Vögelchen")]
    sent = cosmos(geneval_only_strict=True).enqueue(COSMOS, samples)
    assert (sent.method, sent.url) == ("POST", "https://gateway/api/reward/enqueue")
    assert sent.headers == {"content-type": "application/octet-stream", "authorization": "Bearer secret"}
    fields, shape, dtype, elements = body_of(sent.content)
    assert fields == {
        "geneval_only_strict": True,
        "prompts": ["a\ncat", "ein Vögelchen"],
        "reward_fn": {"dance_grpo": 0.5, "pickscore": 1.0},
        "video_infos": [{"video_fps": 16.0}] * 2,
        "media_type": "image",
    }
    assert (shape, dtype, elements) == ((2, 4, 5, 3), "uint8", VIDEO[:1].tobytes() * 2)


def test_cosmos_tags_have_an_element_for_each_sample() -> None:
    samples = [
        RewardSample(media=pixels(VIDEO[0])),
        RewardSample(media=pixels(VIDEO[0]), metadata={"geneval_tags": "color"}),
    ]
    fields = body_of(cosmos().enqueue(COSMOS, samples).content)[0]
    assert fields["geneval_tags"] == [None, "color"]
    assert "geneval_includes" not in fields


@pytest.mark.parametrize(
    ("status", "score", "expected"),
    [
        ("ok", 1.0, "ok"),
        ("truncated", 1.0, "truncated"),
        ("reward_error", 1.0, "ok"),
        ("ok", None, "reward_error"),
        ("truncated", None, "reward_error"),
        ("reward_timeout", None, "reward_timeout"),
    ],
)
def test_v1_status_fits_the_reward_of_the_clients_rule(status: str, score: float | None, expected: str) -> None:
    result = {
        "rewards": [None],
        "statuses": [status],
        "problems": [["why"]],
        "scores": {"q/b": [score], "q": [9.0], "r": [None]},
        "evaluation_scores": {"e": [0.5]},
    }
    rule = RewardRule(functions=(RewardFunction(name="q", score_key="b"),))
    found = V1Protocol(rule).read_result(ticket(1), [json.dumps(result).encode()])
    assert (found.rewards, found.statuses) == ((score,), (expected,))
    assert found.problems[0][0] == "why"
    assert found.evaluation_scores == {"e": (0.5,)}


def test_cosmos_videos_have_their_channels_second() -> None:
    sent = cosmos().enqueue(COSMOS, [RewardSample(media=pixels(VIDEO, 8.0))])
    fields, shape, dtype, elements = body_of(sent.content)
    assert (fields["media_type"], fields["video_infos"]) == ("video", [{"video_fps": 8.0}])
    assert (shape, dtype) == ((1, 3, 2, 4, 5), "uint8")
    assert elements == np.moveaxis(VIDEO, -1, 0).tobytes()


def test_cosmos_latents_of_bfloat16_are_bytes() -> None:
    tensor = torch.randn(16, 1, 2, 3).bfloat16()
    sent = cosmos().enqueue(COSMOS, [RewardSample(media=latents(tensor))] * 2)
    fields, shape, dtype, elements = body_of(sent.content)
    assert (fields["media_type"], shape, dtype) == ("latent", (2, 16, 1, 2, 6), "uint8")
    assert elements == tensor.view(torch.uint8).numpy().tobytes() * 2


def test_cosmos_samples_that_cannot_be_sent_are_refused() -> None:
    with pytest.raises(ConfigError, match="scores pixels and latents, and a sample has none"):
        cosmos().form_of(RewardSample(completion="text"))
    with pytest.raises(ConfigError, match="3 channels, which /api/reward takes for pixels"):
        cosmos().form_of(RewardSample(media=latents(np.zeros((3, 1, 1, 1), np.float32))))
    with pytest.raises(ConfigError, match="the extras have the field 'prompts'"):
        cosmos(prompts=[])
    forms = {cosmos().form_of(RewardSample(media=pixels(one))) for one in (VIDEO, VIDEO[:1], VIDEO[0], VIDEO[:, 1:])}
    assert len(forms) == 3


def test_cosmos_results_are_pulled_by_type_from_the_replica_that_has_them() -> None:
    protocol = cosmos()
    assert protocol.read_accepted(b'{"uuid": "id-1", "replica_id": "r/1"}') == ("id-1", "r/1")
    assert protocol.read_accepted(b'{"uuid": "id-1", "replica_id": null}') == ("id-1", "")
    assert protocol.parts_of(ticket(1)) == ("dance_grpo", "pickscore")
    asked = protocol.poll(COSMOS, ticket(1, "r/1"), "dance_grpo", 30.0)
    assert (asked.method, asked.url, asked.wait_s) == ("POST", "https://gateway/api/reward/pull", 0.0)
    assert parse_qs(asked.content.decode()) == {"uuid": ["id-1"], "type": ["dance_grpo"]}
    assert asked.headers == {
        "content-type": "application/x-www-form-urlencoded",
        "authorization": "Bearer secret",
        "x-lepton-replica-target": "r/1",
    }
    anywhere = CosmosProtocol(RULE, {}, use_replica=False).poll(COSMOS, ticket(1, "r/1"), "dance_grpo", 0.0)
    assert "x-lepton-replica-target" not in anywhere.headers
    assert protocol.remove(COSMOS, ticket(1)) is None


def test_cosmos_reward_is_combined_from_all_types() -> None:
    dance = {"scores": {"vq_reward": [1.0, 2.0], "mq_reward": [0.5, None], "verdict": ["Good", "Bad"]}, "error": "x"}
    pick = {"scores": {"pickscore": [0.25, 0.5], "group": {"colors": [1.0, 1.0]}}, "duration": "0.77"}
    found = cosmos().read_result(ticket(2), [json.dumps(one).encode() for one in (dance, pick)])
    assert found.rewards == (0.5, None)
    assert found.statuses == ("ok", "reward_error")
    assert found.problems[1] == ("scorer 'dance_grpo' has no score for this sample: x",)
    assert found.scores["pickscore"] == (0.25, 0.5)
    assert found.scores["dance_grpo/mq_reward"] == (0.5, None)


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"scores": None, "error": "no GPU\nleft"}, "scorer 'dance_grpo' failed: no GPU left"),
        ({"scores": None}, "scorer 'dance_grpo' failed: the service gives no reason"),
        ({}, "scorer 'dance_grpo' failed: the service gives no reason"),
        ({"scores": {"vq_reward": [1.0]}}, "scorer 'dance_grpo' has no score 'mq_reward'; it has vq_reward."),
        ({"scores": {"vq_reward": [1.0, 2.0]}}, "scorer 'dance_grpo' has no score 'vq_reward'; it has none."),
    ],
)
def test_cosmos_failure_of_a_type_is_the_samples_problem(document: dict[str, Any], problem: str) -> None:
    pick = b'{"scores": {"pickscore": [1.0]}}'
    found = cosmos().read_result(ticket(1), [json.dumps(document).encode(), pick])
    assert (found.rewards, found.problems) == ((None,), ((problem,),))


@given(
    data=st.binary(max_size=40)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["rewards", "statuses", "problems", "scores", "error", "id", "uuid"]), inner
            )
        ),
        max_leaves=12,
    ).map(lambda value: json.dumps(value).encode())
)
def test_replies_of_any_form_are_rewards_or_an_error(data: bytes) -> None:
    """Nothing else is raised, and whatever is returned has the form of rewards."""
    for protocol in (V1Protocol(RewardRule()), V1Protocol(RULE), cosmos()):
        with suppress(AnswerInvalidError):
            found = protocol.read_result(ticket(2), [data] * len(protocol.parts_of(ticket(2))))
            assert len(found.rewards) == len(found.statuses) == len(found.problems) == 2
            assert all(one is None or isfinite(one) for one in found.rewards)
        with suppress(AnswerInvalidError):
            assert protocol.read_accepted(data).id.isprintable()
