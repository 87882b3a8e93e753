"""Placements of a run's replicas: what each of them is, needs, and is started with."""

from __future__ import annotations

from dataclasses import replace

from starling.cli.launch.interface import Placement
from starling.cli.recipe.pools import pool_of
from starling.cli.recipe.schema import Recipe
from starling.cli.run.attempt import Attempt
from starling.cli.run.processes import FORKED
from starling.cli.run.replicas import number_of
from starling.common.addresses import address_of


def first_placements(recipe: Recipe, attempt: Attempt, controller: str) -> list[Placement]:
    """Return all replicas of a run at its start, in the order in which they are started.

    Those of the fork server come last: the start of the first one waits until the server has imported everything.
    """
    names = [(role, f"{role}-{i}") for role, num in recipe.replicas.items() for i in range(num)]
    return [
        placement_of(recipe, attempt, controller, role, name)
        for role, name in sorted(names, key=lambda one: one[0] in FORKED)
    ]


def placement_of(recipe: Recipe, attempt: Attempt, controller: str, role: str, name: str) -> Placement:
    """Return the placement of one replica. `controller`: its address, ``tcp://HOST:PORT``."""
    launch = recipe.launch
    files = ("--config", str(attempt.config), "--dir", str(attempt.folder))
    # The configuration has the endpoint of the controller.
    own = (f"--observe.http={address_of(recipe.observe.http, name)}",) if recipe.observe.http else ()
    placement = Placement(
        name,
        role,
        (*files, "--name", name, "--controller", controller, *own),
        num_gpus={"policy": launch.gpus_per_policy, "rollout": launch.gpus_per_rollout}.get(role, 0),
        num_nodes={"policy": launch.policy_nodes, "rollout": launch.rollout_nodes}.get(role, 1),
        controller=controller,
        settings=own,
    )
    pool = pool_of(recipe.rollout.pools, number_of(name)) if role == "rollout" else None
    if pool is None:
        return placement
    settings = pool.flags()
    return replace(
        placement,
        arguments=(*placement.arguments, *settings),
        settings=(*own, *settings),
        num_gpus=pool.gpus or placement.num_gpus,
        gpu_kind=pool.gpu_kind,
        partition=pool.partition,
        node_selector=pool.node_selector,
    )
