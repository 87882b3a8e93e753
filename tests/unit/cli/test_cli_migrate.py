"""The command `starling migrate`: whole files of Cosmos-RL, and files that it refuses."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from starling.cli.main import main
from starling.cli.recipe.schema import Recipe
from starling.common.settings import load
from starling.reward.score.scorers.registry import BUILT_IN

EXAMPLES = Path(__file__).with_name("cosmos_rl")
NO_FILE = "this is no settings file of Cosmos-RL"


def loaded(recipe: Path) -> Recipe:
    """Return a recipe as `starling run --dry-run` loads it, apart from the folder of its model."""
    return load(Recipe, [recipe])


def migrate(source: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Recipe, str]:
    assert main(["migrate", str(source), "-o", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    return loaded(out), shown.err


def test_grpo_of_a_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, report = migrate(EXAMPLES / "grpo.toml", tmp_path / "recipe.toml", capsys)
    assert recipe.run.kind == "rl"
    assert recipe.run.name == "gsm8k-small"
    assert (recipe.rl.num_steps, recipe.rl.prompts_per_step, recipe.rl.group_size) == (400, 16, 8)
    assert recipe.replicas == {"policy": 1, "rollout": 2, "reward": 1, "teacher": 0}
    assert (recipe.launch.gpus_per_policy, recipe.launch.gpus_per_rollout) == (2, 1)
    assert recipe.policy.algorithm.aggregate == "constant"
    assert recipe.reward is not None
    names = [scorer.name for scorer in recipe.reward.scorers]
    assert names == ["gsm8k", "format", "my_rewards.py:brevity"]
    assert set(names[:2]) <= set(BUILT_IN)
    assert "  train.optm_impl = 'fused': " in report
    assert "1 key not supported:\n  train.train_policy.min_filter_prefix_tokens = 8: " in report
    text = (tmp_path / "recipe.toml").read_text()
    assert "# CHECK: a function of your own" in text
    assert "# CHECK: a folder is needed: `hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir DIR`" in text


def test_supervised_fine_tuning_of_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, report = migrate(EXAMPLES / "sft.toml", tmp_path / "recipe.toml", capsys)
    assert recipe.run.kind == "sft"
    assert (recipe.sft.num_steps, recipe.sft.examples_per_step) == (500, 16)
    assert recipe.model.lora is not None
    assert (recipe.model.lora.rank, recipe.model.lora.targets) == (32, ("q_proj", "v_proj"))
    assert recipe.policy.saving.folder == "s3://models/sft"
    assert recipe.policy.parallel.num_ranks == recipe.launch.gpus_per_policy == 4
    assert recipe.reward is None
    assert "  rollout.max_response_length = 512: This run (`run.kind = 'sft'`) generates no completions." in report
    assert "  custom.my_script_threads = 8: It is a key of your own script, which is not carried over." in report


def test_evaluation_with_num_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, report = migrate(EXAMPLES / "evaluation.toml", tmp_path / "recipe.toml", capsys)
    assert recipe.run.kind == "evaluate"
    assert (recipe.launch.num_rollouts, recipe.launch.gpus_per_rollout) == (2, 4)
    assert recipe.rollout.vllm.tensor_parallel_size == 4
    (task,) = recipe.evaluation.tasks
    assert (task.name, task.data.source, task.data.system) == (
        "its",
        "/data/its/annotations.jsonl",
        "Answer with one letter.",
    )
    assert "  generation.repetition_penalty = 1.05: " in report
    assert "  data.source: convert '/data/its/annotations.json'" in report


@pytest.mark.parametrize("name", ["grpo", "sft", "evaluation"])
def test_every_key_of_an_example_is_counted(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, report = migrate(EXAMPLES / f"{name}.toml", tmp_path / "recipe.toml", capsys)
    counts = [int(line.split()[0]) for line in report.splitlines() if line[0].isdigit() and " key" in line]
    tree = tomllib.loads((EXAMPLES / f"{name}.toml").read_text())
    assert len(counts) == 3
    assert sum(counts) == _num_keys(tree) - (2 if name == "grpo" else 0)  # the table of reward functions is one key


def _num_keys(tree: Any) -> int:
    return sum(_num_keys(value) if isinstance(value, dict) else 1 for value in tree.values())


def test_recipe_is_printed_without_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", str(EXAMPLES / "sft.toml")]) == 0
    assert tomllib.loads(capsys.readouterr().out)["run"]["kind"] == "sft"


def test_recipe_that_does_not_load_is_written_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wide.toml").write_text('[train.train_policy]\ntype = "grpo"\n[rollout.sampling_config]\ntop_p = 7.0\n')
    assert main(["migrate", str(tmp_path / "wide.toml"), "-o", str(tmp_path / "recipe.toml")]) == 0
    assert "the recipe does not load yet: sampling.top_p = 7.0" in capsys.readouterr().err
    assert "# CHECK: it does not load yet: 'sampling.top_p = 7.0" in (tmp_path / "recipe.toml").read_text()


def test_existing_recipe_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.toml").write_text("mine")
    assert main(["migrate", str(EXAMPLES / "sft.toml"), "-o", str(tmp_path / "recipe.toml")]) == 2
    assert "recipe.toml exists already; give another name, or remove it" in capsys.readouterr().err
    assert (tmp_path / "recipe.toml").read_text() == "mine"


def test_text_of_a_file_stays_in_its_value_or_comment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Line breaks and control characters of the source neither end a comment nor reach the terminal."""
    evil = r"m\u007f\n[launch]\nnum_rollouts = 99\n\u001b[2J"
    (tmp_path / "a.toml").write_text(
        f'[policy]\nmodel_name_or_path = "{evil}"\n[logging]\nexperiment_name = "{evil}"\n'
    )
    assert main(["migrate", str(tmp_path / "a.toml"), "-o", str(tmp_path / "recipe.toml")]) == 0
    written = (tmp_path / "recipe.toml").read_text()
    recipe = tomllib.loads(written)
    assert recipe["model"]["path"] == "m\x7f\n[launch]\nnum_rollouts = 99\n\x1b[2J"
    assert recipe["launch"]["num_rollouts"] == 1
    assert "\x1b" not in written + capsys.readouterr().err


