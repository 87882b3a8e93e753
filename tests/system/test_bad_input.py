"""Mistakes of new users: one clear sentence each, a non-zero exit, and nothing left."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
from system_runs import attempt, make_workdir, run, run_concurrently, sentence, starling_command

from starling.cli.main import main
from starling.cli.model.scratch import ScratchSettings, make_model_folder

RUN = ["run", "tiny.toml"]
MISTAKES: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "a missing recipe": (["run", "tinny.toml"], ("file tinny.toml does not exist; did you mean tiny.toml?",)),
    "a missing recipe with no like name": (["run", "t.toml"], ("t.toml does not exist; give the path of a TOML file",)),
    "a missing second recipe": ([*RUN, "--config", "x.toml"], ("the configuration file x.toml does not exist",)),
    "no recipe": (["run"], ("the recipe comes first: write `starling run RECIPE.toml`",)),
    "a flag before the recipe": (["run", "--run.seed", "3", "tiny.toml"], ("the recipe comes first",)),
    "an unknown command": (["rum", "tiny.toml"], ("unknown command 'rum'; did you mean 'run'?",)),
    "a misspelt flag": ([*RUN, "--rl.num-stps", "3"], ("unknown setting rl.num_stps = 3; did you mean rl.num_steps?",)),
    "a misspelt section": ([*RUN, "--sampler.top-k", "3"], ("unknown section sampler; did you mean sampling?",)),
    "no section": ([*RUN, "--group-size", "3"], ("unknown setting group_size = 3; did you mean rl.group_size?",)),
    "a flag without its value": ([*RUN, "--rl.num-steps"], ("--rl.num-steps needs a value",)),
    "a word for a number": ([*RUN, "--rl.num-steps", "ten"], ("rl.num_steps = 'ten'", "valid integer")),
    "no rollouts": ([*RUN, "--launch.num-rollouts", "0"], ("launch.num_rollouts = 0, but", "controller.num_rollouts")),
    "no rewards": ([*RUN, "--launch.num-rewards", "0"], ("launch.num_rewards = 0, but", "controller.num_rewards")),
    "one table for a list of tables": (
        [*RUN, "--reward.scorers", '{name = "prefix_match"}'],
        ("reward.scorers = {'name': 'prefix_match'}", "write [[reward.scorers]] above each table"),
    ),
    "a value for a list": ([*RUN, "--policy.frozen", '"embed"'], ("policy.frozen = ", "write a list in brackets")),
    "a value for a section": (
        [*RUN, "--policy.precision", "fp8_rowwise"],
        ("policy.precision = 'fp8_rowwise'", "set one of its keys: `starling settings policy.precision` lists them"),
    ),
    "a name of two words": (
        [*RUN, "--run.name", "two words"],
        ("run.name: 'two words' names a folder", "use letters, digits, '.', '_' and '-'"),
    ),
    "no such port": ([*RUN, "--network.port", "99999"], ("network.port = 99999", "65535")),
    "a group of one": (
        [*RUN, "--rl.group-size", "1"],
        (
            "rl.group_size: 1 is too small: advantages are relative to the other completions of the group",
            "set at least 2",
        ),
    ),
    "a group beyond a batch": (
        [*RUN, "--rl.group-size", "300"],
        ("rl.group_size = 300 is more than rollout.max_rows = 128", "raise rollout.max_rows"),
    ),
    "an evaluation beyond a batch": (
        [*RUN, "--evaluation.num-completions", "9", "--rollout.max-rows", "8"],
        ("evaluation.num_completions = 9 is more than rollout.max_rows = 8",),
    ),
    "an unknown scorer": (
        [*RUN, "--reward.scorers", '[{name = "prefix_mach"}]'],
        ("There is no scorer 'prefix_mach': did you mean 'prefix_match'", "`path/to/file.py:function`"),
    ),
    "a misspelt key of a scorer": (
        [*RUN, "--reward.scorers", '[{name = "prefix_match", wieght = 2}]'],
        ("unknown setting reward.scorers.0.wieght = 2; did you mean reward.scorers.0.weight?",),
    ),
    "no scorer": ([*RUN, "--reward.scorers", "[]"], ("No scorer is set", "add")),
    "nothing held out": ([*RUN, "--data.held-out", "0"], ("data.held_out = 0 leaves nothing to evaluate on",)),
    "two models": ([*RUN, "--model.path", "here"], ("model.path = 'here' and [model.scratch]", "remove one")),
    "adapters of a model from nothing": (
        [*RUN, "--model.lora.rank", "4"],
        ("[model.scratch] has no weights that [model.lora] could adapt; give the path",),
    ),
    "dropout in adapters": (
        [*RUN, "--model.lora.dropout", "0.1"],
        ("model.lora.dropout: 0.1 would make the trainer's log-probabilities differ", "remove it"),
    ),
    "no supervised steps": (
        [*RUN, "--run.kind", "sft", "--sft.num-steps", "0"],
        ("sft.num_steps = 0, but run.kind = 'sft'", "set it"),
    ),
    "bytes that are no text": ([*RUN, "--run.folder", "\udcff"], (r"run.folder = '\udcff' is not UTF-8", "another")),
    "a null character": ([*RUN, "--run.folder", '"a\\u0000"'], (r"run.folder = 'a\x00' has a null character",)),
    "an absurd length": ([*RUN, "--sampling.max-tokens", "1" + "0" * 30], ("sampling.max_tokens = 1000", "16777216")),
    "an infinite temperature": ([*RUN, "--sampling.temperature", "inf"], ("sampling.temperature = inf", "finite")),
    "a temperature near 0": ([*RUN, "--sampling.temperature", "1e-9"], ("sampling.temperature: 1e-09", "give 0")),
    "a number of thousands of digits": (
        [*RUN, "--rl.num-steps", "0x" + "f" * 9000],
        ("rl.num_steps = a number of thousands of digits", "1000000000"),
    ),
    "memory of this machine for others": (
        [*RUN, "--network.host", "192.0.2.1", "--policy.transport", "local"],
        ("policy.transport = 'local' is memory of this machine", "set policy.transport = 'auto'"),
    ),
    "a run's folder that is a file": ([*RUN, "--run.folder", "tiny.toml"], ("folder in tiny.toml", "set run.folder")),
}
ENVIRONMENT_MISTAKES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "a section that is no JSON": (
        "STARLING_RL",
        "{bad",
        ("STARLING_RL = '{bad' is not valid JSON", "STARLING_RL__KEY"),
    ),
    # Both may hold secrets, which no error shows.
    "a list that is no JSON": (
        "STARLING_REWARD__SCORERS",
        "[{bad",
        ("STARLING_REWARD__SCORERS = (hidden) is not", "JSON"),
    ),
    "a table that is no JSON": ("STARLING_DATA__OPTIONS", "{", ("STARLING_DATA__OPTIONS = (hidden) is not", "JSON")),
    "JSON without end": ("STARLING_RL", "[" * 9000, ("STARLING_RL = '[[[", "is not valid JSON")),
    "a misspelt key in JSON": ("STARLING_RL", '{"grop_size": 4}', ("rl.grop_size = 4; did you mean rl.group_size?",)),
    "a number for a section": ("STARLING_RL", "5", ("rl = 5", "valid dictionary")),
    "bytes that are no text": ("STARLING_RUN__FOLDER", "\udcff", (r"run.folder = '\udcff' is not UTF-8", "another")),
    "half a character": ("STARLING_DATA", r'{"source": "\ud800"}', (r"data.source = '\ud800' is not UTF-8",)),
    "a word for a number": ("STARLING_RL__NUM_STEPS", "{bad", ("rl.num_steps = '{bad'", "valid integer")),
}
MODEL_MISTAKES: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "no model": (RUN, ("model.path is missing", "[model.scratch]")),
    "a missing model folder": ([*RUN, "--model.path", "nowhere"], ("model folder nowhere does not exist; give",)),
    "an empty model folder": ([*RUN, "--model.path", "empty"], ("model folder empty has no config.json; give",)),
    "a model without weights": (
        [*RUN, "--model.path", "bare"],
        ("folder bare has a config.json and no weights",),
    ),
}


SCORERS = "--reward.scorers=[{{name = {}}}]"
UNUSABLE_INPUTS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "no such data": (["--data.source", "promts.jsonl"], ("promts.jsonl does not exist", "nearest: prompts.jsonl")),
    "no rows": (["--data.source", "nothing.jsonl"], ("'nothing.jsonl' is empty", "at least one row")),
    "a row without a value": (
        ["--data.source", "gap.jsonl", "--data.held-out", "0", "--evaluation.at-end", "false"],
        ("row 1 of 'gap.jsonl' has no value in 'question'",),
    ),
    "a dataset that raises": (
        ["--data.source", "mine.py:rows"],
        ("the dataset mine.py:rows raised ZeroDivisionError", "mine.py:4); correct"),
    ),
    "too many held out": (["--data.held-out", "64"], ("held_out = 64 leaves no training rows of the 64",)),
    "no such column": (["--data.format", "{word}>"], ("no column 'word'", "there are: answer, question")),
    "no such file of a scorer": ([SCORERS.format('"none.py:reward"')], ("there is no file", "none.py")),
    "no such function of a scorer": ([SCORERS.format('"mine.py:rewrad"')], ("did you mean 'reward'",)),
    "a scorer that cannot be imported": (
        [SCORERS.format('"broken.py:reward"')],
        ("broken.py:reward' cannot be imported: KeyError: 'missing' (", "broken.py:1)"),
    ),
    "an option that a scorer does not take": (
        ['--reward.scorers=[{name = "mine.py:reward", options = {widht = 1}}]'],
        ("mine.py:reward", "widht"),
    ),
    "no such engine": (["--rollout.engine", "vlm"], ("rollout.engine = 'vlm' is not an engine; did you mean 'vllm'",)),
    "no such package of a logger": (["--logging.loggers", '["wandbb"]'], ("wandbb", "did you mean wandb?")),
    "no such package of a transport": (["--policy.transport", "nixl"], ("NIXL is not available", "choose transport")),
    "no such environment": (["--rollout.environment.kind", "none.py:play"], ("there is no file", "none.py")),
    "no such logger": (["--logging.loggers", '["none.py:log"]'], ("there is no file", "none.py")),
    "a model without a tokenizer": (
        ["--model.path", "bare", "--policy.init", "random"],
        ("the model folder bare has no tokenizer", "add its tokenizer.json"),
    ),
    "a model with fewer embeddings than its tokenizer has tokens": (
        ["--model.path", "small", "--policy.init", "random"],
        ("the tokenizer in small gives", "the model has embeddings for 8 tokens"),
    ),
    "a sequence longer than the model's context": (
        ["--rollout.max-model-len", "25"],
        ("rollout.max_model_len = 25 is more than the 24 tokens", "lower it"),
    ),
    "a model without an end token": (
        ["--model.path", "endless", "--policy.init", "random"],
        ("the model in endless has no end-of-sequence token",),
    ),
    "weights from a folder that does not exist": (
        ["--model.path", "plain", "--policy.weights-from", "nowhere"],
        ("policy.weights_from = ", "nowhere' has no config.json; give the folder of a whole"),
    ),
    "weights from a folder without any": (
        ["--model.path", "plain", "--policy.weights-from", "plain"],
        ("policy.weights_from = ", "has no weights; give the folder of a whole"),
    ),
}
"""Flags of `starling run --dry-run`, and parts of the sentence."""


def write_inputs(folder: Path) -> None:
    """Write the files that `UNUSABLE_INPUTS` names."""
    (folder / "nothing.jsonl").write_text("")
    (folder / "gap.jsonl").write_text('{"question": "abc", "answer": "cba"}\n{"question": null, "answer": "cba"}\n')
    (folder / "mine.py").write_text(
        "def reward(completion, reference, prompt_text, metadata):\n    return 1.0\n\ndef rows(): 1 / 0\n"
    )
    (folder / "broken.py").write_text("{}['missing']\n")
    make_model_folder(ScratchSettings(config={"hidden_size": 32, "num_hidden_layers": 1}), folder / "bare")
    for name in ("small", "endless", "plain"):
        shutil.copytree(folder / "bare", folder / name)
    for path in (folder / "bare").glob("tokenizer*"):
        path.unlink()
    _edit(folder / "small" / "config.json", vocab_size=8)
    _edit(folder / "endless" / "tokenizer_config.json", eos_token=None)
    (folder / "endless" / "generation_config.json").unlink()


def _edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_controller_refuses_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with starling_command(make_workdir(tmp_path), "controller", "--config", "tiny.toml", "--dir", "new") as command:
        assert command.wait() == 2, command.transcript()
        assert command.errors == (
            "starling controller: --dir new is not a folder: create it, or give the folder of a run\n"
        )


@pytest.mark.parametrize("mistake", UNUSABLE_INPUTS)
def test_dry_run_rejects_what_a_run_could_not_read(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, expected = UNUSABLE_INPUTS[mistake]
    without_model: dict[str, dict[str, str]] = {"model": {}} if "--model.path" in flags else {}
    monkeypatch.chdir(make_workdir(tmp_path, **without_model))
    write_inputs(tmp_path)
    monkeypatch.setitem(sys.modules, "nixl", None)  # as where it is not installed
    message = error_of([*RUN, "--dry-run", *flags], capsys)
    assert all(part in message for part in expected), message


def test_dry_run_names_what_it_has_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(make_workdir(tmp_path))
    assert main([*RUN, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "# data: the first 64 rows of 'prompts.jsonl' are usable, the first of 4 tokens" in lines
    assert "# scorers: prefix_match" in lines
    assert not any("notice" in line for line in lines)
    assert main([*RUN, "--dry-run", "--sampling.top-p", "0.9"]) == 0
    (notice,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("# notice: "))
    assert "sampling.logprobs = 'truncated' makes them exact" in notice
    assert not Path("runs").exists()


def test_dry_run_hides_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(make_workdir(tmp_path))
    monkeypatch.setenv("STARLING_ROLLOUT__API__KEY", "of-the-environment")
    (tmp_path / "secrets.toml").write_text(
        '[reward.http]\nstore = "redis"\ntoken = "of-a-file"\nredis_url = "redis://user:of-a-url@host:6379/0"\n'
        '[policy.saving]\nstorage_options = {secret_key = "of-a-table", region = "shown"}\n'
    )
    assert main([*RUN, "--dry-run", "--config", "secrets.toml"]) == 0
    printed = capsys.readouterr()
    assert "of-" not in printed.out + printed.err
    tree = tomllib.loads(printed.out)
    assert tree["rollout"]["api"]["key"] == tree["reward"]["http"]["token"] == "(hidden)"
    assert tree["reward"]["http"]["redis_url"] == "(hidden)"
    assert tree["policy"]["saving"]["storage_options"] == {"secret_key": "(hidden)", "region": "shown"}


@pytest.mark.campaign
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a mount namespace")
def test_dry_run_names_an_rdma_port_that_weights_do_not_use(tmp_path: Path) -> None:
    port = "/sys/class/infiniband/mlx5_0/ports/1"
    lists = f'mount -t tmpfs none /sys/class && mkdir -p {port} && echo 4: ACTIVE > {port}/state && exec "$@"'
    arguments = (*RUN, "--dry-run", "--network.host", "0.0.0.0")
    prefix = ("unshare", "--mount", "sh", "-c", lists, "sh")
    with starling_command(make_workdir(tmp_path), *arguments, prefix=prefix) as command:
        assert command.wait() == 0, command.transcript()
        (notice,) = (line for line in command.output.splitlines() if line.startswith("# notice: "))
    assert notice == (
        "# notice: weights travel over TCP beside the RDMA port mlx5_0:1: RDMA cannot encrypt them: on a private "
        "network set network.encrypt_weights = false"
    )


def error_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail at once, and return its only sentence."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("starling: ")
    assert captured.err.count("\n") == 1, captured.err
    assert not Path("runs").exists(), "an attempt was created"
    return captured.err


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_recipe_is_rejected_in_one_sentence(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(make_workdir(tmp_path))
    argv, expected = MISTAKES[mistake]
    message = error_of(argv, capsys)
    assert all(part in message for part in expected), message


@pytest.mark.parametrize("mistake", ENVIRONMENT_MISTAKES)
def test_bad_variable_of_the_environment_is_rejected_in_one_sentence(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(make_workdir(tmp_path))
    name, value, expected = ENVIRONMENT_MISTAKES[mistake]
    monkeypatch.setenv(name, value)
    message = error_of(RUN, capsys)
    assert all(part in message for part in expected), message


@pytest.mark.parametrize("mistake", MODEL_MISTAKES)
def test_unusable_model_is_rejected_in_one_sentence(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(make_workdir(tmp_path, model={}))
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    argv, expected = MODEL_MISTAKES[mistake]
    message = error_of(argv, capsys)
    assert all(part in message for part in expected), message


def test_misspelt_key_of_file_or_environment_suggests_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(make_workdir(tmp_path, rl={"grop_size": 4}))
    assert "unknown setting rl.grop_size = 4; did you mean rl.group_size? (in tiny.toml)" in error_of(RUN, capsys)
    Path("tiny.toml").write_text("[run\n")
    assert "tiny.toml is not valid TOML" in error_of(RUN, capsys)
    make_workdir(tmp_path)
    monkeypatch.setenv("STARLING_RL__GROP_SIZE", "4")
    assert "rl.grop_size = '4'; did you mean rl.group_size? (in the environment)" in error_of(RUN, capsys)


def assert_fails(folder: Path, expected: tuple[str, ...], *flags: str) -> None:
    """Run a recipe that one of the processes rejects; assert its error, and that there is no checkpoint."""
    with run(make_workdir(folder), *flags) as command:
        assert command.wait() not in (0, 130)
    message = sentence(command)
    assert all(part in message for part in expected), message
    assert not list(attempt(folder).glob("checkpoints/*"))


@pytest.mark.system
@pytest.mark.parametrize(
    "names",
    [
        ("empty", "context", "algorithm", "scorer file"),
        pytest.param(("missing", "row", "column", "scratch", "scorer function"), marks=pytest.mark.campaign),
    ],
    ids=["each service", "more"],
)
def test_services_reject_bad_settings_in_one_sentence(names: tuple[str, ...], tmp_path: Path) -> None:
    """The sentence names process, value and remedy; no process and no shared memory is left."""
    (tmp_path / "nothing.jsonl").write_text("")
    (tmp_path / "gap.jsonl").write_text('{"question": "abc", "answer": "cba"}\n{"question": null, "answer": "cba"}\n')
    (tmp_path / "mine.py").write_text("def reward(completion, reference, prompt_text, metadata):\n    return 1.0\n")
    cases = {
        "empty": (("controller", "nothing.jsonl' is empty", "at least one row"),
                  ["--data.source", "../nothing.jsonl"]),
        "missing": (("controller", "promts.jsonl does not exist", "nearest: prompts.jsonl"),
                    ["--data.source", "promts.jsonl"]),
        "row": (("controller", "row 1 of '../gap.jsonl' has no value in 'question'", "remove the row"),
                ["--data.source", "../gap.jsonl", "--data.held-out", "0", "--evaluation.at-end", "false"]),
        "context": (("rollout-0", "rollout.max_model_len = 25 is more than the 24 tokens", "lower it"),
                    ["--rollout.max-model-len", "25"]),
        "algorithm": (("policy-0", "there is no algorithm 'grop': give one of grpo, dr_grpo"),
                      ["--policy.algorithm.name", "grop"]),
        "column": (("controller", "no column 'word'", "there are: answer, question"), ["--data.format", "{word}>"]),
        "scratch": (("model", "has no config.hidden_sice", "nearest: hidden_size"),
                    ["--model.scratch.config", "{hidden_sice = 3}"]),
        "scorer file": (("reward-0", "there is no file", "none.py"),
                        ["--reward.scorers", '[{name = "none.py:reward"}]']),
        "scorer function": (("reward-0", "no 'rewrad' in there; did you mean 'reward'"),
                            ["--reward.scorers", '[{name = "../mine.py:rewrad"}]']),
    }  # fmt: skip
    run_concurrently(*(partial(assert_fails, tmp_path / name, cases[name][0], *cases[name][1]) for name in names))


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_address_that_cannot_be_listened_on_is_refused_before_anything_starts(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(make_workdir(tmp_path))
    message = error_of([*RUN, *flags, "--network.host", "192.0.2.1"], capsys)
    assert "cannot listen on tcp://192.0.2.1:0" in message
    assert "set network.host to an address of this machine" in message
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = error_of([*RUN, *flags, "--network.port", port], capsys)
    assert f"cannot listen on tcp://127.0.0.1:{port}: Address already in use" in message
    assert "choose another port, or 0" in message


@pytest.mark.system
def test_run_that_cannot_begin_in_time_fails(tmp_path: Path) -> None:
    make_workdir(tmp_path)
    with starling_command(tmp_path, *RUN, "--network.connect-s", "0.01") as command:
        assert command.wait() == 1
    # On a busy machine the controller may listen before the process that makes the model's folder is started.
    reason = "(the controller did not listen|the model's folder was not made) within 0.01 s"
    assert re.search(f"the run could not begin: {reason}; raise network.connect_s if the machine", command.errors)


@pytest.mark.system
def test_service_without_controller_exits_with_the_reason(tmp_path: Path) -> None:
    folder = make_workdir(tmp_path, network={"connect_s": 0.5, "curve": False})
    with socket.create_server(("127.0.0.1", 0)) as silent_server:
        address = "tcp://{}:{}".format(*silent_server.getsockname())
        arguments = ["--config", "tiny.toml", "--controller", address]
        with starling_command(folder, "reward", *arguments) as command:
            assert command.wait() == 1
    assert f"the controller at {address} cannot be reached by reward-0" in command.errors
    assert "check the address" in command.errors
    with starling_command(folder, "reward", *arguments[:-1], "localhost:7") as command:
        assert command.wait() == 2
    assert command.errors == "starling reward-0: --controller localhost:7 is not an address; write tcp://host:port\n"
