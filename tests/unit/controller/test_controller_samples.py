"""Samples of completions for logs: their choice and their truncation."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from transcript import Script

from starling.common.wire.messages import ChatMessage, Media, Prompt, Status, TrajectoryMeta
from starling.controller.core.events import Note
from starling.controller.core.groups.group import Group
from starling.controller.core.training.samples import MAX_CHARACTERS, MAX_TOKENS, choose, shortened, text_of, to_row


def group(ordinal: int, num: int) -> Group:
    """Return a scored group of `num` completions."""
    sample = Group(ordinal, Prompt(id=f"p{ordinal}", text="2 + 2 ="), "train")
    sample.trajectories = tuple(
        TrajectoryMeta(status=Status.OK, num_tokens=index, text=f"{index}", oldest_version=3, newest_version=4)
        for index in range(num)
    )
    sample.rewards, sample.components = (0.5,) * num, {"exact": (1.0,) * num, "short": (None,) * num}
    sample.evaluation_scores = {"judge": (0.75,) * num}
    return sample


@given(
    sizes=st.lists(st.integers(0, 4), max_size=6),
    num=st.integers(0, 8),
    seed=st.integers(0, 2**40),
    step=st.integers(1, 10**6),
)
def test_chosen_samples_are_distinct_and_deterministic(sizes: list[int], num: int, seed: int, step: int) -> None:
    """Samples are distinct existing completions, in order, at most the requested number, and deterministic."""
    groups = [group(ordinal, size) for ordinal, size in enumerate(sizes)]
    chosen = choose(groups, num, seed=seed, step=step)
    places = [(one.ordinal, index) for one, index in chosen]
    assert places == sorted(set(places))
    assert len(places) <= min(num, sum(sizes))
    assert all(index < sizes[ordinal] for ordinal, index in places)
    assert [(one.ordinal, index) for one, index in choose(groups, num, seed=seed, step=step)] == places
    if num and sizes and all(sizes):
        assert places


def test_steps_and_seeds_choose_differently() -> None:
    """Two steps practically never choose the same four of a thousand completions; every completion can be chosen."""
    groups = [group(ordinal, 10) for ordinal in range(100)]
    found = [
        tuple((one.ordinal, index) for one, index in choose(groups, 4, seed=seed, step=step))
        for seed in range(2)
        for step in range(20)
    ]
    assert len(set(found)) == 40
    assert all(len(chosen) == 4 for chosen in found)
    few = [group(0, 2), group(1, 2)]
    seen = {(one.ordinal, index) for step in range(30) for one, index in choose(few, 1, seed=0, step=step)}
    assert len(seen) == 4


def test_sample_row_has_tokens_with_log_probabilities_and_versions() -> None:
    """Those of this completion alone, and at most `MAX_TOKENS`; none where the group's tokens are not in memory."""
    sample = group(0, 3)  # completions of 0, 1 and 2 tokens
    ids, logprobs, versions = np.array([7, 8, 9], "i4"), np.array([-0.5, -1.25, -2], "f4"), np.array([3, 3, 4], "i4")
    sample.buffers = (b"", ids.tobytes(), logprobs.tobytes(), versions.tobytes())
    row = to_row(sample, 2)
    assert (row["token_ids"], row["logprobs"], row["versions"]) == ([8, 9], [-1.25, -2.0], [[3, 1], [4, 1]])
    assert to_row(sample, 0)["token_ids"] == []
    assert "token_ids" not in to_row(group(0, 3), 2)
    num = MAX_TOKENS + 100
    sample.trajectories = (
        TrajectoryMeta(status=Status.OK, num_tokens=num, text="", oldest_version=3, newest_version=3),
    )
    sample.buffers = (b"", *(np.zeros(num, kind).tobytes() for kind in ("i4", "f4", "i4")))
    row = to_row(sample, 0)
    assert (len(row["token_ids"]), row["versions"]) == (MAX_TOKENS, [[0, MAX_TOKENS]])


def test_sample_row_has_addresses_of_media() -> None:
    """Not those that hold the content."""
    sample = group(0, 1)
    media = (Media(kind="image", uri="a.png"), Media(kind="video", uri=f"data:video/mp4;base64,{'A' * 10_000}"))
    sample.prompt = Prompt(id="p", text="?", media=media)
    assert to_row(sample, 0)["media"] == [{"kind": "image", "uri": "a.png"}]


def test_sample_row_has_texts_rewards_and_versions() -> None:
    """Texts, reward with its components, status, length, versions."""
    assert to_row(group(7, 2), 1) == {
        "prompt_id": "p7",
        "prompt": "2 + 2 =",
        "completion": "1",
        "reward": 0.5,
        "score/exact": 1.0,
        "score/short": None,
        "eval_score/judge": 0.75,
        "status": "ok",
        "num_turns": 1,
        "num_tokens": 1,
        "oldest_version": 3,
        "newest_version": 4,
    }


def test_sample_of_a_conversation_has_roles() -> None:
    """Because the controller has no chat template."""
    messages = (ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Why?"))
    assert text_of(Prompt(id="p", messages=messages)) == "system: Be brief.\nuser: Why?"


@given(st.text(max_size=3 * MAX_CHARACTERS))
def test_long_texts_lose_their_middle(text: str) -> None:
    """The start with the task and the end with the answer are kept."""
    short = shortened(text)
    assert len(short) <= MAX_CHARACTERS + 50
    assert short[:100] == text[:100]
    assert short[-100:] == text[-100:]
    assert len(text) > MAX_CHARACTERS or short == text


def test_samples_every_counts_steps() -> None:
    """One note with the step's rows; none if the recipe disables samples."""
    for every, expected in ((1, [1, 2]), (2, [2])):
        script, noted = Script(samples_per_step=3, samples_every=every), []
        script.start_run()
        for step in (1, 2):
            script.generate_and_score(2 * step - 2, 2 * step - 1, version=step - 1)
            script.trains(step)
            noted += [c.fields for c in script.commands if isinstance(c, Note) and c.kind == "samples"]
            script.publishes(step)
            script.adopts("rollout-0", step)
        assert [fields["step"] for fields in noted] == expected
        assert all(len(fields["rows"]) == 3 for fields in noted)
        assert noted[0]["rows"][0]["completion"] == "y"
