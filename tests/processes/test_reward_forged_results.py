"""Results in a shared store that others have written: their clients get a failed result or 404, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec
import redis
from redis_servers import needs_redis, redis_server
from test_reward_cosmos import RECIPE, TOKEN, VIDEO, Raw, client_of, lines, service
from test_reward_http import Client

PREFIX: Final = "starling-reward:request:"
GOOD: Final = {
    "id": "a",
    "rewards": [1.0],
    "statuses": ["ok"],
    "problems": [[]],
    "scores": {"dance_grpo": [1.0], "dance_grpo/vq_reward": [2.0]},
}
INFO: Final = {"types": ["dance_grpo"], "pushed": [], "input_info": {"shape": [1]}, "pushed_until": 0.0}


def record(info: Any = INFO, **fields: Any) -> bytes:
    """Return a record of a result, of which other fields are as they should be."""
    contents = {"result": {**GOOD, **fields}, "info": info, "duration_s": 1.0}
    return b"SR\x01" + msgspec.msgpack.encode(contents)


FORGED: Final = [
    b"",
    b"text",
    b'{"scores": {}}',
    b"SR\x02" + record()[3:],
    record()[:-1],
    record(scores={"dance_grpo": []}),
    record(statuses=["fine"]),
    record(rewards=[], statuses=[], problems=[], scores={}),
    record(info=[]),
    record(info={}),
    record(info={name: value for name, value in INFO.items() if name != "types"}),
    record(info={name: value for name, value in INFO.items() if name != "pushed_until"}),
    record(info={**INFO, "types": 7}),
    record(info={**INFO, "types": [7]}),
    record(info={**INFO, "input_info": "none"}),
    record(info={**INFO, "input_info": {"a": msgspec.msgpack.Ext(5, b"x")}}),
    record(info={**INFO, "pushed_until": None}),
    record(info={**INFO, "types": []}),
]


@needs_redis
def test_result_that_somebody_forged_is_a_failed_result_or_unknown(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        store = f'store = "redis"\nredis_url = "{server.url}"\n'
        with service(tmp_path, RECIPE + store) as port:
            raw, client = Raw(port), Client(port, TOKEN)
            connection = redis.Redis.from_url(server.url)
            connection.hset(f"{PREFIX}good", "result", record())
            status, answer = raw.form("pull", uuid="good", type="dance_grpo")
            assert (status, json.loads(answer)["scores"]) == (200, {"vq_reward": [2.0]})
            for number, forged in enumerate(FORGED):
                id = f"forged-{number}"
                connection.hset(f"{PREFIX}{id}", "result", forged)
                status, answer = raw.form("pull", uuid=id, type="dance_grpo")
                assert status == 200, (forged, answer)
                document = json.loads(answer)
                assert (document["scores"], bool(document["error"])) == (None, True), (forged, document)
                assert client.send("GET", f"/v1/rewards/{id}").status in (200, 404), forged
            connection.set(f"{PREFIX}string", "a string")
            status, answer = raw.form("pull", uuid="string", type="dance_grpo")
            assert (status, json.loads(answer)["scores"]) == (200, None)
            assert client.send("GET", "/v1/rewards/string").status == 404
            connection.close()
            status, answer = raw.post("enqueue", lines(VIDEO, prompts=["a"], reward_fn={"dance_grpo": 1}))
            assert status == 200, answer
            assert client_of(port).fetch(json.loads(answer)["uuid"], None, "dance_grpo")["scores"]
    log = (tmp_path / "log").read_text()
    assert " failed " not in log
    assert "stored_result_refused" in log
