"""Environment variables of the processes of a run."""

from __future__ import annotations

from typing import Final

from starling.common.model_folder import OFFLINE

COMMON: Final = {
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}


def of_services(num_threads: int) -> dict[str, str]:
    """Return the variables of a service that computes with `num_threads`."""
    return {**COMMON, "OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}


def of_fork_server() -> dict[str, str]:
    """Return the variables of the process from which services are forked.

    It starts before the number of threads is known. They load models from a local folder, so the Hugging Face hub is
    switched off for them, which its library reads at the import.
    """
    return {**of_services(1), **OFFLINE}
