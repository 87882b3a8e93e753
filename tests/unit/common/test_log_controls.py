"""Characters that control a terminal, in log lines."""

from __future__ import annotations

import subprocess
import sys

from starling.common.observe.terminal import printable

PROGRAM = r"""
import logging
import structlog
from starling.common.observe.log import configure

configure("controller")
hostile = "\x1b[2J\x1b]0;title\x07\x9b1m\u202e"
log = structlog.get_logger("any")
log.info("joined", host=hostile, **{f"tool{hostile}": 1})
log.info(hostile, values=[hostile])
logging.getLogger("some.library").warning("%s", hostile)
try:
    raise ValueError(hostile)
except ValueError:
    log.exception("failed")
    logging.getLogger("some.library").exception("gave up")
"""


def test_log_lines_do_not_control_a_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert [one for one in done.stderr.replace("\n", "") if not one.isprintable()] == []
    assert done.stderr.count(r"\x1b[2J\x1b]0;title\x07\x9b1m\u202e") == 7
    assert "\nTraceback (most recent call last):\n" in done.stderr


def test_name_of_a_field_begins_no_log_line() -> None:
    program = (
        "import structlog; from starling.common.observe.log import configure; configure('controller'); "
        r"structlog.get_logger('any').info('evaluation', **{'score/x\n12:00:00 [info     ] finished ok=True': 1.0})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert len(done.stderr.splitlines()) == 1
    assert r"score/x\n12:00:00 [info     ] finished ok=True=1.0" in done.stderr


def test_printable_keeps_texts() -> None:
    for text in (
        "",
        "plain",
        "two\nlines\tand a tab",
        "Grüße, 世界, \N{FAMILY}\N{ZERO WIDTH JOINER}",
        "\N{NO-BREAK SPACE}",
    ):
        assert printable(text) == text
    assert printable("\x1b[31m \r\x00\x7f\x85\u2028\ud800") == r"\x1b[31m \r\x00\x7f\x85\u2028\ud800"


def test_error_of_a_service_does_not_control_a_terminal() -> None:
    program = (
        "from starling.common.errors import StarlingError; from starling.common.observe.process import run_service\n"
        r"def fail(): raise StarlingError('the controller refuses rollout-0: \x1b[2J\x9b1m')"
        "\nrun_service('rollout-0', fail)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == r"starling rollout-0: the controller refuses rollout-0: \x1b[2J\x9b1m" + "\n"
