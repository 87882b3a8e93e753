"""Log lines of a process: every line is complete, whichever thread or library writes it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Literal

import pytest

from starling.common.observe.log import MAX_WAITING

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

    def run(self, stop, notify):
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


FULL = """
import logging, resource, signal, sys
import structlog
from starling.common.observe.log import configure

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, most))  # writes fail beyond, the last one in its middle
configure("reward-1", "text")
log = structlog.get_logger("any")
for number in range(500):
    log.info("line", number=number)
    logging.getLogger("some.library").warning("other number=%d", number)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
log.info("line", number=500)
"""


@pytest.mark.parametrize("is_unbuffered", [False, True])
def test_log_that_had_no_space_has_each_line_once(is_unbuffered: bool, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONUNBUFFERED": "1"} if is_unbuffered else {}
    with (tmp_path / "log").open("wb") as file:
        subprocess.run([sys.executable, "-c", FULL], stderr=file, env=environment, timeout=60, check=True)
    lines = (tmp_path / "log").read_text().splitlines()
    [told] = [at for at, line in enumerate(lines) if line.startswith("this log could not be written for a while (")]
    assert lines[told].endswith("(File too large), and may lack lines")
    assert all(line.count("role=reward-1") == line.count("number=") == 1 for line in lines if line is not lines[told])
    written = [("other" in line, int(re.findall(r"number=(\d+)", line)[0])) for line in lines if line != lines[told]]
    all_lines = [(is_other, number) for number in range(501) for is_other in (False, True)][:-1]
    assert written[:told] == all_lines[:told]
    assert 20 < told < 100
    assert written[told:] == all_lines[-MAX_WAITING:], "the newest ones"
