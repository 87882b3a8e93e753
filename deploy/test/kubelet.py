"""The part of a kubelet that the manifests rely on, by Docker: volumes, users, init containers, restarts.

A pod's containers get the volumes as a kubelet lays them out, with its owners and modes, the user, the groups, the
read-only root and the dropped capabilities of the manifest, and Docker's default seccomp profile. Their image is empty:
the programs of this machine and the environment that runs the tests are mounted into it, read-only. There is no API
server, no scheduler, and nothing enforces NetworkPolicies.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import kubernetes_manifests as manifests
from docker_host import PATIENCE_S, DockerHost
from kubernetes_manifests import Manifest, Pod

IMAGE: Final = "starling-test/empty"
NETWORK: Final = "starling-test-pods"
SUBNET: Final = "10.231.77"
SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ssl", "/etc/alternatives")
"""Of this machine, in each container."""
HEALTH: Final = manifests.ROOT / "deploy/images/starling-health"
IMAGE_VARIABLES: Final = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HF_HOME": "/var/cache/starling/huggingface",
    "XDG_CACHE_HOME": "/var/cache/starling",
}
"""Of the images of the services."""


def program_folders() -> list[str]:
    """Return the folders of the interpreter, its packages and this checkout."""
    names = {Path(name).resolve() for name in (sys.prefix, sys.base_prefix, *sys.path, manifests.ROOT, "/usr") if name}
    folders = {one for one in names if one.is_dir()}
    return sorted(str(one) for one in folders if not folders.intersection(one.parents) and str(one) != "/usr")


@dataclass
class RunningPod:
    """One pod: its containers, and what they share."""

    name: str
    role: str
    address: str
    folder: Path
    """Of its volumes."""
    containers: dict[str, str] = field(default_factory=dict)
    """Ids by the name of the container."""


class Node:
    """A node that runs pods."""

    def __init__(self, host: DockerHost, folder: Path, objects: list[Manifest]) -> None:
        """Run pods of `objects`; `folder` has the volumes, and what claims hold stays there."""
        self._host, self.folder, self.objects = host, folder, objects
        self._num_addresses = 1
        with tarfile.open(folder / "empty.tar", "w") as tar:
            for name in ("tmp", "proc", "sys", "dev", "etc", "var", "run"):
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(entry)
        self.close()  # what is left of a test that was killed
        host.docker("import", folder / "empty.tar", IMAGE)
        host.docker("network", "create", "--subnet", f"{SUBNET}.0/24", NETWORK)

    def close(self) -> None:
        """Remove the containers and the network."""
        found = self._host.docker("ps", "--all", "--quiet", "--filter", f"label={NETWORK}").split()
        if found:
            self._host.docker("rm", "--force", *found, check=False)
        self._host.docker("network", "rm", NETWORK, check=False)
        self._host.docker("image", "rm", IMAGE, check=False)

    def start(self, pod: Pod, index: int = 0, **variables: str) -> RunningPod:
        """Start the pod `index` of a workload, with `variables` in place of those of the manifest."""
        name = f"{pod.name.removesuffix('-0')}-{index}"
        self._num_addresses += 1
        folder = self.folder / f"{name}-{self._num_addresses}"
        running = RunningPod(name, pod.role, f"{SUBNET}.{self._num_addresses}", folder)
        self._make_volumes(pod, running)
        for container in pod.spec.get("initContainers", ()):
            if container.get("restartPolicy") != "Always":
                arguments = self._arguments(container, pod, index, running, {})
                self._host.docker("run", "--rm", "--network", "none", *arguments)
        sidecars = [one for one in pod.spec.get("initContainers", ()) if one.get("restartPolicy") == "Always"]
        for container in [*pod.spec["containers"], *sidecars]:
            words = ["run", "--detach", "--restart", "always"]
            if running.containers:
                words += ["--network", f"container:{next(iter(running.containers.values()))}"]
            else:
                words += ["--network", NETWORK, "--ip", running.address, "--hostname", name]
                words += ["--network-alias", pod.role] if pod.role == "controller" else []
            arguments = self._arguments(container, pod, index, running, variables)
            running.containers[container["name"]] = self._host.docker(*words, *arguments).split()[-1]
        return running

    def stop(self, running: RunningPod, grace_s: float) -> int:
        """Delete a pod. Returns the exit code of its service, which has had the grace period to end."""
        first = next(iter(running.containers.values()))
        self._host.docker("stop", "--time", f"{grace_s:g}", first)
        code = int(self._host.docker("inspect", "--format", "{{.State.ExitCode}}", first))
        self._host.docker("rm", "--force", *running.containers.values())
        return code

    def execute(self, running: RunningPod, *command: str) -> int:
        """Run a command in the service's container, as an exec probe does. Returns its exit code."""
        words = ["docker", "exec", running.containers[running.role], *command]
        environment = self._host.environment
        return subprocess.run(words, env=environment, capture_output=True, timeout=PATIENCE_S, check=False).returncode

    def is_open(self, running: RunningPod, port: int) -> bool:
        """Return whether something listens at a port of a pod."""
        script = f"exec 3<>/dev/tcp/{running.address}/{port} && echo open"
        return "open" in self._host.inside("timeout", "10", "bash", "-c", script, check=False).split()

    def http(self, running: RunningPod, port: int, path: str) -> int:
        """Return the status of an HTTP answer of a pod; 0 without one."""
        write = ("--silent", "--output", "/dev/null", "--write-out", "%{http_code}", "--max-time", "10")
        return int(self._host.inside("curl", *write, f"http://{running.address}:{port}{path}", check=False) or 0)

    def logs(self, running: RunningPod) -> str:
        """Return what the service has printed."""
        return self._host.docker("logs", running.containers[running.role], check=False)

    def restarts(self, running: RunningPod) -> int:
        """Return how often the service was started again."""
        return int(self._host.docker("inspect", "--format", "{{.RestartCount}}", running.containers[running.role]))

    def _make_volumes(self, pod: Pod, running: RunningPod) -> None:
        group = pod.spec["securityContext"]["fsGroup"]
        running.folder.mkdir(parents=True)
        for volume in pod.spec["volumes"]:
            place = running.folder / volume["name"]
            if "secret" in volume:
                source = manifests.find(self.objects, "Secret", volume["secret"]["secretName"])["data"]
                files = {name: base64.b64decode(text) for name, text in source.items()}
                # With a group of the pod, a kubelet lets it read what the mode lets the owner read.
                mode = volume["secret"]["defaultMode"]
                write_projected(place, files, mode | (mode & 0o400) >> 3, group)
            elif "configMap" in volume:
                source = manifests.find(self.objects, "ConfigMap", volume["configMap"]["name"])["data"]
                items = volume["configMap"].get("items") or [{"key": name, "path": name} for name in source]
                write_projected(place, {one["path"]: source[one["key"]].encode() for one in items}, 0o644, group)
            else:
                assert "emptyDir" in volume, f"{volume} is not known here"
                _make_folder(place, group)
        for claim in pod.claims:
            disk = self.folder / f"claim-{claim['metadata']['name']}-{running.name}"
            if not disk.exists():
                _make_folder(disk, group)
                (disk / "lost+found").mkdir(mode=0o700)
            (running.folder / claim["metadata"]["name"]).symlink_to(disk)

    def _arguments(
        self, container: Manifest, pod: Pod, index: int, running: RunningPod, variables: dict[str, str]
    ) -> list[str]:
        """Return flags, image and command of `docker run` for a container."""
        context, own = pod.spec["securityContext"], container["securityContext"]
        assert own["readOnlyRootFilesystem"]
        assert own["capabilities"] == {"drop": ["ALL"]}
        words = ["--label", NETWORK, "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        words += ["--user", f"{context['runAsUser']}:{context['runAsGroup']}", "--group-add", str(context["fsGroup"])]
        words += ["--memory", container["resources"]["limits"]["memory"].replace("Gi", "g").replace("Mi", "m")]
        for folder in (*SYSTEM, *program_folders()):
            words += ["--volume", f"{folder}:{folder}:ro"] if os.path.exists(folder) else []
        words += ["--volume", f"{HEALTH}:/opt/starling-health:ro"]
        known = manifests.environment(container, pod, index) | {"REMOTE_REWARD_TOKEN": self._token()}
        known |= {name: running.address for name in known if name == "STARLING_NETWORK__HOST"} | variables
        for name, value in (IMAGE_VARIABLES | self._paths() | {"SERVICE": pod.role} | known).items():
            words += ["--env", f"{name}={value}"]
        for mount in container["volumeMounts"]:
            source = running.folder / mount["name"]
            path = mount.get("subPath") or manifests.expanded(mount.get("subPathExpr", ""), known)
            place = (source / path).resolve()
            words += ["--volume", f"{place}:{mount['mountPath']}" + (":ro" if mount.get("readOnly") else "")]
        command = [manifests.expanded(one, known) for one in [*container["command"], *container.get("args", ())]]
        return [*words, IMAGE, *command]

    def _paths(self) -> dict[str, str]:
        members = [str(path) for name in ("libs", "services") for path in (manifests.ROOT / name).iterdir()]
        return {"PATH": f"{sys.prefix}/bin:/opt:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": ":".join(sorted(members))}

    def _token(self) -> str:
        data: Any = manifests.find(self.objects, "Secret", "reward-token")["data"]["token"]
        return base64.b64decode(data).decode()


def write_projected(folder: Path, files: dict[str, bytes], mode: int, group: int) -> None:
    """Write a ConfigMap or a Secret as a kubelet does: behind two links, by which it replaces all files at once."""
    real = folder / "..2026_01_01_00_00_00.000000001"
    for name, content in files.items():
        path = real / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.chown(path, 0, group)
        path.chmod(mode)
    (folder / "..data").symlink_to(real.name)
    for first in sorted({Path(name).parts[0] for name in files}):
        (folder / first).symlink_to(f"..data/{first}")


def _make_folder(folder: Path, group: int) -> None:
    folder.mkdir(parents=True)
    os.chown(folder, 0, group)
    folder.chmod(0o2775)
