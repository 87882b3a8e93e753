"""Spans of the four processes of a group, each of which knows messages only, hang together as one tree."""

from __future__ import annotations

from collections.abc import Iterable

from starling.common.observe.tracing.exporter import SpanRecord
from starling.common.observe.tracing.ids import trace_id
from starling.common.observe.tracing.traces import GroupTraces
from starling.common.wire import messages as wire
from starling.controller.shell.run_traces import MAX_GROUPS, RunTraces
from starling.policy.shell.step_traces import StepTraces

RUN = "run-1"
SAMPLING = wire.Sampling(max_tokens=4)


class Processes:
    """The tracing parts of a controller, a policy, and of others, without the processes around them."""

    def __init__(self, share: float = 1.0) -> None:
        self.records: list[SpanRecord] = []
        self.other = GroupTraces(self.records.append, RUN, share)
        self.controller = RunTraces(GroupTraces(self.records.append, RUN, share))
        self.policy = StepTraces(GroupTraces(self.records.append, RUN, share), "policy-0")

    def generate(self, number: int, attempt: int = 0) -> None:
        prompt, lease = wire.Prompt(id=f"train/0/{number}"), f"generate:t{number}:1.{attempt}"
        self.controller.sent(
            "rollout-0",
            wire.GenerateGroup(
                lease=lease, purpose="train", prompt=prompt, num_completions=2, sampling=SAMPLING, min_version=0
            ),
        )
        self.other.begin(lease, prompt.id)
        self.other.end(lease, "generate")
        self.controller.received("rollout-0", wire.GroupGenerated(lease=lease, trajectories=(), tensors=()))

    def score(self, number: int, *, answers: str = "reward-0") -> None:
        prompt, lease = wire.Prompt(id=f"train/0/{number}"), f"score:t{number}:1.0"
        self.controller.sent("reward-0", wire.ScoreGroup(lease=lease, prompt=prompt, completions=()))
        self.other.begin(lease, prompt.id)
        self.other.end(lease, "score")
        self.controller.received(answers, wire.GroupScored(lease=lease, rewards=(), statuses=()))

    def train(self, step: int, numbers: Iterable[int], *, replica: int = 0) -> None:
        groups = tuple(
            wire.TrainGroup(prompt_id=f"train/0/{number}", trajectories=(), tensors=()) for number in numbers
        )
        message = wire.TrainStep(lease=f"train:{step}:1.0", step=step, groups=groups, replica=replica)
        self.controller.sent("policy-0", message)
        self.policy.trained(message, 1)

    def publish(self, version: int) -> None:
        lease = f"publish:{version}:1.0"
        self.policy.publishing(wire.PublishWeights(lease=lease, version=version))
        published = wire.WeightsPublished(lease=lease, version=version, publish_s=0.1)
        self.policy.published(published)
        self.controller.received("policy-0", published)

    def adopt(self, version: int, replica: str = "rollout-0", *, answers: str = "") -> None:
        lease = f"adopt:{replica}:1.{version}"
        self.controller.sent(replica, wire.AdoptWeights(lease=lease, version=version))
        adopted = wire.WeightsAdopted(
            lease=lease, version=version, root="", pull_s=0, pause_s=0, size_bytes=0, transport="tcp"
        )
        self.controller.received(answers or replica, adopted)

    def tree(self, number: int) -> dict[str, list[str]]:
        """Return the names of the children of each span of a group, by its name; its root is a child of ``""``."""
        own = [one for one in self.records if one.trace == trace_id(RUN, f"train/0/{number}")]
        names = {one.id: one.name for one in own}
        assert len(names) == len(own), "two spans have one id"
        found: dict[str, list[str]] = {}
        for one in own:
            assert not one.parent or one.parent in names, f"the parent of {one.name} is missing"
            assert one.begin_ns <= one.end_ns
            found.setdefault(names.get(one.parent, ""), []).append(one.name)
        return {name: sorted(children) for name, children in found.items()}


WHOLE = {
    "": ["group"],
    "group": ["generate", "score", "step", "wait in the buffer"],
    "step": ["publish"],
    "publish": ["adopt"],
}


