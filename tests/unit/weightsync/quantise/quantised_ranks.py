"""Two processes of one source, which exchange the maxima of their scale groups over gloo."""

from __future__ import annotations

import multiprocessing as mp
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from quantised_models import WAIT_S, full_tensors, local, rows

from starling.common.errors import WeightsError
from starling.weightsync.plan.layout import TensorSpec, encode
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.quantise.recipe import linear_weights
from starling.weightsync.tensors.quantiser import GroupExchange

WEIGHT = TensorSpec(name="layer.weight", shape=(256, 384), dtype="bfloat16")
SPECS = (WEIGHT, TensorSpec(name="other.weight", shape=(256, 130), dtype="float32"))


def _rank(rank: int, path: str, form: str, deadline_s: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    source = rows(SPECS, [0, 77, 256])
    exchange = GroupExchange(deadline_s=deadline_s)
    with Publisher(source, transport="tcp", rank=rank, quantise=linear_weights(form), exchange=exchange) as publisher:
        pipe.send_bytes(encode(publisher.layout))
        while (version := pipe.recv()) is not None:
            full = full_tensors(SPECS, seed=version)
            try:
                pipe.send_bytes(encode(publisher.publish(version, local(source, rank, full))))
            except WeightsError as error:
                pipe.send_bytes(str(error).encode())


class Ranks:
    """Two processes of one source."""

    def __init__(self, path: Path, form: str, deadline_s: float) -> None:
        context = mp.get_context("forkserver")
        self.pipes, self.processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, str(path), form, deadline_s, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def answer(self, rank: int) -> bytes:
        assert self.pipes[rank].poll(60.0), f"rank {rank} does not answer"
        return self.pipes[rank].recv_bytes()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join(WAIT_S)
