"""The tries of one request, until it has a reply that is expected, is refused for good, or the deadline has passed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from starling.rewardclient.errors import RequestRefusedError, RewardsLateError, ServiceUnreachableError
from starling.rewardclient.hedging import Rotation
from starling.rewardclient.protocols.protocol import HttpRequest, refusal
from starling.rewardclient.schedule import Retries, RetryState, Verdict, judge
from starling.rewardclient.transport import Reply, TryFailed


class Deadline:
    """When the rewards of a call must be there.

    Args:
        timeout_s: from now.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until then; 0 once it has passed."""
        return max(0.0, self._at - time.monotonic())


async def exchange(
    make: Callable[[], Awaitable[tuple[int, HttpRequest]]],
    send: Callable[[HttpRequest], Awaitable[Reply]],
    *,
    expected: frozenset[int],
    retries: Retries,
    rotation: Rotation,
    deadline: Deadline,
) -> Reply:
    """Send a request until it has a reply.

    Args:
        make: returns the request of each try, and the index of the replica that gets it.
        send: makes a try, within the deadline.
        expected: statuses of the replies that are returned.
        retries: how often and when.
        rotation: is told which replicas fail.
        deadline: for all tries.

    Raises:
        RequestRefusedError: the service refuses it for good.
        ServiceUnreachableError: the last try failed on its way, too.
        RewardsLateError: there is no time for another try.
        AnswerInvalidError: the reply is too large.
    """
    state = RetryState(retries)
    while True:
        if not deadline.left_s:
            raise RewardsLateError(f"a request was not sent within {deadline.timeout_s:g} s; raise timeout_s")
        index, request = await make()
        verdict, delay_s = Verdict.RETRY, None
        try:
            reply = await send(request)
        except TryFailed as error:
            problem = str(error)
        else:
            verdict = judge(reply.status, retry_after_s=reply.retry_after_s, accepted=expected)
            if verdict is not Verdict.ACCEPTED:
                is_final = verdict is Verdict.FINAL
                problem = refusal(request, reply.status, reply.body, is_final=is_final)
                delay_s = reply.retry_after_s
        rotation.report(index, time.monotonic(), has_failed=verdict is Verdict.RETRY)
        if verdict is Verdict.ACCEPTED:
            return reply
        if verdict is Verdict.FINAL:
            raise RequestRefusedError(problem, reply.status)
        pause_s = state.delay_s(verdict, delay_s, random.random())
        if pause_s is None:
            raise ServiceUnreachableError(f"{problem}; this was the last of {state.num_failed} tries")
        if pause_s >= deadline.left_s:
            raise RewardsLateError(f"{problem}; the limit of {deadline.timeout_s:g} s leaves no time for another try")
        await asyncio.sleep(pause_s)
