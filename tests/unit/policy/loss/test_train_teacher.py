"""Distillation steps against plain references that process one completion at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from starling.common.errors import ConfigError
from starling.common.wire.messages import ScoredTrajectory, TensorMeta, TrainGroup
from starling.policy.settings.algorithm import AlgorithmSettings, DistillSettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.groups import ScoredGroup, TeacherLogprobs, groups_from_wire
from starling.policy.train.rl import RlTrainer

torch.set_num_threads(1)

RAGGED = [(6, [4, 9, 1, 3]), (1, [2, 2, 7, 5])]
TOP_K = 5
Make = Callable[..., Any]


def position_logprobs(model: Any, group: ScoredGroup, start: int, length: int, divisor: float) -> Tensor:
    """The distributions of a completion's tokens under `model`, [length, vocabulary], in double precision."""
    ids = np.concatenate([group.prompt_ids, group.completion_ids[start : start + length]]).astype(np.int64)
    logits = model(torch.from_numpy(ids)[None]).logits[0].double() / divisor
    first = len(group.prompt_ids) - 1
    return logits[first : first + length].log_softmax(-1)


def teach(teacher: Any, group: ScoredGroup, divisor: float = 1.0) -> ScoredGroup:
    """Add the log-probabilities of `teacher` to `group`."""
    rows, start = [], 0
    with torch.no_grad():
        for length in group.lengths:
            rows.append(position_logprobs(teacher, group, start, length, divisor))
            start += length
    known = torch.cat(rows)
    top = known.topk(TOP_K, dim=-1)
    sampled = known.gather(-1, torch.from_numpy(group.completion_ids.astype(np.int64))[:, None])[:, 0]
    taught = TeacherLogprobs(sampled.float().numpy(), top.indices.to(torch.int32).numpy(), top.values.float().numpy())
    return replace(group, teacher=taught)


