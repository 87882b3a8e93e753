"""Modules that the fork server of `warm.py` imports; its children fork their workers, too."""

from __future__ import annotations

import gc
import multiprocessing

import engines  # noqa: F401 - the publishers' imports
import vllm.distributed.elastic_ep.elastic_execute
import vllm.model_executor.layers.quantization.online.base
import vllm.model_executor.models.transformers
import vllm.plugins.lora_resolvers.filesystem_resolver
import vllm.plugins.lora_resolvers.hf_hub_resolver
import vllm.v1.core.kv_cache_manager
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor as executor
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.platforms import current_platform

import starling.weightsync.vllm.recorded
import starling.weightsync.vllm.worker  # noqa: F401

executor.get_mp_context = lambda: multiprocessing.get_context("fork")

# Each worker would search all modules for kernels. Modules imported later get the replaced kernels from these.
current_platform.register_triton_kernel_overrides()
type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)

# vLLM collects garbage five times while an engine starts, which would traverse and copy the memory of all modules.
gc.collect()
gc.freeze()
