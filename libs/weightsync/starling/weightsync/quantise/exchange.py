"""How ranks bring their maxima to one another: one collective call, with a deadline."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from starling.common.errors import WeightsError


class MaximaExchange(Protocol):
    """Brings messages between all ranks of a source; each calls it equally often, in the same order."""

    @property
    def rank(self) -> int:
        """Which rank of the source this process is."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the source."""

    def __call__(self, outgoing: Sequence[torch.Tensor], sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """Send `outgoing[r]` to rank r; return what rank r sent here, for each rank, this one among them.

        Args:
            outgoing: float32, one-dimensional, possibly empty.
            sizes: the number of elements that each rank sends here.

        Raises:
            WeightsError: not all came within the deadline.
        """


class GroupExchange:
    """Over a process group of torch.distributed, whose ranks are the layout's.

    Args:
        group: by default the group of all processes.
        deadline_s: how long one exchange may take; includes the time by which the ranks are apart.
        device: where messages travel from; by default the CPU, with NCCL the current CUDA device.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        deadline_s: float = 60.0,
        device: torch.device | str | None = None,
    ) -> None:
        self._group, self._deadline = group, timedelta(seconds=deadline_s)
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._device = torch.device(device or ("cuda" if dist.get_backend(group) == "nccl" else "cpu"))

    def __call__(self, outgoing: Sequence[torch.Tensor], sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """Exchange, as `MaximaExchange` says. After a failure the process group is of no use any more.

        Raises:
            WeightsError: a rank failed, or the deadline passed.
        """
        sent = torch.cat([message.to(self._device) for message in outgoing])
        received = sent.new_empty(sum(sizes))
        try:
            work = dist.all_to_all_single(
                received,
                sent,
                list(sizes),
                [message.numel() for message in outgoing],
                group=self._group,
                async_op=True,
            )
            assert work is not None
            work.wait(self._deadline)
        except RuntimeError as error:
            raise WeightsError(
                f"The maxima of the other ranks did not arrive within {self._deadline.total_seconds():g} s: {error}"
            ) from error
        return torch.split(received, list(sizes))
