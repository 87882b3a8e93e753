"""Recipes of `starling evaluate --model`, `infer`, `serve`, `rollout --only` and `policy --replay`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from starling.cli.app import make_app
from starling.cli.command_line import CommandLine, parse
from starling.cli.evaluate.command import is_of_model
from starling.cli.evaluate.recipes import evaluation_recipe, inference_recipe, serving_recipe
from starling.cli.evaluate.results import answer, summary, table_of
from starling.cli.evaluate.tasks import TaskOptions, find_tasks, scorers_of
from starling.cli.main import main
from starling.cli.recipe.arithmetic import describe_arithmetic
from starling.cli.recipe.schema import Recipe, load_recipe
from starling.cli.run.command import generate_settings, replay_settings
from starling.cli.run.gpus import FreeGpus, num_instances, visible_gpus
from starling.cli.run.screen import PlainScreen
from starling.common.errors import ConfigError
from starling.common.wire.messages import Prompt, Status, TrajectoryMeta
from starling.common.wire.telemetry import RunSnapshot
from starling.controller.core.records import StoredGroup
from starling.controller.data.load import load_data, prompts_to_answer


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with a model folder and prompt files; no GPUs are visible."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("model/model.safetensors").touch()
    lines("sums.jsonl", {"question": "1+1", "answer": "#### 2"}, {"question": "2+2", "answer": "#### 4"})
    lines("proofs.jsonl", {"problem": "1", "solution": "\\boxed{1}"})
    lines(
        "chats.jsonl",
        {"messages": [{"role": "user", "content": "Hello"}]},
        {"messages": [{"role": "user", "content": "Bye"}]},
    )
    lines("texts.jsonl", {"text": "Once upon"})
    Path("words.toml").write_text('name = "words"\n[data]\nsource = "sums.jsonl"\n[[scorers]]\nname = "format"\n')
    return tmp_path


def lines(path: str, *rows: dict[str, Any]) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def indexes(folder: str, num: int) -> None:
    """Write a trajectory index with `num` usable groups."""
    description = {"file": "step-000001.msgpack", "step": 1, "num_groups": num, "size_bytes": 1, "sha256": ""}
    lines(f"{folder}/index.jsonl", {**description, "num_usable": num})


def recipe_of(command: str, *argv: str) -> tuple[Recipe, str]:
    """Return the recipe of a command line, and the description of its instances."""
    _, bound = parse(make_app(), [command, "--model", "model", *argv])
    bound.apply_defaults()
    given = bound.arguments
    model, settings = given["model"], given["line"].settings
    if command == "serve":
        return serving_recipe(model, settings)
    if command == "infer":
        return inference_recipe(model, given["answers"], given["prompts"], given["prompt_column"], settings)
    return evaluation_recipe(model, given["answers"], given["tasks"], given["scorer"], settings)


# --- instances -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_gpus", "tp_size", "present", "instances", "description"),
    [
        (8, 4, 8, 2, "8 GPUs = 2 instances x tp 4"),
        (8, 1, 8, 8, "8 GPUs = 8 instances x tp 1"),
        (3, 1, 0, 3, "no GPU here: 3 shares of the CPU = 3 instances x tp 1"),
        (4, 2, 0, 2, "no GPU here: 4 shares of the CPU = 2 instances x tp 2"),
    ],
)
def test_num_instances_divides_the_gpus(
    num_gpus: int, tp_size: int, present: int, instances: int, description: str
) -> None:
    assert num_instances(num_gpus, tp_size, present) == (instances, description)


@pytest.mark.parametrize(
    ("num_gpus", "tp_size", "present", "problem"),
    [
        (6, 4, 8, "--num-gpus 6 does not divide into instances of --tp-size 4; give --num-gpus 4 or 8"),
        (2, 4, 0, "does not divide into instances of --tp-size 4; give --num-gpus 4,"),
        (8, 1, 2, "--num-gpus 8 is more than the 2 GPUs visible here; give at most 2"),
        (0, 1, 2, "must both be 1 or more"),
    ],
)
def test_num_instances_refuses_numbers_that_do_not_divide(
    num_gpus: int, tp_size: int, present: int, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        num_instances(num_gpus, tp_size, present)


def test_free_gpus_gives_each_instance_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5, 6,7,2")
    assert visible_gpus() == ["4", "5", "6", "7", "2"]
    gpus = FreeGpus()
    assert gpus.take("rollout-0", 2) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert gpus.take("rollout-1", 2) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert gpus.take("rollout-1", 0) == {}
    with pytest.raises(ConfigError, match=r"rollout-2 .* = 2, and of the 5 GPUs visible here 1 is free; lower it"):
        gpus.take("rollout-2", 2)


def test_free_gpus_gives_a_restarted_instance_its_former_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    gpus = FreeGpus()
    for name in ("rollout-0", "rollout-1"):
        gpus.take(name, 1)
    for name in ("rollout-0", "rollout-1", "rollout-7"):
        gpus.release(name)
    assert gpus.take("rollout-1", 1) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert gpus.take("rollout-2", 1) == {"CUDA_VISIBLE_DEVICES": "0"}
    assert gpus.take("rollout-0", 1) == {"CUDA_VISIBLE_DEVICES": "2"}, "another one has its former GPU"


# --- evaluate ------------------------------------------------------------------------------------------------------


def test_evaluation_recipe_has_tasks_and_scorers(workdir: Path) -> None:
    flags = ("--rollout.max-rows", "4", "--temperature", "0.5", "--num-completions", "4")
    recipe, description = recipe_of(
        "evaluate", "--tasks", "gsm8k:sums.jsonl,math:proofs.jsonl", "--num-gpus", "2", *flags
    )
    assert description == "no GPU here: 2 shares of the CPU = 2 instances x tp 1"
    assert recipe.replicas == {"rollout": 2, "reward": 1, "teacher": 0}
    assert (recipe.rollout.load_weights, recipe.rollout.max_rows, recipe.launch.gpus_per_rollout) == (True, 4, 0)
    assert recipe.reward is not None
    assert [(s.name, s.tasks, s.title) for s in recipe.reward.scorers] == [
        ("gsm8k", ("gsm8k",), "gsm8k/gsm8k"),
        ("math", ("math",), "math/math"),
    ]
    plan = load_data(recipe).plan
    assert (plan.num_prompts, plan.num_steps, plan.group_size, plan.sampling.temperature) == (3, 1, 4, 0.5)
    assert (plan.kind.trains, plan.kind.keeps_tokens, plan.phase(1)) == (False, False, "evaluate")
    prompts = prompts_to_answer(recipe)
    assert [(prompt.id, prompt.metadata["task"]) for prompt in prompts] == [
        ("gsm8k/0", "gsm8k"), ("gsm8k/1", "gsm8k"), ("math/0", "math")
    ]  # fmt: skip
    assert [prompt.reference for prompt in prompts] == ["#### 2", "#### 4", "\\boxed{1}"]
    assert Path(recipe.model.path).is_absolute(), "the run can be resumed from any folder"


def test_evaluation_recipe_shares_gpus_among_instances(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    recipe, description = recipe_of("evaluate", "--tasks", "words.toml", "--tp-size", "2", "--engine", "vllm")
    assert description == "4 GPUs = 2 instances x tp 2"
    assert (recipe.launch.num_rollouts, recipe.launch.gpus_per_rollout) == (2, 2)
    assert recipe.rollout.vllm.tensor_parallel_size == 2
    assert recipe.model.dtype == "bfloat16"
    assert (recipe.rollout.num_slots, recipe.controller.window) == (128, 1024)
    many, _ = recipe_of("evaluate", "--tasks", "words.toml", "--num-completions", "4")
    assert (many.rollout.num_slots, many.launch.num_rollouts) == (32, 4)


def test_find_tasks_names_each_task_once(workdir: Path) -> None:
    names = ["reasoning_gym:spell_backward", "sums.jsonl", "sums.jsonl", "words.toml", "hf:org/name"]
    tasks = find_tasks(names, TaskOptions(limit=5, scorer="prefix_match", plain=True))
    assert [(task.name, task.scorers[0]["name"]) for task in tasks] == [
        ("spell_backward", "reasoning_gym:spell_backward"),
        ("sums", "prefix_match"),
        ("sums#2", "prefix_match"),
        ("words", "format"),
        ("name", "prefix_match"),
    ]
    assert tasks[0].data["size"] == 5
    assert all((task.data["limit"], task.data["format"]) == (5, "{question}") for task in tasks)
    assert scorers_of(tasks[:1]) == [{"name": "reasoning_gym:spell_backward"}]


# --- infer ---------------------------------------------------------------------------------------------------------


def test_inference_recipe_detects_the_prompt_column(workdir: Path) -> None:
    chats, _ = recipe_of("infer", "chats.jsonl", "--system", "Be kind.")
    assert [[message.content for message in prompt.messages] for prompt in prompts_to_answer(chats)] == [
        ["Be kind.", "Hello"], ["Be kind.", "Bye"]
    ]  # fmt: skip
    assert chats.replicas == {"rollout": 1, "reward": 0, "teacher": 0}
    assert load_data(chats).plan.num_rewards == 0
    texts, _ = recipe_of("infer", "texts.jsonl")
    assert [prompt.text for prompt in prompts_to_answer(texts)] == ["Once upon"]
    limited, _ = recipe_of("infer", "sums.jsonl", "--limit", "1")
    assert [(prompt.id, prompt.messages[0].content) for prompt in prompts_to_answer(limited)] == [("0", "1+1")]


def test_serving_recipe_has_no_prompts_and_no_end(workdir: Path) -> None:
    recipe, _ = recipe_of("serve", "--num-gpus", "2")
    assert recipe.replicas == {"rollout": 2, "reward": 0, "teacher": 0}
    assert (recipe.rollout.api.enabled, recipe.rollout.load_weights) == (True, True)
    plan = load_data(recipe).plan
    assert (plan.kind.serves_requests, plan.num_prompts, plan.num_steps, plan.phase(0)) == (True, 0, 0, "serve")


def test_summary_counts_no_tokens_of_the_environment() -> None:
    one = TrajectoryMeta(
        status=Status.OK, num_tokens=9, num_masked=4, text="", oldest_version=0, newest_version=0, num_turns=2
    )
    group = StoredGroup(ordinal=0, prompt=Prompt(id="0", text="p"), trajectories=(one, one), rewards=(1.0, 0.0))
    found = summary([group])
    assert (found["num_tokens"], found["completion_tokens_mean"], found["reward_mean"]) == (10, 5.0, 0.5)


def test_answers_have_evaluation_scores_apart() -> None:
    one = TrajectoryMeta(status=Status.OK, num_tokens=9, text="t", oldest_version=0, newest_version=0)
    group = StoredGroup(
        ordinal=0,
        prompt=Prompt(id="0", text="p"),
        trajectories=(one, one),
        rewards=(1.0, 0.0),
        components={"right": (1.0, 0.0)},
        evaluation_scores={"judge": (0.25, None)},
    )
    first, second = answer(group, is_scored=True)["completions"]
    assert (first["reward"], first["scores"], first["evaluation_scores"]) == (1.0, {"right": 1.0}, {"judge": 0.25})
    assert (second["scores"], second["evaluation_scores"]) == ({"right": 0.0}, {})
    plain = answer(msgspec.structs.replace(group, evaluation_scores={}), is_scored=True)
    assert "evaluation_scores" not in plain["completions"][0]


def test_table_without_answers_has_no_pass_rate() -> None:
    found = summary([StoredGroup(ordinal=0, prompt=Prompt(id="0", text="p"), problem="too long")])
    assert [column.header for column in table_of(found).columns] == ["task", "prompts", "failed", "reward", "tokens"]


# --- mistakes ------------------------------------------------------------------------------------------------------

EVALUATE = ("evaluate", "--model", "model", "--tasks")
INFER = ("infer", "--model", "model")
MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "no model": (("evaluate", "--tasks", "words.toml"), "--model is missing"),
    "a missing model": (
        ("evaluate", "--model", "nowhere", "--tasks", "words.toml"),
        "the model folder nowhere does not exist",
    ),
    "a model without weights": (
        ("infer", "--model", "bare", "texts.jsonl"),
        "bare has a config.json and no weights; add model.safetensors\n",
    ),
    "no tasks": (("evaluate", "--model", "model"), "--tasks is missing; name what to evaluate"),
    "a task like another": ((*EVALUATE, "gms8k"), "there is no task 'gms8k'; did you mean gsm8k:FILE?"),
    "a task like none": ((*EVALUATE, "hellaswag"), "there is no task 'hellaswag'; write reasoning_gym:TASK,"),
    "a task of reasoning-gym like another": (
        (*EVALUATE, "reasoning_gym:spel_backward"),
        "reasoning-gym has no task 'spel_backward'; nearest: spell_backward",
    ),
    "a missing dataset": ((*EVALUATE, "gsm8k:sum.jsonl"), "sum.jsonl does not exist; in its folder, nearest: sums"),
    "a task without data": ((*EVALUATE, "empty.toml"), "the task empty.toml has no section [data]; add one"),
    "a task with more": ((*EVALUATE, "more.toml"), "the task more.toml has 'scorer'; a task has name, [data] and"),
    "an unknown scorer": ((*EVALUATE, "sums.jsonl", "--scorer", "exact_mach"), "did you mean 'exact_match'"),
    "a broken line": ((*INFER, "broken.jsonl"), "line 2 of"),
    "a line without a prompt": ((*INFER, "gap.jsonl"), "has no column 'prompt'"),
    "a file without prompts": ((*INFER, "proofs.jsonl"), "line 1 of proofs.jsonl has none of messages, prompt,"),
    "no prompts": (INFER, "the file of prompts is missing"),
    "an odd number of GPUs": (
        (*EVALUATE, "words.toml", "--num-gpus", "3", "--tp-size", "2", "--engine", "vllm"),
        "--num-gpus 3 does not divide into instances of --tp-size 2; give --num-gpus 2 or 4",
    ),
    "tensor parallelism without vllm": ((*EVALUATE, "words.toml", "--tp-size", "2"), "give --engine vllm"),
    "an output that is there": ((*INFER, "texts.jsonl", "--out", "sums.jsonl"), "sums.jsonl exists; give another"),
    "a folder that is there": ((*EVALUATE, "words.toml", "--out", "model"), "model exists; give another --out"),
    "an output nowhere": ((*INFER, "texts.jsonl", "--out", "a/b.jsonl"), "the folder of a/b.jsonl does not exist"),
    "no number": (
        (*INFER, "texts.jsonl", "--num-gpus", "two"),
        'invalid value for --num-gpus: unable to convert "two" into int; see starling infer --help',
    ),
    "a run to resume, and settings": (("evaluate", "--resume", "model", "--limit", "3"), "FOLDER without --limit"),
    "nothing to resume": (("infer", "--resume", "model"), "there is no run in model"),
    "a misspelt setting": ((*INFER, "texts.jsonl", "--rollout.max-row", "3"), "did you mean rollout.max_rows?"),
    "nothing recorded": (("policy", "--replay", "model", "rl.toml"), "model has no index.jsonl"),
    "too little recorded": (("policy", "--replay", "short", "rl.toml"), "short has 3 groups, and a step takes 16; set"),
    "no completions": ((*INFER, "texts.jsonl", "--num-completions", "0"), "evaluation.num_completions = 0"),
    "tasks without a name": ((*EVALUATE, ","), "--tasks is missing; name what to evaluate"),
    "a task of lm-eval without a name": ((*EVALUATE, "lm-eval:"), "--tasks lm-eval: names no task of lm-eval; write"),
    "a machine of a million GPUs": ((*EVALUATE, "words.toml", "--num-gpus", "999999"), "launch.num_rollouts = 999999"),
    "an engine that is no text": (
        (*EVALUATE, "words.toml", "--engine", "\udcff"),
        r"rollout.engine = '\udcff' is not UTF-8, as a recipe has to be; give another value (from the command line)",
    ),
    "prompts that are no text": ((*INFER, "\udcff", "--plain"), r"data.source = '\udcff' is not UTF-8"),
    "a folder as the file of answers": ((*INFER, "texts.jsonl", "--out", "hollow"), "hollow is a folder; give a file"),
}  # fmt: skip


@pytest.mark.sample(8)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_one_sentence_and_starts_no_run(
    mistake: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bare").mkdir()
    Path("bare/config.json").write_text("{}")
    Path("short").mkdir()
    Path("hollow").mkdir()
    indexes("short", 3)
    Path("broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    lines("gap.jsonl", {"prompt": "a"}, {"text": "b"})
    Path("empty.toml").write_text("name = 'x'\n")
    Path("more.toml").write_text("scorer = 'x'\n[data]\nsource = 'sums.jsonl'\n")
    Path("rl.toml").write_text(
        "[model]\npath = 'model'\n[data]\nsource = 'sums.jsonl'\n[[reward.scorers]]\nname = 'gsm8k'\n"
    )
    argv, expected = MISTAKES[mistake]
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert expected in captured.err
    assert not Path("runs").exists(), "a run was started"


# --- choice of the command -----------------------------------------------------------------------------------------


def test_evaluate_of_a_model_and_of_a_run_are_distinguished() -> None:
    def given(*argv: str) -> CommandLine:
        line = parse(make_app(), ["evaluate", *argv])[1].arguments["line"]
        assert isinstance(line, CommandLine)
        return line

    assert is_of_model(given("--model", "m", "--tasks", "t"))
    assert is_of_model(given("--resume=out"))
    assert not is_of_model(given("runs/quickstart", "--num-completions", "2"))
    assert not is_of_model(given())


def test_rollout_only_is_a_run_of_its_own_kind() -> None:
    _, bound = parse(make_app(), ["rollout-only", "--only", "rl.toml", "--rl.num-steps", "2"])
    assert bound.arguments["recipe"] == Path("rl.toml")
    settings = generate_settings(bound.arguments["line"].settings)
    assert settings[0] == "--run.kind=generate"
    assert settings[-1] == "--rl.num-steps=2"


def test_replay_trains_no_more_steps_than_there_are_groups_for(workdir: Path) -> None:
    Path("kept").mkdir()
    indexes("kept", 7)
    Path("rl.toml").write_text(
        "[model]\npath = 'model'\n[data]\nsource = 'sums.jsonl'\n[rl]\nprompts_per_step = 3\n"
        "[[reward.scorers]]\nname = 'gsm8k'\n"
    )
    settings = replay_settings(Path("kept"), Path("rl.toml"), ("--rl.num-steps=5",))
    assert load_recipe([Path("rl.toml")], settings).rl.num_steps == 2


def test_dry_run_of_a_run_without_a_policy(workdir: Path) -> None:
    config = {"model_type": "gpt2", "vocab_size": 8, "n_embd": 4, "n_layer": 1, "n_head": 1, "n_positions": 8}
    Path("model/config.json").write_text(json.dumps(config))
    recipe, _ = recipe_of("infer", "texts.jsonl", "--num-completions", "3", "--num-gpus", "2")
    first, last = describe_arithmetic(recipe)
    assert first == "the run: each prompt once, 3 completions of each"
    assert last.startswith("model: ")
    assert last.endswith(" bytes, in each of 2 instances")


# --- the screen ----------------------------------------------------------------------------------------------------


def test_plain_screen_counts_answered_prompts(capsys: pytest.CaptureFixture[str], workdir: Path) -> None:
    recipe, _ = recipe_of("evaluate", "--tasks", "words.toml")
    screen = PlainScreen(recipe)
    for num in (0, 1, 1, 30, 32, 64, 64):
        screen.show(
            RunSnapshot(
                phase="evaluate", version=0, last_step=1, num_supervised_steps=0, elapsed_s=65.0, waiting_for="",
                num_prompts=64, num_answered=num, rewards=(0.5,),
            )
        )  # fmt: skip
    shown = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in shown] == [f"prompt {num} of 64" for num in (1, 30, 64)]
    assert shown[0].split("  ")[1:3] == ["1:05", "reward 0.500"]


def test_serve_from_a_run_refuses_its_recipe(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "recipe.toml").write_text("[model.scratch]\nmodel_type = 'qwen3'\n")
    assert main(["serve", "--from", "tcp://h:1", "--config", "recipe.toml", "--key", "rollout-7.json"]) == 2
    assert "recipe.toml has no run.id, as a recipe has none; give the config.toml" in capsys.readouterr().err
