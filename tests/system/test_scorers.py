"""Misbehaving scorers and impossible prompts: only their groups are dropped, and the reason is recorded."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
from system_runs import (
    WORDS,
    checkpoints,
    make_workdir,
    metrics,
    run,
    run_concurrently,
    sentence,
    trained,
    write_prompts,
)

pytestmark = pytest.mark.system

SCORER = """
import math
import os
import time

def reward(completion, reference, prompt_text, metadata, *, hangs="", raises="", inf="", nan_once=""):
    word = prompt_text.rstrip(">")
    if word == inf:
        return math.inf
    if word == nan_once:
        try:
            os.mkdir("marks/was_nan")
            return math.nan
        except FileExistsError:
            pass
    if word == hangs:
        time.sleep(3600)
    if word == raises or raises == "always":
        raise LookupError(f"nothing is known of {word}")
    return len(set(completion) & set(reference)) / 3
"""


def write_scorer(folder: Path, **options: str) -> dict[str, object]:
    """Write the scorer file, and return the `[reward]` section that names it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text(SCORER)
    (folder / "marks").mkdir()
    (folder / "marks").chmod(0o777)  # the workers of root are another user
    needs = {"writable_paths": ["marks"]}
    return {"scorers": [{"name": "mine.py:reward", "timeout_s": 0.3, "options": options, "needs": needs}]}


def impossible_prompts(folder: Path) -> None:
    """A prompt that hangs the scorer, one that makes it raise, and one beyond the context are dropped with a reason."""
    reward = write_scorer(folder, hangs=WORDS[0], raises=WORDS[1])
    rl = {"num_steps": 11, "max_tries": 0}
    make_workdir(folder, sft={"num_steps": 0}, rl=rl, reward=reward, evaluation={}, data={"held_out": 0})
    write_prompts(folder, [*WORDS[:40], "a" * 40])
    with run(folder) as command:
        assert command.wait() == 0, command.transcript()
    dropped = {line["prompt"].rpartition("/")[2]: line["reason"] for line in metrics(folder, "discarded")}
    assert sorted(dropped) == ["0", "1", "40"], "each once, in the only pass"
    assert "scorer 'mine.py:reward' took longer than 0.3 s." in dropped["0"]
    raised = f"scorer 'mine.py:reward' raised LookupError: nothing is known of {WORDS[1]} ({folder}/mine.py:"
    assert raised in dropped["1"]
    assert "the prompt of 41 tokens leaves no room in the context of 24" in dropped["40"]
    assert len(trained(folder)) == 44
    assert not {f"train/0/{row}" for row in dropped} & set(trained(folder))
    assert {line["score/mine.py:reward"] > 0 for line in metrics(folder, "step")} == {True}
    assert checkpoints(folder) == ["step-11"]


def rewards_that_are_not_finite(folder: Path) -> None:
    """A group with a NaN reward is generated again and trained; one with an infinite reward each time is dropped."""
    reward = write_scorer(folder, nan_once=WORDS[0], inf=WORDS[1])
    rl = {"num_steps": 3, "max_tries": 1}
    make_workdir(folder, sft={"num_steps": 0}, rl=rl, reward=reward, evaluation={}, data={"held_out": 0})
    write_prompts(folder, WORDS[:13])
    with run(folder) as command:
        assert command.wait() == 0, command.transcript()
    assert (folder / "marks" / "was_nan").is_dir()
    (dropped,) = metrics(folder, "discarded")
    assert (dropped["prompt"], dropped["tries"]) == ("train/0/1", 2)
    assert "scorer 'mine.py:reward' returned inf." in dropped["reason"]
    assert trained(folder) == {f"train/0/{row}": 1 for row in range(13) if row != 1}
    for line in metrics(folder, "step"):
        assert all(math.isfinite(line[name]) for name in ("reward_min", "reward_max", "loss", "grad_norm")), line


def equal_rewards(folder: Path) -> None:
    """Steps are made and no weight changes; each alarm is raised once, and the run succeeds."""
    folder.mkdir(parents=True)
    (folder / "mine.py").write_text("def reward(completion, reference, prompt_text, metadata):\n    return 0.5\n")
    scorers = {"scorers": [{"name": "mine.py:reward"}]}
    make_workdir(folder, sft={"num_steps": 0}, rl={"num_steps": 7}, reward=scorers, evaluation={})
    with run(folder) as command:
        assert command.wait() == 0, command.transcript()
    steps = metrics(folder, "step")
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6, 7]
    unchanged = {"zero_advantage_share": 1.0, "reward_std": 0.0, "loss": 0.0, "grad_norm": 0.0, "update_norm": 0.0}
    assert all(unchanged.items() <= line.items() for line in steps), steps
    alarms = [(line["name"], line["step"]) for line in metrics(folder, "alarm")]
    assert alarms == [("weights_still", 3), ("zero_advantage", 5)]
    assert checkpoints(folder) == ["step-7"]


def completions_up_to_the_context_length(folder: Path) -> None:
    """They are truncated there as at a token limit, trained, and penalised for their length by a scorer."""
    overlong = {"name": "overlong", "options": {"max_tokens": 20, "buffer": 10}}
    reward = {"scorers": [{"name": "prefix_match"}, overlong]}
    sampling = {"max_tokens": 1000}
    make_workdir(folder, sft={"num_steps": 0}, rl={"num_steps": 2}, sampling=sampling, reward=reward, evaluation={})
    with run(folder) as command:
        assert command.wait() == 0, command.transcript()
    steps = metrics(folder, "step")
    assert max(line["completion_tokens_max"] for line in steps) == 24 - len("abc>")
    assert all(line["truncated_share"] > 0.0 for line in steps)
    assert all(-1.0 <= line["score/overlong"] <= -line["truncated_share"] for line in steps), "-1 for each cut off"
    assert len(trained(folder)) == 8


