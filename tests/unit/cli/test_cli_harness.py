"""Tasks of lm-eval: options of the harness, and conversion of its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from starling.cli.evaluate.harness import answer, check_alone, harness_tasks, read_results, summary
from starling.common.errors import ConfigError

RESULTS: dict[str, Any] = {
    "lm_eval_version": "0.4.13",
    "n-samples": {"choose": {"original": 9, "effective": 2}},
    "results": {
        "choose": {"alias": "choose", "sample_len": 2, "acc,none": 0.5, "acc_stderr,none": 0.25},
        "both": {"alias": "both", "acc,strict-match": 1, "acc_stderr,strict-match": "N/A"},
    },
}
CHOSEN: dict[str, Any] = {
    "doc_id": 3,
    "target": "1",
    "arguments": {"gen_args_0": {"arg_0": "q>", "arg_1": " x"}, "gen_args_1": {"arg_0": "q>", "arg_1": " y"}},
    "resps": [[["-11.5", "False"]], [["-0.25", "True"]]],
    "filter": "none",
    "metrics": ["acc"],
    "acc": 1.0,
}
SAID: dict[str, Any] = {
    "doc_id": 0,
    "target": "7",
    "arguments": {"gen_args_0": {"arg_0": "3+4", "arg_1": {"until": ["\n"]}}},
    "resps": [["it is 7"]],
    "filter": "strict-match",
    "metrics": ["exact_match"],
    "exact_match": 0.0,
}


def test_summary_has_the_figures_of_the_harness() -> None:
    assert summary(RESULTS) == {
        "harness": "lm-eval 0.4.13",
        "tasks": {
            "choose": {"num_prompts": 2, "metrics": {"acc": {"value": 0.5, "stderr": 0.25}}},
            "both": {"num_prompts": None, "metrics": {"acc/strict-match": {"value": 1, "stderr": None}}},
        },
    }


def test_answer_converts_a_sample() -> None:
    assert answer("choose", CHOSEN) == {
        "id": "choose/3",
        "task": "choose",
        "text": "q>",
        "reference": "1",
        "choices": [
            {"text": " x", "logprob": -11.5, "is_greedy": False},
            {"text": " y", "logprob": -0.25, "is_greedy": True},
        ],
        "scores": {"acc": 1.0},
    }
    assert answer("say", SAID) == {
        "id": "say/0",
        "task": "say",
        "text": "3+4",
        "filter": "strict-match",
        "reference": "7",
        "completions": [{"text": "it is 7"}],
        "scores": {"exact_match": 0.0},
    }


def test_read_results_returns_the_newest_with_their_samples(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lm-eval has written no results into .*; see logs/harness\.log"):
        read_results(tmp_path)
    folder = tmp_path / "tiny"
    folder.mkdir()
    for date, task in (("2026-01-01", "old"), ("2026-01-02", "choose")):
        (folder / f"results_{date}.json").write_text(json.dumps({**RESULTS, "results": {task: {}, "group": {}}}))
        (folder / f"samples_{task}_{date}.jsonl").write_text(json.dumps(CHOSEN) + "\n")
    _, samples = read_results(tmp_path)
    assert samples == {"choose": [CHOSEN]}


def test_completion_with_other_line_ends_is_one_sample(tmp_path: Path) -> None:
    said = {**SAID, "resps": [["a\u2028b\u2029c\u0085d"]]}
    (tmp_path / "results_2026-01-01.json").write_text(json.dumps({**RESULTS, "results": {"say": {}}}))
    (tmp_path / "samples_say_2026-01-01.jsonl").write_text(json.dumps(said, ensure_ascii=False) + "\n")
    assert read_results(tmp_path)[1] == {"say": [said]}


def test_options_that_the_harness_lacks_are_refused() -> None:
    assert harness_tasks("gsm8k:test.jsonl") == harness_tasks(None) == ()
    with pytest.raises(ConfigError, match=r"--tasks names 'b\.jsonl' together with tasks of lm-eval"):
        harness_tasks("lm-eval:a,b.jsonl")
    check_alone(None, 4, 1)
    check_alone(4, 4, 1)
    with pytest.raises(ConfigError, match="--num-gpus 8: lm-eval uses one instance, which has --tp-size 4 GPUs"):
        check_alone(8, 4, 1)
    with pytest.raises(ConfigError, match="--num-completions 4: a task of lm-eval sets that itself"):
        check_alone(None, 1, 4)
