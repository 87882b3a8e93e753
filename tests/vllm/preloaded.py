"""Modules that the fork server of `warm.py` imports; its children fork their workers, too."""

from __future__ import annotations

import multiprocessing

import engines  # noqa: F401 - the publishers' imports
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor as executor
import vllm.v1.worker.cpu_worker  # noqa: F401

executor.get_mp_context = lambda: multiprocessing.get_context("fork")
