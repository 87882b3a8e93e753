"""The reward client and the reward service over HTTP, with faults between them."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
from reward_processes import Client, eventually
from tcp_proxy import PASS, Fault, Proxy, Seen, in_turn, proxy
from test_reward_http import service

from starling.rewardclient.blocking import RewardClient
from starling.rewardclient.client import AsyncRewardClient
from starling.rewardclient.combine import RewardFunction, RewardRule
from starling.rewardclient.errors import (
    AnswerInvalidError,
    RequestLostError,
    RequestRefusedError,
    RewardsLateError,
    ServiceUnreachableError,
    TooFewRewardsError,
)
from starling.rewardclient.hedging import Hedging
from starling.rewardclient.samples import RewardSample
from starling.rewardclient.schedule import Retries, Timeouts
from starling.rewardclient.settings import ClientSettings, Endpoint

PATIENCE_S = 60.0
COOLDOWN_S = 10.0
"""How long a client avoids a replica that has failed."""
SOON = Retries(max_retries=4, first_s=0.01, max_s=0.05)
RESET, BUSY = Fault("reset"), Fault("answer", 429, ("retry-after: 0",), b'{"detail": "full"}')


@pytest.fixture(scope="module")
def shared_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    # A removed request leaves its worker to its call until the time limit: those that hang must not occupy all.
    with service(tmp_path_factory.mktemp("service"), scorer_s=20.0, num_workers=8) as (_, port):
        yield port


@pytest.fixture
def port(shared_port: int, request: pytest.FixtureRequest) -> Iterator[int]:
    """Return the port of a service; after the test, the client has left nothing there.

    What the service accepts without the client hearing of it stays there until it expires.
    """
    before = num_held(shared_port)
    yield shared_port
    loses_reply = "POST" in request.node.name and any(one in request.node.name for one in ("reset_after", "cut"))
    assert eventually(lambda: num_held(shared_port) - loses_reply == before)


def sample(completion: str, **fields: Any) -> RewardSample:
    return RewardSample(completion=completion, reference="abc", **fields)


def settings(*urls: str, **changes: Any) -> ClientSettings:
    fields = {"retries": SOON, "timeout_s": PATIENCE_S} | changes
    return ClientSettings(endpoints=tuple(Endpoint(url) for url in urls), **fields)


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def metric(port: int, name: str) -> float:
    text = Client(port).send("GET", "/metrics").body
    return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).rpartition(" ")[2])


def num_held(port: int) -> float:
    """Return how many requests and results the service holds."""
    return metric(port, "starling_reward_requests")


def num_pending(port: int) -> float:
    return metric(port, "starling_reward_pending_samples")


def pending(port: int, num: int) -> Callable[[], bool]:
    return lambda: num_pending(port) == num


async def eventually_async(is_true: Callable[[], bool]) -> bool:
    return await asyncio.to_thread(eventually, is_true)


def test_samples_have_the_rewards_of_the_service_and_are_removed(port: int) -> None:
    with RewardClient(settings(url_of(port))) as client:
        found = client.score([sample("abc", group="one"), sample("ab", group="one"), sample("abc", group="two")])
        assert found.rewards == (1.5, 0.0, 1.5)
        assert found.statuses == ("ok", "ok", "ok")
        assert found.scores == {"right": (1.0, 0.0, 1.0), "longest": (1.0, 0.0, 1.0)}
        assert [group.rewards for group in found.by_group()] == [(1.5, 0.0), (1.5,)]
        assert (found.valid_rate, found.num_hedged) == (1.0, 0)


def test_rule_of_the_client_decides_instead_of_the_service(port: int) -> None:
    rule = RewardRule(
        functions=(RewardFunction(name="right", weight=-2.0), RewardFunction(name="longest", clip_max=0.25)), scale=10.0
    )
    with RewardClient(settings(url_of(port), rule=rule)) as client:
        found = client.score([sample("abc"), sample("abcd"), sample("a", truncated=True)])
    assert found.rewards == (-20.0, 2.5, 0.0)
    assert found.statuses == ("ok", "ok", "truncated")


def test_many_samples_are_several_requests_that_keep_groups(port: int) -> None:
    with (
        proxy(port) as between,
        RewardClient(settings(between.url, max_request_samples=4, max_polls=2, max_uploads=2)) as client,
    ):
        texts = ["abc", "abcd", "a"] * 4
        found = client.score([sample(text, group=f"g{index // 3}") for index, text in enumerate(texts)])
    assert found.rewards == (1.0, 0.5, 0.0) * 4
    assert between.num_seen()["POST"] == 4


def test_tickets_are_fetched_together_and_by_another_client(port: int) -> None:
    async def run() -> None:
        async with AsyncRewardClient(settings(url_of(port))) as client:
            tickets = [await client.enqueue([sample("abc"), sample(text)]) for text in ("abc", "a", "b")]
            first = await client.fetch(tickets[0], remove=False)
        async with AsyncRewardClient(settings(url_of(port), max_polls=2)) as other:
            found = await other.fetch_many(tickets)
            assert [one.rewards for one in found] == [(1.5, 1.5), (1.5, 0.0), (1.5, 0.0)]
            assert found[0].rewards == first.rewards
        async with AsyncRewardClient(settings(url_of(port))) as other:
            with pytest.raises(RequestLostError, match="does not know request"):
                await other.fetch(tickets[0])

    asyncio.run(run())


@pytest.mark.parametrize(
    "faults",
    [
        [RESET],
        [RESET, RESET, RESET, RESET],
        [Fault("answer", 503), Fault("answer", 500, body=b"\xff")],
        [Fault("reset_after")],
        [Fault("cut")],
        [BUSY] * 8,
    ],
    ids=["reset", "resets", "5xx", "reset_after", "cut", "busy"],
)
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_request_that_fails_on_its_way_is_repeated(port: int, faults: list[Fault], method: str) -> None:
    with proxy(port, in_turn(faults, method)) as between, RewardClient(settings(between.url)) as client:
        assert client.score([sample("abc")]).rewards == (1.5,)
        assert between.num_seen()[method] == len(faults) + 1


def test_request_that_fails_at_every_try_says_why(port: int) -> None:
    with proxy(port, lambda _: RESET) as between, RewardClient(settings(between.url)) as client:
        with pytest.raises(ServiceUnreachableError, match=r"did not answer: .*; this was the last of 5 tries"):
            client.score([sample("abc")])
        assert between.num_seen() == {"POST": 5}
    with RewardClient(settings(between.url)) as client, pytest.raises(ServiceUnreachableError, match="did not answer"):
        client.score([sample("abc")])


def test_stalled_connection_is_given_up_and_tried_again(port: int) -> None:
    timeouts = Timeouts(connect_s=5.0, fixed_s=0.5, poll_s=5.0)
    with (
        proxy(port, in_turn([Fault("stall")])) as between,
        RewardClient(settings(between.url, timeouts=timeouts)) as client,
    ):
        assert client.score([sample("abc")]).rewards == (1.5,)
        assert between.num_seen()["POST"] == 2


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("answer", 401, body=b'{"detail": "no token"}'), "status 401: no token; set REMOTE_REWARD_TOKEN"),
        (Fault("answer", 404, body=b"<html>\n"), r"status 404: <html>; is the URL that of a reward service\?"),
        (Fault("answer", 429, body=b'{"detail": "full"}'), "status 429: full, and it does not say when"),
        (Fault("answer", 400, body=b'{"message": "bad"}'), "status 400: bad"),
        (Fault("answer", 307, ("location: http://elsewhere/",)), "status 307: the service gives no reason"),
        (
            Fault("answer", 422, body=b'{"detail": [{"loc": ["body", 0], "msg": "wrong"}]}'),
            "status 422: body.0: wrong",
        ),
    ],
)
def test_refusal_is_final_and_says_why(port: int, fault: Fault, reason: str) -> None:
    with proxy(port, lambda _: fault) as between, RewardClient(settings(between.url)) as client:
        with pytest.raises(RequestRefusedError, match=reason) as found:
            client.score([sample("abc")])
        assert found.value.status == fault.status
        assert "\n" not in str(found.value)
        assert between.num_seen() == {"POST": 1}


def test_service_refuses_what_is_not_valid(port: int) -> None:
    with RewardClient(settings(url_of(port))) as client:
        with pytest.raises(RequestRefusedError, match=r"status 422: .*sample 1 of group 'g' has another prompt"):
            client.score([sample("a", group="g"), sample("b", group="g", prompt="other")])
        assert client.score([sample("abc")]).rewards == (1.5,)


def test_service_says_why_it_refuses_large_bodies(tmp_path: Path) -> None:
    """It reads what it refuses: otherwise the connection would be reset, and the client retry in vain."""
    limits = "max_body_mb = 40\nmax_memory_mb = 40\ntoken = 'secret'\nresult_ttl_s = 2.0\n"
    large = [sample("a" * (30 << 20))]
    with service(tmp_path, limits, scorer_s=60.0) as (_, port):
        for token, samples, reason in (
            ("wrong", large, "refused with status 401"),
            ("secret", [sample("a" * (200 << 20))], "refused with status 413: the body has more than 40 MiB"),
        ):
            given = ClientSettings(endpoints=(Endpoint(url_of(port), token=token),), timeout_s=PATIENCE_S)
            with RewardClient(given) as client, pytest.raises(RequestRefusedError, match=reason):
                client.score(samples)
        given = ClientSettings(endpoints=(Endpoint(url_of(port), token="secret"),), timeout_s=PATIENCE_S)
        retries = Retries(max_retries=0)
        given = ClientSettings(
            endpoints=(Endpoint(url_of(port), token="secret"),), timeout_s=PATIENCE_S, retries=retries
        )
        with RewardClient(given) as client:
            first = client.enqueue(large)
            second = client.submit(large)  # refused with 429 until the first is removed
            assert client.fetch(first).rewards == (0.5,)
            assert second.result(PATIENCE_S).rewards == (0.5,)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"<html>", b'{"id": 3}', b'{"id": "a\\nb"}', b'{"id": ""}', b'{"id": "' + b"a" * 300 + b'"}'],
)
def test_reply_that_is_no_ticket_is_reported(port: int, body: bytes) -> None:
    with (
        proxy(port, lambda _: Fault("answer", 200, body=body)) as between,
        RewardClient(settings(between.url)) as client,
        pytest.raises(AnswerInvalidError, match="is the URL that of a reward service"),
    ):
        client.score([sample("abc")])


@pytest.mark.parametrize(
    "result",
    [
        b'{"rewards": [1.0, 2.0], "statuses": ["ok"], "problems": [[]], "scores": {}}',
        b'{"rewards": [1.0], "statuses": [1], "problems": [[]], "scores": {}}',
        b'{"rewards": [1.0], "statuses": ["ok"], "problems": [3], "scores": {}}',
        b'{"rewards": [1.0], "statuses": ["ok"], "problems": [[]], "scores": {"right": [1.0, 2.0]}}',
        b'{"rewards": "many"}',
        b"[" * 100_000,
    ],
)
def test_result_that_does_not_fit_the_samples_is_no_reward(port: int, result: bytes) -> None:
    def rule(request: Seen) -> Fault:
        return Fault("answer", 200, body=result) if request.method == "GET" else PASS

    with (
        proxy(port, rule) as between,
        RewardClient(settings(between.url)) as client,
        pytest.raises(AnswerInvalidError, match="the result of request"),
    ):
        client.score([sample("abc")])


def test_result_with_a_number_that_is_none_is_not_valid(port: int) -> None:
    result = b'{"rewards": [NaN, 1e999, true, 0.5], "statuses": ["ok", "ok", "ok", "truncated"], '
    result += b'"problems": [[], [], [], []], "scores": {}}'

    def rule(request: Seen) -> Fault:
        return Fault("answer", 200, body=result) if request.method == "GET" else PASS

    with proxy(port, rule) as between, RewardClient(settings(between.url)) as client:
        found = client.score([sample("abc")] * 4)
    assert found.rewards == (None, None, None, 0.5)
    assert found.statuses == ("reward_error", "reward_error", "reward_error", "truncated")


@pytest.mark.parametrize(
    "large",
    [
        Fault("answer", 200, body=b" " * ((1 << 20) + 1)),
        Fault("answer", 200, ("content-encoding: gzip",), gzip.compress(bytes(64 << 20))),
    ],
    ids=["plain", "compressed"],
)
def test_reply_beyond_the_limit_is_not_read(port: int, large: Fault) -> None:
    with (
        proxy(port, lambda _: large) as between,
        RewardClient(settings(between.url, max_answer_mb=1)) as client,
        pytest.raises(AnswerInvalidError, match="larger than 1 MiB; raise max_answer_mb"),
    ):
        client.score([sample("abc")])


def test_reply_that_never_ends_is_given_up(port: int) -> None:
    """It sends a byte now and then, so that no limit on a single read ends it."""
    timeouts = Timeouts(connect_s=0.5, fixed_s=0.5)
    with (
        proxy(port, in_turn([Fault("drip")])) as between,
        RewardClient(settings(between.url, timeouts=timeouts)) as client,
    ):
        assert client.score([sample("abc")]).rewards == (1.5,)
        assert between.num_seen()["POST"] == 2


def test_time_to_try_again_after_the_deadline_is_not_waited_for(port: int) -> None:
    busy = Fault("answer", 429, ("retry-after: 86400",), b'{"detail": "full"}')
    with proxy(port, lambda _: busy) as between, RewardClient(settings(between.url)) as client:
        with pytest.raises(RewardsLateError, match="full; the limit of 60 s leaves no time for another try"):
            client.score([sample("abc")])
        assert between.num_seen() == {"POST": 1}


def test_sample_that_is_late_is_a_timeout_and_is_removed(port: int) -> None:
    with RewardClient(settings(url_of(port), max_request_samples=1)) as client:
        two = [sample("abc", group="one"), sample("hang", group="two")]
        found = client.score(two, timeout_s=3.0)
        assert (found.rewards, found.statuses) == ((1.5, None), ("ok", "reward_timeout"))
        assert "has no rewards after 3 s" in found.problems[1][0]
        assert (found.mask, found.valid_rate) == ((True, False), 0.5)
        with pytest.raises(TooFewRewardsError, match=r"below 0\.6 \(at the lowest 0\.5\): request \w+ has no rewards"):
            client.score(two, timeout_s=3.0, min_valid_rate=0.6)
        with pytest.raises(RewardsLateError, match="has no rewards after 1 s"):
            client.score([sample("hang")], timeout_s=1.0)


def test_cancelled_call_is_removed_at_the_service(port: int) -> None:
    async def run() -> None:
        async with AsyncRewardClient(settings(url_of(port))) as client:
            call = asyncio.create_task(client.score([sample("hang")]))
            assert await eventually_async(pending(port, 1))
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await eventually_async(pending(port, 0))

    asyncio.run(run())


def test_cancelled_future_and_closed_client_remove_at_the_service(port: int) -> None:
    with RewardClient(settings(url_of(port))) as client:
        future = client.submit([sample("hang")])
        assert eventually(pending(port, 1))
        assert future.cancel()
        assert eventually(pending(port, 0))
        future = client.submit([sample("hang")])
        assert eventually(pending(port, 1))
    with pytest.raises(CancelledError):
        future.result(PATIENCE_S)


def test_call_that_is_cancelled_while_samples_are_sent_is_removed(port: int) -> None:
    """The service accepts the samples after the client has given up, and the client learns their id only then."""
    slow = Fault("pass", delay_s=1.0)

    async def run(between: Proxy) -> None:
        async with AsyncRewardClient(settings(between.url)) as client:
            call = asyncio.create_task(client.score([sample("hang")]))
            assert await eventually_async(lambda: len(between.seen) == 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert between.num_seen() == {"POST": 1, "DELETE": 1}

    with proxy(port, in_turn([slow])) as between:
        asyncio.run(run(between))


def test_result_that_comes_late_is_waited_for_by_few_questions(port: int) -> None:
    """The service waits: the client does not ask again and again."""
    with proxy(port) as between, RewardClient(settings(between.url)) as client:
        future = client.submit([sample("hang")])
        assert eventually(pending(port, 1))
        time.sleep(1.0)
        assert between.num_seen()["GET"] == 1
        future.cancel()


def test_samples_are_sent_again_after_a_restart_of_the_service(tmp_path: Path) -> None:
    with service(tmp_path) as (first, port), proxy(port) as between:
        with RewardClient(settings(between.url, retries=Retries(max_retries=100, max_s=0.2))) as client:
            future = client.submit([sample("abc"), sample("hang")])
            assert eventually(pending(port, 2))
            first.send_signal(signal.SIGKILL)
            first.wait(PATIENCE_S)
            (tmp_path / "again").mkdir()
            with service(tmp_path / "again") as (_, other):
                between._target = other
                found = future.result(PATIENCE_S)
                assert (found.rewards, found.statuses) == ((1.0, None), ("ok", "reward_timeout"))
        assert between.num_seen()["POST"] >= 2


def test_retries_go_to_another_replica(port: int) -> None:
    with proxy(port, lambda _: RESET) as broken, proxy(port) as well:
        begun_at = time.monotonic()
        with RewardClient(settings(broken.url, well.url)) as client:
            for _ in range(6):
                assert client.score([sample("abc")]).rewards == (1.5,)
        num_cooldowns = int((time.monotonic() - begun_at) / COOLDOWN_S)
        assert 1 <= broken.num_seen()["POST"] <= 1 + num_cooldowns, "one that has failed is avoided for a while"
        assert well.num_seen()["POST"] == 6


def test_slow_request_is_hedged_and_the_loser_removed(port: int) -> None:
    """A replica that accepts samples, and then never has a result, delays its requests by a quantile of the others."""

    def never_ready(request: Seen) -> Fault:
        if request.method == "GET" and is_slow.is_set():
            return Fault("stall")
        return PASS

    is_slow = threading.Event()
    hedging = Hedging(quantile=0.9, min_observed=4, min_delay_s=0.2, max_share=0.5)
    with proxy(port, never_ready) as first, proxy(port) as second:
        client = RewardClient(settings(first.url, second.url, hedging=hedging))
        for _ in range(4):
            assert client.score([sample("abc")]).num_hedged == 0
        is_slow.set()
        found = [client.score([sample("abc")]) for _ in range(4)]
        assert [one.rewards for one in found] == [(1.5,)] * 4
        assert sum(one.num_hedged for one in found) >= 1
        client.close()
    assert first.num_seen()["DELETE"] == first.num_seen()["POST"]


def test_forked_process_has_connections_of_its_own(port: int) -> None:
    with RewardClient(settings(url_of(port))) as client:
        assert client.score([sample("abc")]).rewards == (1.5,)
        child = os.fork()
        if not child:
            status = 1
            try:
                status = 0 if client.score([sample("abc")]).rewards == (1.5,) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert client.score([sample("abc")]).rewards == (1.5,)


def test_threads_share_a_client(port: int) -> None:
    with RewardClient(settings(url_of(port))) as client:
        futures = [client.submit([sample("abc"), sample(text)]) for text in ("a", "abcd") * 20]
        assert [future.result(PATIENCE_S).rewards for future in futures] == [(1.5, 0.0), (1.0, 0.5)] * 20


def test_token_is_sent_and_never_shown(tmp_path: Path) -> None:
    with service(tmp_path, 'token = "secret"\n') as (_, port):
        for token in ("", "secret2"):
            wrong = ClientSettings(endpoints=(Endpoint(url_of(port), token=token),))
            with RewardClient(wrong) as client, pytest.raises(RequestRefusedError, match="status 401") as found:
                client.score([sample("abc")])
            assert "secret2" not in str(found.value) + repr(wrong)
        with RewardClient(ClientSettings(endpoints=(Endpoint(url_of(port), token="secret"),))) as client:
            assert client.score([sample("abc")]).rewards == (1.5,)
