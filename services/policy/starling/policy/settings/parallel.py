"""Sizes of the mesh of a policy's ranks (`docs/explanation/parallel.md`)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from starling.common.counts import counted
from starling.common.ranges import MAX_COUNT
from starling.common.settings import Seconds, SettingsSection


class ParallelSettings(SettingsSection):
    """Ranks along each axis of the mesh; their product is the number of ranks of a replica, processes of one host or of
    several."""

    dp_replicate: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Copies of the model, each of which computes a share of the microbatches (DDP; HSDP together with `dp_shard`)."""
    dp_shard: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Ranks over which parameters, gradients and moments are sharded, each computing a share of the microbatches
    (FSDP)."""
    tp: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Ranks that compute each microbatch together, with the matrices and the vocabulary divided (tensor parallelism,
    with sequence parallelism between the matrices)."""
    cp: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Ranks over which the tokens of a microbatch are divided (context parallelism); parameters are sharded over them
    too, as over `dp_shard`."""
    context: Literal["ulysses", "all_gather", "ring"] = "ulysses"
    """How the ranks of `cp` compute attention: `ulysses`, each with all tokens and a share of the heads; `all_gather`,
    each with its own queries and the keys of all tokens; `ring`, with the keys of one rank at a time."""
    ep: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Ranks over which the experts of each mixture are divided, to which tokens are sent (expert parallelism). It is no
    axis of its own but groups neighbours among the ranks of `dp_shard`, `cp` and `tp`: a divisor of their product."""
    pp: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Ranks over which the blocks are divided, so that each has about as many parameters (pipeline parallelism)."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zbv"] = "1f1b"
    """Order in which the ranks of `pp` compute their microbatches: `gpipe`, all forward passes first; `1f1b`, a
    backward pass as soon as there is one, with activations of at most `pp` microbatches; `interleaved`, the same with
    `stages_per_rank` groups of blocks on each rank, so that ranks wait less and send more; `zbv`, two groups on each
    rank, and backward passes in two parts, of which the second fills what would be waiting (arXiv:2401.10241)."""
    stages_per_rank: int = Field(default=2, ge=1, le=MAX_COUNT)
    """Groups of blocks on each rank of `pp` with the schedule `interleaved`."""
    reshard: Literal["default", "always", "never"] = "default"
    """Whether the ranks of `dp_shard` free a block's gathered parameters between its forward and its backward pass:
    `always`, less memory; `never`, less communication; `default`, but for the last block, which is needed again at
    once, and with `pp` none."""
    elastic: bool = False
    """Whether several replicas may make steps together: each computes a share of the microbatches, and they add up
    gradients. They join and leave while the run goes on. `launch.num_policies` above 1 sets it."""
    replica_timeout_s: Seconds = 60.0
    """Time that replicas wait for each other in one operation, before the step is made without those that hang. One
    that has ended is noticed at once. Less than `timeout_s`."""
    timeout_s: Seconds = 600.0
    """Time that ranks wait for each other in one operation, before the replica starts again from its newest state. A
    rank that has ended is noticed at once."""
    join_s: Seconds = 300.0
    """How long the nodes of a policy on several hosts (`--nnodes`) wait for each other, at the start and when the
    replica starts again."""

    @property
    def num_stages(self) -> int:
        """Groups of blocks on all ranks of `pp`."""
        return self.pp * {"interleaved": self.stages_per_rank, "zbv": 2}.get(self.schedule, 1)

    @property
    def num_ranks(self) -> int:
        """Product of the sizes."""
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp

    @property
    def has_mesh(self) -> bool:
        """Whether the policy's process computes as a rank of a mesh, or together with other replicas."""
        return self.num_ranks > 1 or self.elastic

    @property
    def num_shards(self) -> int:
        """Ranks over which parameters are sharded besides `tp`."""
        return self.dp_shard * self.cp

    @model_validator(mode="after")
    def _axes_exist(self) -> Self:
        if self.pp > 1 and self.reshard == "always":
            raise ValueError(
                f'reshard = "always" with pp = {self.pp} would gather every block again for each microbatch: use '
                '"default", which with pp keeps them until the last'
            )
        shared = self.dp_shard * self.cp * self.tp
        if shared % self.ep:
            fitting = ", ".join(str(size) for size in range(1, shared + 1) if not shared % size)
            raise ValueError(
                f"ep = {self.ep} does not divide the {counted(shared, 'rank')} of dp_shard = {self.dp_shard} x cp = "
                f"{self.cp} x tp = {self.tp}, over which experts are divided: use one of {fitting}"
            )
        return self
