"""Policy losses, compared with published implementations on one ragged batch in double precision.

The numbers were computed once with the code of TRL 1.16 (`GRPOTrainer._compute_loss` with the named `loss_type`) and of
verl 0.9.1 (`core_algos`: the policy losses with `agg_loss`, `kl_penalty`; `rollout_corr_helper`) on the inputs below:
the loss of the step and its derivative with respect to each token's log-probability. The completions have 1, 6, 0 and 2
tokens; TRL's mean over completions counts the empty one, verl's does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from algo_batches import gradient

from starling.algo.algorithm import Correction
from starling.algo.loss.aggregate import token_weights
from starling.algo.loss.cispo import cispo
from starling.algo.loss.correct import correct
from starling.algo.loss.gspo import gspo
from starling.algo.loss.ppo import ppo_clip
from starling.algo.loss.regularisers import kl_loss
from starling.algo.loss.sequence_clip import sequence_clip
from starling.algo.loss.terms import LossTerms, Tokens

LENGTHS = [1, 6, 0, 2]
NEW = [-0.35, -1.20, -0.04, -2.90, -0.66, -1.71, -0.52, -0.81, -2.20]
OLD = [-0.62, -1.05, -0.05, -2.35, -1.21, -1.69, -0.95, -0.70, -1.45]
ROLLOUT = [-0.50, -1.40, -0.05, -2.60, -1.18, -1.10, -0.99, -0.42, -1.47]
REFERENCE = [-0.71, -1.33, -0.11, -2.02, -0.58, -2.40, -0.60, -0.73, -1.90]
ADVANTAGES = [-1.3, 0.8, 0.4, -0.6]


class Case(NamedTuple):
    loss: Callable[..., LossTerms]
    options: dict[str, Any]
    aggregate: Any
    num_sequences: int
    value: float
    slopes: list[float]


CASES = {
    "TRL grpo": Case(
        ppo_clip,
        {},
        "sequence_mean_token_mean",
        4,
        0.35866245,
        [0.42573845, -0.02869027, -0.03366834, -0.01923166, 0.0, -0.03267329, 0.0, 0.06718756, 0.0],
    ),
    "TRL dapo": Case(
        ppo_clip,
        {"clip_high": 0.28},
        "token_mean",
        4,
        -0.22998567,
        [0.18921709, -0.07650738, -0.08978224, -0.05128443, 0.0, -0.08712877, 0.0, 0.05972228, 0.0],
    ),
    "TRL dr_grpo": Case(
        ppo_clip,
        {},
        "constant",
        4,
        -0.06068347,
        [0.05321731, -0.0215177, -0.02525125, -0.01442375, 0.0, -0.02450497, 0.0, 0.01679689, 0.0],
    ),
    "TRL delta": Case(
        ppo_clip,
        {"dual_clip": 1.25},
        "token_mean",
        4,
        -0.22442498,
        [0.0, -0.07650738, -0.08978224, -0.05128443, 0.0, -0.08712877, 0.0, 0.05972228, 0.0],
    ),
    "TRL cispo": Case(
        cispo,
        {"clip_high": 0.3},
        "token_mean",
        4,
        0.34609304,
        [
            0.18777778,
            -0.07650738,
            -0.08978224,
            -0.05128443,
            -0.11555556,
            -0.08712877,
            -0.11555556,
            0.05972228,
            0.0314911,
        ],
    ),
    "TRL gspo": Case(
        gspo,
        {"clip_low": 0.1, "clip_high": 0.05},
        "sequence_mean_token_mean",
        4,
        0.35153287,
        [0.42573845, -0.0348676, -0.0348676, -0.0348676, -0.0348676, -0.0348676, -0.0348676, 0.0, 0.0],
    ),
    # `RLOOTrainer._compute_loss`, whose value also has -A / 4 = -0.1 for the completion without a token.
    "TRL rloo": Case(
        sequence_clip,
        {"clip_high": 0.4},
        "sequence_mean_token_sum",
        4,
        0.18374556 + 0.1,
        [0.42573845, -0.26199289, -0.26199289, -0.26199289, -0.26199289, -0.26199289, -0.26199289, 0.0, 0.0],
    ),
    "verl vanilla, token-mean": Case(
        ppo_clip,
        {"clip_high": 0.28, "dual_clip": 1.25},
        "token_mean",
        3,
        -0.2386472,
        [0.0, -0.07650738, -0.08978224, -0.05128443, 0.0, -0.08712877, 0.0, 0.05972228, 0.0],
    ),
    "verl vanilla, seq-mean-token-mean": Case(
        ppo_clip,
        {"clip_high": 0.28, "dual_clip": 1.25},
        "sequence_mean_token_mean",
        3,
        0.44512089,
        [0.0, -0.03825369, -0.04489112, -0.02564221, 0.0, -0.04356439, 0.0, 0.08958341, 0.0],
    ),
    "verl vanilla, seq-mean-token-sum": Case(
        ppo_clip,
        {"clip_high": 0.28, "dual_clip": 1.25},
        "sequence_mean_token_sum",
        3,
        -0.71594161,
        [0.0, -0.22952213, -0.26934671, -0.15385328, 0.0, -0.26138631, 0.0, 0.17916683, 0.0],
    ),
    "verl gspo": Case(
        gspo,
        {"clip_low": 0.1, "clip_high": 0.05},
        "sequence_mean_token_mean",
        3,
        0.46871049,
        [0.56765126, -0.04649013, -0.04649013, -0.04649013, -0.04649013, -0.04649013, -0.04649013, 0.0, 0.0],
    ),
    "verl cispo": Case(
        cispo,
        {"clip_low": 0.3, "clip_high": 0.3},
        "token_mean",
        3,
        0.34442641,
        [
            0.18777778,
            -0.07650738,
            -0.08978224,
            -0.06222222,
            -0.11555556,
            -0.08712877,
            -0.11555556,
            0.05972228,
            0.04666667,
        ],
    ),
}


def batch() -> Tokens:
    sequence = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    return Tokens(
        logprobs=torch.tensor(NEW, requires_grad=True),
        old_logprobs=torch.tensor(OLD),
        rollout_logprobs=torch.tensor(ROLLOUT),
        advantages=torch.tensor(ADVANTAGES)[sequence],
        sequence=sequence,
        num_sequences=4,
    )


def assert_step(terms: LossTerms, tokens: Tokens, weights: torch.Tensor, value: float, slopes: list[float]) -> None:
    assert float((terms.loss.detach() * weights).sum()) == pytest.approx(value, rel=1e-6, abs=1e-6)
    assert gradient(terms, tokens, weights).tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_policy_losses_and_aggregations_equal_published_numbers(name: str) -> None:
    case, tokens = CASES[name], batch()
    shares = token_weights(LENGTHS, case.aggregate, num_tokens=9, num_sequences=case.num_sequences, constant=8)
    weights = torch.from_numpy(shares)[tokens.sequence].float()
    assert_step(case.loss(tokens, **case.options), tokens, weights, case.value, case.slopes)


@pytest.mark.parametrize(
    ("correction", "value", "slopes"),
    [
        # TRL's token_truncate gives the same.
        pytest.param(
            Correction("truncate", high=1.1),
            -0.22581672,
            [0.1678205, -0.08415811, -0.08978224, -0.05641287, 0.0, -0.04829786, 0.0, 0.04513712, 0.0],
            id="verl vanilla, token",
        ),
        pytest.param(
            Correction("truncate", "sequence", high=1.1),
            -0.27350896,
            [0.1678205, -0.07805293, -0.09159596, -0.05232044, 0.0, -0.08888889, 0.0, 0.04604896, 0.0],
            id="verl vanilla, sequence",
        ),
        pytest.param(
            Correction("sequence_mask", high=0.2),
            -0.32881906,
            [0.18921709, -0.07650738, -0.08978224, -0.05128443, 0.0, -0.08712877, 0.0, 0.0, 0.0],
            id="TRL off-policy mask",
        ),
    ],
)
def test_corrections_equal_published_numbers(correction: Correction, value: float, slopes: list[float]) -> None:
    tokens = batch()
    factor, _ = correct(tokens, [correction])
    assert_step(ppo_clip(tokens), tokens, factor / 9, value, slopes)


@pytest.mark.parametrize(
    ("kind", "value", "slopes"),
    [
        pytest.param(
            "k1",
            -0.00111111,
            [
                0.11111111,
                0.11111111,
                0.11111111,
                0.11111111,
                0.11111111,
                0.11111111,
                0.11111111,
                0.11111111,
                0.11111111,
            ],
            id="verl k1",
        ),
        pytest.param(
            "k2",
            0.08395,
            [0.04, 0.01444444, 0.00777778, -0.09777778, -0.00888889, 0.07666667, 0.00888889, -0.00888889, -0.03333333],
            id="verl k2",
        ),
        pytest.param(
            "k3",
            0.09446563,
            [
                0.03359152,
                0.01354495,
                0.0075118,
                -0.15676663,
                -0.00925412,
                0.05538044,
                0.00854263,
                -0.00925412,
                -0.0388732,
            ],
            id="verl k3",
        ),
    ],
)
def test_divergences_equal_published_numbers(kind: Any, value: float, slopes: list[float]) -> None:
    tokens = batch()
    assert_step(kl_loss(tokens, torch.tensor(REFERENCE), kind=kind), tokens, torch.full((9,), 1 / 9), value, slopes)


@pytest.mark.parametrize(
    ("kind", "value", "slopes"),
    [
        pytest.param(
            "k3",
            -0.21198482,
            [
                0.19056075,
                -0.07596558,
                -0.08948177,
                -0.05755509,
                -0.00037016,
                -0.08491355,
                0.00034171,
                0.05935211,
                -0.00155493,
            ],
            id="TRL beta 0.04",
        ),
        pytest.param(
            "unbiased",
            -0.21302563,
            [
                0.19131303,
                -0.07601008,
                -0.089468,
                -0.05354094,
                -0.00061627,
                -0.08412283,
                0.00054658,
                0.05940376,
                -0.00062982,
            ],
            id="TRL use_bias_correction_kl",
        ),
    ],
)
def test_policy_loss_with_divergence_equals_published_numbers(kind: Any, value: float, slopes: list[float]) -> None:
    tokens = replace(batch(), rollout_logprobs=torch.tensor(OLD))
    loss = ppo_clip(tokens).loss + 0.04 * kl_loss(tokens, torch.tensor(REFERENCE), kind=kind).loss
    assert_step(LossTerms(loss, {}), tokens, torch.full((9,), 1 / 9), value, slopes)
