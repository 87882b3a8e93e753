"""The examples of docs/how-to/reward-client.md against the service of that page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_reward_http import PATIENCE_S, port_of

PAGE = Path(__file__).parents[2] / "docs/how-to/reward-client.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
EXAMPLES = [text for language, text in BLOCKS if language == "python"]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("service")
    (recipe,) = [text for language, text in BLOCKS if language == "toml"]
    (folder / "rewards.toml").write_text(recipe.replace("port = 8080", "port = 0"))
    command = [sys.executable, "-m", "starling.reward.shell.main", "--config", str(folder / "rewards.toml")]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen([*command, "--dir", str(folder)], stderr=log, text=True) as process,
    ):
        try:
            yield port_of(folder / "log", process)
        finally:
            process.kill()


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
