"""A worker's first steps: it gives up what scorers must not have. It imports only the standard library."""

from __future__ import annotations

import os

from starling.common.sandbox.execution import start_executor
from starling.common.sandbox.inside import give_up_privileges, settle
from starling.reward.score.workers.time_slice import ask_for_time_slice


def confine(mechanism: str, *, max_tasks: int, data_mb: int, runs_programs: bool, network: bool, nice: int = 0) -> None:
    """Limit this process and its descendants, before anything of a user is imported.

    Args:
        mechanism: how the worker's sandbox was made.
        max_tasks: limit on its processes and threads.
        data_mb: limit on the private memory of each process, in MiB; 0 for none.
        runs_programs: whether its scorers may run programs that a model wrote.
        network: whether its scorers may reach the network.
        nice: how much lower than that of the service its priority is; with 0 it also keeps the service's time slice.
    """
    if nice:
        os.nice(nice)
        ask_for_time_slice(0)
    settle(mechanism, data_mb=data_mb, max_tasks=max_tasks)
    if runs_programs:
        start_executor(mechanism)
    give_up_privileges(mechanism, network=network)
