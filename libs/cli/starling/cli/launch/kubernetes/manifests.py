"""Manifests of one replica: a Secret with its key and configuration, and a Job with a pod for each of its nodes.

A replica with several nodes has an Indexed Job, whose pods have numbers and names, and a headless Service, by which
node 0 is found. Each pod gets the same key: the nodes of a replica admit each other by it.

The pod is that of `deploy/kubernetes/base`: the same labels, which the network policies there select, the same user,
security context and folders, so that the images of `deploy/images` run in it as they are.
"""

from __future__ import annotations

import base64
import re
from typing import Any, Final

from starling.cli.launch.interface import Placement
from starling.cli.launch.settings import KubernetesSettings

PART_OF: Final = {"app.kubernetes.io/part-of": "starling"}
RUN: Final = "starling.run"
REPLICA: Final = "starling.replica"
"""Labels of the objects of a run, and of a replica."""
CONTAINER: Final = "replica"
INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
"""Number of a pod in an Indexed Job."""
RDZV_PORT: Final = 29_500
"""Port at which node 0 of a replica listens for the others."""
GRACE_S: Final = 45
"""A replica hands its unfinished work back within 25 s."""
POLICY_GRACE_S: Final = 300
"""A policy finishes writing a state."""
KEPT_S: Final = 3600
"""How long an ended Job stays, for its log."""
USERS: Final = {"policy": 10001, "rollout": 10002, "reward": 10003, "teacher": 10002}
IMAGES: Final = {"teacher": "rollout"}
"""Roles in the image of another one."""
_DROP: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def label_of(text: str) -> str:
    """Return `text` as a value of a label: at most 63 letters, digits, dots, '-' and '_'."""
    return re.sub(r"[^A-Za-z0-9._-]", ".", text)[-63:].strip("._-")


def object_name(run: str, name: str, number: int) -> str:
    """Return the name of the objects of the replica `name`, started for the `number`-th time, in the run `run`."""
    prefix = re.sub(r"[^a-z0-9-]", "-", run.lower())[-30:].strip("-")
    return f"{prefix}-{name}-{number}"


def manifests(
    placement: Placement, settings: KubernetesSettings, *, name: str, run: str, files: dict[str, str]
) -> dict[str, Any]:
    """Return the list of objects of a replica.

    Args:
        placement: of the replica.
        settings: of the launcher.
        name: of the objects.
        run: the run's id.
        files: contents of `config.toml`, and of `key.json` where the run has CURVE.
    """
    labels = {
        **PART_OF,
        "app.kubernetes.io/component": placement.role,
        RUN: label_of(run),
        REPLICA: placement.name,
    }
    meta = {"name": name, "namespace": settings.namespace, "labels": labels}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": meta,
        "type": "Opaque",
        "data": {file: base64.b64encode(text.encode()).decode() for file, text in files.items()},
    }
    num = placement.num_nodes
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": meta,
        "spec": {
            "backoffLimit": 0,  # the supervisor starts a lost replica again, under another name of its Job
            "ttlSecondsAfterFinished": KEPT_S,
            **({"completionMode": "Indexed", "completions": num, "parallelism": num} if num > 1 else {}),
            "template": {"metadata": {"labels": labels}, "spec": _pod(placement, settings, name, "key.json" in files)},
        },
    }
    service = [_service(name, {**meta, "name": service_name(name)})] if num > 1 else []
    return {"apiVersion": "v1", "kind": "List", "items": [secret, *service, job]}


def service_name(job: str) -> str:
    """Return the name of the Service of a Job: it has to begin with a letter, and other names need not."""
    return f"s-{job}"


