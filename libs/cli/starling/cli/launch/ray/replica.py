"""One replica in Ray, as its driver sees it: a placement group, and an actor on each of its nodes.

    placing -> (all actors say where they are) -> running -> (a process has ended, or is lost) -> ending -> over

A replica with several nodes ends with the first of its processes that fails; the others are closed then. Its end is
told when all are gone, or were silent for `LOST_S`, and only then its placement group is released: the GPUs are free.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterator
from typing import Any, Final

from starling.cli.launch.ray.actor import ProcessActor

POLL_S: Final = 1.0
"""How often an actor is asked."""
LOST_S: Final = 60.0
"""An actor that answers nothing for this long is lost, whatever Ray thinks of its node."""
BEGIN_S: Final = 600.0
"""How long the worker processes of a placement group that has its nodes may take to start."""
WAITS_S: Final = 10.0
"""How often a replica that has no nodes yet says so."""
ENDING_S: Final = 30.0
"""How long the other nodes of a replica may take when one has failed."""

Told = tuple[str, dict[str, Any]]
"""A line for the launcher: its kind and its fields."""


class _Node:
    """The actor on one node of a replica."""

    def __init__(self, actor: Any, order: dict[str, Any]) -> None:
        self.actor, self.order = actor, order
        self.place: dict[str, Any] = {}
        """Where it is; empty before it said so."""
        self.asked: Any = None
        """The call that is being waited for."""
        self.call = ""
        self.answered_at = time.monotonic()
        self.ask_at = 0.0
        self.code: int | None = None
        self.lost = ""
        """Why there is nothing more to be heard of it."""
        self.last_line = ""

    @property
    def is_over(self) -> bool:
        return self.code is not None or bool(self.lost)

    @property
    def has_failed(self) -> bool:
        return bool(self.lost) or self.code not in (None, 0)

    def ask(self, call: str, *arguments: Any) -> None:
        self.call, self.asked = call, getattr(self.actor, call).remote(*arguments)


class RayReplica:
    """A replica from the request for its nodes to its end."""

    def __init__(self, ray: Any, command: dict[str, Any]) -> None:
        """Ask Ray for the nodes, and for an actor on each."""
        self._ray, self._command = ray, command
        needs = command["needs"]
        groups = importlib.import_module("ray.util")
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        bundle = needs["bundle"]
        num = needs["num_nodes"]
        selector = {"bundle_label_selector": [needs["labels"]] * num} if needs["labels"] else {}
        self._table = groups.placement_group_table
        self._remove = groups.remove_placement_group
        self._group = groups.placement_group(
            [bundle] * num, strategy=needs["strategy"], name=f"starling-{command['name']}", **selector
        )
        more = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
        make = ray.remote(ProcessActor).options
        self._nodes = []
        for number, order in enumerate(command["orders"]):
            actor = make(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                memory=int(bundle["memory"]) if "memory" in bundle else None,
                resources=more,
                max_restarts=0,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(self._group, number),
            ).remote()
            self._nodes.append(_Node(actor, order))
        for node in self._nodes:
            node.ask("prepare")
        self._has_nodes_since: float | None = None
        self._look_at = time.monotonic() + 1.0
        self._waits_at = 0.0
        self._is_running = False
        self._end_by: float | None = None
        self.is_over = False

    def asked(self) -> list[Any]:
        """Return the calls that are being waited for."""
        return [node.asked for node in self._nodes if node.asked is not None]

    def stop(self) -> None:
        """Ask its services to end; a replica that does not run yet is given up."""
        if not self._is_running:
            self.close()
        else:
            for node in self._nodes:
                if not node.is_over:
                    node.actor.stop.remote()

    def close(self) -> None:
        """End its services within their grace time; a replica that does not run yet is given up."""
        self._end_by = self._end_by or time.monotonic() + ENDING_S
        for node in self._nodes:
            if not self._is_running:
                node.lost = node.lost or "it was given up before it had its nodes"
            elif not node.is_over:
                node.actor.close.remote()

    def release(self) -> None:
        """Give the nodes back to Ray; agents that still run end by themselves."""
        for node in self._nodes:
            self._ray.kill(node.actor)
        self._remove(self._group)
        self.is_over = True

    def advance(self, now: float) -> Iterator[Told]:
        """Take the answers of the actors, ask again what is due, and yield what the launcher has to know."""
        if not self._is_running and self._end_by is None:
            yield from self._look_for_nodes(now)
        for number, node in enumerate(self._nodes):
            yield from self._listen(number, node, now)
        if not self._is_running and all(node.place for node in self._nodes) and self._end_by is None:
            yield self._begin(now)
        if any(node.has_failed for node in self._nodes) and self._end_by is None:
            self.close()
        if self._end_by is not None and now > self._end_by:
            for node in self._nodes:
                node.lost = node.lost or ("" if node.is_over else f"it did not end within {ENDING_S:g} s")
        if all(node.is_over for node in self._nodes):
            self.release()
            yield self._end()

    def _look_for_nodes(self, now: float) -> Iterator[Told]:
        """Look whether the placement group has its nodes; its actors have a deadline from then on."""
        if self._has_nodes_since is not None:
            if now > self._has_nodes_since + BEGIN_S:
                for node in self._nodes:
                    node.lost = node.lost or f"Ray started no actor within {BEGIN_S:g} s"
            return
        if now < self._look_at:
            return
        self._look_at = now + POLL_S
        if self._table(self._group).get("state") == "CREATED":
            self._has_nodes_since = now
        elif now >= self._waits_at:
            self._waits_at = now + WAITS_S
            yield "waits", {}

    def _begin(self, now: float) -> Told:
        """Start the agents: all nodes are known."""
        self._is_running = True
        first = self._nodes[0].place
        for node in self._nodes:
            node.answered_at = now
            node.ask("start", json.dumps(node.order), self._command["python"], f"{first['address']}:{first['port']}")
        places = [node.place for node in self._nodes]
        return "placed", {"nodes": [place["address"] for place in places], "niceness": [p["niceness"] for p in places]}

    def _listen(self, number: int, node: _Node, now: float) -> Iterator[Told]:
        """Take the answer of one actor, if there is one, and ask again when that is due."""
        if node.is_over:
            return
        if node.asked is None:
            if now >= node.ask_at and (self._is_running or not node.place):
                node.ask("poll" if self._is_running else "prepare")
        elif self._ray.wait([node.asked], timeout=0)[0]:
            yield from self._answer(number, node, now)
        if self._is_running and not node.is_over and now > node.answered_at + LOST_S:
            node.lost = f"its actor answered nothing for {LOST_S:g} s"

    def _answer(self, number: int, node: _Node, now: float) -> Iterator[Told]:
        call, asked, node.asked = node.call, node.asked, None
        errors = self._ray.exceptions
        try:
            found = self._ray.get(asked)
        except errors.ActorUnavailableError:  # its node may come back; LOST_S is the limit
            node.ask_at = now + POLL_S
            return
        except errors.RayTaskError as error:
            node.lost = f"its actor failed: {str(error).strip().splitlines()[-1]}"
            return
        except errors.RayError as error:
            node.lost = self._why(node, error)
            return
        node.answered_at = now
        if call == "prepare":
            node.place = found
        elif call == "poll":
            node.ask_at = now + POLL_S
            if found["lines"]:
                node.last_line = next((line for line in reversed(found["lines"]) if line.strip()), node.last_line)
                yield "lines", {"node": number, "lines": found["lines"], "left_out": found["left_out"]}
            node.code = found["code"]

    def _why(self, node: _Node, error: Exception) -> str:
        """Return why an actor is gone: its node, or what Ray says."""
        alive = {one["NodeID"] for one in self._ray.nodes() if one["Alive"]}
        if node.place and node.place["node"] not in alive:
            return "its node left Ray"
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1][:300] if lines else type(error).__name__

    def _end(self) -> Told:
        """Return the end: that of the first process that failed, or else of the service, which is on the first node."""
        node = next((one for one in self._nodes if one.has_failed), self._nodes[0])
        fields = {"code": node.code, "lost": node.lost, "node": node.place.get("address", "")}
        return "ended", {**fields, "last_line": node.last_line}
