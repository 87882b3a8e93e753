"""The kinds of run (`run.kind`): what feeds a run, what its results are for, and when it is over.

| kind           | fed by                               | results are                      | over                |
|----------------|--------------------------------------|----------------------------------|---------------------|
| `rl`           | examples, then prompts               | trained                          | after its last step |
| `sft`          | examples                             | trained                          | after its last step |
| `dpo`          | pairs of responses                   | trained                          | after its last step |
| `reward_model` | pairs of responses                   | trained                          | after its last step |
| `replay`       | examples, then trajectory files      | trained                          | after its last step |
| `generate`     | prompts                              | written to files, with tokens    | after its last file |
| `evaluate`     | each prompt of the data once         | scored and written to files      | after its last file |
| `infer`        | each prompt of the data once         | written to files                 | after its last file |
| `serve`        | requests at the rollouts' endpoints  | returned to the clients          | when it is stopped  |

The command line names the kind that each of its commands starts. All other code asks a `RunKind` for the property that
it needs, and never compares names.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Final, Literal, Protocol

from starling.common.ids import Activity, Objective, TrainerKind


class Feed(enum.Enum):
    """Source of the groups of a run. Steps of examples come before them, in runs that train."""

    EXAMPLES_ONLY = "examples only"
    PROMPTS = "prompts"
    EACH_PROMPT_ONCE = "each prompt once"
    TRAJECTORIES = "trajectory files"
    REQUESTS = "requests"


class Results(enum.Enum):
    """Use of completions."""

    TRAINED = "trained"
    WRITTEN_WITH_TOKENS = "written to files, with tokens"
    WRITTEN_AS_TEXT = "written to files, as text"
    RETURNED = "returned to the clients"


class PlannedSteps(Protocol):
    """The part of a plan that decides whether a run generates anything."""

    @property
    def num_steps(self) -> int: ...
    @property
    def evaluate_at_start(self) -> bool: ...
    @property
    def evaluate_at_end(self) -> bool: ...


@dataclass(frozen=True, repr=False)
class RunKind:
    """One kind of run."""

    name: str
    """The value of `run.kind`."""
    feed: Feed
    results: Results
    objective: Objective = "sft"
    """The objective of its steps of examples."""
    examples_section: Literal["sft", "preference"] = "sft"
    """The section of the recipe that its steps of examples follow."""
    is_scored: bool = True
    """Completions get rewards, in a run that generates."""
    no_evaluation: str = ""
    """Why its versions cannot be evaluated; empty where they can."""

    def __repr__(self) -> str:
        """Return the expression that is this kind."""
        return f"KINDS[{self.name!r}]"

    # --- what feeds it ----------------------------------------------------------------------------------------------

    @property
    def reads_trajectories(self) -> bool:
        """Whether its groups come from trajectory files instead of rollouts."""
        return self.feed is Feed.TRAJECTORIES

    @property
    def answers_each_prompt(self) -> bool:
        """Whether it answers each prompt of the data once."""
        return self.feed is Feed.EACH_PROMPT_ONCE

    @property
    def learns_from_examples_only(self) -> bool:
        """Whether all its steps are steps of examples."""
        return self.feed is Feed.EXAMPLES_ONLY

    @property
    def learns_from_pairs(self) -> bool:
        """Whether its examples are pairs of a chosen and a rejected response."""
        return self.examples_section == "preference"

    @property
    def serves_requests(self) -> bool:
        """Whether its rollouts answer the requests of clients, and there are no groups."""
        return self.feed is Feed.REQUESTS

    @property
    def filters_groups(self) -> bool:
        """Whether groups whose rewards are all equal can be filtered out, and other prompts take their place."""
        return self.trains and not self.reads_trajectories

    @property
    def has_rl_steps(self) -> bool:
        """Whether `rl.num_steps` counts its steps of groups, or its files."""
        return self.keeps_tokens and not self.learns_from_examples_only

    def needs_rollouts(self, plan: PlannedSteps) -> bool:
        """Say whether anything is generated in a run of this plan."""
        if not self.trains:
            return True
        evaluates = plan.evaluate_at_start or plan.evaluate_at_end
        return not self.reads_trajectories and (plan.num_steps > 0 or evaluates)

    # --- what results are for ---------------------------------------------------------------------------------------

    @cached_property
    def trains(self) -> bool:
        """Whether there is a policy. Without one, rollouts generate with the weights that they load: version 0."""
        return self.results is Results.TRAINED

    @property
    def trainer(self) -> TrainerKind | None:
        """The trainer of its last steps: for `replay` that of `rl`. None for a run without a policy."""
        if not self.trains:
            return None
        return self.objective if self.learns_from_examples_only else "rl"

    @cached_property
    def keeps_tokens(self) -> bool:
        """Whether the tokens of completions are kept, and not only their texts."""
        return self.results in (Results.TRAINED, Results.WRITTEN_WITH_TOKENS)

    @property
    def writes_tokens(self) -> bool:
        """Whether groups are only written to files, with their tokens."""
        return self.results is Results.WRITTEN_WITH_TOKENS

    @property
    def learns_from_rewards(self) -> bool:
        """Whether the rewards of its own completions are trained."""
        return self.trains and self.feed is Feed.PROMPTS

    @property
    def only_scores(self) -> bool:
        """Whether its only purpose is to score completions."""
        return self.answers_each_prompt and self.is_scored

    def publishes(self, plan: PlannedSteps) -> bool:
        """Say whether the versions of a run of this plan are offered to rollouts."""
        return self.trains and self.needs_rollouts(plan)

    @property
    def activity(self) -> Activity:
        """Use of the groups: its name in the journal, and the phase of the run."""
        return ACTIVITIES.get(self.name, "rl")

    def phase(self, *, is_example_step: bool) -> str:
        """Return the phase of a run during a step of examples, or during one of groups."""
        return self.objective if self.trains and is_example_step else self.activity

    # --- when it is over --------------------------------------------------------------------------------------------

    def is_over(self, version: int, last_step: int) -> bool:
        """Say whether a run at `version` has made all its steps, or files."""
        return not self.serves_requests and version >= last_step

    def needs_more_groups(self, num_frozen_steps: int, num_steps: int) -> bool:
        """Say whether rollouts are needed for more than evaluations, with `num_frozen_steps` steps frozen."""
        return self.serves_requests or num_frozen_steps < num_steps


ACTIVITIES: Final[dict[str, Activity]] = {
    "replay": "replay", "generate": "generate", "evaluate": "evaluate", "infer": "infer", "serve": "serve"
}  # fmt: skip
"""Kinds that do something else with groups than reinforcement learning."""
UNTRAINED: Final = "has no versions to evaluate"
RL: Final = RunKind("rl", Feed.PROMPTS, Results.TRAINED)
SFT: Final = RunKind("sft", Feed.EXAMPLES_ONLY, Results.TRAINED)
DPO: Final = RunKind("dpo", Feed.EXAMPLES_ONLY, Results.TRAINED, objective="dpo", examples_section="preference")
REWARD_MODEL: Final = RunKind(
    "reward_model",
    Feed.EXAMPLES_ONLY,
    Results.TRAINED,
    objective="reward_model",
    examples_section="preference",
    no_evaluation="trains a model that generates nothing",
)
REPLAY: Final = RunKind("replay", Feed.TRAJECTORIES, Results.TRAINED, no_evaluation="generates nothing")
GENERATE: Final = RunKind("generate", Feed.PROMPTS, Results.WRITTEN_WITH_TOKENS, no_evaluation=UNTRAINED)
EVALUATE: Final = RunKind("evaluate", Feed.EACH_PROMPT_ONCE, Results.WRITTEN_AS_TEXT, no_evaluation=UNTRAINED)
INFER: Final = RunKind(
    "infer", Feed.EACH_PROMPT_ONCE, Results.WRITTEN_AS_TEXT, is_scored=False, no_evaluation=UNTRAINED
)
SERVE: Final = RunKind("serve", Feed.REQUESTS, Results.RETURNED, is_scored=False, no_evaluation=UNTRAINED)
KINDS: Final[Mapping[str, RunKind]] = MappingProxyType(
    {kind.name: kind for kind in (RL, SFT, DPO, REWARD_MODEL, REPLAY, GENERATE, EVALUATE, INFER, SERVE)}
)
TRAINED_PHASES: Final[frozenset[str]] = frozenset(kind.activity for kind in KINDS.values() if kind.trains)
"""Phases in which groups are trained. In other phases they are answers."""


def kind_of(objective: str, activity: str) -> RunKind:
    """Return the kind of a run by its fields in journals and recordings. Kinds with the same fields are `rl`.

    Raises:
        ValueError: there is no such kind.
    """
    for kind in KINDS.values():
        if (kind.objective, kind.activity) == (objective, activity):
            return kind
    raise ValueError(f"there is no kind of run with the objective {objective!r} and the activity {activity!r}")
