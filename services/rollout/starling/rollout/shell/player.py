"""Those who use the engine through the door: what the shell asks of them, and the player of environments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from starling.algo.text import decode
from starling.rollout.env.runner import EpisodeRunner
from starling.rollout.shell.answer import answer_of_played, interrupted_of

if TYPE_CHECKING:
    from starling.common.wire.messages import Wait
    from starling.rollout.env.trajectory import Played
    from starling.rollout.shell.groups import Answer


class Closes(Protocol):
    """Something that was started."""

    def close(self) -> None:
        """End it."""
        ...


class Waits(Protocol):
    """Something that leases wait for."""

    def expire(self, now: float) -> list[tuple[str, str]]:
        """Give up the leases that took too long; return them with the reason."""
        ...

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Return what is waited for at `now`."""
        ...


class Player(EpisodeRunner):
    """Plays the controller's groups in an environment, and answers for them."""

    def tell(self, played: Played, answer: Answer) -> bool:
        """Answer with what became of a group; False when nobody wants it any longer."""
        if not self.take(played.lease):
            return False
        answer(played.lease, *answer_of_played(played, lambda ids: decode(self.tokenizer, ids)))
        return True

    def leave(self, reason: str, answer: Answer) -> list[str]:
        """Give all groups back; return their leases. Another replica plays them from the beginning: what an environment
        has come to cannot be handed over."""
        leases = self.forget_all()
        for lease in leases:
            answer(lease, *interrupted_of(lease, (), reason))
        return leases
