"""Runs of diffusion models: policy, rollouts and reward service of tiny pipelines, from prompts to checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from system_runs import WORDS, attempt, make_workdir, metrics, num_steps, run, starling_command, trained

pytestmark = pytest.mark.system

NUM_STEPS = 30
"""Of runs that are killed or stopped, enough that they do not end before."""
PROMPTS_PER_STEP = 2
GROUP_SIZE = 4
SAMPLER = {"num_steps": 4, "height": 32, "width": 32, "num_frames": 1, "text_length": 16}
SAVES = {"save_every": 2, "save_rest_s": 0.0}
LEARNING = {"learning_rate": 3e-3}
EXPORTS = {"hf_every": 1}


def make_diffusion_workdir(folder: Path, pipeline: str = "wan", **changes: dict[str, Any]) -> Path:
    """Create a working directory with a recipe of a tiny pipeline, as `make_workdir` does."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"scratch": {"pipeline": pipeline}},
        "diffusion": SAMPLER,
        "data": {"format": "{prompt}", "reference_column": "", "metadata_columns": ["latent_target"]},
        "sft": {},
        "rl": {"num_steps": 8, "prompts_per_step": PROMPTS_PER_STEP, "group_size": GROUP_SIZE},
        "evaluation": {},
        "rollout": {"engine": "diffusion"},
        "policy": {"optimizer": LEARNING},
        "reward": {"scorers": [{"name": "latent_target"}]},
    }
    for section, keys in changes.items():
        sections[section] = {**sections.get(section, {}), **keys} if keys else {}
    make_workdir(folder, **sections)
    rows = [{"prompt": f"the word {word}", "latent_target": 0.5} for word in WORDS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def make_pipeline(folder: Path, pipeline: str) -> Path:
    """Create a tiny pipeline with the weights of its transformer in the new folder `folder`."""
    import torch

    from starling.algo.diffusion.folder import load_transformer, read_pipeline
    from starling.cli.model.scratch import ScratchSettings, make_model_folder

    make_model_folder(ScratchSettings(pipeline=pipeline), folder)
    torch.manual_seed(1)
    model: Any = load_transformer(read_pipeline(folder), dtype=torch.float32, random=True)
    model.save_pretrained(folder / "transformer")
    return folder


def pipelines(folder: Path) -> list[str]:
    """Return the names of the complete checkpoints that are whole pipelines."""
    return sorted(path.parent.name for path in attempt(folder).glob("checkpoints/*/model_index.json"))


def exported_states(folder: Path) -> set[int]:
    """Return the versions of the states of a run that have a checkpoint as well."""
    states = {path.name.removeprefix("version-") for path in attempt(folder).glob("states/version-*")}
    return {int(one) for one in states if (attempt(folder) / "checkpoints" / f"step-{one}").is_dir()}


def weights_of(pipeline: Path) -> dict[str, Any]:
    """Return the tensors of the transformer of a pipeline, by name."""
    from safetensors.torch import load_file

    return dict(load_file(pipeline / "transformer" / "diffusion_pytorch_model.safetensors"))


def assert_trained(folder: Path, last_step: int, max_staleness: int = 1) -> None:
    """Assert that each step trained its groups, each prompt once, with attested weights within the staleness bound."""
    steps = metrics(folder, "step")
    assert [line["step"] for line in steps] == list(range(1, last_step + 1))
    assert len(trained(folder)) == last_step * PROMPTS_PER_STEP
    assert set(trained(folder).values()) == {1}, "a prompt was trained twice"
    for line in steps:
        assert line["num_sequences"] == PROMPTS_PER_STEP * GROUP_SIZE
        assert line["staleness_max"] <= max_staleness
        assert line["reward_min"] < line["reward_max"], "completions of a diffusion model differ"
        assert line["score/latent_target"] == line["reward_mean"]
        assert line["update_norm"] > 0
        assert "entropy" not in line, "no entropy depends on the weights"
    assert metrics(folder, "discarded") == []
    adopted = metrics(folder, "adopted")
    assert adopted
    assert all(line["attested"] for line in adopted)


def assert_same_densities(folder: Path) -> None:
    """Assert that the policy finds the log-densities of fresh actions that the rollouts report."""
    names = [f"ratio_error/{step}" for step in range(SAMPLER["num_steps"])]
    found = [line[name] for line in metrics(folder, "step") for name in names if name in line]
    assert found, "there must be steps with fresh actions"
    assert max(found) < 1e-3


def test_pipeline_from_scratch_is_trained_and_loads_in_diffusers(tmp_path: Path) -> None:
    evaluation = {"at_start": True, "at_end": True}
    launch = {"num_rollouts": 2}
    make_diffusion_workdir(tmp_path, launch=launch, evaluation=evaluation, controller=SAVES, policy={"saving": EXPORTS})
    with run(tmp_path) as command:
        assert command.wait() == 0, command.transcript()
    assert_trained(tmp_path, last_step=8)
    assert_same_densities(tmp_path)
    assert {line["replica"] for line in metrics(tmp_path, "adopted")} == {"rollout-0", "rollout-1"}
    evaluations = metrics(tmp_path, "evaluation")
    assert [(line["version"], line["cause"]) for line in evaluations] == [(0, "start"), (8, "end")]
    assert [(line["num_prompts"], line["num_failed"]) for line in evaluations] == [(4, 0)] * 2
    assert evaluations[0]["reward_mean"] != evaluations[1]["reward_mean"]
    assert pipelines(tmp_path)[-1] == "step-8"
    assert_loads(attempt(tmp_path) / "checkpoints" / "step-8")
    assert_exports_state(tmp_path)


def assert_loads(checkpoint: Path) -> None:
    """Assert that diffusers loads the parts of a checkpoint, and the transformer with exactly its weights."""
    import torch
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanTransformer3DModel

    transformer = WanTransformer3DModel.from_pretrained(checkpoint / "transformer")
    weights = weights_of(checkpoint)
    assert set(transformer.state_dict()) == set(weights)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in transformer.state_dict().items())
    vae = AutoencoderKLWan.from_pretrained(checkpoint / "vae")
    assert vae.config.z_dim == transformer.config.out_channels
    assert FlowMatchEulerDiscreteScheduler.from_pretrained(checkpoint / "scheduler").config.shift == 3.0


