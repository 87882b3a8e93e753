"""Learning from a teacher, in runs that have one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from starling.common.settings import Section


class DistillSettings(Section):
    """What the teacher's log-probabilities count in a step, and how (runs with `launch.num_teachers` above 0)."""

    loss: Literal["reverse_kl", "jsd"] = "reverse_kl"
    """`reverse_kl`: each sampled token has as its advantage how much likelier the teacher finds it. `jsd`: the
    generalised Jensen-Shannon divergence over the teacher's likeliest tokens (`teacher.top_k` above 0)."""
    coefficient: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Weight of the teacher."""
    reward_coefficient: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Weight of the advantages that come from rewards, beside it; without scorers these are 0."""
    discount: float = Field(default=0.0, ge=0.0, le=1.0)
    """How much a token answers for the teacher's view of the tokens after it (`reverse_kl`): 0 not at all."""
    beta: float = Field(default=0.5, ge=0.0, le=1.0)
    """Between KL(teacher || student) at 0, which covers what the teacher does, and KL(student || teacher) at 1, which
    seeks what it does most (`jsd`)."""
