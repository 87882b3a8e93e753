"""What `kubectl get pods,jobs --output=json` says of the replicas of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starling.cli.launch.interface import Ended
from starling.cli.launch.kubernetes.manifests import CONTAINER


@dataclass
class Observed:
    """Ends of replicas, and what others wait for, each in words; both by the name of the Job."""

    present: set[str] = field(default_factory=set)
    """Jobs that exist."""
    ends: dict[str, tuple[int | None, str]] = field(default_factory=dict)
    waits: dict[str, str] = field(default_factory=dict)
    first_ended: set[str] = field(default_factory=set)
    """Jobs whose node 0 has ended, also without a code: what other nodes do then is a consequence."""


def observe(text: str) -> Observed:
    """Return what kubectl's answer says. Raises ValueError for one that is not of its form."""
    found = Observed()
    try:
        items = json.loads(text)["items"]
        for item in items:
            if item["kind"] == "Job":
                _job(item, found)
        for item in items:
            if item["kind"] == "Pod":
                _pod(item, found)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no list of pods and jobs: {error!r}") from None
    return found


def ended(name: str, job: str, found: Observed) -> Ended | None:
    """Return the end of the replica `name`, whose Job is `job`; None if it goes on."""
    if job in found.ends:
        code, text = found.ends[job]
        return Ended(name, code, text)
    if job not in found.present:
        return Ended(name, None, f"is gone: its Job {job} was deleted")
    return None


def _job(item: Mapping[str, Any], found: Observed) -> None:
    """Note a Job; its own end counts only where no pod says more."""
    name = item["metadata"]["name"]
    found.present.add(name)
    for condition in item.get("status", {}).get("conditions") or []:
        if condition["status"] != "True":
            continue
        if condition["type"] == "Complete":
            found.ends[name] = 0, "exited with code 0"
        elif condition["type"] == "Failed":
            reason = condition.get("message") or condition.get("reason") or "no reason is given"
            found.ends[name] = None, f"was lost with its pod ({reason})"


def _pod(item: Mapping[str, Any], found: Observed) -> None:
    meta, status = item["metadata"], item.get("status", {})
    job = (meta.get("labels") or {}).get("batch.kubernetes.io/job-name") or (meta.get("labels") or {}).get("job-name")
    if not job:
        return
    node = item.get("spec", {}).get("nodeName") or "no node yet"
    has_exited = False
    for container in status.get("containerStatuses") or []:
        if container["name"] != CONTAINER:
            continue
        state = container.get("state") or {}
        if terminated := state.get("terminated"):
            has_exited = True
            _node_ended(job, _index(meta), _end(terminated, node, status), found)
        elif waiting := state.get("waiting"):
            found.waits[job] = waiting.get("message") or waiting.get("reason") or "its container"
    if status.get("phase") == "Failed" and not has_exited:
        lost = f"was lost on {node} ({status.get('reason') or 'its pod failed'})"
        _node_ended(job, _index(meta), (None, lost), found)
    if job in found.ends and found.ends[job][0] is not None:
        return
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            found.waits[job] = condition.get("message") or "a node"


def _index(meta: Mapping[str, Any]) -> int:
    """Return the number of a pod among the nodes of its replica; 0 for the only one."""
    text = str((meta.get("annotations") or {}).get("batch.kubernetes.io/job-completion-index", "0"))
    return int(text) if text.isdecimal() else 0


def _node_ended(job: str, index: int, end: tuple[int | None, str], found: Observed) -> None:
    """Note the end of a pod: that of node 0 is the replica's; a failure of another node is, if node 0 goes on."""
    if index == 0:
        found.ends[job] = end
        found.first_ended.add(job)
    elif end[0] != 0 and job not in found.first_ended and found.ends.get(job, (None, ""))[0] is None:
        found.ends[job] = end[0], f"lost its node {index}, which {end[1]}"


def _end(terminated: Mapping[str, Any], node: str, status: Mapping[str, Any]) -> tuple[int | None, str]:
    """Return code and text of the end of a container; of one that its node lost or evicted, no code."""
    code, reason = int(terminated["exitCode"]), str(terminated.get("reason") or "")
    if reason == "OOMKilled":
        return -9, f"was killed on {node}: it used more memory than launch.kubernetes.memory"
    if status.get("reason") in ("Evicted", "NodeLost", "Preempting", "Shutdown", "NodeShutdown", "Terminated"):
        return None, f"was lost on {node} ({status['reason']})"
    if code > 128:
        return 128 - code, f"was killed by signal {code - 128} on {node}"
    return code, f"exited with code {code} on {node}"
