"""Instances of the reward service that share a Redis: they take over from each other, and survive its absence."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import test_reward_cosmos as cosmos
from redis_servers import PASSWORD, QUOTED, needs_redis, redis_server
from reward_load import LEASE_S, Load, Service, of_redis, services
from reward_processes import eventually


@needs_redis
def test_instances_behind_a_load_balancer_take_over_from_one_that_is_killed(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server, services() as started:
        started += [Service(tmp_path, name, of_redis(server)) for name in ("one", "two", "three")]
        clients = [one.client() for one in started]
        load = Load(clients, tmp_path / "scored")
        assert eventually(lambda: len(load.accepted) >= 60)
        # A client may pull anywhere.
        for id in list(load.accepted)[:20]:
            replies = [client.send("GET", f"/v1/rewards/{id}?wait_s=30") for client in clients]
            assert replies[0].status == 200, replies
            assert replies[0].body == replies[1].body == replies[2].body
        started[0].end()
        num = len(load.accepted)
        assert eventually(lambda: len(load.accepted) >= num + 30)
        load.stop()
        load.check(clients[1])
        load.check(clients[2])
        for completion, scored_by in load.scored_by().items():
            living = [name for name in scored_by if name != "one"]
            assert len(living) <= 1, f"{completion} was scored twice by instances that live"
            assert len(scored_by) <= 2


@needs_redis
def test_client_of_cosmos_rl_pulls_at_another_instance_than_the_dead_one_that_accepted(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server, ExitStack() as stack:
        recipe = f"{cosmos.RECIPE}{of_redis(server)}\n"
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        pulled_at = stack.enter_context(cosmos.service(tmp_path / "two", recipe))
        shades = (10, 30, 50)
        videos = [np.full((1, 3, 5, 8, 8), shade, np.uint8) for shade in shades]
        with cosmos.service(tmp_path / "one", recipe) as accepted_at:
            variables = {**cosmos.variables(pulled_at, "REMOTE")}
            variables["REMOTE_REWARD_ENQUEUE_URL"] = variables["REMOTE_REWARD_ENQUEUE_URL"].replace(
                str(pulled_at), str(accepted_at)
            )
            client = cosmos.CosmosClient(variables, "REMOTE")
            meta = {"reward_fn": {"dance_grpo": 1.0}, "media_type": "video", "video_infos": [{"video_fps": 16.0}]}
            prompts = ("quick", "slow", "slow")
            ids = [
                client.enqueue(one, {**meta, "prompts": [text]})[0] for one, text in zip(videos, prompts, strict=True)
            ]
            assert client.fetch(ids[0], None, "dance_grpo")["scores"]["overall_reward"] == [10.0]
        for id, shade in zip(ids, shades, strict=True):
            assert client.fetch(id, None, "dance_grpo")["scores"]["overall_reward"] == [float(shade)]


@needs_redis
def test_instances_continue_when_redis_was_gone_for_a_while(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server, services() as started:
        started += [Service(tmp_path, name, of_redis(server)) for name in ("one", "two")]
        clients = [one.client() for one in started]
        load = Load(clients, tmp_path / "scored")
        assert eventually(lambda: len(load.accepted) >= 40)
        server.stop()
        assert eventually(lambda: 503 in load.refused)
        refused = clients[0].send("POST", "/v1/rewards", {"samples": [{"completion": "a"}]})
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert eventually(lambda: clients[0].send("GET", "/readyz").status == 503)
        assert "starling_reward_store_available 0" in clients[0].send("GET", "/metrics").body
        time.sleep(1.5 * LEASE_S)
        server.start()
        num = len(load.accepted)
        assert eventually(lambda: len(load.accepted) >= num + 20)
        load.stop()
        load.check(clients[0])
        load.check(clients[1])
        twice = {completion: names for completion, names in load.scored_by().items() if len(names) > 1}
        assert not twice, f"{twice}, and no instance has died; the log of one:\n{started[0].log.read_text()}"
        assert eventually(lambda: clients[0].send("GET", "/readyz").status == 200)
        for one in started:
            log = one.log.read_text()
            assert log.count("store_unavailable") == log.count("store_available") >= 1
            assert PASSWORD not in log
            assert QUOTED not in log
            assert "Traceback" not in log
