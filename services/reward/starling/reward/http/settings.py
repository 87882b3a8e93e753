"""Settings of the HTTP front end."""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from starling.common.addresses import is_loopback
from starling.common.errors import ConfigError
from starling.common.ranges import MAX_COUNT, MAX_MIB
from starling.common.secret_settings import Secret
from starling.common.settings import Seconds, SettingsSection

TOKEN_VARIABLES: Final = ("REMOTE_REWARD_TOKEN", "WFM_REWARD_TOKEN")
"""Environment variables with the token, where the settings have none; the first that is set counts."""

MAX_BODY_MIB: Final = 2048


class HttpSettings(SettingsSection):
    """Rewards over HTTP, for other trainers or without any run."""

    enabled: bool = False
    """Serve HTTP, besides the controller if there is one."""
    host: str = "127.0.0.1"
    """Address to listen on. Without a token it must be a loopback address."""
    port: int = Field(default=8080, ge=0, le=65535)
    """Port of reward-0; reward-1 takes the next one, and so on. 0 takes free ones, which are logged."""
    token: Secret = ""
    """What clients send as `Authorization: Bearer TOKEN`; without it, the environment's `REMOTE_REWARD_TOKEN`."""
    max_body_mb: int = Field(default=64, ge=1, le=MAX_BODY_MIB)
    """Limit on the body of one request, in MiB; beyond it the answer is 413."""
    max_media_mb: int = Field(default=512, ge=1, le=MAX_MIB)
    """Limit on the body of one request with media at `/api/reward/enqueue`, in MiB, up to `max_memory_mb`."""
    max_samples: int = Field(default=100_000, ge=1, le=MAX_COUNT)
    """Limit on the samples that are being scored; further requests are answered with 429."""
    max_memory_mb: int = Field(default=1024, ge=1, le=MAX_MIB)
    """Limit on the requests in progress and the results that are kept, in MiB; further ones are answered with 429."""
    result_ttl_s: Seconds = 3600.0
    """How long a result is kept, in seconds; it may be fetched repeatedly."""
    timeout_s: Seconds = 600.0
    """Time limit of a request, in seconds; then samples that are not scored have the status `reward_timeout`."""
    read_timeout_s: Seconds = 60.0
    """Time limit for a request's headers to arrive, and then for its body, in seconds."""
    write_timeout_s: Seconds = 60.0
    """How long a client may read nothing of a response that waits for it, in seconds."""

    pushed_types: tuple[str, ...] = ()
    """Types of rewards that workers of your own score, and push to `/api/reward/push`; a request that asks for one
    waits for it, up to `timeout_s`."""

    store: Literal["memory", "sqlite", "redis"] = "memory"
    """Where requests and results are kept. `memory`: until the service ends. `sqlite`: in a file, from which the next
    process continues. `redis`: shared by several instances behind a load balancer, which take over from each other."""
    store_path: str = ""
    """File of the store `sqlite`, on a local disk; without it, `requests-<name>.sqlite` in the service's folder."""
    redis_url: Secret = ""
    """The store `redis`: `redis://USER:PASSWORD@HOST:PORT/DATABASE`, `rediss://` with TLS, or `unix://PATH`."""
    redis_ca_file: str = ""
    """Certificates (PEM) of those who sign that of a `rediss://` server; without it, those of the system."""
    redis_prefix: str = Field(default="starling-reward:", min_length=1, max_length=200)
    """How all keys in Redis begin. Instances with one prefix score each other's requests: they need equal scorers."""
    redis_lease_s: float = Field(default=15.0, ge=1.0, le=3600.0, allow_inf_nan=False)
    """Lease of an instance, in seconds: when it was not renewed for so long, others take over its requests."""

    @property
    def max_media_bytes(self) -> int:
        """Limit on the body of a request with media, in bytes."""
        return min(self.max_media_mb, self.max_memory_mb) << 20

    @model_validator(mode="after")
    def _store_is_known(self) -> Self:
        if (self.store == "redis") != bool(self.redis_url):  # never shown: it has a password
            raise ConfigError(
                "reward.http.redis_url is set, and reward.http.store is not redis: set it, or remove the URL"
                if self.redis_url
                else 'reward.http.store is "redis": set reward.http.redis_url to redis://USER:PASSWORD@HOST:PORT/DATABASE'
            )
        if self.redis_ca_file and not self.redis_url.startswith("rediss://"):
            raise ConfigError(
                "reward.http.redis_ca_file is set, and reward.http.redis_url does not begin with rediss://"
            )
        if self.store_path and self.store != "sqlite":
            raise ConfigError(
                f'reward.http.store_path is set, and reward.http.store is "{self.store}": set it to "sqlite"'
            )
        return self

    @model_validator(mode="after")
    def _body_fits(self) -> Self:
        if self.max_body_mb > self.max_memory_mb:
            raise ConfigError(
                f"reward.http.max_body_mb is {self.max_body_mb}, more than max_memory_mb {self.max_memory_mb}, so that "
                "no such request could be accepted: raise max_memory_mb."
            )
        return self

    def check_token(self, token: str) -> None:
        """Raise ConfigError for a public address without a token, or a token that an HTTP header cannot carry."""
        if not (token.isascii() and token.isprintable()):
            raise ConfigError("the token of reward.http has characters that a header cannot have; use printable ASCII")
        if token or is_loopback(self.host):
            return
        raise ConfigError(
            f"reward.http.host is {self.host!r}, which others can reach, and there is no token: set reward.http.token, "
            f"the environment variable {TOKEN_VARIABLES[0]}, or the host to 127.0.0.1"
        )
