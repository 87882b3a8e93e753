"""The controller's groups on this replica, from the order to the answer: in the engine, or in an environment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from starling.algo.text import decode
from starling.rollout.engine.base import EngineLostError, GroupFailed, GroupRequest, RequestError
from starling.rollout.engine.validation import kept_size_problem
from starling.rollout.env.runner import EpisodeRunner
from starling.rollout.shell.results import generated_message, interrupted_message, played_message, read_partials

if TYPE_CHECKING:
    from starling.common.wire.messages import Up, Wait
    from starling.rollout.core.machine import StartGroup
    from starling.rollout.engine.base import Engine, GroupResult, PartialCompletion
    from starling.rollout.engine.preparation import PreparedPrompt
    from starling.rollout.env.episodes.trajectory import PlayedGroup

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

    def accept(self, order: StartGroup) -> None:
        """Take an order whose prompt is about to be prepared.

        Raises:
            RequestError: its partial completions do not match its message.
        """
        if partials := read_partials(order.message, order.buffers):
            self._partials[order.message.lease] = (partials, order.message.sampling.temperature)

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
            engine.add(request)
        except EngineLostError as error:
            self._answer(lease, *interrupted_message(lease, partials, str(error), temperature))
            raise
        self._temperatures[lease] = temperature

    def answer(self, result: GroupResult | GroupFailed) -> str | None:
        """Answer with the engine's result for a group; returns the reason if the group failed."""
        temperature = self._temperatures.pop(result.lease, None)
        if temperature is None:  # it was cancelled meanwhile
            return None
        if isinstance(result, GroupFailed):
            return result.reason
        kept_bytes = sum(one.kept.ids.nbytes for one in result.completions if one.kept is not None)
        if problem := kept_size_problem(kept_bytes):
            return problem
        self._answer(result.lease, *generated_message(result, self._decode, temperature))
        return None

    def cancel(self, engine: Engine, lease: str) -> None:
        """Cancel a group."""
        self._partials.pop(lease, None)
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
        for lease, temperature in running.items():
            try:
                partial_completions = engine.interrupt(lease) or ()
            except EngineLostError:  # its next step reports that
                partial_completions = ()
            self._answer(lease, *interrupted_message(lease, partial_completions, reason, temperature, lost=lost))
        return [*preparing_partials, *running]


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
