"""Entry point `vllm.general_plugins`: registers the backend `starling` in every process of vLLM."""

from __future__ import annotations

from typing import Final

BACKEND: Final = "starling"
_PACKAGE: Final = "starling.weightsync.vllm.backend"


def register() -> None:
    """Register both sides; may be called several times. The modules are imported only where they are used."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
    from vllm.platforms import current_platform

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, f"{_PACKAGE}.engine", "StarlingWeightTransferEngine")
    WeightTransferTrainerFactory.register_engine(BACKEND, f"{_PACKAGE}.trainer", "StarlingTrainerEngine")
    if current_platform.is_cpu():
        from starling.weightsync.vllm.cpu import keep_weights

        keep_weights(_is_chosen)


def _is_chosen() -> bool:
    """Return whether the engine whose model is being loaded uses this backend."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    transfer = None if config is None else config.weight_transfer_config
    return transfer is not None and transfer.backend == BACKEND
