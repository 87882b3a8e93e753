"""Log lines of a process: every line is complete, whichever thread or library writes it."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from typing import Literal

PROGRAM = """
import logging, sys, threading
import structlog
from starling.common.observe.log import configure

configure("reward-1", sys.argv[1])
log = structlog.get_logger("any")
log.info("ready", scorers=["exact"])
thread = threading.Thread(target=lambda: log.warning("slow", lease="score:t1:0", pending={1, 2}.__len__))
thread.start()
thread.join()
log.info("joined", role="policy")
log.debug("detail")
logging.getLogger("some.library").warning("%d retries", 3)
try:
    raise ValueError("no such scorer")
except ValueError:
    log.exception("failed")
    logging.getLogger("some.library").exception("gave up")
"""
EVENTS = ("ready", "slow", "joined", "3 retries", "failed", "gave up")


def lines_of(form: Literal["text", "json"]) -> list[str]:
    """Return what a process writes to stderr with this format."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, form], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_json_log_has_one_object_per_line() -> None:
    lines = [json.loads(line) for line in lines_of("json")]
    assert [(line["event"], line["level"], line["role"]) for line in lines] == [
        ("ready", "info", "reward-1"),
        ("slow", "warning", "reward-1"),
        ("joined", "info", "policy"),
        ("3 retries", "warning", "reward-1"),
        ("failed", "error", "reward-1"),
        ("gave up", "error", "reward-1"),
    ]
    assert lines[0]["scorers"] == ["exact"]
    assert lines[1]["lease"] == "score:t1:0"
    assert "method-wrapper" in lines[1]["pending"], "a value that JSON cannot express is written as its repr"
    for line in lines:
        offset = datetime.fromisoformat(line["timestamp"]).utcoffset()
        assert offset is not None
        assert not offset
    for line in lines[-2:]:
        assert line["exception"].endswith("ValueError: no such scorer")


def test_text_log_names_the_process_in_every_line() -> None:
    events = [line for line in lines_of("text") if "role=" in line]
    names = [(event, "role=reward-1" in line) for line, event in zip(events, EVENTS, strict=True) if event in line]
    assert names == [(event, event != "joined") for event in EVENTS]


SERVICE = """
import sys
import structlog
from starling.common.service import serve
from starling.common.settings import ServiceSettings

class Shell:
    def __init__(self, settings, arguments):
        pass

    def run(self, stop):
        structlog.get_logger("any").info("serving")

sys.exit(serve("reward", ServiceSettings, Shell, sys.argv[1:]))
"""


def test_service_writes_its_log_in_the_format_of_the_run() -> None:
    command = [sys.executable, "-c", SERVICE, "--controller", "tcp://127.0.0.1:1", "--name", "reward-2"]
    done = subprocess.run(
        [*command, "--run.log-format", "json"], capture_output=True, text=True, timeout=60, check=True
    )
    line = json.loads(done.stderr)
    assert (line["event"], line["level"], line["role"]) == ("serving", "info", "reward-2")
