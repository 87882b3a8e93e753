"""Manifests of deploy/kubernetes as the tests read them: what kustomize builds, and the pods in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[2]
KUBERNETES: Final = ROOT / "deploy/kubernetes"
RUNS: Final = ("cpu", "gpu", "multi-node", "jobset")
"""Overlays with a whole run."""
BUILDS: Final = (*(f"overlays/{name}" for name in RUNS), "reward", "overlays/reward")
"""Folders that are applied, besides `secrets`."""
CUSTOM: Final = ("JobSet", "LeaderWorkerSet", "PodMonitor", "ServiceMonitor", "PrometheusRule")
"""Kinds that a cluster knows only with the operator that brings them."""
Manifest = dict[str, Any]
REPLICAS: Final = ("policy-0", *(f"rollout-{n}" for n in range(8)), "reward-0", "reward-1", "observer-0", "operator-0")
"""Whose keys deploy/kubernetes/secrets names."""


@dataclass(frozen=True)
class Pod:
    """The template of a workload's pods."""

    workload: str
    """Kind and name, such as `StatefulSet/policy`; of a JobSet, with the name of the job."""
    name: str
    """Of its first pod."""
    labels: dict[str, str]
    spec: Manifest
    claims: tuple[Manifest, ...] = ()
    """Templates of claims, which are volumes, too."""

    @property
    def containers(self) -> list[Manifest]:
        """All containers, those that run first included."""
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def role(self) -> str:
        """Of the service, such as `rollout`."""
        return str(self.labels["app.kubernetes.io/component"])


def build(folder: Path) -> list[Manifest]:
    """Return what `kubectl kustomize` builds. Fails the test with its message."""
    kubectl = shutil.which("kubectl")
    assert kubectl is not None, "kubectl is missing; install version 1.32 or later, which has kustomize"
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # warnings of deprecated fields
    return [one for one in yaml.safe_load_all(done.stdout) if one is not None]


def build_secrets(folder: Path) -> list[Manifest]:
    """Return the Secrets of deploy/kubernetes/secrets, with new keys, which `starling keys` makes in `folder`."""
    copy = folder / "secrets"
    shutil.copytree(KUBERNETES / "secrets", copy, ignore=shutil.ignore_patterns("keys"))
    command = [sys.executable, "-m", "starling.cli.main", "keys", "make", str(copy / "keys"), *REPLICAS]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    for name in ("reward-token", "observe-token"):
        (copy / "keys" / name).write_text("a-token-of-32-bytes-or-more-here")
    return build(copy)


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """Return one manifest."""
    found = [one for one in manifests if one["kind"] == kind and one["metadata"]["name"] == name]
    assert len(found) == 1, f"{len(found)} of {kind}/{name}"
    return found[0]


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    """Return the manifests of these kinds."""
    return [one for one in manifests if one["kind"] in kinds]


def pods(manifests: list[Manifest]) -> Iterator[Pod]:
    """Yield the pods of all workloads."""
    for one in manifests:
        spec, name = one.get("spec", {}), one["metadata"]["name"]
        workload = f"{one['kind']}/{name}"
        match one["kind"]:
            case "StatefulSet" | "Deployment":
                claims = tuple(spec.get("volumeClaimTemplates", ()))
                yield _pod(workload, f"{name}-0", spec["template"], claims)
            case "JobSet":
                for job in spec["replicatedJobs"]:
                    template = job["template"]["spec"]["template"]
                    yield _pod(f"{workload}/{job['name']}", f"{name}-{job['name']}-0-0", template)
            case "LeaderWorkerSet":
                for part in ("leaderTemplate", "workerTemplate"):
                    if part in spec["leaderWorkerTemplate"]:
                        yield _pod(workload, f"{name}-0", spec["leaderWorkerTemplate"][part])


def _pod(workload: str, name: str, template: Manifest, claims: tuple[Manifest, ...] = ()) -> Pod:
    return Pod(workload, name, template["metadata"]["labels"], template["spec"], claims)


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Return whether a selector, of labels and expressions, matches labels."""
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for term in selector.get("matchExpressions", ()):
        assert term["operator"] == "In", term
        if labels.get(term["key"]) not in term["values"]:
            return False
    return True


def environment(container: Manifest, pod: Pod, index: int = 0) -> dict[str, str]:
    """Return the variables of a container, as they are in the pod `index` of its workload."""
    fields = {
        "metadata.name": pod.name.removesuffix("-0") + f"-{index}",
        "status.podIP": "127.0.0.1",
        "metadata.labels['apps.kubernetes.io/pod-index']": str(index),
        "metadata.labels['jobset.sigs.k8s.io/job-index']": str(index),
        "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']": str(index),
    }
    found = {}
    if pod.workload.startswith("LeaderWorkerSet"):
        found = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": f"{pod.name}.rollout"}
    if pod.workload.startswith("JobSet"):
        found = {"JOB_COMPLETION_INDEX": "1"}
    for one in container.get("env", ()):
        if "value" in one:
            found[one["name"]] = one["value"]
            continue
        source = one["valueFrom"]
        found[one["name"]] = fields[source["fieldRef"]["fieldPath"]] if "fieldRef" in source else "redis://of-a-secret"
    return found


def expanded(text: str, variables: dict[str, str]) -> str:
    """Return an argument with its `$(NAME)` replaced, as a kubelet does it. Fails for an unknown one."""
    for name, value in variables.items():
        text = text.replace(f"$({name})", value)
    assert "$(" not in text.replace("$((", ""), f"{text} names a variable that the container does not have"
    return text
