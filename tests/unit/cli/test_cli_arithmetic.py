"""Output of `starling run --dry-run` for a recipe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from starling.cli.main import main
from starling.cli.model.scratch import ScratchSettings, make_model_folder
from starling.cli.recipe.arithmetic import describe_arithmetic
from starling.cli.recipe.schema import load_recipe
from starling.common.errors import ConfigError
from starling.common.settings import ModelSettings

RECIPES = Path(__file__).parents[3] / "recipes"


def dry_run(recipe: str, *flags: str) -> Sequence[str]:
    return describe_arithmetic(load_recipe([RECIPES / recipe], flags))


def test_dry_run_resolves_the_algorithm() -> None:
    flags = ("--policy.algorithm.name", "decoupled_ppo", "--policy.algorithm.clip-low", "0.125")
    flags += ("--policy.algorithm.num-minibatches", "4", "--policy.algorithm.num-passes", "2")
    lines = dry_run("quickstart.toml", *flags, "--policy.algorithm.kl-coefficient", "0.01")
    (algorithm,) = (line for line in lines if line.startswith("algorithm: "))
    assert algorithm.startswith("algorithm: decoupled_ppo, clip_low = 0.125, clip_high = 0.2, ")
    assert "advantage_scale = std, " in algorithm
    assert algorithm.endswith("aggregate = token_mean, old = proximal, kl_coefficient = 0.01 (k3)")
    assert "corrections: mask (token) from 0 to 5" in lines
    assert "updates: 2 passes x 4 minibatches = 8 a step" in lines


def test_corrections_of_the_recipe_replace_those_of_the_algorithm(tmp_path: Path) -> None:
    more = tmp_path / "more.toml"
    more.write_text(
        "[policy.algorithm]\nold = 'proximal'\n[[policy.algorithm.corrections]]\nkind = 'truncate'\nhigh = 2\n"
        "[[policy.algorithm.corrections]]\nkind = 'sequence_mask'\nlevel = 'sequence'\nhigh = 0.1\n"
    )
    lines = describe_arithmetic(load_recipe([RECIPES / "quickstart.toml", more], ()))
    assert "corrections: truncate (token) at 2, sequence_mask (sequence) at 0.1" in lines
    assert "corrections: none" in dry_run("quickstart.toml")


def test_dry_run_lists_each_optimizer_with_its_schedule() -> None:
    schedule = ("--policy.optimizer.schedule", "wsd", "--policy.optimizer.decay-steps", "50")
    lines = dry_run("quickstart.toml", *schedule, "--policy.optimizer.final-share", "0.1")
    config = [line for line in lines if line.startswith("optimizer")]
    assert config == [
        "optimizer of the supervised steps: adamw, learning rate 0.002, 10 steps of warm-up, then constant",
        "optimizer: adamw, learning rate 0.0005, 20 steps of warm-up, then wsd over the last 50 steps to 5e-05",
    ]
    (alone,) = (line for line in dry_run("sft.toml") if line.startswith("optimizer"))
    assert alone.startswith("optimizer of the supervised steps: adamw, ")


def test_dry_run_names_trained_and_published_weights(tmp_path: Path) -> None:
    lines = dry_run("quickstart.toml", "--policy.frozen", '["embed", "norm"]')
    assert "trained: all parameters but embed, norm" in lines
    assert (
        lines[-1]
        == "weight sync: 297,248 parameters x 4 bytes = 1,188,992 bytes to each of 2 rollouts, after every step"
    )
    assert "trained: all parameters" in dry_run("sft.toml")
    every = ("--rl.sync-every", "0", "--rl.max-staleness", "3", "--rl.sync-every-s", "20")
    assert dry_run("quickstart.toml", *every)[-1].endswith(
        "each of 2 rollouts, when no group is left to start with the version before, at least 20 s apart"
    )
    lines = dry_run("lora.toml", "--model.path", str(small_model(tmp_path)), "--model.lora.modules-to-save", '["norm"]')
    assert "trained: LoRA adapters of rank 16 and alpha 32, targets all-linear, and norm whole" in lines
    assert lines[-1] == "weight sync: the adapters alone to each of 2 rollouts, after every step"


def test_dry_run_says_how_much_memory_the_policy_takes() -> None:
    flags = ("--policy.memory.checkpointing", "full", "--model.device", "cpu")
    lines = dry_run("quickstart.toml", *flags, "--policy.tokens-per-microbatch", "4096")
    at = next(number for number, line in enumerate(lines) if line.startswith("memory of the policy: "))
    peak, always, activations, following = lines[at : at + 4]
    found = re.fullmatch(
        r"memory of the policy: about (\d+\.?\d*) MiB of cpu at its peak, in microbatches of 4,096 tokens", peak
    )
    assert found
    assert 40 < float(found[1]) < 80
    assert always == "always: 4.54 MiB = 1.13 MiB of weights + 1.13 MiB of gradients + 2.27 MiB of the optimizer"
    assert activations.startswith("activations: 3.5 MiB of 2 blocks (checkpointing = full), and up to ")
    assert following.startswith("weight sync: ")


def small_model(folder: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    make_model_folder(
        ScratchSettings(config=config | {"head_dim": 16, "num_key_value_heads": 1}, alphabet="ab>", max_length=64),
        folder,
    )
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


NOT_OF_THE_MODEL = {
    "the routers of a dense model": ("--policy.router-aux-coefficient", "0.01"),
    "a value that the loss refuses": ("--policy.algorithm.dual-clip", "0.5"),
    "an option that the algorithm lacks": (
        "--policy.algorithm.name=rloo",
        "--policy.algorithm.advantage-scale=batch",
    ),
    "frozen parameters that do not exist": ("--policy.frozen", '["experts"]'),
    "rates of parameters that do not exist": ("--policy.optimizer.rates", "{experts = 0.1}"),
    "adapters of layers that do not exist": ("--model.lora.targets", '["w1"]'),
    "adapters that do not exist": ("--model.lora.adapter", "nowhere"),
    "kernels that need a GPU": ("--policy.liger=true", "--model.device", "cpu"),
    "a device that does not exist": ("--model.device", "cuda:999"),
}


@pytest.mark.parametrize("mistake", NOT_OF_THE_MODEL)
def test_dry_run_refuses_what_the_policy_would_refuse_in_the_same_sentence(mistake: str, tmp_path: Path) -> None:
    from starling.policy.shell.loading import PolicyProcess, create_learner

    folder = small_model(tmp_path / "model")
    path = tmp_path / "recipe.toml"
    data = "data = {source = 'words.jsonl', format = '{word}>'}"
    path.write_text(f"model.path = '{folder}'\n{data}\nreward.scorers = [{{name = 'exact_match'}}]\n")
    recipe = load_recipe([path], NOT_OF_THE_MODEL[mistake])
    with pytest.raises(ConfigError) as foretold:
        describe_arithmetic(recipe)
    settings = PolicyProcess(
        run=recipe.run, model=ModelSettings(**recipe.model.model_dump(exclude={"scratch"})), policy=recipe.policy
    )
    with pytest.raises(ConfigError) as refused:
        create_learner(folder, settings, folder / "weights")
    assert str(foretold.value) == str(refused.value)


MESHES = {
    "tp=3": "policy.parallel.tp = 3 does not divide the 4 attention heads: set tp = 1, 2 or 4",
    "cp=3": "policy.parallel.cp = 3 does not divide the 4 attention heads: set it to one of 1, 2, 4, or "
    'policy.parallel.context to "ring" or "all_gather"',
    "tp=2 cp=4": "policy.parallel.cp = 4 does not divide the 2 attention heads of each rank of tp: set it to",
    "dp-shard=2 ep=2": "policy.parallel.ep = 2 needs a mixture of experts",
    "pp=3": "policy.parallel.pp = 3 makes 3 stages, and Qwen3ForCausalLM has 2 blocks: use at most 2",
}


@pytest.mark.parametrize("sizes", MESHES)
def test_dry_run_refuses_a_mesh_that_cannot_divide_the_model(sizes: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(MESHES[sizes])):
        dry_run("quickstart.toml", *(f"--policy.parallel.{size}" for size in sizes.split()))


@pytest.mark.parametrize("mesh", ["--policy.parallel.dp-shard=2", "--policy.parallel.elastic=true"])
def test_dry_run_refuses_a_setting_that_is_not_available_on_a_mesh(mesh: str) -> None:
    with pytest.raises(ConfigError, match="offload_activations = true is not available on a mesh yet"):
        dry_run("quickstart.toml", mesh, "--policy.memory.offload-activations=true")


def test_dry_run_takes_a_ring_of_any_number_of_ranks() -> None:
    lines = dry_run("quickstart.toml", "--policy.parallel.cp=3", "--policy.parallel.context=ring")
    assert any(line.startswith("mesh: cp 3 = 3 ranks; each needs about ") for line in lines)


def test_dry_run_says_how_many_layers_multiply_in_low_precision() -> None:
    """Those of keys and values, with 56 rows, are not multiples of 16, nor is the output layer one of a block."""
    flags = ("--policy.precision.kind=fp8_rowwise", "--model.device=cpu")
    lines = dry_run("quickstart.toml", *flags)
    assert "precision: fp8_rowwise in 10 of 15 linear layers, emulated on cpu; float32 elsewhere" in lines
    lines = dry_run("quickstart.toml", *flags, '--policy.precision.skip=["down_proj"]', "--policy.parallel.dp-shard=2")
    assert "precision: fp8_rowwise in 8 of 15 linear layers, emulated on cpu; float32 elsewhere" in lines
    assert not any(line.startswith("precision") for line in dry_run("quickstart.toml"))


def test_dry_run_says_how_many_bytes_of_codes_are_published() -> None:
    """A code takes one byte instead of four, and a row of codes a scale of four."""
    layers = [(128, 128), (64, 128), (64, 128), (128, 128), (320, 128), (320, 128), (128, 320)] * 2
    codes, scales = sum(rows * columns for rows, columns in layers), sum(rows for rows, _ in layers)
    (line,) = (line for line in dry_run("fp8.toml") if line.startswith("weight sync: "))
    whole = int(line.split(" = ")[1].split()[0].replace(",", ""))
    lines = dry_run("fp8.toml", "--weights.quantise=fp8_row")
    num_parameters, num_bytes = whole // 4, whole - 3 * codes + 4 * scales
    assert (
        f"weight sync: {num_parameters:,} parameters, as fp8_row in linear layers = {num_bytes:,} bytes to each of 2 "
        "rollouts, after every step" in lines
    )


def test_unknown_algorithm_is_refused_by_the_dry_run() -> None:
    with pytest.raises(ConfigError, match="there is no algorithm 'grop': give one of grpo, "):
        dry_run("quickstart.toml", "--policy.algorithm.name", "grop")
    with pytest.raises(ConfigError, match=r"policy\.algorithm, gspo: there is no option 'dual_clip'"):
        dry_run("quickstart.toml", "--policy.algorithm.name", "gspo", "--policy.algorithm.dual-clip", "2")


def test_dry_run_names_the_source_of_the_initial_weights(tmp_path: Path) -> None:
    small_model(tmp_path)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"""[model]
