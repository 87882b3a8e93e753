"""Choice of the store by the settings."""

from __future__ import annotations

from pathlib import Path

from starling.reward.http.settings import HttpSettings
from starling.reward.http.stores.memory import MemoryStore
from starling.reward.http.stores.sqlite import SqliteStore
from starling.reward.http.stores.store import RequestStore


def make_store(settings: HttpSettings, path: Path) -> RequestStore:
    """Return the store of the settings; `path` is the file of `sqlite` where they name none. Raises ConfigError."""
    match settings.store:
        case "memory":
            return MemoryStore(settings.result_ttl_s)
        case "sqlite":
            return SqliteStore(Path(settings.store_path or path), settings.result_ttl_s)
        case "redis":
            # Imported here: its client takes a tenth of a second.
            from starling.reward.http.stores.redis import RedisStore

            return RedisStore(
                settings.redis_url,
                prefix=settings.redis_prefix,
                lease_s=settings.redis_lease_s,
                result_ttl_s=settings.result_ttl_s,
                timeout_s=settings.timeout_s,
                ca_file=settings.redis_ca_file,
            )
