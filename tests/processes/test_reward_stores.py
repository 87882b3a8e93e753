"""Accepted means answered: a reward service that is killed and stopped under load, with SQLite and with Redis."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis_servers import PASSWORD, QUOTED, needs_redis, redis_server
from reward_load import Load, Service, of_redis, services
from reward_processes import PATIENCE_S, eventually
from small_disk import disk


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=needs_redis)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return the settings of a store."""
    with ExitStack() as stack:
        if request.param == "sqlite":
            yield 'store = "sqlite"'
        else:
            yield of_redis(stack.enter_context(redis_server(tmp_path / "redis")))


def test_every_accepted_request_is_answered_though_the_service_is_killed_under_load(store: str, tmp_path: Path) -> None:
    with services() as started:
        load: Load | None = None
        loads = []
        for number in range(2):
            started.append(Service(tmp_path, f"start-{number}", store))
            load = Load([started[-1].client()], tmp_path / "scored", f"{number}-")
            loads.append(load)
            num = 60 * (number + 1)
            assert eventually(lambda load=load, num=num: len(load.accepted) >= num), started[-1].log.read_text()
            started[-1].end()
            load.stop()
        started.append(Service(tmp_path, "last", store))
        client = started[-1].client()
        for load in loads:
            load.check(client)
        for completion, scored_by in load.scored_by().items():
            assert len(scored_by) == len(set(scored_by)), f"{completion} was scored twice by one process"
        assert eventually(lambda: "starling_reward_pending_samples 0" in client.send("GET", "/metrics").body)
        assert started[-1].process.poll() is None
        for one in started:
            assert "Traceback" not in one.log.read_text(), one.log.read_text()
            assert QUOTED not in one.log.read_text()
            assert PASSWORD not in one.log.read_text()


def test_results_and_requests_survive_a_stop_and_results_are_never_another(store: str, tmp_path: Path) -> None:
    with services() as started:
        started.append(Service(tmp_path, "first", store))
        load = Load([started[0].client()], tmp_path / "scored")
        assert eventually(lambda: len(load.accepted) >= 40)
        done = {}
        client = started[0].client()
        for id in list(load.accepted)[:10]:
            done[id] = client.send("GET", f"/v1/rewards/{id}?wait_s=30")
            assert done[id].status == 200
        removed = next(reversed(done))
        assert client.send("DELETE", f"/v1/rewards/{removed}").status == 204
        started[0].end(signal.SIGTERM)
        assert started[0].process.returncode == 0, started[0].log.read_text()
        load.stop()
        started.append(Service(tmp_path, "second", store))
        client = started[1].client()
        del done[removed], load.accepted[removed]
        assert client.send("GET", f"/v1/rewards/{removed}").status == 404
        for id, reply in done.items():
            assert client.send("GET", f"/v1/rewards/{id}").body == reply.body
        load.check(client)
        twice = {text: by for text, by in load.scored_by().items() if len(by) > 1}
        # Those that were being scored at the stop; all others were scored once.
        assert all(len(by) == 2 and by[0] != by[1] for by in twice.values()), twice


def test_store_that_cannot_be_used_is_one_sentence_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "requests-reward-0.sqlite").write_text("text" * 1000)
    service = Service(tmp_path, "one", 'store = "sqlite"')
    assert service.process.wait(PATIENCE_S) == 2
    assert "requests-reward-0.sqlite cannot be used: file is not a database" in service.log.read_text()
    service = Service(tmp_path, "two", 'store = "redis"')
    assert service.process.wait(PATIENCE_S) == 2
    assert 'reward.http.store is "redis": set reward.http.redis_url' in service.log.read_text()
    service = Service(tmp_path, "typo", f'store = "redis"\nredis_ulr = "redis://:{QUOTED}@127.0.0.1:1/0"')
    assert service.process.wait(PATIENCE_S) == 2
    log = service.log.read_text()
    assert "unknown setting reward.http.redis_ulr = (hidden); did you mean" in log
    service = Service(tmp_path, "three", f'store = "redis"\nredis_url = "redis://:{QUOTED}@127.0.0.1:1/0"')
    assert service.process.wait(PATIENCE_S) == 2
    log = service.log.read_text()
    assert "the Redis of reward.http.redis_url cannot be used: Error" in log
    assert QUOTED not in log
    assert PASSWORD not in log
    assert "Traceback" not in log


def test_store_on_a_read_only_volume_is_one_sentence(tmp_path: Path) -> None:
    with disk(tmp_path / "small", size_mb=1) as small:
        subprocess.run(["mount", "-o", "remount,ro", str(small.folder)], timeout=60, check=True)
        path = small.folder / "requests.sqlite"
        service = Service(tmp_path, "one", f'store = "sqlite"\nstore_path = "{path}"')
        assert service.process.wait(PATIENCE_S) == 2
        assert service.log.read_text().splitlines()[-1] == (
            f"starling reward-0: cannot open {path}: Read-only file system; set reward.http.store_path to a file on a "
            "local disk"
        )