def _service(job: str, meta: dict[str, Any]) -> dict[str, Any]:
    """Return the Service by which the nodes of a replica find each other, also before they are ready."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"batch.kubernetes.io/job-name": job}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec}


def _pod(placement: Placement, settings: KubernetesSettings, secret: str, has_key: bool) -> dict[str, Any]:
    role = placement.role
    user = USERS[role]
    image = (settings.image or "starling-{role}").replace("{role}", IMAGES.get(role, role))
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": POLICY_GRACE_S if role == "policy" else GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(placement, settings, image, has_key)],
        "volumes": _volumes(settings, secret),
    }
    if has_key:
        pod["initContainers"] = [_key_copying(image)]
    if placement.num_nodes > 1:
        pod["subdomain"] = service_name(secret)
        pod["containers"][0]["args"] += _node_arguments(placement, secret)
        pod["containers"][0]["env"].append({"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}})
    return pod | _placing(placement, settings)


def _container(placement: Placement, settings: KubernetesSettings, image: str, has_key: bool) -> dict[str, Any]:
    """Return the container of the service."""
    limits = {"memory": settings.memory}
    if placement.num_gpus:
        limits[settings.gpu_resource] = str(placement.num_gpus)
    return {
        "name": CONTAINER,
        "image": image,
        "command": ["tini", "--", f"starling-{placement.role}"],
        "args": _arguments(placement, has_key),
        "env": _environment(placement.role),
        "securityContext": _DROP,
        "resources": {"requests": {"cpu": settings.cpu, "memory": settings.memory}, "limits": limits},
        "volumeMounts": _mounts(settings),
    }


def _mounts(settings: KubernetesSettings) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": "secret", "mountPath": "/etc/starling", "readOnly": True},
        {"name": "run", "mountPath": "/var/lib/starling"},
        {"name": "keys", "mountPath": "/run/starling/keys", "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "cache", "mountPath": "/var/cache/starling"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if settings.models_claim:
        mounts.append({"name": "models", "mountPath": "/models", "readOnly": True})
    return mounts


def _volumes(settings: KubernetesSettings, secret: str) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "secret", "secret": {"secretName": secret, "defaultMode": 0o400}},
        {"name": "keys", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        *({"name": one, "emptyDir": {}} for one in ("run", "tmp", "cache")),
    ]
    if settings.models_claim:
        claim = {"claimName": settings.models_claim, "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
    return volumes


def _key_copying(image: str) -> dict[str, Any]:
    """Return the container that copies the key to where only its owner may read it."""
    return {
        "name": "keys",
        "image": image,
        "command": ["sh", "-c", "umask 077 && cp /secret/key.json /keys/key.json"],
        "securityContext": _DROP,
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "64Mi"}},
        "volumeMounts": [
            {"name": "secret", "mountPath": "/secret", "readOnly": True},
            {"name": "keys", "mountPath": "/keys"},
        ],
    }


def _placing(placement: Placement, settings: KubernetesSettings) -> dict[str, Any]:
    """Return the fields of a pod that say on which nodes it may be."""
    fields: dict[str, Any] = {}
    selector = dict(placement.node_selector)
    if placement.gpu_kind:
        selector[settings.gpu_label] = placement.gpu_kind
    if placement.partition:
        selector[settings.pool_label] = placement.partition
    if selector:
        fields["nodeSelector"] = selector
    if placement.num_gpus and settings.tolerations:
        fields["tolerations"] = [
            {"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in settings.tolerations
        ]
    return fields


def _arguments(placement: Placement, has_key: bool) -> list[str]:
    words = ["--config=/etc/starling/config.toml", "--dir=/var/lib/starling", f"--name={placement.name}"]
    words.append(f"--controller={placement.controller}")
    if has_key:
        words.append("--key=/run/starling/keys/key.json")
    return [*words, *placement.settings]


def _node_arguments(placement: Placement, job: str) -> list[str]:
    """Return which of the nodes a pod is, by its index in the Job, and where node 0 is."""
    meeting = f"{job}-0.{service_name(job)}:{RDZV_PORT}"
    return [f"--nnodes={placement.num_nodes}", "--node-rank=$(NODE_RANK)", f"--rdzv={meeting}"]


def _environment(role: str) -> list[dict[str, Any]]:
    """Return the environment of a replica, as in `deploy/kubernetes/base`."""
    found: list[dict[str, Any]] = [
        {"name": "STARLING_NETWORK__HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "STARLING_NETWORK__CONNECT_S", "value": "3600"},
        {"name": "STARLING_NETWORK__SILENCE_S", "value": "1800"},
        {"name": "STARLING_RUN__LOG_FORMAT", "value": "json"},
        {"name": "OMP_NUM_THREADS", "value": "1"},
        {"name": "HOME", "value": "/tmp"},
        {"name": "USER", "value": "starling"},
    ]
    if role == "rollout":
        found.append({"name": "STARLING_ROLLOUT__ENVIRONMENT__SANDBOX", "value": "landlock"})
    return found
