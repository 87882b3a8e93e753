"""Router replay in whole runs: rollout and trainer agree on log-probabilities, and on what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from system_runs import attempt, make_workdir, metrics, run
from test_ranks import MIXTURE

from starling.controller.core.records import CompletionsStored
from starling.controller.shell.journal.journal import Journal

pytestmark = pytest.mark.system

MOST: dict[str, Any] = {"algorithm": {"skip_zero_advantage": False}}
"""Trains every sampled token, so that the mismatch metrics cover all of them."""


def rl_steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(folder, "step") if line["phase"] == "rl"]


def named_tensors(folder: Path) -> set[tuple[tuple[str, str], ...]]:
    """Return name and type of the named tensors of the trained groups in the journal."""
    journal = Journal(attempt(folder) / "journal.sqlite")
    try:
        records = [record for record in journal.records() if isinstance(record, CompletionsStored)]
        return {tuple((one.name, one.dtype) for one in record.tensors[4:]) for record in records if record.tensors}
    finally:
        journal.close()


VLLM: dict[str, Any] = {"engine": "vllm", "vllm": {"kv_cache_mb": 32, "enforce_eager": True, "start_timeout_s": 300}}
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": 32}
"""Sizes that vLLM's build for CPUs computes."""


def check_run(folder: Path, routing: str, dtype: str, *, on_vllm: bool = False) -> list[dict[str, Any]]:
    scratch = MIXTURE["scratch"]
    config = {**scratch["config"], **(WIDE if on_vllm else {})}  # type: ignore[dict-item]
    make_workdir(
        folder,
        sampling={"max_tokens": 6, "routing": routing},
        rl={"max_staleness": 0, "num_steps": 4},
        policy=MOST,
        model={"scratch": {**scratch, "config": config}, "dtype": dtype},
        **({"rollout": VLLM} if on_vllm else {}),
    )
    with run(folder) as command:
        assert command.wait(300) == 0, command.transcript()
    steps = rl_steps(folder)
    assert len(steps) == 4
    assert all(line["attested"] for line in metrics(folder, "adopted"))
    assert all(step["batch_digest"] for step in steps)
    return steps


def test_replayed_run_agrees_with_its_rollouts(tmp_path: Path) -> None:
    steps = check_run(tmp_path, "replayed", "float32")
    assert named_tensors(tmp_path) == {(("prompt_routing", "uint8"), ("routing", "uint8"))}
    assert all(0.0 <= step["router_replay_share"] < 0.05 for step in steps)
    assert all(step["mismatch_max"] < 1e-4 for step in steps)


@pytest.mark.campaign
def test_replayed_run_agrees_with_its_rollouts_on_vllm(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    steps = check_run(tmp_path, "replayed", "float32", on_vllm=True)
    assert named_tensors(tmp_path) == {(("prompt_routing", "uint8"), ("routing", "uint8"))}
    assert all(0.0 <= step["router_replay_share"] < 0.05 for step in steps)
    assert all(step["mismatch_max"] < 1e-4 for step in steps)


@pytest.mark.campaign
def test_replay_lowers_the_mismatch_where_routers_differ(tmp_path: Path) -> None:
    """In bfloat16 both sides round differently, and their routers choose different experts of some tokens."""
    replayed = check_run(tmp_path / "replayed", "replayed", "bfloat16")
    assert sum(step["router_replay_share"] for step in replayed) > 0.0
    own = check_run(tmp_path / "own", "own", "bfloat16")
    assert named_tensors(tmp_path / "own") == {()}
    mismatches = [sum(step["mismatch_kl"] for step in steps) for steps in (replayed, own)]
    assert mismatches[0] <= mismatches[1], mismatches
