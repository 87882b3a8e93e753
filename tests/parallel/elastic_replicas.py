"""Policy replicas as forked processes, each with its own mesh, that make steps together and lose each other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rank_processes import DEADLINE_S
from small_steps import make_groups, make_model, make_settings, whole

from starling.policy.settings.parallel import ParallelSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.errors import PeersLostError
from starling.policy.train.learner import Learner
from starling.policy.train.parallel.group import serve_store
from starling.policy.train.parallel.mesh import Mesh
from starling.policy.train.parallel.replicas.peer_state import ReceivedState
from starling.policy.train.parallel.replicas.peers import PeerGroup

NUM_STEPS = 30
_NUMBERS = count()


def small_model() -> Any:
    """Return the model of most tests."""
    return make_model("qwen3", False)


def elastic_settings(
    parallel: dict[str, Any], *, num_minibatches: int = 1, router_bias_rate: float = 0.0
) -> PolicySettings:
    """Return the settings of the steps of a replica with this mesh."""
    settings = make_settings(**parallel)
    algorithm = settings.algorithm.model_copy(update={"num_minibatches": num_minibatches})
    return settings.model_copy(update={"algorithm": algorithm, "router_bias_rate": router_bias_rate})


def make_step(learner: Learner, number: int) -> tuple[float, ...]:
    """Make a step of groups that its number decides. Returns loss, norm of the gradient, and load of the experts."""
    metrics = learner.reinforce(make_groups(num_groups=4, seed=number), step=number, num_steps=NUM_STEPS)
    return metrics["loss"], metrics["grad_norm"], metrics.get("expert_load_max", 0.0)


class ReplicaProcesses:
    """The ranks of one replica. The test plays the controller."""

    def __init__(
        self,
        folder: Path,
        parallel: dict[str, Any],
        *,
        load: Callable[[], Any] = small_model,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        """Start them. `load`: returns the model; `seed`: other weights for another one; `settings`: of the steps."""
        self.number, self.num_ranks = next(_NUMBERS), ParallelSettings(**parallel).num_ranks
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        of_steps = elastic_settings(parallel, **settings)
        for rank in range(self.num_ranks):
            pipe, theirs = context.Pipe()
            arguments = (rank, self.num_ranks, folder / f"store-{self.number}", theirs, of_steps, load, seed)
            process = context.Process(target=_run, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)
        self.address: str = self.answers()[0]

    def send(self, *command: Any) -> None:
        """Have all ranks execute a command."""
        for pipe in self._pipes:
            pipe.send(command)

    def step(self, number: int, replicas: Sequence[ReplicaProcesses], group: str) -> None:
        """Have them begin a step that `replicas` make together."""
        peers = [one.address for one in replicas] if len(replicas) > 1 else []
        self.send("step", number, peers, replicas.index(self), group if peers else "")

    def answers(self) -> list[Any]:
        """Return what each rank answers."""
        found = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(DEADLINE_S), f"rank {rank} of replica {self.number} does not answer"
            found.append(pipe.recv())
        for answer in found:
            assert answer[0] != "failed", answer[1]
        return found

    def outcome(self) -> tuple[str, Any]:
        """Return the one answer of all ranks; each may have lost another one of the peers that have died."""
        answers = self.answers()
        said = {kind if kind == "lost" else repr((kind, content)) for kind, content in answers}
        assert len(said) == 1, f"the ranks disagree: {answers}"
        return answers[0]

    def signal(self, number: int) -> None:
        """Send a signal to all ranks."""
        for process in self._processes:
            assert process.pid is not None
            os.kill(process.pid, number)

    def kill(self) -> None:
        """End all ranks at once."""
        self.signal(signal.SIGKILL)
        for process in self._processes:
            process.join()


def _run(
    rank: int,
    num_ranks: int,
    store: Path,
    pipe: Connection,
    settings: PolicySettings,
    load: Callable[[], Any],
    seed: int,
) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        limit = timedelta(seconds=DEADLINE_S)
        files = dist.FileStore(str(store), num_ranks)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=num_ranks, timeout=limit)
        learner = Learner(lambda: _changed(load(), seed), settings, mesh=Mesh(settings.parallel))
        served, address = serve_store("127.0.0.1")
        pipe.send(address)
        while True:
            pipe.send(_execute(learner, rank, settings, pipe.recv()))
            assert served is not None
    except EOFError:
        pass
    except Exception:  # noqa: BLE001 - the test raises it
        pipe.send(("failed", traceback.format_exc()))
    finally:
        os._exit(0)


def _changed(model: Any, seed: int) -> Any:
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += seed
    return model


def _execute(learner: Learner, rank: int, settings: PolicySettings, command: tuple[Any, ...]) -> tuple[str, Any]:
    match command:
        case ("step", number, peers, place, group):
            learner.join_peers(peers, place, group)
            try:
                return "made", make_step(learner, number)
            except PeersLostError as error:
                return "lost", str(error)
        case ("send", peers, group, version):
            pair = PeerGroup(peers, 0, f"{group}/{rank}", DEADLINE_S, learner.model.device)
            learner.send_state(version, pair)
            pair.close()
        case ("receive", peers, group):
            pair = PeerGroup(peers, 1, f"{group}/{rank}", DEADLINE_S, learner.model.device)
            received = ReceivedState(pair)
            version = learner.resume(received)
            received.end()
            pair.close()
            return "received", version
        case ("weights",):
            return "weights", {name: whole(one) for name, one in learner.tensors.items()}
        case _:
            raise AssertionError(command)
    return "done", None
