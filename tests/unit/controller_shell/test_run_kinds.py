"""The kinds of run: the plan and the data of each, and the settings that it rejects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from starling.common.errors import ConfigError
from starling.common.kinds import KINDS
from starling.common.service import ServiceArguments
from starling.common.settings import RunSettings
from starling.controller.data.load import load_data
from starling.controller.settings import ControllerProcess
from starling.controller.shell.main import Shell

UNSCORED = {"num_rewards": 0, "num_teachers": 1}
PAIRS = {"num_steps": 5, "examples_per_step": 3}


def settings(kind: str, source: str = "rows.jsonl", **sections: Any) -> ControllerProcess:
    data = {"source": source, "reference_column": "chosen", "rejected_column": "rejected"}
    return ControllerProcess.model_validate({"run": {"kind": kind}, "data": data, **sections})


def test_every_value_of_the_setting_is_a_kind() -> None:
    assert get_args(RunSettings.model_fields["kind"].annotation) == tuple(KINDS)


@pytest.mark.parametrize(
    ("kind", "trainer"),
    [("rl", "rl"), ("replay", "rl"), ("sft", "sft"), ("dpo", "dpo"), ("reward_model", "reward_model")]
    + [(kind, None) for kind in ("generate", "evaluate", "infer", "serve")],
)
def test_kind_has_the_trainer_of_its_last_steps(kind: str, trainer: str | None) -> None:
    assert KINDS[kind].trainer == trainer


@pytest.mark.parametrize("kind", ["dpo", "reward_model"])
def test_preference_run_makes_only_its_steps(kind: str) -> None:
    plan = settings(kind, preference=PAIRS).plan()
    assert (plan.kind.objective, plan.num_supervised_steps, plan.examples_per_step) == (kind, 5, 3)
    assert (plan.num_steps, plan.last_step) == (0, 5)
    assert not plan.kind.needs_rollouts(plan)
    assert plan.phase(1) == plan.phase(5) == kind


def test_rl_run_begins_with_supervised_steps() -> None:
    plan = settings("rl", sft={"num_steps": 2}, rl={"num_steps": 3}).plan()
    assert [plan.phase(step) for step in (1, 2, 3)] == ["sft", "sft", "rl"]
    assert plan.last_step == 5


@pytest.mark.parametrize(
    ("kind", "sections", "complaint"),
    [
        ("dpo", {}, "preference.num_steps = 0, but run.kind = 'dpo'"),
        ("reward_model", {}, "preference.num_steps = 0, but run.kind = 'reward_model'"),
        ("dpo", {"preference": PAIRS, "sft": {"num_steps": 4}}, "sft.num_steps = 4, but run.kind = 'dpo'"),
        ("rl", {"preference": PAIRS}, "preference.num_steps = 5, but run.kind = 'rl' learns from no pairs"),
        ("sft", {"preference": PAIRS, "sft": {"num_steps": 4}}, "run.kind = 'sft' learns from no pairs"),
        ("rl", {"controller": {"num_rewards": 0}}, "controller.num_rewards = 0 leaves nothing to learn from"),
        ("rl", {"controller": UNSCORED, "rl": {"dynamic_sampling": True}}, "compares rewards, and nothing scores"),
        ("rl", {"controller": UNSCORED, "evaluation": {"every": 1}}, "is on, and nothing scores in this run"),
        ("reward_model", {"preference": PAIRS, "evaluation": {"every": 2}}, "trains a model that generates nothing"),
        ("generate", {"sft": {"num_steps": 4}}, "sft.num_steps = 4, but run.kind = 'generate' trains nothing"),
        ("generate", {"evaluation": {"every": 2}}, "run.kind = 'generate' has no versions to evaluate; turn it off"),
        ("infer", {"rl": {"dynamic_sampling": True}}, "but run.kind = 'infer' keeps all groups; turn it off"),
        ("evaluate", {"controller": {"num_rewards": 0}}, "leaves nothing to evaluate by"),
        ("replay", {}, "data.source = 'rows.jsonl', but run.kind = 'replay' trains from trajectories; write trajec"),
        ("replay", {"evaluation": {"at_end": True}}, "run.kind = 'replay' generates nothing; turn it off"),
        ("replay", {"sft": {"num_steps": 1}}, "sft.data is missing"),
    ],
)
def test_settings_reject_steps_that_the_kind_does_not_make(kind: str, sections: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        settings(kind, **sections)


TRUNCATED = {"logprobs": "truncated", "top_p": 0.8, "top_k": 50, "max_tokens": 1000}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"top_k": 0}, r"top_k = 0 does not bound their number.*set sampling.top_k from 1 to 1024"),
        ({"top_k": 1025}, "set sampling.top_k from 1 to 1024"),
        ({"temperature": 0.0}, "temperature = 0 keeps a single token"),
        ({"top_k": 1024, "max_tokens": 16384}, r"can take 536870912 bytes.*268435456 can be sent; lower one of the"),
        ({"min_p": 1.1}, "min_p"),
        ({"logprobs": "some"}, "logprobs"),
    ],
)
def test_kept_tokens_that_cannot_be_recorded_are_refused(changes: dict[str, Any], complaint: str) -> None:
    for kind in ("rl", "generate"):
        with pytest.raises(ValidationError, match=complaint):
            settings(kind, sampling={**TRUNCATED, **changes})


def test_kept_tokens_are_recorded_for_training_only() -> None:
    plan = settings("rl", sampling={**TRUNCATED, "min_p": 0.01}).plan()
    assert (plan.sampling.logprobs, plan.sampling.top_k, plan.sampling.min_p) == ("truncated", 50, 0.01)
    evaluated = plan.eval_sampling
    assert (evaluated.logprobs, evaluated.top_p, evaluated.top_k, evaluated.min_p) == ("full", 1.0, 0, 0.0)
    for kind in ("evaluate", "infer"):
        assert settings(kind, sampling={**TRUNCATED, "top_k": 0}).plan().sampling.logprobs == "full"


def test_run_without_policy_has_files_as_steps() -> None:
    plan = settings("generate", rl={"num_steps": 3, "prompts_per_step": 4}, controller={"window": 10}).plan()
    assert (plan.num_prompts, plan.num_steps, plan.max_staleness, plan.group_size) == (12, 3, 2, 8)
    kind = plan.kind
    assert (kind.trains, kind.keeps_tokens, kind.needs_rollouts(plan), kind.publishes(plan)) == (
        False,
        True,
        True,
        False,
    )
    assert plan.phase(1) == "generate"


def test_evaluate_run_prefers_held_out_prompts(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n}?", "chosen": str(n)}) + "\n" for n in range(70)))
    everything = load_data(settings("evaluate", str(rows), evaluation={"num_completions": 3, "temperature": 0.7}))
    plan = everything.plan
    assert (plan.num_prompts, plan.num_steps, plan.group_size, plan.sampling.temperature) == (70, 2, 3, 0.7)
    assert [everything.prompts.prompt(n).id for n in (0, 69)] == ["0", "69"]
    data = {"source": str(rows), "reference_column": "chosen", "held_out": 5}
    some = load_data(ControllerProcess.model_validate({"run": {"kind": "evaluate"}, "data": data}))
    assert some.plan.num_prompts == 5
    twice = {"tasks": [{"name": "a", "data": data}, {"name": "a", "data": data}]}
    with pytest.raises(ValidationError, match="two tasks have the name 'a'"):
        settings("evaluate", str(rows), evaluation=twice)


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        ({"rl": {"prompts_per_step": 16, "group_size": 65_536}}, "does not fit into a message"),
        ({"sampling": {"logprobs": "truncated", "top_p": 0.9}}, "does not bound their number"),
    ],
)
def test_groups_that_cannot_be_sent_are_refused_where_there_are_groups(sections: dict[str, Any], match: str) -> None:
    for kind, source in (("rl", "rows.jsonl"), ("replay", "trajectories:runs/run")):
        with pytest.raises(ValidationError, match=match):
            settings(kind, source, **sections)
    assert settings("sft", sft={"num_steps": 5}, **sections).sft.num_steps == 5
    assert settings("dpo", preference=PAIRS, **sections).preference.num_steps == 5


ROW = {"question": "Why?", "chosen": "So."}


def test_load_data_rejects_rows_without_responses(tmp_path: Path) -> None:
    pairs, answers = tmp_path / "pairs.jsonl", tmp_path / "answers.jsonl"
    pairs.write_text(json.dumps({**ROW, "rejected": "No."}))
    answers.write_text(json.dumps({**ROW, "rejected": ""}))
    loaded = load_data(settings("dpo", str(pairs), preference=PAIRS))
    prompts, examples = loaded.prompts, loaded.examples
    assert prompts is examples
    assert examples.prompt(0).rejected == "No."
    with pytest.raises(ConfigError, match=r"row 0 of .* has no rejected response"):
        load_data(settings("dpo", str(answers), preference=PAIRS))
    of_its_own = {"source": str(pairs), "reference_column": "chosen", "rejected_column": "rejected"}
    examples = load_data(settings("dpo", str(answers), preference={**PAIRS, "data": of_its_own})).examples
    assert examples.prompt(0).rejected == "No."
    assert load_data(settings("sft", str(answers), sft={"num_steps": 1})).examples.prompt(0).reference == "So."
    answers.write_text(json.dumps({**ROW, "chosen": None}))
    with pytest.raises(ConfigError, match=r"row 0 of .* has no response to learn"):
        load_data(settings("sft", str(answers), sft={"num_steps": 1}))


def test_controller_with_teachers_needs_their_number_of_likeliest_tokens(tmp_path: Path) -> None:
    started = settings("rl", controller={"num_teachers": 1}, network={"curve": False})
    arguments = ServiceArguments(name="controller", configs=(), folder=tmp_path, controller="", key=None, flags=())
    with pytest.raises(ConfigError, match=r"controller\.num_teachers = 1 needs controller\.teacher_top_k"):
        Shell(started, arguments)
