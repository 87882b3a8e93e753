"""Proposal of meshes for training a model on a number of GPUs, as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from starling.cli.plan.sizes import size_text
from starling.common.errors import ConfigError, WeightsError
from starling.policy.plan.proposals import AXES, Hardware, Proposal, StepSize, propose, written
from starling.policy.plan.sizes import ModelSizes, model_sizes

MAX_GPUS: Final = 1_000_000


def print_meshes(
    config: Mapping[str, Any], num_gpus: int, step: StepSize, hardware: Hardware, *, num_rows: int, as_json: bool
) -> None:
    """Print the fastest meshes that fit.

    Args:
        config: contents of the model's `config.json`.
        num_gpus: of a replica.
        step: its tokens.
        hardware: the GPUs and the links between them.
        num_rows: meshes to print.
        as_json: print one JSON object.

    Raises:
        ConfigError: a number is not positive, the model cannot be estimated, or no mesh fits.
    """
    numbers = {"--gpus": num_gpus, **_flags(step, hardware)}
    for flag, number in numbers.items():
        if not number > 0:
            raise ConfigError(f"{flag} {number:g} is not a size; give a number above 0")
    if num_gpus > MAX_GPUS:
        raise ConfigError(f"--gpus {num_gpus} is too many; give at most {MAX_GPUS}")
    try:
        sizes = model_sizes(config)
    except WeightsError as error:
        raise ConfigError(str(error)) from None
    found = propose(sizes, num_gpus, step, hardware)[: max(1, num_rows)]
    if as_json:
        print(json.dumps({"parameters": sizes.num_parameters, "meshes": [_values(one) for one in found]}))
    else:
        print(_text(found, sizes, num_gpus, step, hardware))


def _flags(step: StepSize, hardware: Hardware) -> dict[str, float]:
    return {
        "--step-tokens": step.num_tokens,
        "--microbatch-tokens": step.microbatch_tokens,
        "--sequence-tokens": step.sequence_tokens,
        "--gpus-per-host": hardware.gpus_per_host,
        "--gpu-gb": hardware.memory_gb,
        "--gpu-tflops": hardware.tflops,
        "--host-gb-per-s": hardware.host_gb_per_s,
        "--network-gb-per-s": hardware.network_gb_per_s,
    }


def _values(proposal: Proposal) -> dict[str, Any]:
    return {
        "mesh": proposal.parallel.model_dump(),
        "recomputes": proposal.recomputes,
        "memory": msgspec.to_builtins(proposal.memory),
        "traffic": {
            axis: {"bytes": sent.num_bytes, "calls": sent.num_calls} for axis, sent in proposal.traffic.items()
        },
        "compute_s": proposal.compute_s,
        "bubble_s": proposal.bubble_s,
        "waiting_s": proposal.waiting_s,
        "tokens_per_s_and_gpu": proposal.tokens_per_s,
    }


def _text(found: list[Proposal], sizes: ModelSizes, num_gpus: int, step: StepSize, hardware: Hardware) -> str:
    """Return the table, and the flags of its first row."""
    width = max(len("mesh"), *(len(written(one.parallel)) for one in found))
    lines = [
        f"{sizes.num_parameters / 1e9:.3g} billion parameters on {num_gpus} GPUs of {hardware.memory_gb:g} GB, "
        f"{hardware.gpus_per_host} in a host",
        f"a step: {step.num_tokens:,} tokens, in microbatches of {step.microbatch_tokens:,}",
        "",
        f"{'mesh':<{width}}  checkpointing  memory of a rank  step in s  tokens/s of a GPU  a rank sends for a step",
    ]
    for one in found:
        sent = ", ".join(f"{size_text(traffic.num_bytes)} ({axis})" for axis, traffic in one.traffic.items())
        lines.append(
            f"{written(one.parallel):<{width}}  {_checkpointing(one):<13}  {size_text(one.memory.total):>16}  "
            f"{one.seconds:>9.2f}  {one.tokens_per_s:>17,.0f}  {sent or 'nothing'}"
        )
    best = found[0]
    chosen = {axis: size for axis in (*AXES, "ep") if (size := getattr(best.parallel, axis)) > 1}
    flags = [f"--policy.parallel.{axis.replace('_', '-')} {size}" for axis, size in chosen.items()]
    lines += ["", " ".join([*flags, f"--policy.memory.checkpointing {_checkpointing(best)}"])]
    return "\n".join(lines)


def _checkpointing(proposal: Proposal) -> str:
    return "full" if proposal.recomputes else "none"
