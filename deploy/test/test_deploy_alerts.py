"""Alerts of a real run: Prometheus scrapes it with the rules of deploy/, and Alertmanager calls the webhooks."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import yaml
from metrics_services import RECIPE, asked, await_all, free_port, process_titled, start_run, started
from prometheus_files import PROMETHEUS, find_programs

START_S: Final = 60.0
"""How long the run waits for a rollout."""


class Receiver:
    """HTTP server that keeps what Alertmanager posts, by path."""

    def __init__(self) -> None:
        """Begin to listen."""
        posted = self.posted = list[tuple[str, dict[str, Any]]]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                posted.append((self.path, json.loads(body)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def alerts(self, path: str) -> list[dict[str, Any]]:
        """Return the firing alerts that were posted to a path."""
        return [one for at, body in self.posted if at == path for one in body["alerts"] if one["status"] == "firing"]

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def receiver() -> Iterator[Receiver]:
    """Listen for the webhooks of Alertmanager."""
    one = Receiver()
    try:
        yield one
    finally:
        one.close()


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return find_programs(tmp_path_factory.getbasetemp() / "packages-of-alerts")


def write_alertmanager(folder: Path, webhooks: str) -> Path:
    """Write the example with the addresses of its receivers changed, as its reader does."""
    text = (PROMETHEUS / "alertmanager.yml").read_text()
    path = folder / "alertmanager.yml"
    path.write_text(re.sub(r"http://(pager|chat)\.example:8000/starling", rf"http://{webhooks}/\1", text))
    return path


def write_prometheus(folder: Path, alertmanager: str, run: Mapping[str, str]) -> Path:
    """Write the configuration with its targets changed: those of the run are in files, as the page describes."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["rule_files"] = [f"{PROMETHEUS}/rules/*.yml"]
    config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [alertmanager]
    (folder / "token").write_text("none is asked for on 127.0.0.1")
    for job in config["scrape_configs"]:
        job.pop("static_configs", None)
        job.pop("dns_sd_configs", None)
        if "authorization" in job:
            job["authorization"]["credentials_file"] = str(folder / "token")
    (folder / "targets").mkdir()
    replicas = [address for name, address in run.items() if name != "controller"]
    for name, addresses in (("run", [run["controller"]]), ("replica", replicas)):
        targets = [{"targets": addresses, "labels": {"run": "metrics"}}]
        (folder / f"targets/{name}-mine.yml").write_text(yaml.safe_dump(targets))
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def with_templates(program: str) -> list[str]:
    """Return the command of Alertmanager: Debian's reads its templates in /usr/share, also when it is only unpacked."""
    templates = Path(program).parents[1] / "share/prometheus"
    if Path("/usr/share/prometheus").exists() or not templates.exists():
        return [program]
    place = 'mount -t tmpfs none /usr/share && mkdir /usr/share/prometheus && mount --bind "$0" /usr/share/prometheus'
    namespaces = ["--mount"] if os.geteuid() == 0 else ["--mount", "--user", "--map-root-user"]
    return ["unshare", *namespaces, "sh", "-c", f'{place} && exec "$@"', str(templates), program]


def start_monitoring(
    stack: ExitStack, folder: Path, programs: Mapping[str, str], run: Mapping[str, str], webhooks: str
) -> str:
    """Start Alertmanager and Prometheus. Returns the address of Prometheus, once it has scraped the run."""
    prometheus, manager = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    command = [
        *with_templates(programs["prometheus-alertmanager"]),
        f"--config.file={write_alertmanager(folder, webhooks)}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address={manager}",
        "--cluster.listen-address=",
    ]
    stack.enter_context(started(folder, "alertmanager", *command))
    await_all(lambda: asked(f"http://{manager}/-/ready") == "OK")
    command = [
        programs["prometheus"],
        f"--config.file={write_prometheus(folder, manager, run)}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        f"--web.listen-address={prometheus}",
    ]
    stack.enter_context(started(folder, "prometheus", *command))
    await_all(lambda: len(query(prometheus, "up == 1")) == len(run))
    return prometheus


def query(prometheus: str, expression: str) -> list[dict[str, Any]]:
    """Return the samples of an expression, none while Prometheus does not answer."""
    answer = asked(f"http://{prometheus}/api/v1/query?query={expression.replace(' ', '%20')}")
    found: list[dict[str, Any]] = (
        json.loads(answer)["data"]["result"] if answer.startswith('{"status":"success"') else []
    )
    return found


def test_stopped_rollout_reaches_the_pager(programs: Mapping[str, str], tmp_path: Path) -> None:
    """The controller loses its only rollout, which is stopped, and ends the run when none has come for a while."""
    recipe = RECIPE + f"\n[controller]\nstart_s = {START_S}\n"
    with ExitStack() as stack:
        webhooks = stack.enter_context(receiver())
        _, run = start_run(stack, tmp_path, recipe)
        prometheus = start_monitoring(stack, tmp_path, programs, run, webhooks.address)
        await_all(lambda: query(prometheus, "starling_run_version > 3"))
        assert not webhooks.alerts("/pager")

        rollout = process_titled("rollout-0", tmp_path)
        rollout.suspend()
        stack.callback(resume, rollout)
        await_all(lambda: "StarlingRunFailed" in map(named, webhooks.alerts("/pager")))
        [alert, *_] = [one for one in webhooks.alerts("/pager") if named(one) == "StarlingRunFailed"]
        assert alert["labels"]["run"] == "metrics"
        assert alert["labels"]["severity"] == "critical"
        assert {one["labels"]["severity"] for one in webhooks.alerts("/pager")} == {"critical"}
        assert "critical" not in {one["labels"]["severity"] for one in webhooks.alerts("/chat")}


def resume(process: psutil.Process) -> None:
    """Let a stopped process go on, if it is there."""
    with suppress(psutil.NoSuchProcess):
        process.resume()


def test_killed_run_reaches_the_pager(programs: Mapping[str, str], tmp_path: Path) -> None:
    """Every process of the run is killed at once, as with its machine: nothing can say how it ended."""
    with ExitStack() as stack:
        webhooks = stack.enter_context(receiver())
        supervisor, run = start_run(stack, tmp_path)
        prometheus = start_monitoring(stack, tmp_path, programs, run, webhooks.address)
        await_all(lambda: query(prometheus, "starling_run_version"))
        supervisor.kill()  # the processes of the run end with it
        await_all(lambda: "StarlingControllerDown" in map(named, webhooks.alerts("/pager")))
        [alert, *_] = [one for one in webhooks.alerts("/pager") if named(one) == "StarlingControllerDown"]
        assert alert["labels"]["severity"] == "critical"
        assert alert["annotations"]["summary"].startswith("The controller of run metrics does not answer at ")


def named(alert: Mapping[str, Any]) -> str:
    """Return the name of an alert."""
    return str(alert["labels"]["alertname"])
