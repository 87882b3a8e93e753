"""A learner that is killed repeatedly at random moments trains the same weights as an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import killed_learner
import pytest
import torch
from forks import forked

from starling.policy.train.checkpoint.header import find_state
from starling.policy.train.checkpoint.state import SavedState

torch.set_num_threads(1)


def run_until(line: str, folder: Path) -> None:
    """Run the learner until it reports `line`, then kill it."""
    with forked(killed_learner.run, folder) as learner:
        reported = []
        for report in learner.received():
            reported.append(report)
            if report == line:
                learner.process.kill()
        assert learner.exit_code() is not None
    assert line in reported, reported


@pytest.mark.parametrize(
    "moments",
    [
        ("made 1", "saving 3"),
        *(
            pytest.param(moments, marks=pytest.mark.campaign)
            for moments in (("saving 1", "saved 4"), ("saving 2", "made 4", "saving 6"), ("saving 7",))
        ),
    ],
    ids=lambda moments: ", ".join(moments),
)
def test_killed_learner_makes_the_same_weights(tmp_path: Path, moments: tuple[str, ...]) -> None:
    for line in moments:
        run_until(line, tmp_path / "killed")
    learners = []
    for name in ("killed", "whole"):
        learner = killed_learner.learner()
        begun = killed_learner.resume_and_train(learner, killed_learner.saving_of(learner, tmp_path / name))
        assert (begun > 0) == (name == "killed" and moments != ("made 1",))
        learners.append(learner)
    killed, whole = learners
    assert all(torch.equal(tensor, killed.tensors[name]) for name, tensor in whole.tensors.items())
    states = [SavedState.of(find_state(str(tmp_path / name))) for name in ("killed", "whole")]
    assert states[0].state.digests == states[1].state.digests, "optimizer, reference and generators too"
    assert states[0].state.version == killed_learner.LAST
    assert len(list((tmp_path / "killed" / "states").iterdir())) == 2, "no incomplete state is left"
