"""Start of the pool of a service: the check of its scorers and VAEs, and the pool, with decoders if there are any."""

from __future__ import annotations

from collections.abc import Collection

from starling.reward.core.media import INPUTS, Input
from starling.reward.score.decode.geometry import read_geometries
from starling.reward.score.decode.pool import DecodingPool
from starling.reward.score.decode.scorers import decoder_scorers
from starling.reward.score.pool.check import check_scorers
from starling.reward.score.pool.pool import ScoringPool
from starling.reward.score.workers.shared import MediaMemory
from starling.reward.settings import RewardSettings

AnyPool = ScoringPool | DecodingPool


def open_pool(settings: RewardSettings, memory: MediaMemory) -> AnyPool:
    """Return the pool of a service, with decoders if there are any. Raises ConfigError when it cannot be started."""
    geometries = read_geometries(settings.decoder.folders)
    return DecodingPool(settings, geometries, memory) if geometries else ScoringPool(settings)


def check_pool(settings: RewardSettings, *, inputs: Collection[Input] = INPUTS) -> None:
    """Load every scorer and VAE in a worker, as the service will.

    Args:
        settings: of the service.
        inputs: what its samples may have.

    Raises:
        ConfigError: one cannot be used.
    """
    geometries = read_geometries(settings.decoder.folders)
    check_scorers(settings, inputs=inputs)
    if geometries:
        check_scorers(decoder_scorers(settings, geometries))