JUDGE = """
class Judge:
    keys = ("letters", "size")
    batch_size = 3

    def __init__(self, factor):
        self.factor = factor

    def setup(self):
        self.is_set_up = True

    def score(self, batch):
        assert self.is_set_up
        both = list(zip(batch.completions, batch.references))
        letters = [self.factor * len(set(one) & set(right)) / 3 for one, right in both]
        return {"letters": letters, "size": [len(batch)] * len(both)}

class Comparison:
    scope = "groupwise"

    def score(self, batch):
        longest = max(map(len, batch.completions))
        return {"score": [float(len(one) == longest) for one in batch.completions]}
"""


def scores_of_classes(folder: Path) -> None:
    """A class in batches, of whose scores one counts within bounds, and one that compares whole groups."""
    folder.mkdir(parents=True)
    (folder / "mine.py").write_text(JUDGE)
    judge = {"name": "mine.py:Judge", "label": "judge", "key": "letters", "clip_max": 0.5, "options": {"factor": 2.0}}
    comparison = {"name": "mine.py:Comparison", "label": "longest", "weight": 0.0}
    reward = {"scorers": [judge, comparison], "scale": 3.0}
    make_workdir(folder, sft={"num_steps": 0}, rl={"num_steps": 3}, reward=reward, evaluation={})
    with run(folder) as command:
        assert command.wait() == 0, command.transcript()
    for line in metrics(folder, "step"):
        assert 0.0 < line["score/judge/letters"] == line["score/judge"] <= 2.0, "the score itself"
        assert 1.0 <= line["score/judge/size"] <= 3.0, "never more than batch_size"
        assert 0.0 <= line["reward_mean"] <= line["reward_max"] == 1.5, "clip_max times scale"
        assert 0.0 < line["score/longest"] <= 1.0, "at least one of each group"


STERN = """
def reward(completion, reference, prompt_text, metadata, *, raises):
    if prompt_text.rstrip(">") in raises:
        raise LookupError("nothing is known of it")
    return 1e12
"""


def scores_one_by_one_and_evaluation(folder: Path) -> None:
    """GDPO trains the scores of two classes; a third scorer only evaluates, and its failures cost no group."""
    folder.mkdir(parents=True)
    (folder / "mine.py").write_text(JUDGE)
    (folder / "stern.py").write_text(STERN)
    judge = {"name": "mine.py:Judge", "label": "judge", "key": "letters", "options": {"factor": 1e6}}
    comparison = {"name": "mine.py:Comparison", "label": "longest", "weight": 0.5}
    stern = {"name": "stern.py:reward", "label": "stern", "use": "evaluation", "options": {"raises": WORDS[:4]}}
    make_workdir(
        folder,
        sft={"num_steps": 0},
        rl={"num_steps": 3},
        policy={"algorithm": {"name": "gdpo"}},
        reward={"scorers": [judge, comparison, stern]},
        evaluation={"at_end": True, "training_share": 1.0},
    )
    with run(folder) as command:
        assert command.wait() == 0, command.transcript()
    steps = metrics(folder, "step")
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert metrics(folder, "discarded") == metrics(folder, "waiting") == []
    for line in steps:
        assert line.get("eval_score/stern", 1e12) == 1e12
        assert "score/stern" not in line
        assert line["reward_max"] <= 1e6 + 0.5
    assert any("eval_score/stern" in line for line in steps)
    (evaluated,) = metrics(folder, "evaluation")
    assert evaluated["eval_score/stern"] == 1e12
    assert checkpoints(folder) == ["step-3"]


def scorer_that_always_raises(folder: Path) -> None:
    make_workdir(folder, sft={"num_steps": 0}, evaluation={}, reward=write_scorer(folder, raises="always"))
    with run(folder) as command:
        assert command.wait() == 1, command.transcript()
    assert "groups were all discarded" in sentence(command)
    assert "scorer 'mine.py:reward' raised LookupError: nothing is known of" in sentence(command)
    assert f" ({folder}/mine.py:" in sentence(command), "the line of the user's file"
    assert trained(folder) == {}


def example_longer_than_the_context(folder: Path) -> None:
    make_workdir(folder, run={"kind": "sft"}, evaluation={}, sft={"num_steps": 20})
    rows = [{"question": word, "answer": "a" * 40} for word in WORDS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with run(folder) as command:
        assert command.wait() == 1, command.transcript()
    assert "policy-0 could not train" in sentence(command)
    assert "24" in sentence(command), "the context is named"
    assert checkpoints(folder) == []


def test_misbehaving_scorers_fail_only_their_groups(tmp_path: Path) -> None:
    scenarios = [
        impossible_prompts,
        equal_rewards,
        completions_up_to_the_context_length,
        scores_of_classes,
        scores_one_by_one_and_evaluation,
    ]
    run_concurrently(*(partial(scenario, tmp_path / scenario.__name__) for scenario in scenarios))


@pytest.mark.campaign
def test_unusable_rewards_and_examples_end_a_run_or_fail_their_groups(tmp_path: Path) -> None:
    scenarios = [rewards_that_are_not_finite, scorer_that_always_raises, example_longer_than_the_context]
    run_concurrently(*(partial(scenario, tmp_path / scenario.__name__) for scenario in scenarios))
