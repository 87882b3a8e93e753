"""`starling plan`: the forecast of a weight synchronisation, or of a policy's mesh, before anything is started."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from starling.cli.command_line import define
from starling.common.errors import ConfigError

WEIGHTS = Group("Weights", sort_key=1)
MACHINES = Group("Machines", sort_key=2)
MESH = Group("Mesh of a policy", sort_key=3)
OUTPUT = Group("Output", sort_key=9)


def plan(
    source: Annotated[str, Parameter(help="A parallelism such as fsdp256, or a file with an encoded layout.")] = "",
    destination: Annotated[str, Parameter(help="Likewise; 'tp8 x16' means 16 replicas.")] = "",
    /,
    *,
    model: Annotated[
        str, Parameter(metavar="NAME", help="A config.json, its folder, or a preset such as kimi-k2.", group=WEIGHTS)
    ] = "",
    dtype: Annotated[str, Parameter(help="Element type of the weights, such as float32.", group=WEIGHTS)] = "",
    quantise: Annotated[
        str,
        Parameter(metavar="FORMAT", help="How the source quantises linear weights, such as fp8_block.", group=WEIGHTS),
    ] = "",
    topology: Annotated[
        Path | None,
        Parameter(
            help="TOML: hosts, GPUs, cards, rails, switches, bandwidths. Or 'found': this machine.", group=MACHINES
        ),
    ] = None,
    bucket_mib: Annotated[float, Parameter(help="Size of a bucket in MiB.", group=MACHINES)] = 32.0,
    gpus: Annotated[
        int, Parameter(help="Propose meshes for training on so many GPUs, without SOURCE and DESTINATION.", group=MESH)
    ] = 0,
    gpus_per_host: Annotated[int, Parameter(help="GPUs of a host.", group=MESH)] = 8,
    gpu_gb: Annotated[float, Parameter(help="Memory of a GPU in GB.", group=MESH)] = 80.0,
    gpu_tflops: Annotated[
        float, Parameter(help="What a GPU achieves in training, in 10^12 operations per second.", group=MESH)
    ] = 400.0,
    host_gb_per_s: Annotated[float, Parameter(help="From a GPU to others of its host.", group=MESH)] = 400.0,
    network_gb_per_s: Annotated[float, Parameter(help="From a GPU to other hosts.", group=MESH)] = 50.0,
    step_tokens: Annotated[int, Parameter(help="Tokens of a step.", group=MESH)] = 1 << 20,
    microbatch_tokens: Annotated[int, Parameter(help="Tokens of a microbatch.", group=MESH)] = 1 << 14,
    sequence_tokens: Annotated[
        int, Parameter(help="Tokens of a sequence; by default those of a microbatch.", group=MESH)
    ] = 0,
    rows: Annotated[int, Parameter(help="Rows of each table.", group=OUTPUT)] = 10,
    picture: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="Draw which replica sends what to which: an .svg or a .png.", group=OUTPUT),
    ] = None,
    json: Annotated[bool, Parameter(help="Print one JSON object instead.", group=OUTPUT)] = False,
) -> int:
    """Estimate a weight synchronisation, or meshes for training: bytes, time and memory, without a GPU."""
    from starling.cli.plan.forecast import print_forecast, read_config

    for_weights = {
        "dtype": dtype,
        "quantise": quantise,
        "topology": topology,
        "bucket_mib": bucket_mib,
        "picture": picture,
    }
    for_meshes = {
        "gpus_per_host": gpus_per_host,
        "gpu_gb": gpu_gb,
        "gpu_tflops": gpu_tflops,
        "host_gb_per_s": host_gb_per_s,
        "network_gb_per_s": network_gb_per_s,
        "step_tokens": step_tokens,
        "microbatch_tokens": microbatch_tokens,
        "sequence_tokens": sequence_tokens,
    }
    if gpus:
        from starling.cli.plan.meshes import print_meshes
        from starling.policy.plan.proposals import Hardware, StepSize

        if source or not model:
            raise ConfigError("--gpus proposes meshes for a model: write `starling plan --model NAME --gpus NUMBER`")
        _refuse(for_weights, "describes a weight synchronisation, and --gpus proposes meshes")
        print_meshes(
            read_config(model),
            gpus,
            StepSize(step_tokens, microbatch_tokens, sequence_tokens or microbatch_tokens),
            Hardware(gpus_per_host, gpu_gb, gpu_tflops, host_gb_per_s, network_gb_per_s),
            num_rows=rows,
            as_json=json,
        )
        return 0
    if source and not destination:
        raise ConfigError("DESTINATION is missing; see starling plan --help")
    if not source:
        raise ConfigError(
            "give SOURCE and DESTINATION of a weight synchronisation, or --model and --gpus for meshes of a policy"
        )
    _refuse(for_meshes, "describes a mesh, and SOURCE and DESTINATION a weight synchronisation")
    print_forecast(
        source,
        destination,
        model=model,
        dtype=dtype,
        quantise=quantise,
        topology=topology,
        bucket_mib=bucket_mib,
        num_rows=rows,
        picture=picture,
        as_json=json,
    )
    return 0


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Raise ConfigError for an option that was given and has no effect; `options`: values by parameter of `plan`."""
    defaults = inspect.signature(plan).parameters
    for name, value in options.items():
        if value != defaults[name].default:
            raise ConfigError(f"--{name.replace('_', '-')} {value} {why}: leave it out")


command = define(
    "plan",
    plan,
    "[SOURCE DESTINATION] [--model NAME] [--gpus NUMBER] [OPTIONS]",
    """Examples:
  starling plan fsdp256 "tp8 x16" --model kimi-k2 --quantise fp8_block
  starling plan fsdp8 tp4 --model /models/Qwen3-8B --picture plan.svg
  starling plan --model qwen3-8b --gpus 64""",
)
