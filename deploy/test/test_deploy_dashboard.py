"""The dashboard in a real Chromium: every view in light, dark and on a phone, axe, a long run, and a live run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from dashboard_runs import RECIPE, write_run
from small_recipe import write_prompts

PATIENCE_S = 600.0
NUM_STEPS = 10_000
BROWSER = Path(__file__).with_name("dashboard_browser.py")
LIVE = "live"


@contextmanager
def started(folder: Path, name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of `starling` in `folder`, with its output in `<name>.log`; SIGTERM ends it."""
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "starling.cli.main", *arguments], cwd=folder, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(120)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(120)


def await_text(path: Path, pattern: str, process: subprocess.Popen[bytes]) -> re.Match[str]:
    found: list[re.Match[str]] = []

    def look() -> bool:
        match = re.search(pattern, path.read_text())
        assert match or process.poll() is None, path.read_text()
        found.extend([match] if match else [])
        return bool(found)

    await_true(look, f"{pattern} in {path}")
    return found[0]


def await_true(is_true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return the interpreter that has Playwright, and the file of axe. Both are fetched."""
    if shutil.which("chromium") is None:
        pytest.skip("chromium is not installed; deploy/test/packages.txt names its package")
    folder = tmp_path_factory.mktemp("browser")
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    python = folder / "venv/bin/python"
    commands = [
        [uv, "venv", "--quiet", "venv"],
        [uv, "pip", "install", "--quiet", "--python", str(python), "playwright", "axe-core-python"],
    ]
    if shutil.which("npm") is not None:  # it has the newest one
        commands += [["npm", "pack", "--silent", "axe-core@4"], ["sh", "-c", "tar -xzf axe-core-*.tgz"]]
    for command in commands:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        if done.returncode:
            pytest.skip(f"{command[0]} could not fetch what the test needs: {done.stderr[-300:]}")
    found = [*folder.glob("package/axe.min.js"), *folder.glob("venv/lib/*/site-packages/axe_core_python/axe.min.js")]
    return str(python), found[0]


@pytest.fixture(scope="module")
def seen(browser: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Any]]:
    """What the browser saw of a long run, a short one and a live one, which it stopped."""
    folder = tmp_path_factory.mktemp("dashboard")
    python, axe = browser
    write_run(folder / "long", NUM_STEPS)
    write_run(folder / "short", 400, seed=1)
    (folder / f"{LIVE}.toml").write_text(RECIPE)
    write_prompts(folder)
    shots = folder / "shots"
    shots.mkdir()
    arguments = ("dashboard", "long", "short", f"runs/{LIVE}", "--port", "0", "--allow-control")
    with started(folder, "run", "run", f"{LIVE}.toml") as run, started(folder, "dashboard", *arguments) as page:
        metrics = folder / f"runs/{LIVE}/attempt-1/metrics.jsonl"
        await_true(lambda: metrics.exists() and '"phase": "rl"' in metrics.read_text(), "step of the live run")
        match = await_text(folder / "dashboard.log", r"(http://\S+)/#token=(\S+)", page)
        task = {
            "url": match[1],
            "token": match[2],
            "axe": str(axe),
            "shots": str(shots),
            "control": LIVE,
            "chromium": shutil.which("chromium"),
        }
        command = [python, str(BROWSER), json.dumps(task)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3 * PATIENCE_S)
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout)
        found["code"] = run.wait(PATIENCE_S)
        found["lines"] = metrics.read_text()
        yield found


def test_views_are_drawn_without_errors(seen: Mapping[str, Any]) -> None:
    assert len(seen["views"]) == 3 * 7
    assert seen["messages"] == [], "neither errors nor violations of the policy"
    for one in seen["views"]:
        assert one["overflow"] <= 0, f"{one['view']} scrolls sideways ({one['kind']})"


def test_axe_finds_nothing(seen: Mapping[str, Any]) -> None:
    print(f"Chromium {seen['version']}: {sum(one['rules'] for one in seen['views'])} checks of axe passed")
    assert [f"{one['view']} {one['kind']}: {text}" for one in seen["views"] for text in one["violations"]] == []


def test_completions_are_texts_and_coloured_tokens(seen: Mapping[str, Any]) -> None:
    for one in (one for one in seen["views"] if one["view"] == "completions"):
        assert one["hurt"] is None
        assert one["hostile"] > 0, "markup is shown as the text that it is"
        assert one["tokens"] > 0
        assert one["tinted"] == one["tokens"]
        assert one["images"] > 0


def test_token_is_asked_for_and_kept_out_of_the_address(seen: Mapping[str, Any]) -> None:
    assert seen["login"] == {"shown_before": 0, "token_in_address": False}


def test_long_run_is_drawn_and_answers_inputs(seen: Mapping[str, Any]) -> None:
    """Times are printed, and not asserted: they are those of a machine that does other things too."""
    speed = seen["speed"]
    print(f"{NUM_STEPS} steps: {speed}")
    assert speed["first_paint_ms"] is not None
    assert speed["hover"] == 1
    assert speed["elements"] < 4000, "plots have columns, not steps"
    assert speed["points"] <= 480, "columns of a curve"
    assert speed["redrawn"] == 0, "plots of runs that have not changed, beside a live one"


def test_buttons_control_a_live_run(seen: Mapping[str, Any]) -> None:
    control = seen["control"]
    assert {"policy-0", "rollout-0", "reward-0"} <= set(control["replicas"])
    assert control["waits"][0] == "controller"
    for action in ("evaluate", "set", "Save a state", "Scale", "Drain", "stop"):
        assert "good" in control[action]["class"], control[action]
    assert len(control["asked"]) == 4, "each of the last four is confirmed"
    assert seen["code"] == 0, "the run ended as asked"
    assert '"kind": "evaluation"' in seen["lines"]
    assert '"key": "rl.max_staleness"' in seen["lines"]
    assert '"kind": "scaled", "role": "rollout", "num": 2' in seen["lines"]
    assert '"kind": "draining", "replica": "rollout-1"' in seen["lines"]
