"""Settings of the reward client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import urlsplit, urlunsplit

from starling.common.errors import ConfigError
from starling.rewardclient.combine import RewardRule
from starling.rewardclient.hedging import Hedging
from starling.rewardclient.rewards import check_rate
from starling.rewardclient.schedule import Polling, Retries, Timeouts, check_seconds

ProtocolName = Literal["v1", "cosmos"]

V1_PATH: Final = "/v1/rewards"
ENQUEUE_END: Final = "/enqueue"
PULL_END: Final = "/pull"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a reward service, or one replica of it, is.

    The URL says which protocol it speaks: with the path ``/v1/rewards``, or none, Starling's API; with another one,
    that of ``/api/reward/enqueue`` and ``/api/reward/pull``.
    """

    enqueue_url: str
    fetch_url: str = ""
    """By default that which belongs to `enqueue_url`."""
    token: str = field(default="", repr=False)
    """Sent as `Authorization: Bearer TOKEN`."""
    protocol: ProtocolName | None = None
    """What it speaks, where the URL does not say so."""

    def __post_init__(self) -> None:
        path = _path_of(self.enqueue_url)
        is_v1 = path.endswith(V1_PATH) or not path
        protocol = self.protocol or ("v1" if is_v1 else "cosmos")
        if protocol not in ("v1", "cosmos"):
            raise ConfigError(f"the protocol of a reward service is {protocol!r}; give 'v1' or 'cosmos'")
        enqueue_url = self.enqueue_url if path else _with_path(self.enqueue_url, V1_PATH)
        enqueue_url = enqueue_url.rstrip("/")
        fetch_url = self.fetch_url.rstrip("/") or enqueue_url
        if not self.fetch_url and protocol == "cosmos":
            if not path.endswith(ENQUEUE_END):
                raise ConfigError(
                    f"the URL {shown(self.enqueue_url)} has the path of no known API; end it with {V1_PATH} or "
                    f"/api/reward{ENQUEUE_END}, or say where results are: give fetch_url, or set "
                    "REMOTE_REWARD_FETCH_URL"
                )
            fetch_url = _with_path(enqueue_url, path.removesuffix(ENQUEUE_END) + PULL_END)
        _path_of(fetch_url)
        if not (self.token.isascii() and self.token.isprintable()):
            raise ConfigError(
                "the token of the reward service has characters that a header cannot have; use printable ASCII"
            )
        for name, value in (("enqueue_url", enqueue_url), ("fetch_url", fetch_url), ("protocol", protocol)):
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Settings of a client."""

    endpoints: tuple[Endpoint, ...]
    """Replicas of one service: requests go to them in turn, retries and second requests to another one."""
    rule: RewardRule = field(default_factory=RewardRule)
    """How rewards follow from scores. Needs functions with `/api/reward`; without them, `/v1/rewards` decides."""
    timeout_s: float = 600.0
    """Until a sample has its reward, in seconds."""
    min_valid_rate: float = 0.0
    """The least share of samples with a valid reward; a call with fewer raises TooFewRewardsError."""
    max_request_samples: int = 1024
    """More samples are sent as several requests."""
    max_request_mb: int = 48
    """And so is more data, in MiB: less than `reward.http.max_body_mb` of the service."""
    max_uploads: int = 8
    """Requests that are being sent at a time."""
    max_polls: int = 32
    """Results that are being asked for at a time."""
    max_answer_mb: int = 64
    """Limit on a reply, in MiB."""
    retries: Retries = field(default_factory=Retries)
    timeouts: Timeouts = field(default_factory=Timeouts)
    polling: Polling = field(default_factory=Polling)
    hedging: Hedging | None = None
    """Sends slow requests a second time; None for never."""
    use_replica: bool = True
    """Ask the replica of `/api/reward` that accepted a request, by `X-Lepton-Replica-Target`."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the requests of `/api/reward`, such as `geneval_only_strict`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "endpoints", tuple(self.endpoints))
        if not self.endpoints:
            raise ConfigError("no reward service is given; give its URL, or set REMOTE_REWARD_ENQUEUE_URL")
        protocols = {endpoint.protocol for endpoint in self.endpoints}
        if len(protocols) > 1:
            raise ConfigError("the reward services speak different protocols; use one client for each protocol")
        if protocols == {"cosmos"} and not self.rule.functions:
            raise ConfigError(
                "/api/reward asks for scorers by name, and none is given; give rule=RewardRule(functions=...)"
            )
        if self.extras and protocols == {"v1"}:
            raise ConfigError("/v1/rewards has no extras; put them into the metadata of the samples")
        check_rate(self.min_valid_rate)
        check_seconds("timeout_s", self.timeout_s)
        for name in ("max_request_samples", "max_request_mb", "max_uploads", "max_polls", "max_answer_mb"):
            if not 1 <= getattr(self, name) <= 1_000_000:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give a number from 1")

    @property
    def protocol(self) -> ProtocolName:
        """What all endpoints speak."""
        protocol = self.endpoints[0].protocol
        assert protocol is not None, "set at the end of __init__"
        return protocol


def shown(url: str) -> str:
    """Return a URL for errors: without a password in it, and without its query, where some services want a key."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return "(not a URL)"
    return urlunsplit((parts.scheme, host, parts.path, "", ""))[:200]


def _path_of(url: str) -> str:
    """Return the path of a URL without a slash at its end. Raises ConfigError for what is no URL of HTTP."""
    try:
        parts = urlsplit(url)
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port  # raises where it is none
    except ValueError:
        is_http = False
    if not is_http or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"the reward service has the URL {shown(url)!r}; give one as http://host:8080{V1_PATH}")
    return parts.path.rstrip("/")


def _with_path(url: str, path: str) -> str:
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))
