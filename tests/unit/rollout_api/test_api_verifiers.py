"""Real environments of `verifiers` generate trajectories that can be trained."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vf_environments
from api_stage import EpisodeStage, check, stage

from starling.algo.text import decode
from starling.common.errors import ConfigError
from starling.common.wire.messages import ChatMessage, Prompt, Status
from starling.rollout.env.environments.verifiers import make_verifiers
from starling.rollout.settings import EnvironmentSettings

PROMPT = Prompt(
    id="train/0/0",
    messages=(ChatMessage(role="user", content="hello"),),
    reference="e",
    metadata={"info": {"word": "four"}},
)


def environment(name: str, *flags: str) -> tuple[str, ...]:
    options = f'{{ environment = "vf_environments:{name}" }}'
    return ("--rollout.environment.kind", "verifiers", "--rollout.environment.options", options, *flags)


def text_runs(stage: EpisodeStage, trajectory: Any) -> list[tuple[int, str]]:
    """Return a trajectory's text in runs of sampled tokens and of others."""
    edges = np.flatnonzero(np.diff(trajectory.loss_mask)) + 1
    runs = zip(np.split(trajectory.loss_mask, edges), np.split(trajectory.token_ids, edges), strict=True)
    return [(int(mask[0]), decode(stage.tokenizer, ids)) for mask, ids in runs]


def test_verifiers_single_turn(api_model: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stage(api_model, *environment("single")) as made:
        assert signal.getsignal(signal.SIGTERM) is before, "verifiers must not replace the signal handler"
        played = made.play(PROMPT, 4, max_tokens=30)
        assert decode(made.tokenizer, played.prompt_ids) == "s:be brief;u:hello;a:"
        for trajectory in played.trajectories:
            check(api_model, played, trajectory)
            ((mask, text),) = text_runs(made, trajectory)
            assert mask == 1
            assert trajectory.reward == pytest.approx(text.count("e") / max(1, len(text)))
            assert trajectory.metrics == {
                "num_branches": 1.0,
                "share": trajectory.reward,
                "length": 401.0,
                "num_turns": 1.0,
            }


def test_verifiers_several_turns(api_model: Path) -> None:
    with stage(api_model, *environment("several", "--rollout.environment.turn-max-tokens", "6")) as made:
        played = made.play(PROMPT, 3)
        for trajectory in played.trajectories:
            check(api_model, played, trajectory)
            assert trajectory.num_turns == 3
            runs = text_runs(made, trajectory)
            assert [mask for mask, _ in runs] == [1, 0, 1, 0, 1]
            assert [text for mask, text in runs if not mask] == [";u:more 1;a:", ";u:more 2;a:"]
            text = "".join(text for mask, text in runs if mask)
            assert trajectory.reward == pytest.approx(text.count("e") / max(1, len(text)))


def test_verifiers_tools_are_in_the_prompt(api_model: Path) -> None:
    with stage(api_model, *environment("tools")) as made:
        played = made.play(PROMPT, 2, max_tokens=8)
        assert decode(made.tokenizer, played.prompt_ids) == "[add]u:hello;a:"
        for trajectory in played.trajectories:
            check(api_model, played, trajectory)
            assert trajectory.metrics["add_calls"] == 0.0


def test_verifiers_scores_empty_reply(api_model: Path) -> None:
    with stage(api_model, *environment("single")) as made:
        vf_environments.SEEN.clear()
        played = [made.play(PROMPT, 64, max_tokens=1, seed=seed, temperature=1.5) for seed in range(5)]
        spoken = [one for group in played for one in group.trajectories]
        found = [one for one in spoken if not decode(made.tokenizer, one.token_ids)]
        assert Status.OK in {one.status for one in found}, "none of 320 replies of up to 99 tokens was empty"
        assert all((one.reward, one.problem) == (0.0, "") for one in found)
        judged = [completion for completion, _ in vf_environments.SEEN if not completion[-1]["content"]]
        assert len(judged) == len(found)


def test_verifiers_scores_episode_at_its_limit(api_model: Path) -> None:
    with stage(api_model, *environment("several", "--rollout.environment.max-turns", "2")) as made:
        (trajectory,) = made.play(PROMPT, 1, max_tokens=20).trajectories
        assert trajectory.reward is not None
        assert (trajectory.num_turns, trajectory.problem) == (trajectory.num_turns, "")
        assert trajectory.num_turns <= 2


def test_verifiers_reward_exception_is_not_zero(api_model: Path) -> None:
    with stage(api_model, *environment("broken")) as made:
        for trajectory in made.play(PROMPT, 2).trajectories:
            assert trajectory.status is Status.ENV_ERROR
            assert trajectory.reward is None
            assert "the reward function 'raising' raised KeyError" in trajectory.problem


@pytest.mark.parametrize(
    ("environment", "args", "problem"),
    [
        ("vf_environments:over_groups", {}, "the reward function 'ranked' over a whole group"),
        ("vf_environments:of_text", {}, "message_type 'completion': only conversations"),
        ("vf_environments:nothing", {}, "is a int: return an environment of `verifiers`"),
        ("vf_environments:impossible", {}, "cannot be made: RuntimeError: no data here"),
        ("vf_environments:several", {"turns": 3}, "does not take rollout.environment.options"),
        ("vf_environments:sevral", {}, "did you mean 'several'"),
        ("no-such-environment", {}, "Could not import 'no-such-environment' environment"),
    ],
)
def test_invalid_verifiers_environments_are_rejected(environment: str, args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_verifiers(EnvironmentSettings(kind="verifiers"), environment, args=args)
    assert problem in str(refused.value)
