"""Truncated sampling: a step renormalises over the tokens that the rollout kept, exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from plain_rl import (
    ALGORITHMS,
    RAGGED,
    Completion,
    assert_same_gradients,
    by_constant,
    double,
    gradients,
    logprobs_of,
    near,
    plain_loss,
)
from property_tests import examples
from torch import Tensor
from vocabulary import VOCABULARY

from starling.algo.truncation import KeptTokens, join_kept, kept_problem
from starling.common.errors import ConfigError, WireError
from starling.common.wire.messages import ModelLimits, ScoredTrajectory, TensorMeta, TrainGroup
from starling.policy.settings.algorithm import AlgorithmSettings, DistillSettings
from starling.policy.settings.memory import MemorySettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.groups import ScoredGroup, TeacherLogprobs, groups_from_wire
from starling.policy.train.loss.logprobs import KeptSets, logits_logprobs
from starling.policy.train.rl import RlTrainer

torch.set_num_threads(1)

Make = Callable[..., Any]
WAYS = [(30, True, 4096), (30, False, 4096), (10_000, True, 4096), (10_000, True, 7), (10_000, False, 3)]
"""Token budget of a microbatch, whether prompts are shared, and tokens whose logits exist at a time."""
MASKS = [
    [1, 0, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1],
    [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 0],
    [1, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 1, 1],
]
"""Of `RAGGED`."""


def truncated(groups: list[ScoredGroup], vocabulary: int = VOCABULARY, *, seed: int = 3) -> list[ScoredGroup]:
    """Return `groups` with 1 to 8 tokens kept at most positions, and the whole vocabulary at some."""
    generator = np.random.default_rng(seed)
    found = []
    for group in groups:
        rows = []
        for token, sampled in zip(group.completion_ids, group.sampled, strict=True):
            others = generator.choice(vocabulary, generator.integers(0, 8), replace=False)
            whole = not sampled or generator.random() < 0.2
            rows.append(np.zeros(0, np.int64) if whole else np.unique([*others, token]))
        found.append(replace(group, kept=KeptTokens.from_rows(rows)))
    return found


def settings(algorithm: AlgorithmSettings, budget: int = 10_000, share: bool = True, chunk: int = 4096) -> Any:
    return PolicySettings(
        optimizer=OptimizerSettings(learning_rate=1e-12, max_grad_norm=0.0),
        algorithm=algorithm,
        tokens_per_microbatch=budget,
        share_prompts=share,
        memory=MemorySettings(logprob_chunk_tokens=chunk),
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "temperature"), covering(ALGORITHMS, [1.0, 0.7]))
def test_kept_tokens_step_equals_loop_over_sequences(
    tiny: Make, make_groups: Make, name: str, temperature: float
) -> None:
    plain = double(tiny())
    groups = near(plain, truncated(make_groups(RAGGED)), ALGORITHMS[name].noise, temperature=temperature)
    aggregate = by_constant(max(length for _, lengths in RAGGED for length in lengths)) if name == "dr_grpo" else None
    expected = plain_loss(name, plain, groups, temperature=temperature, aggregate=aggregate)
    expected.backward()  # type: ignore[no-untyped-call]
    for budget, share, chunk in WAYS:
        model = tiny().double()
        chosen = settings(AlgorithmSettings(name=name), budget, share, chunk)
        metrics = RlTrainer(model, chosen, total_steps=1).step(groups, step=1, temperature=temperature)
        assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-7, rel=1e-6)
        assert_same_gradients(model, plain, 1e-6)


def test_kept_tokens_change_the_gradient(tiny: Make, make_groups: Make) -> None:
    groups = truncated(make_groups(RAGGED))
    models = tiny(), tiny()
    for model, own in zip(models, (groups, [replace(group, kept=None) for group in groups]), strict=True):
        RlTrainer(model, settings(AlgorithmSettings()), total_steps=1).step(own, step=1)
    with pytest.raises(AssertionError):
        assert_same_gradients(models[0], models[1], 1e-2)


def test_kept_tokens_reference_entropy_and_loss_mask_use_the_same_sets(tiny: Make, make_groups: Make) -> None:
    plain, other = double(tiny()), double(tiny(seed=1))
    masked = [
        replace(group, loss_mask=np.array(mask, np.uint8))
        for group, mask in zip(make_groups(RAGGED), MASKS, strict=True)
    ]
    groups = near(plain, truncated(masked), 0.2)

    def extra(one: Completion) -> list[Tensor]:
        kl = [torch.exp(known - new) - 1 + new - known for new, known in zip(one.new, one.reference, strict=True)]
        return [0.4 * a - 0.1 * b for a, b in zip(kl, one.entropy, strict=True)]

    expected = plain_loss("dapo", plain, groups, extra=extra, reference=other)
    expected.backward()  # type: ignore[no-untyped-call]
    for budget, share, chunk in WAYS:
        model = tiny().double()
        algorithm = AlgorithmSettings(name="dapo", kl_coefficient=0.4, entropy_coefficient=0.1)
        trainer = RlTrainer(model, settings(algorithm, budget, share, chunk), total_steps=1, reference=other)
        metrics = trainer.step(groups, step=1)
        assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-7, rel=1e-6)
        assert_same_gradients(model, plain, 1e-6)


def test_kept_tokens_of_the_same_weights_give_a_ratio_of_1(tiny: Make, make_groups: Make) -> None:
    """Several updates in a step, with the old log-probabilities of a separate pass: they use the same sets."""
    model = tiny()
    groups = near(double(model), truncated(make_groups(RAGGED)), 0.0)
    algorithm = AlgorithmSettings(name="decoupled_ppo", num_minibatches=2)
    metrics = RlTrainer(model, settings(algorithm, 30), total_steps=1).step(groups, step=1)
    assert metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)


def test_kept_tokens_of_some_groups_only(tiny: Make, make_groups: Make) -> None:
    """A group without sets, as one resumed from before, is normalised over the vocabulary."""
    plain = double(tiny())
    first, *others = truncated(make_groups(RAGGED))
    groups = near(plain, [replace(first, kept=None), *others], 0.2)
    expected = plain_loss("grpo", plain, groups)
    expected.backward()  # type: ignore[no-untyped-call]
    model = tiny().double()
    RlTrainer(model, settings(AlgorithmSettings(name="grpo")), total_steps=1).step(groups, step=1)
    assert_same_gradients(model, plain, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_tokens_leave_the_logits_of_the_caller_alone(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = logits.clone()
    kept = KeptSets(KeptTokens.from_rows([np.array([1, 4])] * 5))
    logprobs, entropy = logits_logprobs(logits, torch.full((5,), 4), kept=kept)
    assert torch.equal(logits, before)
    exact = before.float()[:, [1, 4]].log_softmax(-1)
    torch.testing.assert_close(logprobs, exact[:, 1])
    torch.testing.assert_close(entropy, -(exact.exp() * exact).sum(-1))


def test_jsd_distillation_with_kept_tokens_is_refused(tiny: Make, make_groups: Make) -> None:
    model = tiny()
    groups = []
    for group in truncated(make_groups(RAGGED)):
        size = len(group.completion_ids)
        top = TeacherLogprobs(
            np.zeros(size, np.float32), np.zeros((size, 2), np.int32), np.zeros((size, 2), np.float32)
        )
        groups.append(replace(group, teacher=top))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    chosen = settings(AlgorithmSettings()).model_copy(update={"distill": DistillSettings(loss="jsd")})
    with pytest.raises(ConfigError, match=r"jsd.*sampling\.logprobs = 'full'"):
        RlTrainer(model, chosen, total_steps=1).step(groups, step=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# --- the sets ---------------------------------------------------------------------------------------------------------

ROWS = st.lists(st.sets(st.integers(0, 20), max_size=6).map(lambda ids: np.array(sorted(ids), np.int32)), max_size=12)


@given(ROWS, st.data())
@examples(100)
def test_take_and_join_equal_lists(rows: list[npt.NDArray[np.int32]], data: st.DataObject) -> None:
    kept = KeptTokens.from_rows(rows)
    assert len(kept) == len(rows)
    places = data.draw(st.lists(st.integers(0, max(0, len(rows) - 1)), max_size=20 if rows else 0))
    taken = kept.take(np.array(places, np.int64))
    assert [row.tolist() for row in taken.rows()] == [rows[place].tolist() for place in places]
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))), np.bool_)
    chosen = [row.tolist() for row, flag in zip(rows, mask, strict=True) if flag]
    assert [row.tolist() for row in kept.take(mask).rows()] == chosen
    cut = data.draw(st.integers(0, len(rows)))
    both = join_kept([(kept.take(slice(0, cut)), cut), (None, 2), (kept.take(slice(cut, None)), len(rows) - cut)])
    assert both is not None
    expected = [row.tolist() for row in rows]
    assert [row.tolist() for row in both.rows()] == [*expected[:cut], [], [], *expected[cut:]]


def test_join_of_parts_without_sets_is_none() -> None:
    assert join_kept([(None, 3), (None, 0)]) is None


IDS = np.array([5, 6, 7], np.int32)


def sets(counts: list[int], ids: list[int]) -> KeptTokens:
    return KeptTokens(np.array(counts, np.int32), np.array(ids, np.int32))


PROBLEMS = {
    "too few counts": (sets([1, 1], [5, 6]), "2 sets of kept tokens came with 3 tokens"),
    "negative count": (sets([1, 2, -1], [5, 6]), "do not add up"),
    "other sum": (sets([1, 1, 1], [5, 6]), "do not add up"),
    "overflowing sum": (sets([2**31 - 1, 2**31 - 1, 4], [5, 6]), "do not add up"),
    "twice the same": (sets([2, 1, 1], [5, 5, 6, 7]), "ascending order"),
    "descending": (sets([2, 1, 1], [5, 4, 6, 7]), "ascending order"),
    "negative id": (sets([2, 1, 1], [-1, 5, 6, 7]), "ascending order"),
    "without its own": (sets([1, 2, 1], [5, 7, 8, 7]), "token 1 is not among"),
    "at a masked token": (sets([1, 1, 1], [5, 6, 7]), "not sampled"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_wrong_sets_are_found(case: str) -> None:
    kept, complaint = PROBLEMS[case]
    mask = np.array([True, True, case != "at a masked token"])
    assert complaint in kept_problem(kept, IDS, mask)
    wire_group(kept, mask.astype(np.uint8), refused=complaint)


def test_right_sets_have_no_problem() -> None:
    for kept in (sets([0, 0, 0], []), sets([3, 0, 1], [4, 5, 900, 7]), sets([1, 1, 1], [5, 6, 7])):
        assert kept_problem(kept, IDS, None) == ""
        (group,) = wire_group(kept, np.ones(3, np.uint8))
        assert group.kept is not None
        assert group.kept.counts.tolist() == kept.counts.tolist()
        assert group.kept.ids.tolist() == kept.ids.tolist()


def test_group_with_half_of_the_tensors_or_unknown_ids_is_refused() -> None:
    kept = sets([3, 0, 1], [4, 5, 900, 7])
    with pytest.raises(WireError, match="lacks the other"):
        decode_group([("kept_ids", kept.ids)])
    with pytest.raises(WireError, match="token ids from 4 to 900, and the model has 512"):
        decode_group([("kept_counts", kept.counts), ("kept_ids", kept.ids)], 512)


def wire_group(kept: KeptTokens, mask: npt.NDArray[np.uint8], *, refused: str = "") -> list[ScoredGroup]:
    """Decode a group with `kept`, as a policy does; with `refused` it must refuse it with this text."""
    named = [("kept_counts", kept.counts), ("kept_ids", kept.ids), ("loss_mask", mask)]
    if not refused:
        return decode_group(named)
    with pytest.raises(WireError, match=refused):
        decode_group(named)
    return []


def decode_group(named: list[tuple[str, npt.NDArray[Any]]], vocabulary: int = 0) -> list[ScoredGroup]:
    zeros = np.zeros(3, np.int32)
    arrays = [("", zeros), ("", IDS), ("", np.zeros(3, np.float32)), ("", zeros), *named]
    group = TrainGroup(
        prompt_id="p",
        trajectories=(ScoredTrajectory(num_tokens=3, oldest_version=0, reward=0.0),),
        tensors=tuple(TensorMeta(dtype=a.dtype.name, shape=a.shape, nbytes=a.nbytes, name=name) for name, a in arrays),
    )
    return groups_from_wire([group], [array.tobytes() for _, array in arrays], ModelLimits(vocabulary_size=vocabulary))


def test_gradients_and_logprobs_are_independent_of_tokens_that_were_not_kept(tiny: Make, make_groups: Make) -> None:
    """With a single kept token everywhere the log-probability is 0, whatever the weights are, and has no gradient."""
    groups = make_groups(RAGGED)
    alone = [replace(g, kept=KeptTokens.from_rows(list(g.completion_ids[:, None]))) for g in groups]
    model = tiny()
    assert {one for rows in logprobs_of(double(model), alone) for row in rows for one in row} == {0.0}
    RlTrainer(model, settings(AlgorithmSettings()), total_steps=1).step(alone, step=1)
    assert all(not gradient.any() for gradient in gradients(model).values())
