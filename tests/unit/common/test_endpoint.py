"""The HTTP endpoint of a service: health, readiness and metrics as the working loop has stored them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from starling.common import addresses
from starling.common.errors import ConfigError
from starling.common.observe import endpoint as module
from starling.common.observe import page as page_module
from starling.common.observe.endpoint import Endpoint, open_endpoint
from starling.common.observe.metrics import Family, Histogram, render, table
from starling.common.observe.notify import NotifySocket
from starling.common.observe.page import StatusPage
from starling.common.settings import ObserveSettings

PATIENCE_S = 60.0
FAMILIES = (Family("x_total", "counter", "Things.", ("of",)),)


def asked(url: str, token: str = "") -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def page() -> StatusPage:
    return StatusPage(stalled_s=1000.0)


@pytest.fixture
def endpoint(page: StatusPage) -> Iterator[Endpoint]:
    one = open_endpoint(ObserveSettings(http="127.0.0.1:0"), "rollout-3", page, FAMILIES)
    yield one
    one.close()


def notify_with(page: StatusPage) -> NotifySocket:
    notify = NotifySocket()
    notify.page = page
    return notify


def test_service_that_loads_is_healthy_and_not_ready(endpoint: Endpoint) -> None:
    assert asked(f"{endpoint.url}/healthz")[0] == 200
    assert asked(f"{endpoint.url}/readyz")[0] == 503


def test_readiness_follows_the_loop(endpoint: Endpoint, page: StatusPage) -> None:
    notify = notify_with(page)
    notify.turn(serves=False)
    assert asked(f"{endpoint.url}/readyz")[0] == 503
    notify.turn(serves=True)
    assert asked(f"{endpoint.url}/readyz") == (200, '{"status": "ok"}\n')
    notify.turn(serves=None)
    assert asked(f"{endpoint.url}/readyz")[0] == 200
    notify.turn(serves=False)
    assert asked(f"{endpoint.url}/readyz")[0] == 503
    notify.stopping("ends", 1000.0)
    notify.turn(serves=True)
    assert asked(f"{endpoint.url}/readyz") == (503, '{"status": "ends"}\n')


def test_loop_that_does_not_turn_is_unhealthy_unless_it_waits_for_something() -> None:
    page = StatusPage(stalled_s=0.05)
    endpoint = open_endpoint(ObserveSettings(http="127.0.0.1:0"), "policy-0", page, ())
    try:
        notify = notify_with(page)
        notify.turn(serves=True)
        time.sleep(0.1)
        status, text = asked(f"{endpoint.url}/healthz")
        assert (status, json.loads(text)["status"]) == (503, "stalled")
        assert asked(f"{endpoint.url}/readyz") == (503, '{"status": "stalled"}\n')
        with notify.patient(1000.0, "saves"):
            time.sleep(0.1)
            assert asked(f"{endpoint.url}/healthz")[0] == 200
        notify.stopping("ends", 1000.0)
        time.sleep(0.1)
        assert asked(f"{endpoint.url}/healthz")[0] == 200
    finally:
        endpoint.close()


def test_metrics_are_those_that_the_loop_has_stored(endpoint: Endpoint, page: StatusPage) -> None:
    notify = notify_with(page)
    notify.turn(samples=lambda: {("x_total", (("of", 'a "b"\n\\'),)): 3})
    text = asked(f"{endpoint.url}/metrics")[1]
    samples = {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["x_total", (("of", 'a "b"\n\\'),)] == 3
    assert samples["starling_service_ready", ()] == 1
    assert ("starling_service_info", (("name", "rollout-3"), ("version", module._version()))) in samples
    assert samples["process_resident_memory_bytes", ()] > 1 << 20
    notify.turn(samples=lambda: pytest.fail("they are asked for once a second"))


def test_metrics_ask_for_the_token_and_health_does_not(tmp_path: Path, page: StatusPage) -> None:
    (tmp_path / "token").write_text("secret\n")
    settings = ObserveSettings(http="127.0.0.1:0", token_file=str(tmp_path / "token"))
    endpoint = open_endpoint(settings, "controller", page, FAMILIES)
    try:
        assert [asked(f"{endpoint.url}/metrics", token)[0] for token in ("", "wrong", "secré", "secret")] == [
            401,
            401,
            401,
            200,
        ]
        assert asked(f"{endpoint.url}/healthz")[0] == 200
        assert asked(f"{endpoint.url}/other")[0] == 404
    finally:
        endpoint.close()


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"http": "9464"}, "observe.http = '9464' is no address; write host:port"),
        ({"http": "::1:9464"}, "is no address"),
        ({"http": "127.0.0.1:99999"}, "is no address"),
        ({"http": "0.0.0.0:0"}, "others can reach, and there is no token: set observe.token_file"),
        ({"http": "127.0.0.1:0", "token_file": "/nowhere"}, "observe.token_file /nowhere cannot be read"),
        ({"http": "127.0.0.1:0", "token_file": "/dev/null"}, "has no token"),
    ],
)
def test_setting_that_cannot_be_used_is_one_sentence(settings: dict[str, str], what: str, page: StatusPage) -> None:
    with pytest.raises(ConfigError, match=what):
        Endpoint(ObserveSettings(**settings), "controller", page, ())


def test_end_waits_for_the_last_scrape_where_there_is_one_regularly(
    endpoint: Endpoint, page: StatusPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "LAST_SCRAPE_S", PATIENCE_S)
    page.finish({("x_total", (("of", "a"),)): 1})  # nobody reads: returns at once
    asked(f"{endpoint.url}/metrics")
    read: list[str] = []
    reader = threading.Thread(target=lambda: (time.sleep(0.2), read.append(asked(f"{endpoint.url}/metrics")[1])))
    reader.start()
    page.finish({("x_total", (("of", "a"),)): 2})
    reader.join(PATIENCE_S)
    assert 'x_total{of="a"} 2' in read[0]


def test_service_without_an_endpoint_does_not_load_it() -> None:
    code = (
        "import sys; import starling.controller.shell.main, starling.reward.shell.main\n"
        "names = ('observe.endpoint', 'observe.page', 'observe.metrics', 'http.small')\n"
        "print([name for name in names if f'starling.common.{name}' in sys.modules],"
        " [name for name in sys.modules if 'shell.metrics' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "[] []\n", done.stderr


def test_histogram_counts_are_cumulative() -> None:
    histogram = Histogram("h_seconds", (0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(seconds)
    text = render([Family("h_seconds", "histogram", "Times.")], histogram.samples())
    [family] = text_string_to_metric_families(text)
    assert [(sample.name, sample.labels.get("le"), sample.value) for sample in family.samples] == [
        ("h_seconds_bucket", "0.1", 2),
        ("h_seconds_bucket", "1.0", 3),
        ("h_seconds_bucket", "+Inf", 4),
        ("h_seconds_sum", None, 7.65),
        ("h_seconds_count", None, 4),
    ]


def test_render_limits_series_and_leaves_other_families_out() -> None:
    samples = {("x_total", (("of", str(number)),)): 1.0 for number in range(10_000)}
    text = render(FAMILIES, samples | {("y", ()): 1.0})
    assert text.count("\nx_total{") == 512
    assert "\ny " not in text


def test_table_has_a_row_for_each_family() -> None:
    assert table(FAMILIES).splitlines()[2:] == ["| `x_total` | counter | `of` | Things. |"]


def test_addresses_of_processes_of_one_machine_differ() -> None:
    names = ("controller", "policy-0", "rollout-0", "rollout-7", "reward-1", "teacher-0")
    assert [addresses.address_of("127.0.0.1:9464", name) for name in names] == [
        f"127.0.0.1:{port}" for port in (9464, 9564, 9664, 9671, 9765, 9864)
    ]
    assert addresses.address_of("127.0.0.1:0", "rollout-7") == "127.0.0.1:0"
    assert addresses.address_of("[::1]:9464", "policy-1") == "[::1]:9565"
    with pytest.raises(ConfigError, match="leaves no port for teacher-0, which takes 65935"):
        addresses.address_of("127.0.0.1:65535", "teacher-0")
