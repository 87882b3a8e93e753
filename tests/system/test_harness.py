"""lm-eval evaluates a model through its endpoint; its results equal those of forward passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from system_runs import Command, starling_command, wait_until
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from starling.cli.model.scratch import ScratchSettings, make_model_folder

pytestmark = pytest.mark.system

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
CHAT = "{% for m in messages %}{{ m.role[0] + ':' + m.content + ';' }}{% endfor %}a:"
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: {kind}
doc_to_text: "{{{{q}}}}>"
metric_list:
  - metric: {metric}
    aggregation: mean
    higher_is_better: true
"""
CHOICES = """
doc_to_choice: "{{choices}}"
doc_to_target: label
target_delimiter: ""
"""
GENERATE = """
doc_to_target: "{{a}}"
generation_kwargs:
  until: ["?"]
  max_gen_toks: 6
  do_sample: false
"""
ROWS = [
    {"q": a + b, "a": "xyz"[at % 3], "choices": ["x", "yy", "z!"], "label": at % 3}
    for at, (a, b) in enumerate(zip("abcdefgh", "hgfedcba", strict=True))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_model_folder(ScratchSettings(config=SMALL, chat_template=CHAT, max_length=256), folder)
    config = AutoConfig.from_pretrained(folder)
    config.initializer_range = 0.3
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def write_tasks(folder: Path) -> dict[str, str]:
    """Write the tasks; return environment variables that keep Hugging Face libraries offline."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    file = folder / "rows.jsonl"
    choose = TASK.format(name="choose", file=file, kind="multiple_choice", metric="acc")
    (folder / "choose.yaml").write_text(choose + CHOICES)
    say = TASK.format(name="say", file=file, kind="generate_until", metric="exact_match")
    (folder / "say.yaml").write_text(say + GENERATE)
    return {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}


def score_choice(model: Any, prompt: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Return the log-probability of a continuation, and whether it is the greedy one."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *continuation]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    expected = torch.tensor(continuation)
    found = logits.log_softmax(-1).gather(-1, expected[:, None])
    return float(found.sum()), bool((logits.argmax(-1) == expected).all())


@pytest.mark.campaign
def test_lm_eval_agrees_with_a_forward_pass(tmp_path: Path, model: Path) -> None:
    tasks = "lm-eval:choose.yaml,lm-eval:say.yaml"
    words = ("evaluate", "--model", str(model), "--tasks", tasks, "--out", "out", "--launch.screen", "plain")
    with starling_command(tmp_path, *words, environment=write_tasks(tmp_path)) as command:
        assert command.wait(240) == 0, command.transcript()
    found = json.loads((tmp_path / "out/summary.json").read_text())
    assert found["harness"].startswith("lm-eval 0.4")
    lines = [json.loads(line) for line in (tmp_path / "out/answers.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"{task}/{row}" for task in ("choose", "say") for row in range(8)]

    network, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    right = []
    for row, line in zip(ROWS, lines[:8], strict=True):
        assert line["text"] == f"u:{row['q']}>;a:"
        prompt = tokenizer.encode(line["text"], add_special_tokens=False)
        for text, choice in zip(row["choices"], line["choices"], strict=True):
            assert choice["text"] == text
            logprob, is_greedy = score_choice(network, prompt, tokenizer.encode(text, add_special_tokens=False))
            assert choice["logprob"] == pytest.approx(logprob, abs=1e-4)
            assert choice["is_greedy"] == is_greedy
        best = max(range(3), key=lambda at: line["choices"][at]["logprob"])
        right.append(float(best == row["label"]))
        assert line["scores"] == {"acc": right[-1]}
    assert found["tasks"]["choose"]["num_prompts"] == 8
    assert found["tasks"]["choose"]["metrics"]["acc"]["value"] == pytest.approx(sum(right) / 8)
    assert 0 < sum(right) < 8, "a random model must be right sometimes and wrong sometimes"

    for line in lines[8:]:
        (generated,) = line["completions"]
        prompt_ids = torch.tensor([tokenizer.encode(line["text"], add_special_tokens=False)])
        expected = network.generate(prompt_ids, max_new_tokens=6, do_sample=False)[0, prompt_ids.shape[1] :]
        assert generated["text"] == tokenizer.decode(expected, skip_special_tokens=True).partition("?")[0]
    assert found["tasks"]["say"]["metrics"].keys() == {"exact_match"}
    assert "choose" in command.output


@pytest.mark.campaign
def test_unknown_task_fails_the_run(tmp_path: Path, model: Path) -> None:
    words = ("evaluate", "--model", str(model), "--tasks", "lm-eval:no_such_task", "--launch.screen", "plain")
    command = Command(tmp_path, *words, environment=write_tasks(tmp_path))
    assert command.wait(240) == 1
    assert "harness exited with code" in command.errors
    assert "no_such_task" in command.errors
    wait_until(lambda: not command.processes(), "its processes to be gone", command)
