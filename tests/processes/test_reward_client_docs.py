"""The examples of docs/how-to/reward-client.md against the service of that page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from reward_processes import PATIENCE_S, run_service

PAGE = Path(__file__).parents[2] / "docs/how-to/reward-client.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
EXAMPLES = [text for language, text in BLOCKS if language == "python"]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("service")
    (recipe,) = [text for language, text in BLOCKS if language == "toml"]
    with run_service(folder, recipe.replace("port = 8080", "port = 0")) as (_, found):
        yield found


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_prints_what_its_comments_say(port: int, number: int) -> None:
    variables = {**os.environ, "REMOTE_REWARD_ENQUEUE_URL": f"http://127.0.0.1:{port}"}
    command = [sys.executable, "-c", EXAMPLES[number]]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    comments = re.findall(r"print\(.*\)  # (.*)", EXAMPLES[number])
    printed = done.stdout.splitlines()
    assert len(printed) >= len(comments)
    for line, comment in zip(printed, comments, strict=False):
        assert comment.partition(";")[0] == line


def test_page_has_examples() -> None:
    assert len(EXAMPLES) == 4
    assert "RewardClient()" in EXAMPLES[0]
