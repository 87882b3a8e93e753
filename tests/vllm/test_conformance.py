"""The conformance suite on vLLM."""

from __future__ import annotations

from typing import ClassVar

from conformance import EngineConformance, Facts


class TestVllm(EngineConformance):
    """One worker. vLLM's random numbers depend on the calls so far, so a resumed completion draws others."""

    rollout: ClassVar = {
        "engine": "vllm",
        "vllm": {"kv_cache_mb": 64, "enforce_eager": True, "start_timeout_s": 500.0},
    }
    facts: ClassVar = Facts(resumes_draws=False, long=300)
