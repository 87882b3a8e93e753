"""Policy replicas that make steps together: sums over the same rank of each.

The default process group connects the ranks of one replica, and loses all with one of them. Replicas join and leave a
run, so each rank has a further process group with its counterparts in the other replicas, for as long as the same ones
make steps together. Nothing in it outlives an error: the next step has a new one.

An error reaches the ranks of a replica one by one: the collective operation of one rank may have succeeded where that
of its neighbour failed. So an operation with other replicas raises nothing. It notes that they are lost, and goes on
with the values of this replica alone, which `StepPeers.check` throws away: there all ranks of the replica find out
together whether one of them has lost its counterparts, before the optimizer changes anything.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeVar

import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from starling.common.errors import StarlingError
from starling.common.settings import set_variable
from starling.policy.train.errors import PeersLostError

LOOK_S: Final = 1.0
"""How often a group that is not complete looks whether the stores of those that are missing are still there."""
_POLL_S: Final = 0.01
REACH_S: Final = 5.0
"""How long the store of another replica may take to accept a connection."""

_CHECKED_BYTES: Final = 1 << 22
"""Bytes whose checksum is computed at a time, with eight times as much memory."""

log = structlog.get_logger(__name__)

T = TypeVar("T")


class PeerGroup:
    """One rank's process groups with its counterparts in other replicas: gloo, and NCCL between GPUs."""

    def __init__(self, peers: Sequence[str], place: int, name: str, timeout_s: float, device: torch.device) -> None:
        """Connect with the others, each of which calls this.

        Args:
            peers: host and port of the store of each replica; all find each other through the first one.
            place: of this one among them.
            name: of the group, new for each.
            timeout_s: how long they wait for each other, in this and in each operation.
            device: of the tensors.

        Raises:
            PeersLostError: one of them does not come.
        """
        self.place, self.size = place, len(peers)
        size, timeout = len(peers), timedelta(seconds=timeout_s)

        def meet() -> tuple[PrefixStore, ProcessGroupGloo]:
            store = PrefixStore(name, connect_store(peers[0], timeout_s))
            _await_all(store, peers, place, timeout_s)
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timeout
            options._devices = [ProcessGroupGloo.create_device(hostname=_own_host(peers[0]))]
            return store, ProcessGroupGloo(store, place, size, options)

        self._nccl: Any = None
        try:
            store, gloo = ask_store(peers[0], meet, timeout_s + REACH_S)
            self._gloo: Any = gloo
            if device.type == "cuda":
                from torch._C._distributed_c10d import ProcessGroupNCCL

                set_variable("TORCH_NCCL_BLOCKING_WAIT", "1")  # an error is raised, instead of ending the process
                nccl = ProcessGroupNCCL.Options()
                nccl._timeout = timeout
                self._nccl = ProcessGroupNCCL(PrefixStore("nccl", store), place, size, nccl)
        except (RuntimeError, OSError) as error:
            raise _lost(error) from error

    def all_reduce_(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce `tensor` over all by `op`, in place. Raises PeersLostError."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self._run(tensor, lambda group, one: group.allreduce([one], options))

    def broadcast_(self, tensor: Tensor) -> None:
        """Give all the first one's `tensor`, in place. Raises PeersLostError."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._run(tensor, lambda group, one: group.broadcast([one], options))

    def gather(self, values: Any) -> list[Any]:
        """Return the `values` of each: what JSON can hold, NaN and infinities included. Raises PeersLostError."""
        text = torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.place] = len(text)
        self.all_reduce_(sizes)
        texts = [torch.zeros(int(sizes.max()), dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.nn.functional.pad(text, (0, len(texts[0]) - len(text)))
        self._run(padded, lambda group, one: group.allgather([texts], [one]))
        return [json.loads(bytes(one[: int(size)].tolist())) for one, size in zip(texts, sizes, strict=True)]

    def close(self) -> None:
        """Disconnect at once; operations of others then fail."""
        if self._nccl is not None:
            self._nccl.abort()
        self._gloo = self._nccl = None

    def _run(self, tensor: Tensor, operation: Any) -> None:
        try:
            if tensor.is_cuda:
                operation(self._nccl, tensor).wait()
                torch.cuda.synchronize(tensor.device)  # an error is to be raised here, not by a later operation
            else:
                operation(self._gloo, tensor).wait()
        except RuntimeError as error:
            raise _lost(error) from error


class StepPeers:
    """The replicas with which this one makes the present step, as one of its ranks sees them."""

    def __init__(self, timeout_s: float, device: torch.device) -> None:
        """See `PeerGroup`."""
        self._timeout_s, self._device = timeout_s, device
        self._group: PeerGroup | None = None
        self._name = ""
        self._problem: StarlingError | None = None
        self.place, self.size = 0, 1
        """Of this replica among those of the step."""

    def begin(self, peers: Sequence[str], place: int, name: str, state: Callable[[], Mapping[str, Tensor]]) -> None:
        """Prepare a step that the replicas `peers` make together, in the groups of the step before if it has `name`.

        Args:
            peers: address of the store of each; none for a step that this replica makes alone.
            place: of this replica among them.
            name: of the process groups.
            state: returns this rank's part of everything that the step depends on, which new groups compare.
        """
        if name == self._name:
            return
        self.leave()
        self.place, self.size, self._name = place, max(1, len(peers)), name
        if not peers:
            return
        try:
            self._group = PeerGroup(peers, place, f"{name}/{dist.get_rank()}", self._timeout_s, self._device)
            self._compare(self._group, state())
        except StarlingError as error:
            self._lose(error)

    def leave(self) -> None:
        """Disconnect from the other replicas; the next step is of this one alone, unless it says otherwise."""
        if self._group is not None:
            self._group.close()
        self._group = self._problem = None
        self._name, self.place, self.size = "", 0, 1

    def sum_(self, tensor: Tensor) -> None:
        """Add up `tensor` over the replicas, in place."""
        self._try(lambda group: group.all_reduce_(tensor))

    def max_(self, tensor: Tensor) -> None:
        """Take the maxima of `tensor` over the replicas, in place."""
        self._try(lambda group: group.all_reduce_(tensor, dist.ReduceOp.MAX))

    def gather(self, values: Any) -> list[Any]:
        """Return the `values` of each replica, see `PeerGroup.gather`; those of this one where others are lost."""
        found = [values]

        def gather(group: PeerGroup) -> None:
            found[:] = group.gather(values)

        self._try(gather)
        return found

    def check(self) -> None:
        """Check, together with the other ranks of this replica, that none of them has lost its counterparts.

        Raises:
            PeersLostError: one has; what was computed since `begin` is worthless.
            ConfigError: the replicas hold different states.
        """
        if self.size == 1:
            return
        is_lost = torch.tensor([self._problem is not None], dtype=torch.uint8)
        dist.all_reduce(is_lost, dist.ReduceOp.MAX)
        if self._problem is not None:
            raise self._problem
        if is_lost:
            raise PeersLostError("another rank has lost the other policies of the step")

    def _try(self, operation: Any) -> None:
        if self._group is None or self._problem is not None:
            return
        try:
            operation(self._group)
        except PeersLostError as error:
            self._lose(error)

    def _lose(self, error: StarlingError) -> None:
        log.warning("lost_policies", reason=str(error))
        self._problem = error
        if self._group is not None:
            self._group.close()  # so that the others notice, too

    @staticmethod
    def _compare(group: PeerGroup, state: Mapping[str, Tensor]) -> None:
        """Check that all replicas hold the same `state`, by a sum over its bits. Raises PeersLostError."""
        own = torch.tensor([_checksum(tensor) for _, tensor in sorted(state.items())], dtype=torch.int64)
        greatest, least = own.clone(), -own
        group.all_reduce_(greatest, dist.ReduceOp.MAX)
        group.all_reduce_(least, dist.ReduceOp.MAX)
        different = (greatest != -least).nonzero().flatten().tolist()
        if different:
            name = sorted(state)[different[0]]
            raise PeersLostError(
                f"the policies hold different bits in {name}: start them with the same model folder and recipe, and on "
                "the same kind of device"
            )


def connect_store(address: str, timeout_s: float) -> TCPStore:
    """Connect to the store of a replica. Raises OSError or RuntimeError if it cannot be reached."""
    host, port = _endpoint(address)
    socket.create_connection((host, port), REACH_S).close()  # the store itself would try again and again
    return TCPStore(host, port, None, False, timedelta(seconds=timeout_s))


def ask_store(address: str, ask: Callable[[], T], timeout_s: float) -> T:
    """Return what `ask` returns, which asks the store at `address`, from a thread of its own.

    The client of a store waits for its answer without any limit, and a replica that hangs accepts connections: so a
    thread is left behind, which ends with that replica.

    Raises:
        TimeoutError: it has not returned within the time.
    """
    answer = Future[T]()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits
            answer.set_exception(error)

    threading.Thread(target=run, name="store", daemon=True).start()
    wait([answer], timeout_s)
    if not answer.done():
        raise TimeoutError(f"the store at {address} did not answer within {timeout_s:g} s")
    return answer.result()


def _await_all(store: PrefixStore, peers: Sequence[str], place: int, timeout_s: float) -> None:
    """Wait until all replicas of a group are there. A process group itself would wait for one that has ended, too.

    Raises:
        OSError: one has ended, or does not come within the time.
    """
    store.set(f"here/{place}", "")
    begun = looked = time.monotonic()
    missing = list(range(len(peers)))
    while missing := [one for one in missing if not store.check([f"here/{one}"])]:
        now = time.monotonic()
        if now > begun + timeout_s:
            names = ", ".join(peers[one] for one in missing)
            raise TimeoutError(f"{names} did not come within {timeout_s:g} s")
        if now > looked + LOOK_S:
            looked = now
            for one in missing:
                with suppress(TimeoutError):  # it may be far, and is waited for
                    socket.create_connection(_endpoint(peers[one]), REACH_S).close()
        time.sleep(_POLL_S)


def _endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _own_host(address: str) -> str:
    """Return the address of this host on the way to the store at `address`."""
    host, port = _endpoint(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _checksum(tensor: Tensor) -> int:
    """Return a sum over the bytes of `tensor`, each times a number that depends on its place, modulo 2^62."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for chunk in torch.split(data, _CHECKED_BYTES):
        places = torch.arange(len(chunk), device=data.device) % 65_521 + 1
        total = 31 * total + (chunk * places).sum()
    return int(total) % (1 << 62)


def _lost(error: Exception) -> PeersLostError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return PeersLostError(f"the other policies of the step are lost: {reason}")
