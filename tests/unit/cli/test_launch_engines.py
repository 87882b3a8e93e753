"""Launchers of engines as pure functions: commands and manifests of a placement, and what the engines answer."""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from starling.cli.launch.interface import Ended, LaunchError, Placement
from starling.cli.launch.joining import join_command, service_command
from starling.cli.launch.kubernetes.launcher import kubectl
from starling.cli.launch.kubernetes.manifests import label_of, manifests, object_name
from starling.cli.launch.kubernetes.pods import ended, observe
from starling.cli.launch.settings import KubernetesSettings, SlurmSettings
from starling.cli.launch.slurm import (
    ADDRESS,
    JobState,
    batch_script,
    batch_words,
    nodes_script,
    parse_queue,
    put_service,
)

PLACEMENT = Placement(
    name="rollout-3",
    role="rollout",
    arguments=(),
    num_gpus=2,
    gpu_kind="h100",
    partition="fast",
    node_selector={"zone": "a"},
    controller="tcp://10.0.0.1:5555",
    settings=("--rollout.num-slots=4", "--rollout.load-weights"),
)
PLAIN = Placement(name="reward-0", role="reward", arguments=(), controller="tcp://10.0.0.1:5555")


def test_replica_joins_with_its_own_settings() -> None:
    words = join_command(PLACEMENT, "/run/key.json", "/run/joined")
    assert words == shlex.split(
        "starling join tcp://10.0.0.1:5555 --role rollout --key /run/key.json --dir /run/joined --replace "
        "--timeout 600 --gpus 2 --set rollout.num_slots=4 --set rollout.load_weights=true"
    )
    assert "--gpus" not in join_command(PLAIN, "k", "d")


# --- Slurm ---------------------------------------------------------------------------------------------------------


def test_slurm_job_has_the_gpus_partition_and_features_of_its_replica() -> None:
    settings = SlurmSettings(options=("--account=rl",), prefix="srun --container-image=/images/a.sqsh")
    words = batch_words(PLACEMENT, settings, "/logs/rollout-3.log")
    assert words == shlex.split(
        "sbatch --parsable --no-requeue --open-mode=append --output=/logs/rollout-3.log --job-name=starling-rollout-3 "
        "--nodes=1 --ntasks=1 --partition=fast --gres=gpu:h100:2 --constraint=a --account=rl"
    )
    assert not [word for word in batch_words(PLAIN, SlurmSettings(), "l") if "gres" in word or "partition" in word]
    script = batch_script(["starling", "join", "a b"], settings)
    assert script == "#!/bin/sh\nexec srun --container-image=/images/a.sqsh starling join 'a b'\n"
    assert batch_script(["starling"], SlurmSettings()) == "#!/bin/sh\nexec starling\n"
    policy = batch_script(service_command(PLAIN, ADDRESS), SlurmSettings())
    assert policy.splitlines()[1:] == [
        "NODE_ADDRESS=$(hostname --ip-address | awk '{ print $1 }')",
        "export NODE_ADDRESS",
        'exec starling reward --network.host="$NODE_ADDRESS"',
    ]


def test_replica_of_several_nodes_is_a_step_with_a_task_on_each() -> None:
    placement = Placement(
        name="policy-0", role="policy", arguments=(), num_gpus=8, num_nodes=4, settings=("--observe.http=h:1",)
    )
    words = batch_words(placement, SlurmSettings(), "l")
    assert words[-4:] == ["--nodes=4", "--ntasks=4", "--ntasks-per-node=1", "--gres=gpu:8"]
    settings = SlurmSettings(prefix="srun --container-image=/images/a.sqsh", program="/opt/starling")
    script = nodes_script(placement, settings, Path("/shared/my run"))
    assert subprocess.run(["bash", "-nc", script], check=False).returncode == 0
    assert "export RUN='/shared/my run' PROGRAM=/opt/starling\n" in script
    step = "srun --nodes=4 --ntasks=4 --ntasks-per-node=1 --input=none --kill-on-bad-exit=0 --wait=60"
    command = "'/shared/my run/service.sh' policy 0 4 --observe.http=h:1 &"
    assert f"\n{step} --container-image=/images/a.sqsh {command}\n" in script
    assert f"\n{step} nice {command}\n" in nodes_script(placement, SlurmSettings(prefix="nice"), Path("/shared/my run"))


