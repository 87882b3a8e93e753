"""Meshes for a model and a number of GPUs, the fastest first, with their memory, traffic and time. Pure.

The time of a step is a model of first order, for choosing between meshes and not for promises:

    compute       6 operations per active parameter and token, and 6 per token, head element and token of its sequence
                  for the attention; a third more where blocks are computed again; at the stated rate of a GPU
    tp, cp, ep    wait for their exchanges: nothing else can be computed meanwhile
    pp            the rank with most to compute decides; it waits for the first microbatches to arrive and for the
                  last gradients to leave, and for what is sent between
    dp_shard      gathers and sums while it computes: only what takes longer than that counts
    efsdp         likewise, with the experts that ep divides
    dp_replicate  sums after the last pass

An axis whose ranks lie within a host uses the links between its GPUs, any other one the network. Each collective takes
a fixed time, and some for each host that it passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from starling.common.errors import ConfigError
from starling.policy.plan.memory import RankMemory, memory_of
from starling.policy.plan.sizes import ModelSizes
from starling.policy.plan.stages import num_idle, num_passes, sizes_of_rank, stages_of_rank
from starling.policy.plan.traffic import Traffic, Update, traffic_of
from starling.policy.settings.parallel import ParallelSettings

AXES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
MAX_STAGES: Final = 16
"""Most ranks of pp that are proposed."""
BFLOAT16: Final = 2
USABLE: Final = 0.9
"""Share of a GPU's memory that is planned: the rest is context, gaps and buckets of a publication."""
LATENCY_S: Final = 20e-6
"""Of a collective, however small."""
HOP_S: Final = 5e-6
"""From host to host: a ring passes each of them."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The GPUs of a replica; defaults are those of H100s with NVLink and a card of 400 Gbit/s each."""

    gpus_per_host: int = 8
    memory_gb: float = 80.0
    tflops: float = 400.0
    """That a GPU achieves in the products of training, in 10^12 operations per second."""
    host_gb_per_s: float = 400.0
    """From one GPU to others of its host, in one direction."""
    network_gb_per_s: float = 50.0
    """From one GPU to those of other hosts, in one direction."""

    def seconds(self, sent: Traffic, num_ranks: int, stride: int) -> float:
        """Return the time of traffic among `num_ranks` ranks that are `stride` apart."""
        num_hosts = -(-num_ranks * stride // self.gpus_per_host)
        bandwidth = self.host_gb_per_s if num_hosts == 1 else self.network_gb_per_s
        return sent.num_bytes / (bandwidth * 1e9) + sent.num_calls * (LATENCY_S + HOP_S * (num_hosts - 1))


@dataclass(frozen=True, slots=True)
class StepSize:
    """Tokens of a step."""

    num_tokens: int
    """Of all its microbatches."""
    microbatch_tokens: int
    sequence_tokens: int
    """Of one sequence: what its last token attends to."""
    chunk_tokens: int = 1024
    """`policy.memory.logprob_chunk_tokens`."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A mesh, and what a rank of it needs for a step."""

    parallel: ParallelSettings
    recomputes: bool
    memory: RankMemory
    traffic: dict[str, Traffic]
    """By axis, for a step."""
    compute_s: float
    bubble_s: float
    """In which a rank of pp has nothing to compute."""
    waiting_s: float
    """For communication that nothing hides."""
    tokens_per_s: float
    """Of each GPU."""

    @property
    def seconds(self) -> float:
        """Time of a step."""
        return self.compute_s + self.bubble_s + self.waiting_s


def propose(sizes: ModelSizes, num_gpus: int, step: StepSize, hardware: Hardware) -> list[Proposal]:
    """Return the meshes of `num_gpus` ranks that fit into memory, the fastest first; of equal ones the simpler first.

    Raises:
        ConfigError: none fits; the text names the one that needs least, and the remedy.
    """
    found = [
        proposal_of(sizes, parallel, step, hardware, recomputes=recomputes)
        for parallel in _meshes(sizes, num_gpus, hardware)
        for recomputes in (False, True)
    ]
    limit = USABLE * hardware.memory_gb * 1e9
    fitting = [one for one in found if one.memory.total <= limit]
    if not fitting:
        least = min(found, key=lambda one: one.memory.total)
        raise ConfigError(
            f"no mesh of {num_gpus} GPUs fits into {USABLE:.0%} of {hardware.memory_gb:g} GB each: "
            f"{written(least.parallel)} needs least, {least.memory.total / 1e9:.1f} GB; give more GPUs, or smaller "
            "microbatches"
        )
    return sorted(fitting, key=lambda one: (one.seconds, one.recomputes, len(one.traffic)))


def proposal_of(
    sizes: ModelSizes, parallel: ParallelSettings, step: StepSize, hardware: Hardware, *, recomputes: bool
) -> Proposal:
    """Return what a rank of one mesh needs."""
    copies = parallel.dp_replicate * parallel.dp_shard
    own_passes = math.ceil(step.num_tokens / (step.microbatch_tokens * copies))
    update = Update(num_passes(parallel, own_passes), step.microbatch_tokens, BFLOAT16, recomputes)
    traffic = traffic_of(sizes, parallel, update)
    pass_s = max(
        _operations(sizes_of_rank(sizes, parallel, place), parallel, place, step) for place in range(parallel.pp)
    ) / (hardware.tflops * 1e12)
    if recomputes:
        pass_s *= 4 / 3
    compute_s, bubble_s = own_passes * pass_s, num_idle(parallel) * pass_s
    seconds = {axis: _seconds(axis, sent, parallel, hardware) for axis, sent in traffic.items()}
    gathers_s = seconds.pop("dp_shard", 0.0) + seconds.pop("efsdp", 0.0)
    waiting_s = max(0.0, gathers_s - compute_s) + sum(seconds.values())
    return Proposal(
        parallel=parallel,
        recomputes=recomputes,
        memory=memory_of(sizes, parallel, update, chunk_tokens=step.chunk_tokens),
        traffic=traffic,
        compute_s=compute_s,
        bubble_s=bubble_s,
        waiting_s=waiting_s,
        tokens_per_s=step.num_tokens / (compute_s + bubble_s + waiting_s) / parallel.num_ranks,
    )


def _operations(own: ModelSizes, parallel: ParallelSettings, place: int, step: StepSize) -> float:
    """Return the operations of a rank for one microbatch, from the sizes of what a place of pp has."""
    is_last = parallel.num_stages - 1 in stages_of_rank(parallel, place)
    num_active = own.num_active if is_last else own.num_active_in_blocks
    query = own.heads * own.head_dim
    operations = 6 * num_active + 6 * own.num_blocks * query * step.sequence_tokens
    return operations * step.microbatch_tokens / (parallel.cp * parallel.tp)


def written(parallel: ParallelSettings) -> str:
    """Return the axes of a mesh in words, such as `dp_shard 8 x tp 2`; ep, which divides some of them, comes last."""
    sizes = {axis: getattr(parallel, axis) for axis in (*AXES, "ep")}
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1 rank"


def _meshes(sizes: ModelSizes, num_gpus: int, hardware: Hardware) -> Iterator[ParallelSettings]:
    """Yield the meshes of `num_gpus` ranks that the trainer has, with tp and ep within a host."""
    for tp in _divisors(math.gcd(num_gpus, hardware.gpus_per_host)):
        if not can_divide(sizes, tp):
            continue
        for pp in _divisors(num_gpus // tp):
            if pp > 1 and not (sizes.has_tensor_plan and pp <= min(MAX_STAGES, sizes.num_blocks)):
                continue
            for cp in _divisors(num_gpus // (tp * pp)):
                if sizes.heads // tp % cp:
                    continue
                for dp_shard in _divisors(num_gpus // (tp * pp * cp)):
                    copies = num_gpus // (tp * pp * cp * dp_shard)
                    for ep in _divisors(math.gcd(sizes.num_experts or 1, hardware.gpus_per_host)):
                        if dp_shard * cp * tp % ep == 0:
                            yield ParallelSettings(dp_replicate=copies, dp_shard=dp_shard, cp=cp, tp=tp, pp=pp, ep=ep)


def can_divide(sizes: ModelSizes, tp: int) -> bool:
    """Return whether `tp` ranks can divide the heads and hidden units of a model."""
    if tp == 1:
        return True
    key_heads = sizes.key_heads % tp == 0 or tp % sizes.key_heads == 0
    return sizes.has_tensor_plan and key_heads and sizes.heads % tp == 0 and sizes.inner % tp == 0


def _divisors(number: int) -> list[int]:
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def _seconds(axis: str, sent: Traffic, parallel: ParallelSettings, hardware: Hardware) -> float:
    """Return the time of the traffic along an axis."""
    tp, shards = parallel.tp, parallel.num_shards
    ranks = {
        "tp": (tp, 1),
        "ep": (parallel.ep, 1),
        "efsdp": (tp * shards // parallel.ep, parallel.ep),
        # Each rank sends to its neighbours.
        "pp": (2, tp * shards * parallel.dp_replicate),
        "cp": (parallel.cp, tp),
        "dp_shard": (shards, tp),
        "dp_replicate": (parallel.dp_replicate, tp * shards),
    }
    return hardware.seconds(sent, *ranks[axis])
