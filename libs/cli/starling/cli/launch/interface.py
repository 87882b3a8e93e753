"""Interface between the supervisor of a run and the engine that places its replicas.

The supervisor (`starling.cli.run.supervisor`) decides which replicas a run has, and which of them are started again. A
launcher places them: `local` on this machine, others on other machines. Placement, quotas and failures of machines
belong to the engine behind it; a launcher schedules nothing.

One launcher serves one run and is called from one thread. No call may wait longer than a tenth of a second, except
`start`, which may take some seconds, and `close`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from starling.common.errors import StarlingError

if TYPE_CHECKING:
    from starling.cli.recipe.schema import Recipe
    from starling.cli.run.attempt import Attempt
    from starling.cli.run.processes import ServiceProcesses

CLOSE_S = 30.0
"""Longest time that `close` may take."""
EXIT_S: Final = 5.0
"""How long a process of a replica may take to exit after the run is over: it has given up its work already."""


class LaunchError(StarlingError):
    """A replica could not be placed; the text is one sentence with the remedy."""


@dataclass(frozen=True)
class Placement:
    """One replica to start: its role, its needs, and the command that starts it."""

    name: str
    """Its name in the run, such as ``rollout-3``, which is also that of its key file."""
    role: str
    """`policy`, `rollout`, `reward` or `teacher`."""
    arguments: tuple[str, ...]
    """Of `starling ROLE`, on a machine that has the run's folder: configuration, folder, name, controller, settings."""
    num_gpus: int = 0
    """GPUs on each of its nodes. 0: none is set apart for it."""
    gpu_kind: str = ""
    """Kind of the GPUs, as the engine names it; empty for any."""
    partition: str = ""
    """Partition of Slurm or node pool of Kubernetes; empty for the engine's default."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels that a node must have."""
    num_nodes: int = 1
    """Nodes that its ranks are on."""
    controller: str = ""
    """Address of the run's controller, ``tcp://HOST:PORT``, as in `arguments`."""
    settings: tuple[str, ...] = ()
    """Settings of this replica alone, as flags (``--rollout.engine=vllm``); `arguments` end with them."""


@dataclass(frozen=True)
class Ended:
    """The end of a replica that was placed."""

    name: str
    code: int | None
    """Exit code, -n when signal n killed it; None where the engine lost it."""
    reason: str
    """How it ended, to follow its name in a sentence: ``exited with code 1``, ``was lost with its node n3``."""


@dataclass(frozen=True)
class LaunchSite:
    """The run whose replicas a launcher places."""

    recipe: Recipe
    attempt: Attempt
    """Its folder, with the configuration and the key files: `attempt.config`, `attempt.key(name)`, `attempt.logs`."""
    children: ServiceProcesses
    """Processes of this machine that end with the supervisor, whose output goes to ``logs/NAME.log``."""
    say: Callable[[str], None]
    """Show a notice to the user."""


class Launcher(Protocol):
    """Places replicas through an existing engine, tells when they end, and stops them."""

    @property
    def leave_s(self) -> float:
        """How long after the end of a run `poll` may take to report the ends of all replicas, which exit by themselves.

        In seconds: the time to exit, and that in which the engine notices the exit and tells it. Replicas that have
        not ended then are ended by `close`.
        """

    def start(self, placement: Placement) -> None:
        """Start a replica, or start one again that has ended. Raises LaunchError or ConfigError with one sentence."""

    def poll(self) -> list[Ended]:
        """Return the replicas that have ended since the last call, each once for each start."""

    def stop(self, name: str) -> None:
        """Ask a replica to end: SIGTERM, or the engine's equivalent. Does nothing for one that has ended."""

    def close(self) -> None:
        """End all replicas that are still placed, within `CLOSE_S`, and remove what the launcher has made."""