def test_script_of_the_tasks_is_written_once_and_always_executable(tmp_path: Path) -> None:
    put_service(tmp_path)
    path = tmp_path / "service.sh"
    first = path.stat()
    assert first.st_mode & 0o777 == 0o755
    put_service(tmp_path)
    again = path.stat()
    assert (again.st_ino, again.st_ctime_ns) == (first.st_ino, first.st_ctime_ns), "other replicas may run it"
    content = path.read_bytes()
    for damage in (lambda: path.write_text("old"), lambda: path.chmod(0o644)):
        damage()
        put_service(tmp_path)
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (content, 0o755)


def test_script_of_the_tasks_that_cannot_be_written_is_a_failed_start(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"cannot write .*service\.sh: No such file or directory; make"):
        put_service(tmp_path / "absent")
    (tmp_path / "service.sh").mkdir()
    with pytest.raises(LaunchError, match=r"cannot write .*service\.sh: Is a directory; make"):
        put_service(tmp_path)


def test_answer_of_squeue_is_read_and_damaged_lines_are_left_out() -> None:
    text = (
        "7      |RUNNING|0|None|\n8|FAILED|512|NonZeroExitCode|\n9|FAILED|9|RaisedSignal:9|\n"
        "10|FAILED|2:0|None|\n11|FAILED|0:15|None|\n\nslurm_load_jobs error\n7_1|RUNNING|0|x|\n12|COMPLETED|\n"
    )
    jobs = parse_queue(text)
    assert {number: (job.state, job.code) for number, job in jobs.items()} == {
        "7": ("RUNNING", 0),
        "8": ("FAILED", 2),
        "9": ("FAILED", 9),
        "10": ("FAILED", 2),
        "11": ("FAILED", -15),
    }


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [
        ("PENDING", 0, None),
        ("COMPLETING", 0, None),
        ("COMPLETED", 0, Ended("rollout-3", 0, "exited with code 0 (job 7)")),
        ("FAILED", 2, Ended("rollout-3", 2, "exited with code 2 (job 7)")),
        ("FAILED", -9, Ended("rollout-3", -9, "was killed by signal 9")),
        ("CANCELLED", 0, Ended("rollout-3", None, "was cancelled in Slurm (job 7)")),
        ("NODE_FAIL", 1, Ended("rollout-3", None, "was lost with its node (job 7)")),
        ("PREEMPTED", 1, Ended("rollout-3", None, "was preempted by another job of Slurm (job 7)")),
        (
            "OUT_OF_MEMORY",
            1,
            Ended("rollout-3", -9, "was killed by Slurm: it used more memory than its job has (job 7)"),
        ),
    ],
)
def test_state_of_a_slurm_job_is_the_end_of_its_replica(state: str, code: int, expected: Ended | None) -> None:
    assert JobState(state, code, "None").ended("rollout-3", "7") == expected


# --- Kubernetes ----------------------------------------------------------------------------------------------------


