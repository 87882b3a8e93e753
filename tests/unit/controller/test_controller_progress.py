"""Progress of pulls in the controller's explanations."""

from __future__ import annotations

from transcript import Script

from starling.common.wire.messages import LeaseProgress
from starling.common.wire.telemetry import ReplicaView
from starling.controller.shell.status import MetricsHistory, snapshot

SOME = LeaseProgress(bytes_done=43, bytes_total=100, seconds_left=2.1)


def view(script: Script, name: str) -> ReplicaView:
    shown = snapshot(script.state, MetricsHistory(0.0), script.now, dropped=0)
    return next(replica for replica in shown.replicas if replica.name == name)


def adopting() -> Script:
    """Return a run whose two rollouts are to adopt version 0."""
    script = Script()
    for name in ("policy-0", "reward-0", "rollout-0", "rollout-1"):
        script.joins(name)
    script.publishes(0)
    assert script.controller.waiting_for == "rollout-0, rollout-1 to adopt version 0"
    return script


def test_explain_shows_the_progress_of_a_pull() -> None:
    script = adopting()
    script.heartbeats("rollout-1", "adopt:0:1", progress=SOME)
    assert script.controller.waiting_for == "rollout-1 pulls version 0: 43 %, 2.1 s left; rollout-0 to adopt version 0"
    assert (view(script, "rollout-1").pulling, view(script, "rollout-1").progress) == (0, SOME)
    assert (view(script, "rollout-0").pulling, view(script, "rollout-0").progress) == (-1, None)


def test_explain_shows_no_finished_pull() -> None:
    for end in ("adopted", "failed", "lost"):
        script = adopting()
        script.heartbeats("rollout-1", "adopt:0:1", progress=SOME)
        if end == "adopted":
            script.adopts("rollout-1", 0, 1)
        elif end == "failed":
            script.fails("rollout-1", "adopt:0:1")
        else:
            script.disconnect("rollout-1")
            script.joins("rollout-1")
        assert view(script, "rollout-1").progress is None, end
        assert "pulls" not in script.controller.waiting_for, end


def test_heartbeat_from_before_an_adoption_shows_no_pull() -> None:
    script = adopting()
    script.adopts("rollout-1", 0, 1)
    script.heartbeats("rollout-1", "adopt:0:1", progress=SOME)
    assert view(script, "rollout-1").progress is None


def test_explain_shows_progress_of_pulls_only() -> None:
    script = Script()
    script.start_run()
    script.heartbeats("rollout-0", "generate:t0:0", "generate:t1:0", version=0, progress=SOME)
    assert view(script, "rollout-0").progress is None
