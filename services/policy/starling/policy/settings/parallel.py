"""Sizes of the mesh of a policy's ranks (`docs/explanation/parallel.md`)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from starling.common.ranges import MAX_COUNT
from starling.common.settings import Seconds, SettingsSection


class ParallelSettings(SettingsSection):
    """Ranks along each axis of the mesh; their product is the number of ranks of a replica, processes of one host."""

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
    pp: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Ranks over which the blocks are divided (pipeline parallelism); only 1 so far."""
    reshard: Literal["default", "always", "never"] = "default"
    """Whether the ranks of `dp_shard` free a block's gathered parameters between its forward and its backward pass:
    `always`, less memory; `never`, less communication; `default`, but for the last block, which is needed again at
    once."""
    timeout_s: Seconds = 600.0
    """Time that ranks wait for each other in one operation, before the replica starts again from its newest state. A
    rank that has ended is noticed at once."""

    @property
    def num_ranks(self) -> int:
        """Product of the sizes."""
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp

    @model_validator(mode="after")
    def _axes_exist(self) -> Self:
        if self.pp > 1:
            raise ValueError(f"pp = {self.pp}: this axis is not available yet; set it to 1, and use dp_shard or tp")
        return self
