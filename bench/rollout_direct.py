"""vLLM driven directly, for `rollout.py`: AsyncLLM in a process that does nothing else.

    python rollout_direct.py SETTINGS.json

vLLM gets the arguments and the environment of Starling's engine, without the worker extension. For each line of JSON on
standard input, a list of prompts, the process submits all prompts at once, as requests with n completions and final
outputs only, and prints the seconds and the number of tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from starling.common.settings import ModelSettings, WeightsSettings, validate
from starling.rollout.engine.base import EngineSpec
from starling.rollout.engine.vllm.launch import arguments, environment
from starling.rollout.settings import RolloutSettings


def spec_of(settings: dict[str, Any]) -> EngineSpec:
    """Return the spec of an engine with these settings."""
    model = validate(ModelSettings, settings["model"])
    rollout = validate(RolloutSettings, settings["rollout"])
    return EngineSpec(
        path=Path(model.path),
        model=model,
        rollout=rollout,
        weights=WeightsSettings(),
        name="direct",
        eos_token_ids=tuple(settings["eos_token_ids"]),
        max_model_len=rollout.max_model_len,
        wake=lambda: None,
    )


async def generate(engine: Any, jobs: list[dict[str, Any]], eos_token_ids: list[int]) -> int:
    """Run all jobs; return the number of sampled tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    async def one(number: int, job: dict[str, Any]) -> int:
        params = SamplingParams(
            n=job["num_completions"],
            temperature=1.0,
            max_tokens=job["max_tokens"],
            seed=job["seed"],
            stop_token_ids=eos_token_ids,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        num_tokens = 0
        async for output in engine.generate({"prompt_token_ids": job["prompt_ids"]}, params, f"{time.time()}-{number}"):
            num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        return num_tokens

    return sum(await asyncio.gather(*(one(number, job) for number, job in enumerate(jobs))))


async def serve(settings: dict[str, Any], answers: Any) -> None:
    """Start vLLM, and run the loads from standard input until it ends."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    given = arguments(spec_of(settings), on_cpu=current_platform.is_cpu())
    del given["worker_extension_cls"]  # it pulls weights, and on a CPU keeps unpacked copies of them
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
    try:
        print(json.dumps({"ready": True}), file=answers, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            begin = time.monotonic()
            num_tokens = await generate(engine, json.loads(line), settings["eos_token_ids"])
            answer = {"seconds": time.monotonic() - begin, "num_tokens": num_tokens}
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        engine.shutdown()


def main() -> None:
    """Run the process."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes to standard output, too
    os.environ.update(environment(spec_of(settings), on_cpu=settings["on_cpu"]))
    asyncio.run(serve(settings, answers))


if __name__ == "__main__":
    main()
