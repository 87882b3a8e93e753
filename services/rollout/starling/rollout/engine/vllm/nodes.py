"""One vLLM engine on several hosts: node 0's side, and the executor that the agent of each other node runs.

vLLM's scheduler is on node 0. Its executor for several nodes starts the workers of its own node only, so every other
node runs that executor without a scheduler. Workers find each other by a store that node 0 serves; then vLLM
exchanges requests, outputs and activations by sockets of its own. Everything of Starling takes the connection between
node 0 and the agents (`starling.common.nodes`): the order to start, and the messages of pulls. Each worker pulls its
shards of a version itself, on whichever host it is.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import active_children
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil  # which vLLM brings
import structlog

from starling.common.errors import ConfigError, UnreachableError
from starling.common.nodes.children import END, Loss
from starling.common.nodes.nodes import Nodes, NodeSetup
from starling.rollout.engine.base import EngineLostError, EngineSpec
from starling.rollout.engine.vllm import adapters, launch, processes
from starling.rollout.engine.vllm.pull_progress import PullMessageReceiver
from starling.weightsync.offers.sealed import new_key, seal

POLL_S: Final = 0.5
KILL_S: Final = 10.0
"""How long workers that were killed may take to exit."""

log = structlog.get_logger(__name__)


class StartExecutor(msgspec.Struct, frozen=True, kw_only=True):
    """Order to the other nodes to start their workers."""

    store: str
    """``host:port`` of the store by which all workers find each other."""
    offer_key: bytes
    """See `launch.EngineHost`."""


class EngineNodes:
    """The other nodes of an engine, as node 0 has them; for one engine, since all nodes start again with the next."""

    def __init__(
        self, setup: NodeSetup, received: Callable[[bytes], None], lost: Callable[[str], None], served_at: str
    ) -> None:
        """Wait until all nodes have joined, and have them start their workers.

        Args:
            setup: of this node.
            received: called with each message of a pull, in another thread.
            lost: called with a sentence when a node is lost, in another thread.
            served_at: address of this host, as others know it.

        Raises:
            ConfigError: the address of `--rdzv` is not one of this host, or is in use.
            EngineLostError: a node has not joined in time.
        """
        self._setup, self._closing = setup, threading.Lock()
        number, num_nodes = setup.arguments.number, setup.arguments.num_nodes
        self._nodes = Nodes(setup.name, setup.arguments, setup.network, setup.key, setup.facts)
        try:
            self._nodes.gather(setup.limit)
            self._store, address = _serve_store(setup.arguments.host)  # as long as there are workers
            self.host = launch.EngineHost(number, num_nodes, address, served_at, new_key())
            """This one."""
            self._nodes.welcome(range(num_nodes))
            self._nodes.serve(lambda _, frame: received(frame), lambda loss: lost(_sentence(loss)))
            self._nodes.send(msgspec.msgpack.encode(StartExecutor(store=address, offer_key=self.host.offer_key)))
        except UnreachableError as error:
            self._nodes.close()
            raise EngineLostError(str(error)) from error
        except BaseException as error:  # raised again; the address must be free for the next engine
            self._nodes.close(str(error) if isinstance(error, ConfigError) else "")
            raise

    def seal(self, offer: bytes) -> bytes:
        """Encrypt an encoded offer on its way to the workers: vLLM's messages between hosts are not."""
        return seal(self.host.offer_key, offer)

    def end(self) -> None:
        """Let the workers of the other nodes end, and their agents, if this replica is not started again."""
        self._nodes.end(is_over=self._setup.is_over)

    def close(self, problem: str = "") -> None:
        """Disconnect. Agents that were not ended kill their workers, and join the next engine.

        `problem`: that a restart does not mend, with which they end.
        """
        with self._closing:
            self._nodes.close(problem)


def _sentence(loss: Loss) -> str:
    return f"{loss.what}; see {loss.log}" if loss.log else loss.what


def _serve_store(host: str) -> tuple[Any, str]:
    """Serve a store at the address `host` only. Returns it, and its ``host:port``. Raises ConfigError."""
    from torch._C._distributed_c10d import TCPStore

    listener = socket.socket()
    try:
        listener.bind((host, 0))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {host} ({error.strerror}); give --rdzv an address of this host") from error
    port = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, f"{host}:{port}"


@dataclass(frozen=True)
class ExecutorProcess:
    """The process that runs the executor of a node: a child of its agent, and the parent of its workers."""

    spec: EngineSpec
    number: int
    num_nodes: int
    served_at: str
    """Address of this host, as others know it."""

    def serve(self, pipe: Connection) -> None:
        """Start the workers when node 0 says so, and wait for the end.

        Raises:
            EngineLostError: a worker has ended.
        """
        order = pipe.recv_bytes()
        if order == END:
            return
        folder = Path(tempfile.mkdtemp(prefix="starling-vllm-"))
        threading.Thread(target=await_end, args=(pipe, folder), name="requests", daemon=True).start()
        try:
            messages = PullMessageReceiver(folder)
            threading.Thread(target=_pass_on, args=(messages, pipe), name="pulls", daemon=True).start()
            start = msgspec.msgpack.decode(order, type=StartExecutor)
            host = launch.EngineHost(self.number, self.num_nodes, start.store, self.served_at, start.offer_key)
            self._run(host, messages.path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, host: launch.EngineHost, socket_path: str) -> None:
        spec = self.spec
        adapted = None if spec.model.lora is None else adapters.read(spec)
        on_cpu = launch.prepare(spec)
        launch.check_nodes(spec, host.num_nodes)
        variables = launch.environment(spec, on_cpu=on_cpu, host=host)
        variables |= {
            processes.PULLS: socket_path,
            processes.SERVED_AT: self.served_at,
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
        }
        with launch.with_environment(variables):
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.executor.multiproc_executor import MultiprocExecutor

            arguments = AsyncEngineArgs(**launch.arguments(spec, adapted, on_cpu=on_cpu, host=host))
            config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
            executor = MultiprocExecutor(config, monitor_workers=False)
            log.info("workers_ready", workers=len(executor.workers))
            executor.start_worker_monitor(inline=True)  # returns when one of them ends
        raise EngineLostError("a worker of vLLM has ended; see its output above")


def await_end(pipe: Connection, folder: Path) -> None:
    """End this process and its workers when the agent says so, or is gone; remove `folder`, which is its own."""
    with suppress(EOFError, OSError):
        while pipe.recv_bytes() != END:
            pass
    workers: set[psutil.Process] = set()
    for child in active_children():
        with suppress(psutil.NoSuchProcess):
            worker = psutil.Process(child.pid)
            workers |= {worker, *worker.children(recursive=True)}
    files = processes.shared_memory(workers)
    processes.kill_processes(workers, KILL_S)
    processes.remove_shared_memory(files)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _pass_on(messages: PullMessageReceiver, pipe: Connection) -> None:
    """Pass the messages of pulls on to the agent, which passes them on to node 0."""
    with suppress(OSError):
        while True:
            message = messages.next(POLL_S)
            if message is not None:
                pipe.send_bytes(msgspec.msgpack.encode(message))
