"""Evaluation of one pinned version on the held-out prompts, concurrent with training.

An evaluation pins a few rollouts that hold its version. They adopt no other version until it is done, so all of its
tokens are of one version. The other rollouts continue with training; the only rollout of a run gives it half of its
slots. So an evaluation neither blocks training nor waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from starling.common.wire.messages import Prompt, RequestEvaluation
from starling.controller.core.groups.group import Group, Groups, GroupState
from starling.controller.core.records import EvaluationRequested, EvaluationsSummary, EvaluationSummary
from starling.controller.core.replicas.routing.earliest_finish import Routing
from starling.controller.core.training.metrics import evaluation_means, means_by_name

TASK = "task"
"""Key of a prompt's metadata by which results are grouped."""
MAX_TASKS: Final = 1024
"""Tasks whose results are listed, those with the most prompts. Each row of a dataset may have a task of its own, and no
line of metrics.jsonl may be longer than is read when the run is resumed."""
TASK_CHARACTERS: Final = 200
"""Characters of the name of a task."""


class Evaluation(Groups):
    """The held-out prompts under one weight version."""

    def __init__(
        self,
        number: int,
        version: int,
        cause: str,
        prompts: Iterable[Prompt],
        *,
        num_completions: int,
        max_tries: int,
        first: int,
        deadline: float,
        expected: Callable[[Prompt], int],
    ) -> None:
        """`first` is the ordinal of its first group: no two evaluations of a run share one.

        `expected` returns the expected tokens of all completions of a prompt.
        """
        super().__init__("evaluate", max_tries)
        self.number, self.version, self.cause = number, version, cause
        self.num_completions, self.deadline = num_completions, deadline
        self.num_admitted = self.first = first
        self.pinned: set[str] = set()
        """Rollouts that it is pinned to."""
        self.given_back_by: set[str] = set()
        """Rollouts that have given groups back, and get none of this evaluation while there are others."""
        self.routing = Routing()
        """Of the pinned rollouts, those that hold its version."""
        for prompt in prompts:
            self.admit(prompt, expected(prompt))
        self.num_prompts = self.num_admitted - first

    def restore(self, summary: EvaluationSummary, held_out: Sequence[Prompt]) -> None:
        """Bring an evaluation that was made without prompts to the state of `summary`."""
        self.num_prompts, self.num_discarded = summary.num_prompts, summary.num_discarded
        self.num_admitted = summary.first + summary.num_prompts
        for one in summary.groups:
            if one.ordinal - summary.first < len(held_out):
                self.restore_group(one, held_out[one.ordinal - summary.first])

    @property
    def is_done(self) -> bool:
        """Whether every prompt is scored or discarded."""
        return self.num_live == self.count(GroupState.SCORED)

    def give_up(self) -> None:
        """Discard all groups that are not scored: the time is over."""
        for group in list(self.live()):
            if group.state is not GroupState.SCORED:
                self.discard(group)

    def summary(self) -> dict[str, Any]:
        """Return mean@k, pass@k (any completion with the full reward of 1), failures, and the same by task."""
        groups = self.within(GroupState.SCORED)
        fields: dict[str, Any] = {
            "version": self.version,
            "cause": self.cause,
            "num_prompts": self.num_prompts,
            "num_failed": self.num_discarded,
            **pass_rates([group.rewards for group in groups]),
        }
        scores = ((name, v) for group in groups for name, values in group.components.items() for v in values)
        fields |= {f"score/{name}": mean for name, mean in means_by_name(scores).items()}
        fields |= evaluation_means(groups)
        lengths = [t.num_tokens - t.num_masked for group in groups for t in group.trajectories]
        fields["completion_tokens_mean"] = sum(lengths) / len(lengths) if lengths else None
        tasks: dict[str, list[Group]] = {}
        for group in groups:
            if TASK in group.prompt.metadata:
                tasks.setdefault(str(group.prompt.metadata[TASK])[:TASK_CHARACTERS], []).append(group)
        if tasks:
            largest = sorted(tasks, key=lambda task: (-len(tasks[task]), task))[:MAX_TASKS]
            fields["tasks"] = {
                task: {"num_prompts": len(tasks[task]), **pass_rates([group.rewards for group in tasks[task]])}
                for task in sorted(largest)
            }
        return fields


