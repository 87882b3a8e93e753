"""Data that a run reads at its start, by its kind: prompts, examples, held-out prompts and trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.kinds import RunKind
from starling.common.wire.messages import Prompt
from starling.controller.core.evaluation.evaluation import TASK
from starling.controller.core.events import Prompts
from starling.controller.core.groups.digest import digest_of_prompts
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import DataRead
from starling.controller.data.prompts import Needs, PromptSource, load_prompts
from starling.controller.data.settings import DataSettings
from starling.controller.data.trajectories import TRAJECTORIES, Trajectories, check_enough
from starling.controller.settings import ControllerProcess, PreferenceSettings, SftSettings
from starling.weightsync.offers.offer import digest_of


class PromptList:
    """A finite list of prompts."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self._prompts)

    def prompt(self, position: int) -> Prompt:
        """Return the prompt at `position`."""
        return self._prompts[position]


Dataset = PromptSource | PromptList | Trajectories


@dataclass(frozen=True)
class RunData:
    """The data of a run, and its plan completed with the sizes of the data."""

    plan: RunPlan
    prompts: Prompts
    examples: Prompts
    held_out: list[Prompt]
    trajectories: Trajectories | None = None
    """Set for a run that replays; its `prompts` are those of the trajectories."""
    read: DataRead | None = None
    """What the journal notes of the data; None without data."""


def load_data(settings: ControllerProcess) -> RunData:
    """Read the data of a run. Raises ConfigError."""
    plan = settings.plan()
    kind = settings.kind
    if kind.serves_requests:
        return RunData(plan, PromptList([]), PromptList([]), [])
    if kind.answers_each_prompt:
        prompts_once = PromptList(prompts_to_answer(settings))
        num_files = -(-len(prompts_once) // plan.prompts_per_step)
        plan = replace(plan, num_prompts=len(prompts_once), num_steps=num_files)
        return RunData(plan, prompts_once, prompts_once, [], read=_read_of(settings, prompts_once))
    needs: Needs = "prompt"
    if settings.examples.num_steps:
        needs = "pair" if kind.learns_from_pairs else "response"
    if kind.reads_trajectories:
        trajectories = _load_trajectories(settings, plan)
        examples: Prompts = trajectories if settings.sft.data is None else load_examples(settings, needs)
        return RunData(plan, trajectories, examples, [], trajectories, _read_of(settings, trajectories, examples))
    examples = load_examples(settings, needs)
    prompts = examples if settings.examples.data is None else load_prompts(settings.data)
    held_out = prompts.held_out_prompts()
    return RunData(plan, prompts, examples, held_out, read=_read_of(settings, prompts, examples, held_out))


def load_examples(settings: ControllerProcess, needs: Needs) -> PromptSource:
    """Read the examples of the supervised steps, which are those of [data] unless they have a dataset of their own.

    Raises ConfigError, also where no message holds the examples of a step.
    """
    section = settings.examples
    examples = load_prompts(settings.data if section.data is None else section.data, needs)
    check_examples(examples, section, settings.kind)
    return examples


def check_examples(examples: PromptSource, section: SftSettings | PreferenceSettings, kind: RunKind) -> None:
    """Check that a message holds the examples of each step that `section` describes. Raises ConfigError."""
    setting = f"{kind.examples_section or 'sft'}.examples_per_step"
    examples.check_steps(section.num_steps, section.examples_per_step, setting)


def _read_of(
    settings: ControllerProcess, prompts: Dataset, examples: Prompts | None = None, held_out: Sequence[Prompt] = ()
) -> DataRead:
    """Return the digest of everything that a run reads, in the order of the first epoch, which follows from the seed.

    Later epochs and other orders follow from the same rows.
    """
    parts = [_digest(prompts), digest_of_prompts(held_out)]
    num_rows = len(prompts) + len(held_out)
    if examples is not None and examples is not prompts:
        assert isinstance(examples, PromptSource), "examples of their own are rows"
        parts.append(_digest(examples))
        num_rows += len(examples)
    return DataRead(
        digest=digest_of("".join(parts).encode()),
        num_rows=num_rows,
        source=settings.data.source,
        revision=prompts.revision if isinstance(prompts, PromptSource) else "",
    )


def _digest(data: Dataset) -> str:
    if isinstance(data, Trajectories):
        return data.digest  # of files, which have digests themselves
    return digest_of_prompts(data.prompt(position) for position in range(len(data)))


def prompts_to_answer(settings: ControllerProcess) -> list[Prompt]:
    """Return the prompts of a run that answers each prompt once: those of its tasks in order, or those of [data].

    Ids are ``<task>/<row>``, or ``<row>`` without tasks. Raises ConfigError.
    """
    tasks = settings.evaluation.tasks if settings.kind.only_scores else ()
    if not tasks:
        return [_named(prompt, "") for prompt in _prompts_of(settings.data)]
    return [_named(prompt, task.name) for task in tasks for prompt in _prompts_of(task.data)]


def _prompts_of(data: DataSettings) -> list[Prompt]:
    """Return the held-out prompts of a dataset, or all prompts where none are held out."""
    source = load_prompts(data.model_copy(update={"shuffle": False}))
    return source.held_out_prompts() or [source.prompt(row) for row in range(len(source))]


def _named(prompt: Prompt, task: str) -> Prompt:
    row = prompt.id.rpartition("/")[2]
    if not task:
        return msgspec.structs.replace(prompt, id=row)
    return msgspec.structs.replace(prompt, id=f"{task}/{row}", metadata={**prompt.metadata, TASK: task})


def _load_trajectories(settings: ControllerProcess, plan: RunPlan) -> Trajectories:
    folder = Path(settings.data.source.removeprefix(TRAJECTORIES)).expanduser()
    first_step = max(plan.num_supervised_steps, plan.begin_version) + 1
    trajectories = Trajectories(
        folder, prompts_per_step=plan.prompts_per_step, first_step=first_step, first_prompt=plan.begin_prompt
    )
    trajectories.check_tokens()
    check_enough(folder, trajectories.num_groups, plan.prompts_per_step)
    needed = plan.begin_prompt + (plan.last_step - first_step + 1) * plan.prompts_per_step
    if needed > trajectories.num_groups:
        raise ConfigError(
            f"{folder} has {counted(trajectories.num_groups, 'group')}, and rl.num_steps = {plan.num_steps} with "
            f"rl.prompts_per_step = {plan.prompts_per_step} needs {needed}; set "
            f"rl.num_steps = {trajectories.num_groups // plan.prompts_per_step} or less"
        )
    return trajectories
