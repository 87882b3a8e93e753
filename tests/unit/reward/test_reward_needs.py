"""What a scorer declares it gets, what it does not declare it does not, and programs of a model get none of it."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_levels import ALL, STRONG
from scoring import scored, settings_of, task

from starling.common.sandbox.launch import Mechanism, problem_of
from starling.common.wire.messages import Status
from starling.reward.core.samples import Score
from starling.reward.score.pool.pool import ScoringPool
from starling.reward.settings import RewardSettings

SCORERS = """
import os
import socket

from starling.common.sandbox.execution import run_python


def connects(completion, reference, prompt_text, metadata):
    with socket.create_connection(("127.0.0.1", int(completion)), timeout=5):
        return 1.0


def sees(completion, reference, prompt_text, metadata):
    os.stat(completion)
    return 1.0


def reads(completion, reference, prompt_text, metadata):
    return float(open(completion).read())


def knows(completion, reference, prompt_text, metadata):
    return float(os.environ[completion])


def runs(completion, reference, prompt_text, metadata):
    return float(run_python(completion).finished)
"""
DEVICE = "/dev/fuse"


@pytest.fixture(params=ALL)
def level(request: pytest.FixtureRequest) -> Mechanism:
    mechanism: Mechanism = request.param
    if problem := problem_of(mechanism):
        pytest.skip(f"this machine does not offer the level {mechanism}: {problem}")
    return mechanism


@pytest.fixture
def scorers(tmp_path: Path) -> Path:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    (tmp_path / "judges.py").write_text(SCORERS)
    return tmp_path / "judges.py"


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def score(file: Path, level: Mechanism, name: str, text: str, needs: dict[str, Any]) -> Score:
    scorer = {"name": f"{file}:{name}", "label": name, "needs": needs}
    with ScoringPool(settings_of(scorer, sandbox=level)) as pool:
        (one,) = scored(pool, task(text))
    return one


@pytest.mark.sample(1)
def test_network_is_there_only_if_declared(scorers: Path, level: Mechanism, server: socket.socket) -> None:
    port = str(server.getsockname()[1])
    assert score(scorers, level, "connects", port, {"network": True}).value == 1.0
    undeclared = score(scorers, level, "connects", port, {})
    assert (undeclared.status == Status.REWARD_ERROR) == (level in STRONG), undeclared


@pytest.mark.sample(1)
def test_file_is_there_only_if_declared(scorers: Path, level: Mechanism) -> None:
    data = scorers.parent / "data.txt"
    data.write_text("0.5")
    assert score(scorers, level, "reads", str(data), {"paths": [str(data)]}).value == 0.5
    assert (score(scorers, level, "reads", str(data), {}).status == Status.REWARD_ERROR) == (level in STRONG)


@pytest.mark.sample(1)
def test_variable_is_there_only_if_declared(scorers: Path, level: Mechanism, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "0.25")
    assert score(scorers, level, "knows", "JUDGE_KEY", {"variables": ["JUDGE_KEY"]}).value == 0.25
    assert score(scorers, level, "knows", "JUDGE_KEY", {}).status == Status.REWARD_ERROR


@pytest.mark.sample(1)
@pytest.mark.skipif(not os.path.exists(DEVICE), reason=f"this machine has no {DEVICE}")
def test_device_is_there_only_if_declared(scorers: Path, level: Mechanism) -> None:
    if level not in ("bubblewrap", "namespaces"):
        pytest.skip(f"the level {level} hides no names of devices")
    assert stat.S_ISCHR(os.stat(DEVICE).st_mode)
    assert score(scorers, level, "sees", DEVICE, {"devices": [DEVICE]}).value == 1.0
    assert score(scorers, level, "sees", DEVICE, {}).status == Status.REWARD_ERROR


PROGRAM = "import os, socket\n"
GETS = {
    "variable": ({"variables": ["JUDGE_KEY"]}, "os.environ['JUDGE_KEY']"),
    "file": ({"paths": ["DATA"]}, "open('DATA').read()"),
    "device": ({"devices": [DEVICE]}, f"os.stat('{DEVICE}')"),
    "network": ({"network": True}, "socket.create_connection(('127.0.0.1', PORT), timeout=5)"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("what", GETS)
def test_program_of_a_model_gets_nothing_that_its_judge_declares(
    scorers: Path, level: Mechanism, server: socket.socket, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "device" and not os.path.exists(DEVICE):
        pytest.skip(f"this machine has no {DEVICE}")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    data = scorers.parent / "data.txt"
    data.write_text("0.5")
    needs, code = GETS[what]
    needs = {key: [str(data)] if value == ["DATA"] else value for key, value in needs.items()}
    program = PROGRAM + code.replace("DATA", str(data)).replace("PORT", str(server.getsockname()[1]))
    judged = score(scorers, level, "runs", program, needs)
    assert judged.value is None, f"the program got the {what}"
    assert "declares needs" in judged.problem
    assert score(scorers, level, "runs", "pass", {}).value == 1.0


def test_scorer_code_may_declare_nothing() -> None:
    settings = {"scorers": [{"name": "code", "needs": {"network": True}}]}
    with pytest.raises(ValueError, match="'code' runs programs that a model wrote, which would get what it declares"):
        RewardSettings.model_validate(settings)
    RewardSettings.model_validate({"scorers": [{"name": "code", "needs": {"max_tasks": 64}}]})