@dataclass
class Evaluations:
    """The evaluation that is running, and the history and queue of evaluations."""

    current: Evaluation | None = None
    unpinned: dict[str, None] = field(default_factory=dict)
    """Rollouts whose version changed since the current evaluation looked for rollouts to pin."""
    evaluated: dict[str, int] = field(default_factory=dict)
    """The newest version that was evaluated for each cause."""
    requested: list[RequestEvaluation] = field(default_factory=list)
    """Requests of operators that wait."""
    granted: set[str] = field(default_factory=set)
    """Requests whose evaluation has begun: a request that arrives again changes nothing."""
    num_begun: int = 0
    num_groups: int = 0
    """Groups of all evaluations so far, which is the ordinal of the next one."""

    def summary(self) -> EvaluationsSummary:
        """Return the evaluations as a restarted controller knows them: without the rollouts that are pinned."""
        current = self.current
        return EvaluationsSummary(
            current=None
            if current is None
            else EvaluationSummary(
                number=current.number,
                version=current.version,
                cause=current.cause,
                num_completions=current.num_completions,
                first=current.first,
                max_tries=current.max_tries,
                num_prompts=current.num_prompts,
                num_discarded=current.num_discarded,
                groups=current.summaries(),
            ),
            evaluated=dict(self.evaluated),
            requested=tuple(
                EvaluationRequested(request=one.request, num_completions=one.num_completions) for one in self.requested
            ),
            granted=tuple(sorted(self.granted)),
            num_begun=self.num_begun,
            num_groups=self.num_groups,
        )

    def restore(self, summary: EvaluationsSummary, held_out: Sequence[Prompt]) -> None:
        """Bring fresh state to that of `summary`."""
        self.evaluated, self.granted = dict(summary.evaluated), set(summary.granted)
        self.num_begun, self.num_groups = summary.num_begun, summary.num_groups
        self.requested = [
            RequestEvaluation(request=one.request, num_completions=one.num_completions) for one in summary.requested
        ]
        running = summary.current
        if running is not None:
            self.current = Evaluation(
                running.number,
                running.version,
                running.cause,
                (),
                num_completions=running.num_completions,
                max_tries=running.max_tries,
                first=running.first,
                deadline=float("inf"),
                expected=lambda _: 0,
            )
            self.current.restore(running, held_out)


def num_pinned(num_rollouts: int, share: float) -> int:
    """Return how many rollouts an evaluation is pinned to."""
    return min(num_rollouts, max(1, math.ceil(num_rollouts * share)))


def pass_at(k: int, num: int, num_right: int) -> float:
    """Return the probability that one of `k` completions, drawn from `num` with `num_right` right ones, is right.

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, equation 1).
    """
    if num - num_right < k:
        return 1.0
    return 1.0 - math.prod((num - num_right - i) / (num - i) for i in range(k))


def pass_rates(rewards_of_groups: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """Return mean@k and pass@k of the rewards of groups; None where there are none."""
    rewards = [[r for r in group if r is not None] for group in rewards_of_groups]
    flat = [r for group in rewards for r in group]
    k = max((len(r) for r in rewards), default=0)
    fields: dict[str, Any] = {
        "reward_mean": sum(flat) / len(flat) if flat else None,
        "pass_at_k": sum(max(r, default=0) >= 1 for r in rewards) / len(rewards) if rewards else None,
        "k": k,
    }
    smaller = 1
    while smaller < k:
        rates = [pass_at(smaller, len(r), sum(x >= 1 for x in r)) for r in rewards if len(r) >= smaller]
        fields[f"pass_at_{smaller}"] = sum(rates) / len(rates) if rates else None
        smaller *= 2
    return fields
