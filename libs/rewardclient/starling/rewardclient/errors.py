"""Errors of the reward client.

    StarlingError
    ├── ConfigError                settings or samples that cannot be used (also a ValueError)
    └── RewardClientError
        ├── RequestRefusedError    the service refuses a request; another try would be refused too
        ├── TooFewRewardsError     fewer samples have a valid reward than the caller demands
        └── RewardsMissingError    these rewards did not come, others may
            ├── ServiceUnreachableError   connections fail, or the service answers with 5xx, at every try
            ├── RewardsLateError          the deadline has passed
            ├── RequestLostError          the service does not know the request (any more)
            └── AnswerInvalidError        the service sent something else than rewards

Each text is one sentence that names the URL or value at fault, and the remedy.
"""

from __future__ import annotations

from starling.common.errors import StarlingError


class RewardClientError(StarlingError):
    """Any error of a request for rewards."""


class RequestRefusedError(RewardClientError):
    """The service refuses a request for good.

    Args:
        text: one sentence.
        status: of the HTTP reply.
    """

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class TooFewRewardsError(RewardClientError):
    """Fewer samples have a valid reward than the caller demands."""


class RewardsMissingError(RewardClientError):
    """The rewards of a request did not come."""


class ServiceUnreachableError(RewardsMissingError):
    """Every try of a request failed before the service answered."""


class RewardsLateError(RewardsMissingError):
    """The deadline of a request has passed."""


class RequestLostError(RewardsMissingError):
    """The service does not know a request that it has accepted: it was restarted, or the result has expired."""


class AnswerInvalidError(RewardsMissingError):
    """The service sent something else than the rewards of the request."""
