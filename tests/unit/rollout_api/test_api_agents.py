"""Agents written against OpenAI's client: their conversations become trajectories of the sampled tokens."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from api_stage import EpisodeStage, check, stage

from starling.algo.text import decode
from starling.common.sandbox.launch import Mechanism, problem_of
from starling.common.wire.messages import ChatMessage, Prompt, Status

PROMPT = Prompt(
    id="train/0/0", messages=(ChatMessage(role="user", content="hello"),), reference="r", metadata={"word": "w"}
)


def agent(name: str, *flags: str, **args: Any) -> tuple[str, ...]:
    """Return the settings of the environment `agent` with a program of these tests."""
    written = ", ".join(f"{key} = {json.dumps(value)}" for key, value in args.items())
    given = f'program = "agent_programs:{name}", args = {{ {written} }}'
    return ("--rollout.environment.kind", "agent", "--rollout.environment.options", f"{{ {given} }}", *flags)


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    return Notes(tmp_path)


class Notes:
    """What programs have written, by the index of their trajectory."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o777)  # the sandboxes of root are another user
        self.folder = str(folder)
        self.needs = ("--rollout.environment.needs", f'{{ writable_paths = ["{folder}"] }}')

    def __getitem__(self, index: int) -> list[str]:
        texts: list[str] = json.loads((Path(self.folder) / f"{index}.json").read_text())
        return texts


def parts(stage: EpisodeStage, played: Any, number: int) -> tuple[str, list[tuple[int, str]]]:
    """Return the prompt's text, and the trajectory's as runs of sampled and of other tokens, as a client sees it."""
    trajectory = played.trajectories[number]
    edges = np.flatnonzero(np.diff(trajectory.loss_mask)) + 1
    runs = zip(np.split(trajectory.loss_mask, edges), np.split(trajectory.token_ids, edges), strict=True)
    return decode(stage.tokenizer, played.prompt_ids), [
        (int(mask[0]), decode(stage.tokenizer, ids)) for mask, ids in runs
    ]


def test_agent_conversation_is_a_trajectory(api_model: Path, notes: Notes) -> None:
    with stage(api_model, *agent("converse", *notes.needs, notes=notes.folder, turns=3)) as made:
        played = made.play(PROMPT, 4, temperature=0.9)
        assert [t.reward for t in played.trajectories] == [3.0] * 4
        assert len({t.token_ids.tobytes() for t in played.trajectories}) == 4, "trajectories of a group must differ"
        for number, trajectory in enumerate(played.trajectories):
            check(api_model, played, trajectory, 0.9)
            assert (trajectory.num_turns, trajectory.metrics["num_branches"]) == (3, 1.0)
            prompt, runs = parts(made, played, number)
            assert prompt == "s:be brief;u:hello;a:"
            assert [mask for mask, _ in runs] == [1, 0, 1, 0, 1]
            replies = [text for mask, text in runs if mask]
            assert replies == notes[number]
            assert [text for mask, text in runs if not mask] == [";u:and 0?;a:", ";u:and 1?;a:"]


def test_agent_may_be_plain_function_that_streams(api_model: Path, notes: Notes) -> None:
    with stage(api_model, *agent("plain", *notes.needs, notes=notes.folder)) as made:
        played = made.play(Prompt(id="p", text="go"), 2)
        for number, trajectory in enumerate(played.trajectories):
            check(api_model, played, trajectory)
            assert (trajectory.reward, trajectory.num_turns) == (None, 1)
            assert parts(made, played, number)[0] == "u:go;a:"
            assert decode(made.tokenizer, trajectory.token_ids) == notes[number][0]


def test_last_branch_is_the_trajectory(api_model: Path, notes: Notes) -> None:
    with stage(api_model, *agent("branching", *notes.needs, notes=notes.folder)) as made:
        played = made.play(PROMPT, 2)
        for number, trajectory in enumerate(played.trajectories):
            check(api_model, played, trajectory)
            one, two, other, _, three = notes[number]
            assert two != other, "repeated requests get different replies"
            prompt, runs = parts(made, played, number)
            assert prompt == "u:hello;a:"
            assert [text for mask, text in runs if mask] == [one, two, three]
            assert trajectory.num_turns == 3
            assert trajectory.metrics == {"num_branches": 3.0, "asked": 5.0}, (
                "the trajectory, the other branch, the other conversation"
            )
            assert trajectory.reward == 0.5


