"""`starling plan`: the forecast of a weight synchronisation, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from starling.cli.command_line import define

WEIGHTS = Group("Weights", sort_key=1)
MACHINES = Group("Machines", sort_key=2)
OUTPUT = Group("Output", sort_key=9)


def plan(
    source: Annotated[str, Parameter(help="A parallelism such as fsdp256, or a file with an encoded layout.")],
    destination: Annotated[str, Parameter(help="Likewise; 'tp8 x16' means 16 replicas.")],
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
    rows: Annotated[int, Parameter(help="Rows of each table.", group=OUTPUT)] = 10,
    picture: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="Draw which replica sends what to which: an .svg or a .png.", group=OUTPUT),
    ] = None,
    json: Annotated[bool, Parameter(help="Print one JSON object instead.", group=OUTPUT)] = False,
) -> int:
    """Estimate a weight synchronisation: bytes, time and memory, without a GPU."""
    from starling.cli.plan.forecast import print_forecast

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


command = define(
    "plan",
    plan,
    "SOURCE DESTINATION [--model NAME] [OPTIONS]",
    """Examples:
  starling plan fsdp256 "tp8 x16" --model kimi-k2 --quantise fp8_block
  starling plan fsdp8 tp4 --model /models/Qwen3-8B --picture plan.svg""",
)
