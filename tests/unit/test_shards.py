"""The list of shards covers the test suite, and knows which files a shard depends on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import shards

BY_NAME = {shard.name: shard for shard in shards.SHARDS}
CONTROLLER = "services/controller/starling/controller/core/machine.py"


@pytest.mark.parametrize("campaign", [False, True])
def test_shards_cover_every_test_file_once(campaign: bool) -> None:
    chosen = [shard for shard in shards.SHARDS if shard.campaign == campaign]
    for name in sorted(shards.tracked_files()):
        if name.startswith("tests/") and Path(name).name.startswith("test_"):
            holders = [s.name for s in chosen if any(name == p or name.startswith(f"{p}/") for p in s.paths)]
            assert len(holders) == 1, f"{name} is in the shards {holders}"


def test_dependencies_follow_imports_through_modules_and_helpers() -> None:
    found = shards.dependencies(BY_NAME["sim"])
    assert CONTROLLER in found, "the simulator runs the controller's core"
    assert "pyproject.toml" in found
    assert "libs/common/starling/common/wire/messages.py" in found
    assert not any(name.startswith("services/rollout/starling/rollout/engine/vllm/") for name in found)


@pytest.mark.campaign
def test_dependencies_of_single_test_files_have_their_fixtures() -> None:
    found = shards.dependencies(BY_NAME["architectures-campaign"])
    assert {"tests/vllm/test_architectures.py", "tests/vllm/architectures.py", "tests/vllm/conftest.py"} <= found
    assert "tests/vllm/test_service.py" not in found


def test_property_tests_have_all_examples_in_a_campaign() -> None:
    profiles = {shard.campaign: shard.variables()["HYPOTHESIS_PROFILE"] for shard in shards.SHARDS}
    assert profiles == {False: "quick", True: "full"}
    markers = {shard.campaign: shard.command()[shard.command().index("-m", 3) + 1] for shard in shards.SHARDS}
    assert markers == {False: "not campaign", True: "campaign or hypothesis"}


@pytest.mark.campaign
def test_dependencies_of_service_tests_are_all_services() -> None:
    found = shards.dependencies(BY_NAME["system"])
    assert {name for name in shards.tracked_files() if name.startswith("services/")} <= found


def test_result_is_green_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    shard = BY_NAME["sim"]
    assert not shards.is_green(shard, shards.read_results())
    shards.write_result(shard.name, shards.Result(shards.digest_of(shards.dependencies(shard)), 1.0, 2.0))
    assert shards.is_green(shard, shards.read_results())
    monkeypatch.setattr(shards, "EVERYWHERE", ())
    assert not shards.is_green(shard, shards.read_results()), "it depends on other files now"


def test_damaged_results_count_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    shards.results_file().parent.mkdir(parents=True)
    for text in ("{", "[]", '{"sim": 3}', '{"sim": {"digest": "a"}}'):
        shards.results_file().write_text(text)
        assert shards.read_results() == {}


@pytest.mark.campaign
def test_summary_lists_the_faults_that_were_not_injected() -> None:
    """Without `ip` on the path no network can be cut, as without root."""
    fault = "tests/system/chaos/test_host_faults.py::test_network_is_cut_and_restored"
    command = [sys.executable, "-m", "pytest", "--numprocesses", "1", fault]
    done = subprocess.run(command, cwd=shards.ROOT, env={**os.environ, "PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    summary = done.stdout.partition("FAULTS THAT WERE NOT INJECTED")[2]
    assert f"{fault}: Skipped: network namespaces need `ip` and root" in summary, done.stdout


SAMPLED = """
import pytest

@pytest.fixture(params="abc")
def letter(request):
    return request.param

@pytest.mark.sample(3)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_product(letter, number):
    assert {letter: number} in ({"a": 1}, {"b": 2}, {"c": 3}) or CAMPAIGN

@pytest.mark.sample(2)
@pytest.mark.parametrize("number", [1, 2, pytest.param(3, marks=pytest.mark.campaign), 4])
def test_values(number):
    assert number <= 2 or CAMPAIGN
"""


@pytest.mark.campaign
@pytest.mark.parametrize(("expression", "num_passed"), [("not campaign", 5), ("campaign", 8)])
def test_sample_covers_the_values_of_each_parameter(tmp_path: Path, expression: str, num_passed: int) -> None:
    file = tmp_path / "test_sampled.py"
    file.write_text(f"CAMPAIGN = {expression == 'campaign'}\n{SAMPLED}")
    shutil.copy(shards.ROOT / "tests" / "conftest.py", tmp_path)
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-m", expression, str(file)]
    done = subprocess.run(command, cwd=shards.ROOT, capture_output=True, text=True)
    assert f"{num_passed} passed" in done.stdout, done.stdout + done.stderr