def test_spans_of_one_group_form_one_tree() -> None:
    processes = Processes()
    for number in (0, 1):
        processes.generate(number)
        processes.score(number)
    processes.train(1, (0, 1))
    processes.publish(1)
    processes.adopt(1)
    assert processes.tree(0) == processes.tree(1) == WHOLE


def test_every_attempt_and_every_adoption_is_a_span_of_its_own() -> None:
    processes = Processes()
    processes.generate(0, 0)
    processes.generate(0, 1)
    processes.score(0)
    processes.train(1, (0,))
    processes.publish(1)
    processes.adopt(1)
    processes.adopt(1, "rollout-1")
    tree = processes.tree(0)
    assert tree["group"] == ["generate", "generate", "score", "step", "wait in the buffer"]
    assert tree["publish"] == ["adopt", "adopt"]


def test_one_publication_of_several_steps_is_in_all_of_their_groups() -> None:
    processes = Processes()
    for number in (0, 1):
        processes.generate(number)
        processes.score(number)
        processes.train(number + 1, (number,))
    processes.publish(2)
    processes.adopt(2)
    assert processes.tree(0) == processes.tree(1) == WHOLE


def test_rollout_that_skips_a_version_adopts_both_steps() -> None:
    processes = Processes()
    for number in (0, 1):
        processes.generate(number)
        processes.score(number)
        processes.train(number + 1, (number,))
        processes.publish(number + 1)
    processes.adopt(2)
    assert processes.tree(0) == processes.tree(1) == WHOLE


def test_adoption_of_a_step_long_ago_is_left_out() -> None:
    processes = Processes()
    processes.generate(0)
    processes.score(0)
    processes.train(1, (0,))
    processes.publish(1)
    for step in range(2, 200):
        processes.train(step, ())
    processes.adopt(1)
    processes.controller.close()
    assert "publish" not in processes.tree(0)


def test_second_policy_of_a_step_adds_no_span_and_a_repeated_step_no_wait() -> None:
    processes = Processes()
    processes.generate(0)
    processes.score(0)
    processes.train(1, (0,))
    processes.train(1, (0,), replica=1)
    processes.publish(1)
    processes.adopt(1)
    assert processes.tree(0) == WHOLE


def test_answers_of_others_than_the_holder_of_a_lease_count_for_nothing() -> None:
    processes = Processes()
    processes.generate(0)
    processes.score(0, answers="reward-1")
    processes.train(1, (0,))
    processes.publish(1)
    processes.adopt(1, answers="rollout-9")
    processes.controller.close()
    assert processes.tree(0) == {
        "": ["group"],
        "group": ["generate", "score", "step", "wait in the buffer"],
        "step": ["publish"],
    }


def test_group_that_no_version_adopts_ends_with_the_run() -> None:
    processes = Processes()
    processes.generate(0)
    processes.generate(1)
    processes.score(1)
    processes.train(1, (1,))
    processes.controller.close()
    assert processes.tree(0) == {"": ["group"], "group": ["generate"]}
    assert processes.tree(1) == {"": ["group"], "group": ["generate", "score", "step", "wait in the buffer"]}


def test_number_of_followed_groups_is_bounded_in_a_run_without_rollouts() -> None:
    """As when trajectories of an earlier run are replayed: nothing adopts a version, so that no group ends."""
    processes = Processes()
    for step in range(1, 6):
        processes.train(step, range(step * 4096, (step + 1) * 4096))
    processes.controller.close()
    assert sum(one.name == "group" for one in processes.records) == MAX_GROUPS


def test_nothing_is_recorded_of_groups_that_are_not_sampled_or_evaluated() -> None:
    processes = Processes(share=0.0)
    processes.generate(0)
    processes.score(0)
    processes.train(1, (0,))
    processes.publish(1)
    processes.adopt(1)
    processes.controller.close()
    assert processes.records == []
    evaluated = Processes()
    evaluated.controller.sent(
        "rollout-0",
        wire.GenerateGroup(
            lease="generate:e0:1.0",
            purpose="evaluate",
            prompt=wire.Prompt(id="held/0"),
            num_completions=1,
            sampling=SAMPLING,
            min_version=0,
        ),
    )
    evaluated.controller.close()
    assert evaluated.records == []