def test_rewritten_messages_are_not_trained(api_model: Path) -> None:
    with stage(api_model, *agent("rewriting")) as made:
        played = made.play(PROMPT, 2)
        for number, trajectory in enumerate(played.trajectories):
            check(api_model, played, trajectory)
            prompt, runs = parts(made, played, number)
            assert prompt == "u:hello;a:I said else;u:go;a:"
            assert [mask for mask, _ in runs] == [1]
            assert trajectory.metrics["num_branches"] == 2.0


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("limits", "sampling", "status", "turns"),
    [
        (("--rollout.environment.max-turns", "3"), {}, Status.OK, 3),
        ((), {"max_tokens": 10}, Status.TRUNCATED, 3),
    ],
)
def test_agent_episode_limits(
    api_model: Path, limits: tuple[str, ...], sampling: Any, status: Status, turns: int
) -> None:
    with stage(api_model, *agent("endless", *limits)) as made:
        (trajectory,) = made.play(PROMPT, 1, **sampling, seed=6).trajectories
        assert trajectory.num_turns >= turns
        assert (trajectory.problem, trajectory.reward) == ("", 0.0), "reaching a limit is no failure of the program"
        if sampling:
            assert trajectory.status is status
            assert trajectory.loss_mask.sum() == 10


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "limit_s", "problem"),
    [
        ("greedy", 60, "n = 4: an episode is one trajectory; ask for one reply at a time"),
        ("failing", 60, "ValueError: the disk is full"),
        ("hanging", 1, "the environment took longer than 1 s"),
    ],
)
def test_failed_program_costs_its_own_trajectory(api_model: Path, name: str, limit_s: int, problem: str) -> None:
    with stage(api_model, *agent(name, "--rollout.environment.timeout-s", str(limit_s))) as made:
        for trajectory in made.play(PROMPT, 2).trajectories:
            assert trajectory.status is Status.ENV_ERROR
            assert problem in trajectory.problem


def test_requests_of_an_episode_are_bounded(api_model: Path, notes: Notes) -> None:
    limits = ("--rollout.api.max-requests", "3", "--rollout.environment.max-branches", "5")
    with stage(api_model, *agent("crowding", *limits, *notes.needs, notes=notes.folder)) as made:
        (trajectory,) = made.play(PROMPT, 1).trajectories
        assert (trajectory.problem, trajectory.reward) == ("", 1.0)
    answers = "\n".join(notes[0])
    assert re.fullmatch(
        r"(200\n){3}429 .*raise rollout.api.max_requests.*\n-\n"
        r"(200\n){2}429 .*raise rollout.environment.max_branches.*\n-\n"
        r"413 .*the body has more than \d+ bytes; send less at a time.*",
        answers,
    ), answers


def test_episode_key_is_revoked_at_its_end(api_model: Path, notes: Notes) -> None:
    with stage(api_model, *agent("leaking", *notes.needs, notes=notes.folder)) as made:
        made.play(PROMPT, 1)
        base_url, (key,) = made.server.base_url, notes[0]
        with (
            openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


@pytest.mark.sample(1)
@pytest.mark.parametrize("level", ["bubblewrap", "namespaces", "landlock"])
def test_agent_reaches_endpoint_and_nothing_else(
    api_model: Path, tmp_path: Path, notes: Notes, level: Mechanism
) -> None:
    if problem := problem_of(level):
        pytest.skip(f"this machine does not offer the level {level}: {problem}")
    key = tmp_path.parent / "rollout-0.json"
    key.write_text("the key")
    strict = ("--rollout.environment.sandbox", level)
    with socket.create_server(("127.0.0.1", 0)) as other:
        nosy = agent("nosy", *strict, path=str(key), port=other.getsockname()[1])
        with stage(api_model, *nosy) as made:
            assert made.play(PROMPT, 1).trajectories[0].problem.startswith("the environment ended without a reply")
    with stage(api_model, *agent("plain", *strict, *notes.needs, notes=notes.folder)) as made:
        (trajectory,) = made.play(PROMPT, 1).trajectories
        assert (trajectory.problem, trajectory.num_turns) == ("", 1)
