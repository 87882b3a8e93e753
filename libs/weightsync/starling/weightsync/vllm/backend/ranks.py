"""The ranks of a trainer: rank 0 leads, the others send it their part, and all learn how it ended."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch

from starling.common.errors import WeightsError
from starling.weightsync.plan.layout import UNDECODABLE


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank contributes, or why it cannot; and the same of the leader's result."""

    data: bytes = b""
    problem: str = ""


class TrainerRanks:
    """Steps that all ranks of a trainer take together, over a process group of their own on the CPU.

    Only a few bytes of control travel here: layouts and offers, never weights.

    Args:
        rank: of this process.
        deadline_s: how long a step may take; a rank that waits longer for another one raises.
        alone: other ranks take no part, and this one has everything.

    Raises:
        WeightsError: `rank` is not that of torch.distributed's default group.
    """

    def __init__(self, rank: int, deadline_s: float, *, alone: bool = False) -> None:
        self.rank, self._group = rank, None
        distributed: Any = torch.distributed
        if alone or not (distributed.is_available() and distributed.is_initialized()):
            if rank:
                raise WeightsError(f"rank is {rank}, and torch.distributed is not initialised: initialise it first.")
            self.num_ranks = 1
            return
        self.num_ranks = int(distributed.get_world_size())
        if rank != distributed.get_rank():
            raise WeightsError(f"rank is {rank}, expected that of torch.distributed, {distributed.get_rank()}.")
        if self.num_ranks > 1:
            self._group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def together(self, contribute: Callable[[], bytes], lead: Callable[[list[bytes]], bytes]) -> bytes:
        """Run `contribute` on every rank, then `lead` on rank 0 with the results in rank order; return its result.

        Raises:
            WeightsError: on every rank, what was raised on one of them; or a rank is gone.
        """
        mine = _attempt(contribute)
        parts = self._gather(msgspec.msgpack.encode(mine))
        result = _Part()
        if self.leads:
            result = self._led(parts, lead)
        result = _decode(self._broadcast(msgspec.msgpack.encode(result)))
        if result.problem:
            raise WeightsError(result.problem)
        return result.data

    def close(self) -> None:
        """Free the process group."""
        group, self._group = self._group, None
        if group is not None:
            torch.distributed.destroy_process_group(group)

    def _led(self, parts: list[bytes], lead: Callable[[list[bytes]], bytes]) -> _Part:
        decoded = [_decode(part) for part in parts]
        for rank, part in enumerate(decoded):
            if part.problem:
                where = f"Rank {rank} of the trainer: " if self.num_ranks > 1 else ""
                return _Part(problem=where + part.problem)
        return _attempt(lambda: lead([part.data for part in decoded]))

    def _gather(self, data: bytes) -> list[bytes]:
        """Return the data of all ranks on rank 0, and nothing elsewhere."""
        if self._group is None:
            return [data]
        distributed: Any = torch.distributed
        content = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
        try:
            if not self.leads:
                distributed.send(torch.tensor([len(data)]), 0, group=self._group)
                distributed.send(content, 0, group=self._group)
                return []
            return [data, *(self._received(rank) for rank in range(1, self.num_ranks))]
        except RuntimeError as error:
            raise WeightsError(f"A rank of the trainer does not answer: {_first_line(error)}") from error

    def _received(self, rank: int) -> bytes:
        distributed: Any = torch.distributed
        size = torch.zeros(1, dtype=torch.int64)
        distributed.recv(size, rank, group=self._group)
        content = torch.zeros(max(1, int(size)), dtype=torch.uint8)
        distributed.recv(content, rank, group=self._group)
        return content.numpy().tobytes()[: int(size)]

    def _broadcast(self, data: bytes) -> bytes:
        """Return the data of rank 0."""
        if self._group is None:
            return data
        distributed: Any = torch.distributed
        try:
            size = torch.tensor([len(data)])
            distributed.broadcast(size, 0, group=self._group)
            content = torch.zeros(int(size), dtype=torch.uint8)
            if self.leads:
                content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            distributed.broadcast(content, 0, group=self._group)
        except RuntimeError as error:
            raise WeightsError(f"A rank of the trainer does not answer: {_first_line(error)}") from error
        return content.numpy().tobytes()


def _attempt(work: Callable[[], bytes]) -> _Part:
    try:
        return _Part(data=work())
    except WeightsError as error:
        return _Part(problem=str(error))
    except Exception as error:  # noqa: BLE001 - every rank raises it
        return _Part(problem=f"{type(error).__name__}: {error}")


def _decode(data: bytes) -> _Part:
    try:
        return msgspec.msgpack.decode(data, type=_Part)
    except UNDECODABLE as error:
        raise WeightsError(f"A rank of the trainer sent what is no message: {error}.") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
