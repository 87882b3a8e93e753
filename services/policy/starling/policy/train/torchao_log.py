"""Warnings that torchao's import logs and that no user of Starling can act on."""

from __future__ import annotations

import logging

import torch


def quiet_torchao() -> None:
    """Leave them out; call it before torchao is imported.

    Without a GPU each library of kernels for GPUs cannot be loaded, and is named. `torch.utils._pytree` tells torchao's
    authors that they need not register their enumerations any more.
    """
    if not torch.cuda.is_available():
        logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").addFilter(_is_not_about_enums)


def _is_not_about_enums(record: logging.LogRecord) -> bool:
    return "is an Enum subclass" not in record.getMessage()
