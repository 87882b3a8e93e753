"""The controller's groups on this replica, from the order to the answer: in the engine, or in an environment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import structlog

from starling.algo.text import decode
from starling.rollout.engine.base import EngineLostError, GroupFailed, GroupRequest, RequestError
from starling.rollout.engine.validation import kept_size_problem, routing_size_problem
from starling.rollout.env.runner import EpisodeRunner
from starling.rollout.shell.results import generated_message, interrupted_message, played_message, read_partials

if TYPE_CHECKING:
    from starling.common.wire.messages import Up, Wait
    from starling.rollout.core.machine import StartGroup
    from starling.rollout.engine.base import Engine, GroupResult, PartialCompletion
    from starling.rollout.engine.preparation import PreparedPrompt
    from starling.rollout.env.episodes.trajectory import PlayedGroup

log = structlog.get_logger(__name__)

SendAnswer = Callable[[str, "Up", tuple[bytes, ...]], None]
"""Takes a lease, its answer, and the answer's buffers."""


class HasLeases(Protocol):
    """A part of the replica that works on leases, with time limits."""

    def expire(self, now: float) -> list[tuple[str, str]]:
        """Cancel the leases that took too long; return them with the reason."""
        ...

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Return the waits at `now`."""
        ...


class EngineGroups:
    """Groups that the engine generates.

    Args:
        answer: sends an answer reliably.
        decode: decodes token ids, without special tokens.
    """

    def __init__(self, answer: SendAnswer, decode: Callable[[Sequence[int]], str]) -> None:
        self._answer, self._decode = answer, decode
        self._partials: dict[str, tuple[tuple[PartialCompletion, ...], float]] = {}
        """Partial completions of groups that are not in the engine yet, with their temperature."""
        self._temperatures: dict[str, float] = {}
        """Temperatures of the groups in the engine."""
        self._resumed: dict[str, GroupRequest] = {}
        """Requests, without their partial completions, of the groups in the engine that resume some."""

    def accept(self, order: StartGroup) -> None:
        """Take an order whose prompt is about to be prepared."""
        lease = order.message.lease
        try:
            partials = read_partials(order.message, order.buffers)
        except RequestError as error:
            _note_anew(lease, str(error))
            return
        if partials:
            self._partials[lease] = (partials, order.message.sampling.temperature)

    def begin(self, engine: Engine, prepared: PreparedPrompt) -> None:
        """Add a group to `engine`.

        Raises:
            RequestError: the group cannot be generated.
            EngineLostError: the engine is lost; the group was handed over.
        """
        message, lease = prepared.message, prepared.message.lease
        partials, temperature = self._partials.pop(lease, ((), message.sampling.temperature))
        if prepared.problem is not None:
            raise RequestError(prepared.problem)
        request = GroupRequest(
            lease, prepared.ids, message.num_completions, message.sampling, prepared.tensors, partials
        )
        try:
            is_resumed = _add(engine, request)
        except EngineLostError as error:
            self._answer(lease, *interrupted_message(lease, partials, str(error), temperature))
            raise
        self._temperatures[lease] = temperature
        if is_resumed:
            self._resumed[lease] = replace(request, partial=())

    def begin_anew(self, engine: Engine, result: GroupResult | GroupFailed) -> bool:
        """Add a group again that failed, without the partial completions that it resumed; returns False for others.

        They may be why: another replica has made them so long that they fill the KV cache, or with as many kept tokens
        as can be sent. A failure would be this replica's.

        Raises:
            EngineLostError: the engine is lost.
        """
        request = self._resumed.pop(result.lease, None)
        if request is None or not (problem := _problem(result)):
            return False
        engine.add(request)
        _note_anew(request.lease, problem)
        return True

    def answer(self, result: GroupResult | GroupFailed) -> str | None:
        """Answer with the engine's result for a group; returns the reason if the group failed."""
        temperature = self._temperatures.pop(result.lease, None)
        if temperature is None:  # it was cancelled meanwhile
            return None
        if isinstance(result, GroupFailed):
            return result.reason
        if problem := _problem(result):
            return problem
        self._answer(result.lease, *generated_message(result, self._decode, temperature))
        return None

    def cancel(self, engine: Engine, lease: str) -> None:
        """Cancel a group."""
        self._partials.pop(lease, None)
        self._resumed.pop(lease, None)
        if self._temperatures.pop(lease, None) is not None:
            engine.cancel(lease)

    def interrupt(self, engine: Engine, reason: str, preparing: Iterable[str], *, lost: bool = False) -> list[str]:
        """Hand over the groups in `engine`, and those being prepared, to other replicas; return their leases.

        `lost`: the engine died, possibly because of one of its groups. A group whose tokens a lost engine does not give
        is handed over without them.
        """
        preparing_partials = {lease: self._partials.pop(lease, ((), -1.0)) for lease in preparing}
        for lease, (partials, temperature) in preparing_partials.items():
            self._answer(lease, *interrupted_message(lease, partials, reason, temperature))
        running, self._temperatures = self._temperatures, {}
        self._resumed.clear()
        for lease, temperature in running.items():
            try:
                partial_completions = engine.interrupt(lease) or ()
            except EngineLostError:  # its next step reports that
                partial_completions = ()
            self._answer(lease, *interrupted_message(lease, partial_completions, reason, temperature, lost=lost))
        return [*preparing_partials, *running]


def _add(engine: Engine, request: GroupRequest) -> bool:
    """Add a group to `engine`, without its partial completions if they cannot be resumed; returns whether they are.

    Another replica has sampled them, or says so. What is wrong with them is no failure of the prompt, nor of this
    replica, which would be blamed for it.
    """
    try:
        longest = len(request.prompt_ids) + max((len(one.token_ids) for one in request.partial), default=0)
        if request.partial and longest > engine.max_model_len:
            raise RequestError(f"a sequence has {longest} tokens already, and the context {engine.max_model_len}")
        engine.add(request)
    except RequestError as error:
        if not request.partial:
            raise
        engine.add(replace(request, partial=()))
        _note_anew(request.lease, str(error))
        return False
    return bool(request.partial)


def _problem(result: GroupResult | GroupFailed) -> str:
    """Return why a group cannot be answered with `result`; empty if it can."""
    if isinstance(result, GroupFailed):
        return result.reason
    routings = [result.prompt_routing, *(one.routing for one in result.completions)]
    return kept_size_problem(
        sum(one.kept.ids.nbytes for one in result.completions if one.kept is not None)
    ) or routing_size_problem(sum(one.nbytes for one in routings if one is not None))


def _note_anew(lease: str, reason: str) -> None:
    log.warning("partial completions cannot be resumed: the group begins anew", lease=lease, reason=reason)


class EnvironmentGroups(EpisodeRunner):
    """Groups that are played in an environment."""

    def answer(self, played: PlayedGroup, send: SendAnswer) -> bool:
        """Answer with the trajectories of a group; returns False when the group was cancelled."""
        if not self.take(played.lease):
            return False
        send(played.lease, *played_message(played, lambda ids: decode(self.tokenizer, ids)))
        return True

    def interrupt(self, reason: str, send: SendAnswer) -> list[str]:
        """Hand over all groups; return their leases. Another replica plays them from the beginning, since the state of
        an environment cannot be moved."""
        leases = self.cancel_all()
        for lease in leases:
            send(lease, *interrupted_message(lease, (), reason))
        return leases
