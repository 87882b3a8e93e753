"""Python of the documentation: each block is run by a test, by one of this file or by the named one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from snippets import ROOT, Snippet, all_snippets

from starling.common.wire.messages import CompletionText, Sampling, Status
from starling.controller.core.plan import RunPlan
from starling.reward.core.samples import PromptText
from starling.reward.score.scorers.batch import MediaArray
from starling.reward.score.scorers.registry import load_scorer
from starling.sim.cluster.cluster import SimulatedCluster
from starling.sim.scenario.faults import Faults
from starling.sim.scenario.scenario import Scenario

ENVIRONMENTS: Final = "docs/how-to/environments.md"
SCORER: Final = "docs/how-to/extend/scorer.md"
SIM: Final = "docs/explanation/sim.md"
HERE: Final = {
    (ENVIRONMENTS, "def python(code: str) -> str:"),
    (ENVIRONMENTS, "class World:"),
    (SCORER, "def brevity("),
    (SCORER, "class Judge:"),
    (SCORER, "class Contrast:"),
    (SIM, "def test_seed_19"),
}
"""Blocks that this file runs: their pages and beginnings."""
RUN_BY: Final = {
    ENVIRONMENTS: "tests/system/test_environments.py",
    "docs/how-to/extend/algorithm.md": "tests/unit/policy/loss/test_train_user_algorithm.py",
    "docs/how-to/extend/engine.md": "tests/unit/rollout_engine/test_engine_conformance.py",
    "docs/how-to/extend/logger.md": "tests/unit/controller_shell/test_extend_logger.py",
    "docs/how-to/extend/model.md": "tests/unit/extend/test_extend_model.py",
    "docs/how-to/openai-endpoint.md": "tests/system/test_openai.py",
    "docs/how-to/replay.md": "tests/unit/controller_shell/test_trajectory_files.py",
    "docs/how-to/reward-client.md": "tests/processes/test_reward_client_docs.py",
}
"""Tests that run the other blocks of a page."""
PARTS: Final = {
    "docs/explanation/weightsync.md": "tests/unit/weightsync/quantise",
    "docs/how-to/extend/transport.md": "tests/unit/weightsync/transports/test_transport_conformance.py",
    "docs/how-to/vllm-weight-transfer.md": "tests/vllm/test_backend_engine.py",
}
"""Tests of the calls that a page shows, in a program that the page does not show."""


def code_of(snippet: Snippet) -> str:
    """Return a block without the comment that names its file."""
    first, _, rest = snippet.text.partition("\n")
    return rest if first.startswith("# ") else snippet.text


def program(page: str, beginning: str) -> str:
    """Return the block of a page that begins so."""
    assert (page, beginning) in HERE
    (text,) = [
        code for one in all_snippets("python") if one.page == page and (code := code_of(one)).startswith(beginning)
    ]
    return text


def names_of(page: str, beginning: str, **given: Any) -> dict[str, Any]:
    """Execute a block in which these names are given. Returns what it defines."""
    names: dict[str, Any] = dict(given)
    exec(compile(program(page, beginning), page, "exec"), names)
    return names


@pytest.mark.parametrize("snippet", all_snippets("python"), ids=str)
def test_block_is_run_by_a_test(snippet: Snippet) -> None:
    if snippet.title or snippet.is_runnable:
        return
    if any(snippet.page == page and code_of(snippet).startswith(beginning) for page, beginning in HERE):
        return
    test = {**PARTS, **RUN_BY}.get(snippet.page)
    assert test is not None, f"no test runs {snippet}; add one, or the line <!-- runnable --> before it"
    assert (ROOT / test).exists(), test
    if snippet.page in RUN_BY:
        assert Path(snippet.page).name in (ROOT / test).read_text(), f"{test} does not read {snippet.page}"


def test_printed_scenario_runs() -> None:
    given = {one.__name__: one for one in (Sampling, RunPlan, SimulatedCluster, Faults, Scenario)}
    names_of(SIM, "def test_seed_19", **given)["test_seed_19_of_crashes"]()


def samples(*texts: str, num_tokens: int = 10) -> list[tuple[PromptText, CompletionText]]:
    """Return completions of a prompt whose answer is 4."""
    prompt = PromptText(text="2 + 2", reference="4", metadata={})
    return [(prompt, CompletionText(text=text, status=Status.OK, num_tokens=num_tokens)) for text in texts]


def test_function_scores_by_its_length_and_options(tmp_path: Path) -> None:
    (tmp_path / "my_scorers.py").write_text(program(SCORER, "def brevity("))
    scorer = load_scorer(f"{tmp_path}/my_scorers.py:brevity", {"limit": 5})
    assert scorer.score(samples("it is 4", "it is 5"), ()).values == ((0.5,), (-0.5,))
    assert scorer.score(samples("it is 4", num_tokens=5), ()).values == ((1.0,),)


def test_class_scores_in_batches(tmp_path: Path) -> None:
    """The page leaves open how a judge is loaded: here it counts letters."""
    judge = (
        "def load(folder):\n    return lambda prompts, texts: ([len(t) for t in texts], [len(folder)] * len(texts))\n"
    )
    (tmp_path / "my_scorers.py").write_text(judge + program(SCORER, "class Judge:"))
    scorer = load_scorer(f"{tmp_path}/my_scorers.py:Judge", {"folder": "abc"})
    assert (scorer.form.keys, scorer.form.batch_size) == (("quality", "motion"), 16)
    assert scorer.score(samples("it", "it is 4"), ()).values == ((2.0, 3.0), (7.0, 3.0))


def test_class_scores_pixels(tmp_path: Path) -> None:
    (tmp_path / "my_scorers.py").write_text(program(SCORER, "class Contrast:"))
    scorer = load_scorer(f"{tmp_path}/my_scorers.py:Contrast", {})
    clip = np.array([0, 200], dtype=np.uint8).reshape(1, 1, 2, 1).repeat(3, axis=3)
    assert scorer.score(samples(""), [MediaArray(clip, 0.0)]).values == ((100.0,),)


def test_tool_runs_a_program() -> None:
    python = names_of(ENVIRONMENTS, "def python(code: str) -> str:", subprocess=subprocess, sys=sys)["python"]
    assert python("print(6 * 7)") == "42\n"
    assert "ZeroDivisionError" in python("1 / 0")


def test_world_is_played(tmp_path: Path) -> None:
    world = names_of(ENVIRONMENTS, "class World:")["World"]()
    assert world.reset(seed=1, options={}) == "You are in a room."
    assert world.step("look") == ("You see a door.", 0.0, False, False, {})
