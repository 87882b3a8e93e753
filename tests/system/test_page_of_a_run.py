"""`launch.dashboard`: a run serves its page as long as it lasts, and does not depend on it."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from urllib.error import URLError

import psutil
import pytest
from system_runs import END_S, attempt, make_workdir, metrics, run

pytestmark = pytest.mark.system


def serving(port: int) -> psutil.Process:
    """Return the process that listens at this port."""
    listening = (one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
    found = [one.pid for one in listening if one.laddr.port == port]
    assert found, f"nothing listens at {port}"
    return psutil.Process(found[0])


def test_run_serves_its_page_and_goes_on_without_it(tmp_path: Path) -> None:
    folder = make_workdir(tmp_path, launch={"dashboard": True}, rl={"num_steps": 1_000_000})
    with run(folder) as command:
        command.wait_for_output("dashboard: http://127.0.0.1:", "#token=")
        file = attempt(folder) / "dashboard.url"
        assert file.stat().st_mode & 0o077 == 0, "the address has the token"
        url, token = file.read_text().strip().split("/#token=")
        request = urllib.request.Request(f"{url}/api/runs", headers={"authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=END_S) as answer:
            found = json.load(answer)
        assert [one["name"] for one in found["runs"]] == ["tiny/attempt-1"]
        assert found["may_control"] is False
        assert token not in (attempt(folder) / "logs/dashboard.log").read_text()
        serving(int(url.rpartition(":")[2])).kill()
        command.wait_for_output("the dashboard ", "; the run goes on without it")
        num = len(metrics(folder, "step"))
        command.wait_until(lambda: len(metrics(folder, "step")) > num + 2, "steps without the page")
        command.interrupt()
        assert command.wait() == 0, command.transcript()
    assert not file.exists()
    with pytest.raises(URLError):
        urllib.request.urlopen(request, timeout=END_S)