def test_manifests_have_the_key_in_a_secret_and_the_needs_of_the_replica() -> None:
    settings = KubernetesSettings(image="example.org/starling-{role}:1", models_claim="models", memory="8Gi")
    files = {"config.toml": "[run]\n", "key.json": "{}"}
    objects = manifests(PLACEMENT, settings, name="one-rollout-3-1", run="one/attempt-1/ab", files=files)
    secret, job = objects["items"]
    assert {name: base64.b64decode(data).decode() for name, data in secret["data"].items()} == files
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert labels == {
        "app.kubernetes.io/part-of": "starling",
        "app.kubernetes.io/component": "rollout",
        "starling.run": "one.attempt-1.ab",
        "starling.replica": "rollout-3",
    }
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"] == "example.org/starling-rollout:1"
    assert container["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": "2"}
    assert container["args"][-3:] == ["--key=/run/starling/keys/key.json", *PLACEMENT.settings]
    assert pod["nodeSelector"] == {
        "zone": "a",
        "nvidia.com/gpu.product": "h100",
        "cloud.google.com/gke-nodepool": "fast",
    }
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in container["volumeMounts"]
    assert (job["spec"]["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert "key.json" not in json.dumps(job).replace("/key.json", ""), "the key itself is in the Secret alone"


def test_nodes_of_a_replica_are_an_indexed_job_with_a_service() -> None:
    placement = replace(PLACEMENT, num_nodes=2)
    objects = manifests(placement, KubernetesSettings(), name="7b-rollout-3-1", run="r", files={"config.toml": ""})
    secret, service, job = objects["items"]
    assert (secret["kind"], service["kind"], job["kind"]) == ("Secret", "Service", "Job")
    assert service["metadata"]["name"] == "s-7b-rollout-3-1"
    assert service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": "7b-rollout-3-1"},
    }
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == "s-7b-rollout-3-1"
    assert pod["containers"][0]["args"][-3:] == [
        "--nnodes=2",
        "--node-rank=$(NODE_RANK)",
        "--rdzv=7b-rollout-3-1-0.s-7b-rollout-3-1:29500",
    ]
    assert pod["containers"][0]["env"][-1]["name"] == "NODE_RANK"


def test_run_without_curve_has_no_key_and_a_teacher_the_image_of_a_rollout() -> None:
    teacher = Placement(name="teacher-0", role="teacher", arguments=(), controller="tcp://c:1")
    objects = manifests(teacher, KubernetesSettings(), name="n", run="r", files={"config.toml": ""})
    pod = objects["items"][1]["spec"]["template"]["spec"]
    assert "initContainers" not in pod
    assert pod["containers"][0]["image"] == "starling-rollout"
    assert not [word for word in pod["containers"][0]["args"] if "--key" in word]
    assert "nodeSelector" not in pod


def test_names_and_labels_fit_into_kubernetes() -> None:
    run = "A_Run.With-a-very-long-name-of-more-than-sixty-three-characters/attempt-12/0badcafe"
    name = object_name(run, "rollout-123", 4)
    assert name == "characters-attempt-12-0badcafe-rollout-123-4"
    assert len(label_of(run)) <= 63
    assert label_of(run).endswith("attempt-12.0badcafe")


def test_kubectl_has_the_namespace_and_the_context() -> None:
    words = kubectl(KubernetesSettings(namespace="rl", context="lab"), "get", "pods")
    assert words == ["kubectl", "--context=lab", "--namespace=rl", "--request-timeout=30s", "get", "pods"]


def pod(job: str, state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    if state is not None:
        status["containerStatuses"] = [{"name": "keys", "state": {}}, {"name": "replica", "state": state}]
    meta = {"name": f"{job}-x", "labels": {"batch.kubernetes.io/job-name": job}}
    return {"kind": "Pod", "metadata": meta, "spec": {"nodeName": "n1"}, "status": status}


def job(name: str, *conditions: dict[str, str]) -> dict[str, Any]:
    return {"kind": "Job", "metadata": {"name": name}, "status": {"conditions": list(conditions)}}


ANSWERS: dict[str, tuple[list[dict[str, Any]], Ended | None]] = {
    "runs": ([job("j"), pod("j", {"running": {}}, phase="Running")], None),
    "exits": (
        [
            job("j", {"type": "Complete", "status": "True"}),
            pod("j", {"terminated": {"exitCode": 0, "reason": "Completed"}}),
        ],
        Ended("rollout-3", 0, "exited with code 0 on n1"),
    ),
    "a wrong setting": (
        [job("j"), pod("j", {"terminated": {"exitCode": 2, "reason": "Error"}}, phase="Failed")],
        Ended("rollout-3", 2, "exited with code 2 on n1"),
    ),
    "a signal": (
        [job("j"), pod("j", {"terminated": {"exitCode": 137, "reason": "Error"}}, phase="Failed")],
        Ended("rollout-3", -9, "was killed by signal 9 on n1"),
    ),
    "too much memory": (
        [job("j"), pod("j", {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, phase="Failed")],
        Ended("rollout-3", -9, "was killed on n1: it used more memory than launch.kubernetes.memory"),
    ),
    "eviction": (
        [job("j"), pod("j", phase="Failed", reason="Evicted")],
        Ended("rollout-3", None, "was lost on n1 (Evicted)"),
    ),
    "a lost pod": (
        [job("j", {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "backoff limit"})],
        Ended("rollout-3", None, "was lost with its pod (backoff limit)"),
    ),
    "a deleted job": ([job("other")], Ended("rollout-3", None, "is gone: its Job j was deleted")),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_answer_of_kubectl_is_the_end_of_a_replica(case: str) -> None:
    items, expected = ANSWERS[case]
    assert ended("rollout-3", "j", observe(json.dumps({"items": items}))) == expected


def node(index: int, code: int | None) -> dict[str, Any]:
    """Return a pod of a replica with several nodes, which runs or has ended with `code`."""
    found = pod("j", {"running": {}} if code is None else {"terminated": {"exitCode": code, "reason": "Error"}})
    found["metadata"]["annotations"] = {"batch.kubernetes.io/job-completion-index": str(index)}
    return found


NODES: dict[str, tuple[tuple[int | None, int | None], Ended | None]] = {
    "both run": ((None, None), None),
    "node 1 is done before node 0": ((None, 0), None),
    "node 0 is done": ((0, None), Ended("rollout-3", 0, "exited with code 0 on n1")),
    "node 1 fails": ((None, 1), Ended("rollout-3", 1, "lost its node 1, which exited with code 1 on n1")),
    "a wrong setting of node 0": ((2, 137), Ended("rollout-3", 2, "exited with code 2 on n1")),
}


@pytest.mark.parametrize("case", NODES)
@pytest.mark.parametrize("order", [1, -1])
def test_end_of_a_replica_with_several_nodes_is_that_of_node_0(case: str, order: int) -> None:
    codes, expected = NODES[case]
    pods = [node(index, code) for index, code in enumerate(codes)][::order]
    assert ended("rollout-3", "j", observe(json.dumps({"items": [job("j"), *pods]}))) == expected


@pytest.mark.parametrize("has_container", [True, False])
@pytest.mark.parametrize("order", [1, -1])
def test_eviction_of_node_0_is_not_the_exit_that_it_causes(order: int, has_container: bool) -> None:
    evicted = node(0, 137)
    evicted["spec"]["nodeName"] = "n0"
    evicted["status"] |= {"phase": "Failed", "reason": "Evicted"}
    if not has_container:
        del evicted["status"]["containerStatuses"]
    pods = [evicted, node(1, 1)][::order]
    expected = Ended("rollout-3", None, "was lost on n0 (Evicted)")
    assert ended("rollout-3", "j", observe(json.dumps({"items": [job("j"), *pods]}))) == expected


def test_pod_that_waits_says_for_what() -> None:
    unplaced = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: Insufficient gpu"}
    pulling = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}
    items = [job("a"), job("b"), pod("a", phase="Pending", conditions=[unplaced]), pod("b", pulling, phase="Pending")]
    found = observe(json.dumps({"items": items}))
    assert found.waits == {"a": "0/3 nodes are available: Insufficient gpu", "b": "Back-off pulling image"}
    assert found.ends == {}


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"items": [{}]}', '{"items": 3}', "Error from server"])
def test_other_answers_of_kubectl_are_no_end(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        observe(text)