path = "{tmp_path}"
[data]
source = "reasoning_gym:spell_backward"
format = "{{question}}"
[policy]
weights_from = "s3://bucket/model"
[[reward.scorers]]
name = "exact_match"
"""
    )
    lines = describe_arithmetic(load_recipe([recipe], ()))
    assert lines[-1] == "initial weights: from s3://bucket/model, which the policy reads when it starts"


def test_dry_run_shows_the_mesh() -> None:
    flags = ("--policy.parallel.tp", "2", "--policy.parallel.dp-shard", "2", "--policy.tokens-per-microbatch", "1000")
    lines = dry_run("quickstart.toml", *flags)
    (mesh,) = (line for line in lines if line.startswith("mesh: "))
    assert re.fullmatch(
        r"mesh: dp_shard 2 x tp 2 = 4 ranks; each needs about [\d.]+ MB, [\d.]+ MB of them for its weights, "
        "gradients and moments",
        mesh,
    )
    (sent,) = (line for line in lines if line.startswith("in a pass of a microbatch and an update each sends "))
    assert re.search(r"sends [\d.]+ [kM]B along dp_shard, [\d.]+ [kM]B along tp$", sent)
    stages = dry_run("quickstart.toml", "--policy.parallel.pp", "2")
    assert any(line.startswith("mesh: pp 2 = 2 ranks; each needs about ") for line in stages)
    assert any(
        re.search(r"^in the passes of 2 microbatches and an update each sends [\d.]+ [kM]B along pp$", line)
        for line in stages
    )
    assert not any(line.startswith(("mesh", "in a pass")) for line in dry_run("quickstart.toml"))


SIZES = {"num_hidden_layers": 60, "num_local_experts": 300, "num_experts_per_tok": 8}
MIXTURE = (
    *("--model.scratch.model-type", "gpt_oss"),
    *(word for name, size in SIZES.items() for word in (f"--model.scratch.config.{name}", str(size))),
)
REPLAYED = ("--sampling.routing", "replayed")
VLLM = ("--rollout.engine", "vllm")
EAGER = ("--rollout.vllm.enforce-eager", "true")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "needs a mixture of experts whose routers"),
        ([*MIXTURE, "--sampling.max-tokens", "200000"], "8 in each of 60 layers, and 268435456 can be sent"),
        ([*MIXTURE, "--policy.memory.compile", "true"], "policy.memory.compile = true replaces by compiled code"),
        ([*MIXTURE, *VLLM], "set rollout.vllm.enforce_eager = true"),
        ([*MIXTURE, *VLLM, *EAGER, "--rollout.vllm.speculative.method", "ngram"], "remove rollout.vllm.speculative"),
    ],
)
def test_dry_run_refuses_a_replay_that_a_run_could_not_make(flags: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        dry_run("quickstart.toml", *REPLAYED, *flags)


def test_dry_run_takes_a_replay_of_a_mixture() -> None:
    assert dry_run("quickstart.toml", *REPLAYED, *MIXTURE)
    assert dry_run("quickstart.toml", *REPLAYED, *MIXTURE, *VLLM, *EAGER)


@pytest.mark.parametrize(
    ("http", "reason"),
    [
        ("localhost", "observe.http = 'localhost' is no address; write host:port"),
        ("0.0.0.0:9464", "observe.http is '0.0.0.0:9464', which others can reach, and there is no token"),
    ],
)
def test_dry_run_refuses_an_endpoint_that_the_controller_would_refuse(
    http: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(RECIPES / "quickstart.toml"), "--observe.http", http, "--dry-run"]) == 2
    assert reason in capsys.readouterr().err