def assert_exports_state(folder: Path) -> None:
    """Assert that the export of a state has the bits of the checkpoint of the same version."""
    version = max(exported_states(folder))
    state = attempt(folder) / "states" / f"version-{version}"
    with starling_command(folder, "export", str(state), "out", name="export") as command:
        assert command.wait() == 0, command.transcript()
    checkpoint = attempt(folder) / "checkpoints" / f"step-{version}"
    names = sorted(path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(folder / "out") for path in (folder / "out").rglob("*") if path.is_file())
    assert all((folder / "out" / name).read_bytes() == (checkpoint / name).read_bytes() for name in names)


def test_adapters_of_a_pipeline_are_trained_and_published_alone(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    base = make_pipeline(tmp_path / "pipeline", "cosmos")
    targets = json.dumps(["to_q", "to_k", "to_v", "to_out.0"])
    flags = ("--model.path", str(base), "--model.lora.rank", "2", "--model.lora.targets", targets)
    make_diffusion_workdir(tmp_path, model={}, controller=SAVES, policy={"saving": EXPORTS})
    with run(tmp_path, *flags) as command:
        assert command.wait() == 0, command.transcript()
    assert_trained(tmp_path, last_step=8)
    assert_same_densities(tmp_path)
    checkpoint = attempt(tmp_path) / "checkpoints" / "step-8"
    adapters = load_file(checkpoint / "adapter_model.safetensors")
    assert len(adapters) == 2 * 4 * 2, "two factors for four layers of each of two attentions"
    assert any(tensor.any() for name, tensor in adapters.items() if "lora_B" in name), "they are zero at first"
    num_bytes = sum(tensor.nbytes for tensor in adapters.values())
    assert num_bytes < sum(tensor.nbytes for tensor in weights_of(base).values()) / 4
    assert {line["size_bytes"] for line in metrics(tmp_path, "adopted")} == {num_bytes}
    assert_exports_state(tmp_path)


def test_samples_without_noise_are_trained_by_nft(tmp_path: Path) -> None:
    make_diffusion_workdir(tmp_path, diffusion={"dynamics": "ode"}, policy={"diffusion": {"method": "nft"}})
    with run(tmp_path) as command:
        assert command.wait() == 0, command.transcript()
    assert_trained(tmp_path, last_step=8)
    names = {name for line in metrics(tmp_path, "step") for name in line}
    assert not {name for name in names if name.startswith("ratio_")}, "these samples have no densities"
    assert pipelines(tmp_path) == ["step-8"]
    assert_loads(attempt(tmp_path) / "checkpoints" / "step-8")


def test_killed_services_of_a_diffusion_model_are_restarted(tmp_path: Path) -> None:
    make_diffusion_workdir(tmp_path, launch={"num_rollouts": 2}, rl={"num_steps": NUM_STEPS}, controller=SAVES)
    with run(tmp_path) as command:
        for name, least in (("rollout-1", 2), ("policy-0", 4)):
            command.wait_until(lambda least=least: num_steps(tmp_path) >= least, f"{least} steps")
            command.process_titled(name).kill()
            command.wait_for_output(f"{name} was killed by SIGKILL; restarting it")
        assert command.wait() == 0, command.transcript()
    joined = [line["replica"] for line in metrics(tmp_path, "joined")]
    assert joined.count("policy-0") == 2
    assert_trained(tmp_path, last_step=NUM_STEPS)
    assert_same_densities(tmp_path)
    assert pipelines(tmp_path) == [f"step-{NUM_STEPS}"]


def test_stopped_run_of_a_diffusion_model_is_resumed(tmp_path: Path) -> None:
    make_diffusion_workdir(tmp_path, "cosmos", rl={"num_steps": NUM_STEPS})
    with run(tmp_path) as command:
        command.wait_until(lambda: num_steps(tmp_path) >= 3, "three steps")
        command.interrupt()
        assert command.wait() == 0, command.transcript()
    made = num_steps(tmp_path)
    assert (
        f"stopped at step {made} of {NUM_STEPS}; `starling run --resume runs/tiny/attempt-1` resumes it"
        in command.output
    )
    assert pipelines(tmp_path) == [f"step-{made}"]
    before = weights_of(attempt(tmp_path) / "checkpoints" / f"step-{made}")
    with starling_command(tmp_path, "run", "--resume", "runs/tiny", name="resume") as command:
        assert command.wait() == 0, command.transcript()
    assert f"version={made}" in command.output, command.transcript()
    assert_trained(tmp_path, last_step=NUM_STEPS)
    assert_same_densities(tmp_path)
    assert f"step-{NUM_STEPS}" in pipelines(tmp_path)
    after = weights_of(attempt(tmp_path) / "checkpoints" / f"step-{NUM_STEPS}")
    assert any(not before[name].equal(tensor) for name, tensor in after.items())