def test_token_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.toml").write_text('[model.rl.reward_config.remote_reward]\ntoken = "hidden"\n[job]\nname = "j"\n')
    assert main(["migrate", str(tmp_path / "a.toml")]) == 2
    error = capsys.readouterr().err
    assert "  model.rl.reward_config.remote_reward.token = ...: " in error
    assert "hidden" not in error


REFUSED = {
    "": "is empty",
    "# nothing": "the file has no settings",
    "a = ": "is not valid TOML",
    "[train]\noptm_lrr = 1e-6": "unknown setting train.optm_lrr = 1e-06; did you mean train.optm_lr?",
    "[train]\nn_generation = 8": "unknown setting train.n_generation = 8; rollout.n_generation has that name; move it",
    "[rollout]\nxyz = 8": "unknown setting rollout.xyz = 8; correct or remove it",
    "[trainn]\nepoch = 1": f"{NO_FILE}: trainn is no section of one; did you mean train?",
    "[rl]\nnum_steps = 1": "this is a recipe of Starling, which needs no translation",
    "[[reward_args]]\nreward_type = 'hpsv3'": "this is a rewards.toml, which needs no translation",
    "[train]\nepoch = true": "train.epoch = true must be an integer; correct it",
    "[train]\nckpt = 3": "train.ckpt = 3 must be a table; write it as [train.ckpt]",
    "[train.train_policy.remote_reward]\nreward_fns = 3": "reward_fns = 3 must be a list of tables; write [[",
    "[train.train_policy]\ntype = 'grpo'\ntrainer_type = 'grpo_vla'": "it trains a vision-language-action model",
    "[train.train_policy]\ntrainer_type = 'grpo_vla'\nclip_ratio_c = 3.0": "it trains a vision-language-action model",
    "[rollout]\nbackend = 'vla'": "it trains a vision-language-action model",
    "[rollout]\nbackend = 'gym'": "it trains a network that is no language model",
    "[policy]\nis_diffusers = true": "it trains a generator of images or videos",
    "[trainer]\nseed = 1\n[job]\nname = 'a'": "it trains a generator of images or videos",
    "num_gpus = 3\n[model]\nmodel_name = 'm'\ntp_size = 2": "num_gpus = 3 does not divide into instances",
    "num_gpus = 0\n[model]\nmodel_name = 'm'": "num_gpus = 0 must be at least 1",
    "num_gpus = 1": "model.model_name is missing, so there is nothing to evaluate",
    "num_gpus = 1\n[model]\nmodel_name = 'm'": "dataset.annotation_path is missing",
    "num_gpus = 1\n[model]\nmodel_name = 'm'\nenable_lora = true": "enable_lora = true without model.base_model_path",
    "[rollout]\nn_generation = 0": "rollout.n_generation = 0 must be at least 1",
    "[train.train_policy]\ntype = 'ppo'": "train.train_policy.type = 'ppo' must be one of sft, grpo",
    "[train]\noptm_lr = { global = 'a' }": "train.optm_lr has 'a', which must be a number",
    "[train]\noptm_lr = nan": "train.optm_lr = nan must be a list or a table or a number",
}


@pytest.mark.parametrize(("text", "expected"), REFUSED.items())
def test_bad_file_is_refused_with_a_sentence(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.toml").write_text(text)
    assert main(["migrate", str(tmp_path / "bad.toml"), "-o", str(tmp_path / "recipe.toml")]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert "bad.toml" in error
    assert not (tmp_path / "recipe.toml").exists()


def test_missing_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", str(tmp_path / "absent.toml")]) == 2
    assert "does not exist; give the path of a TOML file" in capsys.readouterr().err


def test_recipe_needs_no_translation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[run]\nname = "mine"\n\n[policy.optimizer]\nlearning_rate = 1e-5\n')
    assert main(["migrate", str(recipe)]) == 2
    assert "this is a recipe of Starling, which needs no translation" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[train\n", None])
def test_file_that_cannot_be_read_is_named_once(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cosmos.toml"
    if text is not None:
        path.write_text(text)
    assert main(["migrate", str(path)]) == 2
    assert capsys.readouterr().err.count(str(path)) == 1