def plain_loss(model: Any, groups: list[ScoredGroup], settings: DistillSettings, divisor: float) -> Tensor:
    """The loss of a step, as in the papers: REINFORCE at ratio r, or the divergence over the likeliest tokens."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        assert group.teacher is not None
        assert group.teacher.top_ids is not None
        start = 0
        for length in group.lengths:
            logs = position_logprobs(model, group, start, length, divisor)
            for offset in range(length):
                at = start + offset
                if settings.loss == "reverse_kl":
                    gains = [
                        settings.discount**later
                        * float(group.teacher.logprobs[at + later] - group.logprobs[at + later])
                        for later in range(length - offset)
                    ]
                    advantage = settings.coefficient * sum(gains)
                    ratio = torch.exp(logs[offset, int(group.completion_ids[at])] - float(group.logprobs[at]))
                    bounded = ratio.clamp(0.8, 1.2)
                    total = total - torch.minimum(ratio * advantage, bounded * advantage)
                else:
                    ids = torch.from_numpy(group.teacher.top_ids[at].astype(np.int64))
                    p = torch.exp(torch.from_numpy(group.teacher.top_logprobs[at]).double())
                    q = logs[offset, ids].exp()
                    p, q = (torch.cat([values, 1 - values.sum(dim=0, keepdim=True)]) for values in (p, q))
                    m = settings.beta * p + (1 - settings.beta) * q
                    jsd = settings.beta * (p * (p / m).log()).sum() + (1 - settings.beta) * (q * (q / m).log()).sum()
                    total = total + settings.coefficient * jsd
                count += 1
            start += length
    return total / count


@pytest.mark.sample(3)
@pytest.mark.parametrize("budget", [30, 10_000])
@pytest.mark.parametrize(
    "distill",
    [
        DistillSettings(),
        DistillSettings(coefficient=0.3, discount=0.9),
        DistillSettings(loss="jsd"),
        DistillSettings(loss="jsd", beta=0.2, coefficient=2.0),
    ],
)
@pytest.mark.parametrize("divisor", [1.0, 0.7])
def test_distillation_step_equals_plain_reference(
    tiny: Make, make_groups: Make, budget: int, distill: DistillSettings, divisor: float
) -> None:
    plain, model, teacher = tiny(), tiny(), tiny(seed=5)
    groups = [teach(teacher, replace(one, rewards=(0.0,) * 4), divisor) for one in make_groups(RAGGED)]
    expected = plain_loss(plain, groups, distill, divisor)
    expected.backward()  # type: ignore[no-untyped-call]
    settings = PolicySettings(
        optimizer=OptimizerSettings(learning_rate=1e-12, max_grad_norm=0.0),
        algorithm=AlgorithmSettings(aggregate="token_mean"),
        distill=distill,
        tokens_per_microbatch=budget,
    )
    metrics = RlTrainer(model, settings, total_steps=1).step(groups, step=1, temperature=divisor)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=2e-6, abs=1e-7)
    assert metrics["num_trained_tokens"] == sum(map(sum, (group.lengths for group in groups)))
    differences = np.concatenate(
        [group.logprobs - group.teacher.logprobs for group in groups if group.teacher is not None]
    )
    assert metrics["teacher_kl"] == pytest.approx(float(differences.mean()), rel=1e-5)
    for (name, one), (_, other) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        difference = torch.linalg.vector_norm(other.grad - one.grad)
        assert difference <= 5e-6 * torch.linalg.vector_norm(one.grad) + 1e-8, name


@pytest.mark.campaign
@pytest.mark.sample(1)
@pytest.mark.parametrize("loss", ["reverse_kl", "jsd"])
def test_distillation_student_converges_to_teacher(tiny: Make, loss: Any) -> None:
    model, teacher = tiny(), tiny(seed=5)
    rate = OptimizerSettings(learning_rate=1e-2)
    settings = PolicySettings(optimizer=rate, distill=DistillSettings(loss=loss))
    trainer = RlTrainer(model, settings, total_steps=25)
    prompt = np.array([4, 7, 9], np.int32)
    generator = torch.Generator().manual_seed(0)

    def divergence() -> float:
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        with torch.no_grad():
            student, known = (one(ids).logits[0, -1].log_softmax(-1) for one in (model, teacher))
        return float((student.exp() * (student - known)).sum())

    before = divergence()
    for step in range(1, 26):
        with torch.no_grad():
            logs = model(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1].log_softmax(-1)
        drawn = torch.multinomial(logs.exp(), 64, replacement=True, generator=generator)
        versions = np.full(64, step - 1, np.int32)
        ids = drawn.to(torch.int32).numpy()
        group = ScoredGroup(prompt, ids, logs[drawn].numpy(), versions, (1,) * 64, (0.0,) * 64)
        metrics = trainer.step([teach(teacher, group)], step=step)
    assert divergence() < 0.5 * before
    assert np.isfinite(metrics["teacher_kl"])


def test_incomplete_teacher_data_is_refused(tiny: Make, make_groups: Make) -> None:
    groups = [teach(tiny(seed=5), group) for group in make_groups(RAGGED)]
    sampled_only = [
        replace(group, teacher=TeacherLogprobs(group.teacher.logprobs)) for group in groups if group.teacher
    ]
    trainer = RlTrainer(tiny(), PolicySettings(distill=DistillSettings(loss="jsd")), total_steps=1)
    with pytest.raises(ConfigError, match=r"needs the teacher's likeliest tokens.*set teacher.top_k above 0"):
        trainer.step(sampled_only, step=1)
    with pytest.raises(ConfigError, match="a teacher reported less about group"):
        trainer.step([groups[0], replace(groups[1], teacher=None)], step=1)
    teacher = groups[1].teacher
    assert teacher is not None
    assert teacher.top_ids is not None
    assert teacher.top_logprobs is not None
    fewer = TeacherLogprobs(teacher.logprobs, teacher.top_ids[:, :1], teacher.top_logprobs[:, :1])
    with pytest.raises(ConfigError, match="a teacher reported less about group"):
        trainer.step([groups[0], replace(groups[1], teacher=fewer)], step=1)
    with pytest.raises(
        ConfigError, match="has 17 tokens and its teacher's data does not match them: 3 log-probabilities"
    ):
        replace(groups[0], teacher=TeacherLogprobs(np.zeros(3, np.float32)))
    with pytest.raises(ConfigError, match="a log-probability of its teacher is not finite"):
        replace(groups[0], teacher=TeacherLogprobs(np.full(17, -np.inf, np.float32)))


def test_groups_from_wire_decodes_teacher_logprobs(tiny: Make, make_groups: Make) -> None:
    group = teach(tiny(seed=5), make_groups(RAGGED)[0])
    assert group.teacher is not None
    arrays = {
        "": [group.prompt_ids, group.completion_ids, group.logprobs, group.versions],
        "teacher_logprobs": [group.teacher.logprobs],
        "teacher_top_ids": [group.teacher.top_ids],
        "teacher_top_logprobs": [group.teacher.top_logprobs],
    }
    named = [(name, array) for name, several in arrays.items() for array in several]
    message = TrainGroup(
        prompt_id="p",
        trajectories=tuple(
            ScoredTrajectory(num_tokens=length, oldest_version=0, reward=reward)
            for length, reward in zip(group.lengths, group.rewards, strict=True)
        ),
        tensors=tuple(
            TensorMeta(dtype=array.dtype.name, shape=array.shape, nbytes=array.nbytes, name=name)
            for name, array in named
        ),
    )
    (read,) = groups_from_wire([message], [array.tobytes() for _, array in named])
    assert read.teacher is not None
    for name in ("logprobs", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(read.teacher, name), getattr(group.teacher, name))
