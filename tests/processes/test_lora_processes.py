"""Adapters between processes: only adapters are transferred; every replica loads the base weights itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_hub import FakeHub
from replica_processes import exit_code, replica
from safetensors.torch import load_file
from test_policy_process import step_of

from starling.common.errors import WeightsError
from starling.common.wire import messages as wire
from starling.policy.train.model.load import load_model
from starling.weightsync.offers.offer import decode_offer
from starling.weightsync.plan.layout import Layout, decode, encode
from starling.weightsync.plan.planner import make_plan

RANK = 4
LORA = ("--model.lora.rank", str(RANK), "--model.lora.targets", '["q_proj", "down_proj"]', "--model.lora.dora")
OWN = ("--policy.transport", "tcp", "--policy.optimizer.learning-rate", "0.01")


def with_weights(model: Path, folder: Path, seed: int) -> Path:
    """Return a folder of the model with weights."""
    from transformers import AutoTokenizer

    load_model(model, init="random", seed=seed).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def adapter_bytes(base: Path) -> int:
    """Return the bytes of the adapters of q_proj and down_proj: two factors and the magnitudes of DoRA."""
    shapes = [
        tuple(tensor.shape)
        for name, tensor in load_file(base / "model.safetensors").items()
        if "q_proj" in name or "down_proj" in name
    ]
    return sum(4 * (RANK * (rows + columns) + rows) for rows, columns in shapes)


def generate(hub: FakeHub, version: int) -> wire.GenerateGroup:
    return wire.GenerateGroup(
        lease=hub.lease("generate"),
        purpose="train",
        prompt=wire.Prompt(id="p", text="abc>"),
        num_completions=2,
        sampling=wire.Sampling(max_tokens=4),
        min_version=version,
    )


def test_only_adapters_are_transferred(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    base, other = (with_weights(model, tmp_path / name, seed) for seed, name in enumerate(("base", "other")))
    shared = ("--model.device", "cpu", *LORA)
    with (
        replica(hub, "policy-0", tmp_path, *shared, *OWN, "--model.path", str(base)) as policy,
        replica(hub, "rollout-0", tmp_path, *shared, "--model.path", str(base)) as rollout,
        replica(hub, "rollout-1", tmp_path, *shared, "--model.path", str(other)),
        replica(hub, "rollout-2", tmp_path, *shared, "--model.path", str(base), "--model.lora.alpha", "4"),
    ):
        names = ("policy-0", "rollout-0", "rollout-1", "rollout-2")
        layouts = {name: decode(Layout, hub.hello(name)[1][0]) for name in names}
        for name in ("rollout-1", "rollout-2"):
            with pytest.raises(
                WeightsError, match=f"{name} has its adapters on other weights than policy-0, or scales"
            ):
                make_plan(layouts["policy-0"], layouts[name])
        plan, roots = make_plan(layouts["policy-0"], layouts["rollout-0"]), set()
        assert plan.total_bytes == adapter_bytes(base)
        for version in range(3):
            if version:
                step, buffers = step_of(hub.lease("train"), version + 2)  # of groups
                buffers = tuple(bytes(len(one)) if at % 4 == 3 else one for at, one in enumerate(buffers))  # version 0
                step = wire.TrainStep(lease=step.lease, step=version, groups=step.groups, num_steps=2)
                hub.ask("policy-0", step, wire.StepTrained, buffers)
            publish = wire.PublishWeights(lease=hub.lease("publish"), version=version)
            _, (offer,) = hub.ask("policy-0", publish, wire.WeightsPublished)
            order = wire.AdoptWeights(lease=hub.lease("adopt"), version=version, source="policy-0")
            adopted, _ = hub.ask("rollout-0", order, wire.WeightsAdopted, (offer, encode(plan)))
            assert adopted.root == decode_offer(offer).root
            assert adopted.size_bytes == adapter_bytes(base)
            roots.add(adopted.root)
            hub.ask("rollout-0", generate(hub, version), wire.GroupGenerated)
        assert len(roots) == 3

        saved, _ = hub.ask("policy-0", wire.SaveCheckpoint(lease=hub.lease("save"), step=2), wire.CheckpointSaved)
        assert json.loads((Path(saved.path) / "adapter_config.json").read_text())["use_dora"]
        assert not (Path(saved.path) / "model.safetensors").exists()
        for process in (policy, rollout):
            process.terminate()
        assert [exit_code(process) for process in (policy, rollout)] == [0, 0]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        pytest.param(
            ("--policy.init", "random"),
            "policy.init = 'random' is not compatible with [model.lora]",
            marks=pytest.mark.campaign,
        ),
        pytest.param(
            ("--policy.frozen", '["layers"]'),
            "policy.frozen is not compatible with [model.lora]",
            marks=pytest.mark.campaign,
        ),
        (("--weights.quantise", "fp8_row"), "weights.quantise = 'fp8_row' is not compatible with [model.lora]"),
    ],
)
def test_settings_incompatible_with_adapters_are_rejected(
    hub: FakeHub, model: Path, tmp_path: Path, flags: tuple[str, ...], reason: str
) -> None:
    with replica(hub, "policy-0", tmp_path, "--model.path", str(model), *LORA, *flags) as policy:
        _, errors = policy.communicate(timeout=120.0)
    assert policy.returncode == 2
    assert reason in errors
    assert "Traceback" not in errors
