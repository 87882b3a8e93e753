"""No numbers that the controller stores can keep a step of any algorithm from being made.

A rollout, a reward replica or a teacher that lies could else stop the training of all others: a step whose gradient is
not finite changes no weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st

from starling.algo import algorithm as built_in
from starling.common.errors import ConfigError
from starling.common.ranges import MAX_REWARD
from starling.controller.core.groups.validation.validation import MAX_LOGPROB_NATS
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.groups import ScoredGroup, TeacherLogprobs
from starling.policy.train.rl import RlTrainer

torch.set_num_threads(1)

SHAPES = [(3, [4, 2, 5]), (5, [1, 3, 3])]
NUM_TOKENS = sum(sum(lengths) for _, lengths in SHAPES)
NUM_COMPLETIONS = sum(len(lengths) for _, lengths in SHAPES)
LOGPROBS = st.sampled_from([-MAX_LOGPROB_NATS, -1e3, -88.0, -50.0, -3.4, 0.0, 1.0])
REWARDS = st.sampled_from([-MAX_REWARD, -1.0, 0.0, 1e-30, 1.0, MAX_REWARD])


def of_tokens(values: st.SearchStrategy[float]) -> st.SearchStrategy[list[float]]:
    """Draw a value for each token: seldom all different ones, since lies need not be many."""
    return st.one_of(
        values.map(lambda one: [one] * NUM_TOKENS),
        st.lists(values, min_size=NUM_TOKENS, max_size=NUM_TOKENS),
        st.tuples(values, st.integers(0, NUM_TOKENS - 1)).map(
            lambda drawn: [drawn[0] if index == drawn[1] else -3.4 for index in range(NUM_TOKENS)]
        ),
    )


CORRECTIONS = st.sampled_from(
    [
        (),
        ({"kind": "truncate", "high": 2.0},),
        ({"kind": "mask", "low": 0.5, "high": 5.0},),
        ({"kind": "sequence_mask", "high": 1.0},),
        ({"kind": "truncate", "level": "sequence", "high": 2.0},),
        ({"kind": "mask", "level": "geometric", "low": 0.5, "high": 2.0},),
    ]
)


@st.composite
def algorithms(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the section `policy.algorithm`."""
    found: dict[str, Any] = {
        "name": draw(st.sampled_from(sorted(built_in.ALGORITHMS))),
        "advantage_scale": draw(st.sampled_from([None, "std", "batch", "none"])),
        "aggregate": draw(st.sampled_from([None, "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"])),
    }
    if draw(st.booleans()):
        found |= {"old": "proximal", "corrections": draw(CORRECTIONS)}
    if draw(st.booleans()):
        found |= {"kl_coefficient": 0.1, "kl_estimator": draw(st.sampled_from(["k1", "k2", "k3", "unbiased"]))}
    if draw(st.booleans()):
        found |= {"positive_nll_coefficient": 0.1, "entropy_coefficient": 0.1}
    return found


@st.composite
def distillations(draw: st.DrawFn) -> dict[str, Any] | None:
    """Draw the section `policy.distill`; None for a run without a teacher."""
    if draw(st.booleans()):
        return None
    return {
        "loss": draw(st.sampled_from(["reverse_kl", "jsd"])),
        "discount": draw(st.sampled_from([0.0, 1.0])),
        "beta": draw(st.sampled_from([0.0, 0.5, 1.0])),
    }


def changed(
    groups: list[ScoredGroup], logprobs: list[float], rewards: list[float], taught: list[float], top: list[float]
) -> list[ScoredGroup]:
    """Return `groups` with other numbers."""
    found, token, completion = list[ScoredGroup](), 0, 0
    for group in groups:
        num, num_completions = sum(group.lengths), len(group.lengths)
        own = slice(token, token + num)
        ids = np.tile(np.arange(2, dtype=np.int32), (num, 1))
        tops = np.stack([np.array(top[own], np.float32), np.full(num, -0.7, np.float32)], axis=1)
        found.append(
            replace(
                group,
                logprobs=np.array(logprobs[own], np.float32),
                rewards=tuple(rewards[completion : completion + num_completions]),
                teacher=TeacherLogprobs(np.array(taught[own], np.float32), ids, tops),
            )
        )
        token, completion = token + num, completion + num_completions
    return found


GSPO = {"name": "gspo", "advantage_scale": "none"}
ALIKE, FAR = [-3.4] * NUM_TOKENS, [-88.0, *[-3.4] * (NUM_TOKENS - 1)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    algorithm=algorithms(),
    distill=distillations(),
    logprobs=of_tokens(LOGPROBS),
    rewards=st.lists(REWARDS, min_size=NUM_COMPLETIONS, max_size=NUM_COMPLETIONS),
    taught=of_tokens(LOGPROBS),
    top=of_tokens(LOGPROBS),
)
@example(
    algorithm=GSPO,
    distill=None,
    logprobs=FAR,
    rewards=[-1.0 if index == 2 else -MAX_REWARD for index in range(6)],
    taught=ALIKE,
    top=ALIKE,
)
def test_step_is_made_whatever_is_stored(
    tiny: Callable[..., Any],
    make_groups: Callable[..., list[ScoredGroup]],
    algorithm: dict[str, Any],
    distill: dict[str, Any] | None,
    logprobs: list[float],
    rewards: list[float],
    taught: list[float],
    top: list[float],
) -> None:
    model = tiny()
    groups = changed(make_groups(SHAPES), logprobs, rewards, taught, top)
    if distill is None:
        groups = [replace(group, teacher=None) for group in groups]
    chosen = PolicySettings.model_validate(
        {"algorithm": algorithm, "distill": distill or {}, "optimizer": {"learning_rate": 1e-3}}
    )
    try:
        trainer = RlTrainer(model, chosen, total_steps=2)
    except ConfigError:  # the algorithm has no such option
        reject()
    metrics = trainer.step(groups, step=1)
    assert not metrics["skipped_step"]
    assert math.isfinite(metrics["grad_norm"])
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
