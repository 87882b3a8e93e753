"""The groups that the engine generates for the controller: from the order to the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from starling.algo.text import decode
from starling.rollout.engine.base import EngineLostError, GroupFailed, GroupRequest, RequestError
from starling.rollout.env.runner import EpisodeRunner
from starling.rollout.shell.results import generated_message, interrupted_message, played_message, read_partials

if TYPE_CHECKING:
    from starling.common.wire.messages import Up
    from starling.rollout.core.machine import StartGroup
    from starling.rollout.engine.base import Engine, GroupResult, PartialCompletion
    from starling.rollout.shell.preparation import PreparedPrompt

SendAnswer = Callable[[str, "Up", tuple[bytes, ...]], None]
"""Takes a lease, its answer, and the buffers of that."""


class EngineGroups:
    """What the engine was asked for on behalf of the controller.

    Args:
        answer: sends an answer, and sees to it that it arrives.
        decode: makes token ids into text, without special tokens.
    """

    def __init__(self, answer: SendAnswer, decode: Callable[[Sequence[int]], str]) -> None:
        self._answer, self._decode = answer, decode
        self._partials: dict[str, tuple[tuple[PartialCompletion, ...], float]] = {}
        """What another replica left of groups that the engine does not have yet, and their temperature."""
        self._temperatures: dict[str, float] = {}
        """Of the groups that the engine has."""

    def come(self, order: StartGroup) -> None:
        """Take up an order, whose prompt is to be prepared now.

        Raises:
            RequestError: what is there of the group already is not what its message says.
        """
        if partials := read_partials(order.message, order.buffers):
            self._partials[order.message.lease] = (partials, order.message.sampling.temperature)

    def begin(self, engine: Engine, prepared: PreparedPrompt) -> None:
        """Give a group to `engine`.

        Raises:
            RequestError: it cannot be generated.
            EngineLostError: the engine is gone; the group was handed over.
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

    def end(self, result: GroupResult | GroupFailed) -> str | None:
        """Answer with what the engine made of a group, or return why it made nothing of it."""
        temperature = self._temperatures.pop(result.lease, None)
        if temperature is None:  # it was taken out meanwhile
            return None
        if isinstance(result, GroupFailed):
            return result.reason
        self._answer(result.lease, *generated_message(result, self._decode, temperature))
        return None

    def forget(self, engine: Engine, lease: str) -> None:
        """Want a group no longer."""
        self._partials.pop(lease, None)
        if self._temperatures.pop(lease, None) is not None:
            engine.cancel(lease)

    def interrupt(self, engine: Engine, reason: str, preparing: Iterable[str], *, lost: bool = False) -> list[str]:
        """Hand over the groups that are in `engine`, and those that were being prepared; return their leases.

        `lost`: the engine died, of one of those that it had, it may be.
        """
        found = {lease: self._partials.pop(lease, ((), -1.0)) for lease in preparing}
        for lease, (partials, temperature) in found.items():
            self._answer(lease, *interrupted_message(lease, partials, reason, temperature))
        held, self._temperatures = self._temperatures, {}
        for lease, temperature in held.items():
            left = engine.interrupt(lease) or ()
            self._answer(lease, *interrupted_message(lease, left, reason, temperature, lost=lost))
        return [*found, *held]


# JOINED from starling.rollout.shell.player: Those who use the engine through the door: what the shell asks of
# them, and the player of environments.

if TYPE_CHECKING:
    from starling.common.wire.messages import Wait
    from starling.rollout.env.episodes.trajectory import PlayedGroup


class Closeable(Protocol):
    """Something that was started."""

    def close(self) -> None:
        """End it."""
        ...


class LeaseWaits(Protocol):
    """Something that leases wait for."""

    def expire(self, now: float) -> list[tuple[str, str]]:
        """Give up the leases that took too long; return them with the reason."""
        ...

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Return what is waited for at `now`."""
        ...


class EnvironmentGroups(EpisodeRunner):
    """Plays the controller's groups in an environment, and answers for them."""

    def tell(self, played: PlayedGroup, answer: SendAnswer) -> bool:
        """Answer with what became of a group; False when nobody wants it any longer."""
        if not self.take(played.lease):
            return False
        answer(played.lease, *played_message(played, lambda ids: decode(self.tokenizer, ids)))
        return True

    def leave(self, reason: str, answer: SendAnswer) -> list[str]:
        """Give all groups back; return their leases. Another replica plays them from the beginning: what an environment
        has come to cannot be handed over."""
        leases = self.forget_all()
        for lease in leases:
            answer(lease, *interrupted_message(lease, (), reason))
        return leases
