"""The launcher `kubernetes`: each replica is a Job with a pod for each of its nodes, which kubectl applies, watches and
deletes.

A replica gets its configuration and its key in a Secret of its own. The Job does not try again: the supervisor places a
lost replica under another Job. Deleting the Job ends the pod by SIGTERM.
"""

from __future__ import annotations

import json
import tempfile
import time
from typing import Final

from starling.cli.launch.commands import Done, RunningCommand, last_line, run
from starling.cli.launch.interface import CLOSE_S, EXIT_S, Ended, LaunchError, LaunchSite, Placement
from starling.cli.launch.kubernetes.manifests import GRACE_S, RUN, label_of, manifests, object_name, service_name
from starling.cli.launch.kubernetes.pods import ended, observe
from starling.cli.launch.settings import KubernetesSettings
from starling.common.settings import read_toml

LOOK_EVERY_S: Final = 3.0
"""How often kubectl is asked for the pods of the run."""


def kubectl(settings: KubernetesSettings, *words: str) -> list[str]:
    """Return a command of kubectl in the run's namespace."""
    context = [f"--context={settings.context}"] if settings.context else []
    return ["kubectl", *context, f"--namespace={settings.namespace}", "--request-timeout=30s", *words]


class KubernetesLauncher:
    """Places replicas as Jobs of Kubernetes."""

    def __init__(self, site: LaunchSite) -> None:
        """Start nothing yet. Raises LaunchError where kubectl reaches no cluster, or may not create Jobs there."""
        self._site, self._settings = site, site.recipe.launch.kubernetes
        done = run(self._words("auth", "can-i", "create", "jobs.batch"))
        if done.code != 0:
            raise LaunchError(
                f"kubectl may not create Jobs in the namespace {self._settings.namespace} "
                f"({last_line(done.errors or done.output)}); check launch.kubernetes, or kubectl's configuration"
            )
        self._jobs: dict[str, str] = {}
        """Jobs of the replicas that have not ended, by the replica's name."""
        self._starts: dict[str, int] = {}
        self._asked: RunningCommand | None = None
        self._asked_of: frozenset[str] = frozenset()
        self._ask_at = float("-inf")
        self._deleting: list[RunningCommand] = []
        self._said = ""

    @property
    def _run(self) -> str:
        run_id: str = read_toml(self._site.attempt.config)["run"]["id"]
        return run_id

    @property
    def leave_s(self) -> float:
        """A pod that is being deleted, with its Job or by the cluster, has its grace period; kubectl tells it then."""
        return EXIT_S + GRACE_S + 2 * LOOK_EVERY_S

    def start(self, placement: Placement) -> None:
        """Create the Job of a replica, its Secret, and the Service of several nodes.

        Raises LaunchError when the cluster does not accept them.
        """
        attempt, run_id = self._site.attempt, self._run
        number = self._starts[placement.name] = self._starts.get(placement.name, 0) + 1
        files = {"config.toml": attempt.config.read_text()}
        if self._site.recipe.network.curve:
            files["key.json"] = attempt.key(placement.name).read_text()
        # The id of a run has an attempt's random part: names of another run differ.
        name = object_name(run_id, placement.name, number)
        objects = manifests(placement, self._settings, name=name, run=run_id, files=files)
        done = run(self._words("apply", "--filename=-"), given=json.dumps(objects))
        if done.code != 0:
            raise LaunchError(f"Kubernetes does not accept the Job of {placement.name}: {last_line(done.errors)}")
        self._jobs[placement.name] = name
        self._ask_at = 0.0

    def poll(self) -> list[Ended]:
        """Return the replicas whose pods have ended, by kubectl's newest answer; ask again when it is due."""
        self._deleting = [command for command in self._deleting if command.poll() is None]
        ends: list[Ended] = []
        if self._asked is not None and (done := self._asked.poll()) is not None:
            self._asked = None
            ends = self._ends(done)
        now = time.monotonic()
        if self._asked is None and self._jobs and now >= self._ask_at:
            self._ask_at, self._asked_of = now + LOOK_EVERY_S, frozenset(self._jobs.values())
            selector = f"--selector={RUN}={label_of(self._run)}"
            self._asked = self._begin("get", "jobs,pods", selector, "--output=json")
        return ends

    def stop(self, name: str) -> None:
        """Delete the Job of a replica, and so its pod: SIGTERM, and SIGKILL after its grace period."""
        if name in self._jobs:
            self._deleting.append(self._begin(*self._deletion(self._jobs[name])))

    def close(self) -> None:
        """Delete all Jobs and Secrets of the run."""
        for command in (*self._deleting, *([self._asked] if self._asked is not None else [])):
            command.kill()
        if self._starts:
            selector = f"--selector={RUN}={label_of(self._run)}"
            words = ("delete", "jobs,secrets,services", selector, "--wait=false", "--ignore-not-found")
            run(self._words(*words), timeout_s=CLOSE_S)

    def _ends(self, done: Done) -> list[Ended]:
        try:
            if done.code != 0:
                raise ValueError(last_line(done.errors))
            found = observe(done.output)
        except ValueError as error:
            self._say(f"kubectl does not say what became of the pods, and is asked again: {error}")
            return []
        ends = []
        for name, job in list(self._jobs.items()):
            if job not in self._asked_of:
                continue  # it was created since
            end = ended(name, job, found)
            if end is not None:
                del self._jobs[name]
                self._deleting.append(self._begin("delete", *self._besides(job)))
                ends.append(end)
            elif job in found.waits:
                self._say(f"{name} waits for {found.waits[job]}")
        return ends

    def _deletion(self, job: str) -> list[str]:
        return ["delete", f"job/{job}", *self._besides(job)]

    def _besides(self, job: str) -> list[str]:
        """Return what belongs to a Job, and the flags by which kubectl deletes it."""
        return [f"secret/{job}", f"service/{service_name(job)}", "--wait=false", "--ignore-not-found"]

    def _words(self, *words: str) -> list[str]:
        return kubectl(self._settings, *words)

    def _begin(self, *words: str) -> RunningCommand:
        try:
            return RunningCommand(self._words(*words), output=tempfile.TemporaryFile(), errors=tempfile.TemporaryFile())
        except OSError as error:
            raise LaunchError(f"kubectl cannot be run here ({error.strerror}); install it, or set PATH") from None

    def _say(self, text: str) -> None:
        """Show a notice, unless it was the last one."""
        if text != self._said:
            self._said = text
            self._site.say(text)
