"""`starling top` in a terminal, with a real controller that dies and returns."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lone_controller import PATIENCE_S, lone_controller
from pseudo_terminal import ENTER, PseudoTerminal

pytestmark = pytest.mark.system

COLOURS = {str(code) for code in (*range(30, 39), *range(40, 49), *range(90, 98), *range(100, 108))}
"""Numbers that set a colour in what a program sends; 39 and 49 set that of the terminal."""
HOSTILE = "\x1b]0;owned\x07\x1b[2J"


def test_top_follows_a_controller_over_its_death_and_operates_it(tmp_path: Path) -> None:
    with lone_controller(tmp_path / "runs/lone/attempt-1", "reward-0") as controller:
        controller.reward("reward-0")
        (controller.folder / "samples.jsonl").write_text(
            json.dumps({"step": 1, "prompt": HOSTILE, "completion": HOSTILE, "reward": 0.5}) + "\n"
        )
        terminal = PseudoTerminal(["top", str(tmp_path / "runs/lone"), "--allow-control"])
        try:
            terminal.wait_for("lone/attempt-1", "needs the policy", "reward-0", timeout_s=PATIENCE_S)
            terminal.press("2")
            terminal.wait_for("queue_depth", timeout_s=PATIENCE_S)
            terminal.press("5")
            terminal.wait_for("at the root: controller waits for", timeout_s=PATIENCE_S)
            terminal.press("7")
            terminal.wait_for("owned", timeout_s=PATIENCE_S)
            assert HOSTILE not in terminal.received
            terminal.press("x")
            terminal.wait_for("rl.max_staleness", timeout_s=PATIENCE_S)
            terminal.press("rl.max_staleness 3\r")
            terminal.wait_for("Set rl.max_staleness = 3", timeout_s=PATIENCE_S)
            terminal.press("y")
            terminal.wait_for("rl.max_staleness = 3 from step 1 on", timeout_s=PATIENCE_S)

            controller.kill()
            terminal.wait_for("the run has crashed: nothing runs", timeout_s=PATIENCE_S)
            controller.start()
            terminal.press("1")
            terminal.wait_until(lambda: " now " in terminal.screen(), "a new snapshot", PATIENCE_S)
            terminal.press("\x03")
            assert terminal.wait(PATIENCE_S) == 0
            assert terminal.is_restored()
        finally:
            terminal.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_top_restores_the_terminal_when_a_signal_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "attempt-1").mkdir()
    (tmp_path / "attempt-1/metrics.jsonl").write_text('{"time": 1.0, "kind": "joined", "replica": "rollout-0"}\n')
    terminal = PseudoTerminal(["top", str(tmp_path)], NO_COLOR="1")
    try:
        terminal.wait_for("attempt-1", "1 overview", timeout_s=PATIENCE_S)
        assert ENTER in terminal.received
        os.kill(terminal.process.pid, number)
        assert terminal.wait(PATIENCE_S) == 128 + number
        assert terminal.is_restored()
        styles = ";".join(re.findall(r"\x1b\[([\d;]*)m", terminal.received)).split(";")
        assert COLOURS.isdisjoint(styles), "a colour in spite of NO_COLOR"
    finally:
        terminal.close()


def test_top_on_a_dumb_terminal_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "attempt-1").mkdir()
    (tmp_path / "attempt-1/metrics.jsonl").write_text("")
    terminal = PseudoTerminal(["top", str(tmp_path)], TERM="dumb")
    try:
        assert terminal.wait(PATIENCE_S) == 1
        assert terminal.received == (
            "starling: this terminal cannot place its cursor (TERM=dumb); set TERM, such as TERM=xterm-256color, or "
            "use `starling status RUN`\r\n"
        )
    finally:
        terminal.close()


def test_commands_do_not_import_what_top_needs() -> None:
    code = "import sys\nfrom starling.cli.main import main\nmain(['--help'])\nassert 'textual' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S, stdout=subprocess.DEVNULL)
