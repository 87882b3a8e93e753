"""Algorithms: built-in ones train, user algorithms are imported, and unknown options are rejected."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from algo_batches import gradient, make_tokens

from starling.algo.advantage import group_normalised, leave_one_out
from starling.algo.algorithm import (
    ALGORITHMS,
    Algorithm,
    Correction,
    bind,
    compares_scores,
    find,
    functions,
    takes_scores,
)
from starling.algo.loss.aggregate import token_weights
from starling.algo.loss.correct import correct
from starling.algo.loss.ppo import ppo_clip
from starling.algo.loss.terms import LossTerms, Tokens
from starling.common.errors import ConfigError
from starling.common.wire.messages import ScorerScores

OWN = """
from starling.algo.algorithm import Algorithm
from starling.algo.loss.terms import LossTerms

def centred(groups, *, shift=0.0):
    return [[reward - shift for reward in group] for group in groups]

def scaled(tokens, *, factor=1.0):
    return LossTerms(-factor * tokens.advantages * tokens.logprobs, {})

class Shelf:
    own = Algorithm(scaled, centred, options={"factor": 2.0})

own = Shelf.own
number = 3
"""


def half(tokens: Tokens, *, factor: float = 0.5) -> LossTerms:
    return LossTerms(-factor * tokens.advantages * tokens.logprobs, {})


def raw(groups: Sequence[Sequence[float]], *, factor: float = 1.0, shift: float = 0.0) -> list[list[float]]:
    return [[factor * reward + shift for reward in group] for group in groups]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_built_in_algorithm_has_useful_gradients(name: str) -> None:
    algorithm = find(name)
    loss, advantage = functions(algorithm, {})
    lengths = [3, 1, 5, 2]
    rewards = [[1.0, 0.0], [0.0, 0.5]]
    scores = [[ScorerScores(label="judge", weight=1.0, values=tuple(group))] for group in rewards]
    credit = [value for group in advantage(rewards, *([scores] if takes_scores(advantage) else [])) for value in group]
    tokens = make_tokens(lengths, seed=1)
    tokens = Tokens(
        logprobs=tokens.logprobs,
        old_logprobs=tokens.old_logprobs,
        rollout_logprobs=tokens.rollout_logprobs,
        advantages=torch.tensor(credit)[tokens.sequence],
        sequence=tokens.sequence,
        num_sequences=4,
    )
    shares = token_weights(lengths, algorithm.aggregate, num_tokens=11, num_sequences=4, constant=8)
    factor, _ = correct(tokens, algorithm.corrections)
    slopes = gradient(loss(tokens), tokens, factor * torch.from_numpy(shares)[tokens.sequence].float())
    assert torch.isfinite(slopes).all()
    assert slopes.abs().sum() > 0.0
    moved = slopes * torch.sign(tokens.advantages)
    assert (moved <= 0.0).all(), "tokens of good completions must become more likely, those of bad ones less likely"


def test_advantage_that_takes_scores_is_known_by_its_parameter() -> None:
    def positional(groups: object, scores: object, *, factor: float = 1.0) -> list[list[float]]:
        return []

    def option(groups: object, *, scores: float = 1.0) -> list[list[float]]:
        return []

    assert takes_scores(positional)
    assert takes_scores(bind(positional, {"factor": 2.0}))
    assert not takes_scores(option)
    assert {name for name in ALGORITHMS if compares_scores(name)} == {"gdpo"}
    assert compares_scores("mine.py:own") is None, "it is not imported for the answer"


def test_options_are_passed_to_the_function_that_has_them() -> None:
    algorithm = Algorithm(half, raw, options={"factor": 3.0})
    loss, advantage = functions(algorithm, {"shift": 1.0})
    tokens = make_tokens([4])
    assert torch.equal(loss(tokens).loss, half(tokens, factor=3.0).loss)
    assert advantage([[1.0], [2.0, 0.0]]) == [[4.0], [7.0, 1.0]]
    loss, _ = functions(algorithm, {"factor": 5.0})
    assert torch.equal(loss(tokens).loss, half(tokens, factor=5.0).loss)


def test_bind_ignores_options_that_a_function_lacks() -> None:
    assert bind(raw, {"shift": 1.0, "clip_low": 0.1})([[0.0]]) == [[1.0]]
    assert bind(leave_one_out, {"clip_low": 0.1})([[1.0, 0.0]]) == [[1.0, -1.0]]


@pytest.mark.parametrize("option", ["clip_hgih", "tokens", "groups"])
def test_unknown_option_is_rejected_with_the_known_ones(option: str) -> None:
    expected = (
        f"there is no option '{option}': ppo_clip takes clip_low, clip_high, dual_clip, and leave_one_out takes none"
    )
    with pytest.raises(ConfigError, match=expected):
        functions(find("rloo"), {option: 0.3})


def test_default_options_of_an_algorithm_are_checked() -> None:
    with pytest.raises(ConfigError, match="there is no option 'scale': half takes factor, and leave_one_out"):
        functions(Algorithm(half, leave_one_out, options={"scale": "std"}), {})


def test_algorithm_names_are_resolved_lazily() -> None:
    algorithm = Algorithm("starling.algo.loss.nowhere:loss")
    with pytest.raises(ConfigError, match=r"'starling\.algo\.loss\.nowhere:loss' cannot be imported"):
        functions(algorithm, {})
    with pytest.raises(ConfigError, match=r"'starling\.algo\.loss\.ppo:PPO': no .PPO. in there; it has LossTerms"):
        functions(Algorithm("starling.algo.loss.ppo:PPO"), {})
    loss, advantage = functions(find("grpo"), {})
    assert (loss.func, advantage.func) == (ppo_clip, group_normalised)  # type: ignore[attr-defined]


@pytest.mark.parametrize("attribute", ["own", "Shelf.own"])
def test_user_algorithm_is_loaded_from_a_file(tmp_path: Path, attribute: str) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    algorithm = find(f"{tmp_path}/mine.py:{attribute}")
    loss, advantage = functions(algorithm, {"shift": 1.0})
    tokens = make_tokens([2])
    assert torch.equal(gradient(loss(tokens), tokens), -2.0 * tokens.advantages)
    assert advantage([[1.0, 3.0]]) == [[0.0, 2.0]]
    by_text = Algorithm(f"{tmp_path}/mine.py:scaled", f"{tmp_path}/mine.py:centred")
    assert functions(by_text, {}).advantage([[1.0]]) == [[1.0]]


def test_user_algorithm_is_loaded_from_a_module_or_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside_algorithm.py").write_text(OWN)
    info = tmp_path / "outside_algorithm-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-algorithm\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[starling.algorithms]\noutside = outside_algorithm:Shelf.own\nodd = outside_algorithm:number\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = find("outside_algorithm:own")
    assert own.options == {"factor": 2.0}
    assert find("outside") is own
    with pytest.raises(ConfigError, match="the algorithm 'odd' has the type int: make it an Algorithm"):
        find("odd")
    with pytest.raises(ConfigError, match=r"no algorithm 'gpro': give one of grpo, .*, odd, outside, or your own"):
        find("gpro")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nowhere.py:own", "there is no file '/.*nowhere.py'"),
        ("starling.algo.advantage:group_normalised", "has the type function: make it an Algorithm"),
        ("starling.algo.advantage:", "write `module:attribute` or `path/to/file.py:attribute`"),
        (":own", "write `module:attribute` or `path/to/file.py:attribute`"),
        ("starling.algo:own", "no 'own' in there; it has nothing to call"),
    ],
)
def test_missing_algorithm_is_rejected_by_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        find(name)


def test_failing_file_is_reported_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('out of tea')")
    with pytest.raises(ConfigError, match=r"imported: RuntimeError: out of tea \(.*broken\.py:1\)\."):
        find(f"{tmp_path}/broken.py:own")


def test_decoupled_ppo_uses_the_proximal_policy_and_drops_far_tokens() -> None:
    algorithm = find("decoupled_ppo")
    assert algorithm.old == "proximal"
    assert algorithm.corrections == (Correction("mask", "token", high=5.0),)
    assert all(find(name).old == "rollout" for name in ALGORITHMS if name != "decoupled_ppo")
