"""Weights from a trainer to vLLM: the backend `starling` compared with vLLM's own path, on one machine without a GPU.

    python bench/weightsync_vllm.py [--quick]

One trainer, with FSDP on two ranks, and for each backend an engine of vLLM in a process of its own with the same model
(Qwen2, bf16, weights not tied). The sides alternate within each round; a ratio is the median over the rounds of the
ratio within the round.

- `starling`: each rank publishes its shards; the engine pulls them into staging, switches, and attests full digests.
- `gloo`: what vLLM's backend `nccl` does, with gloo in place of NCCL, which needs a GPU: the ranks gather tensor after
  tensor, rank 0 packs them into chunks of 256 MiB and broadcasts those; the engine loads whole tensors by
  `load_weights`, between the beginning and the end of a layerwise reload.

Seconds are those from the trainer's call until the engine holds the version. The pause is the time from the first call
of the engine until the end of the last one, during which it cannot generate. No side packs weights for the CPU, as GPUs
do not either. After each round both engines must compute the same log-probabilities.

- `dense` changes every element, on one host.
- `unchanged_99` changes one in a hundred, all over the model, on one host: Starling sends everything, as by default.
- `unchanged_99_on_1_gbit_s` does so with the trainer on one host and the engines on another: network namespaces, joined
  by a link that `tc tbf` limits to 1 Gbit/s both ways for both sides. Starling sends deltas, its default between hosts,
  and encrypts them; gloo does not encrypt. Ranks of the trainer gather over the loopback device. Needs root.
- `unchanged_99_deltas` has it send deltas on one host, for comparison: there is no network that they would spare.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from subprocess import SubprocessError
from typing import Any

import torch
import torch.distributed as dist
import transformers
from figure import machine, print_figure, progress, rounded, versions
from torch.distributed.fsdp import fully_shard
from weightsync_fanout import Host, enter, missing, network

from starling.weightsync.vllm.backend.sender import SenderOptions, WeightSender

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
}
MIB = 1 << 20
CHUNK_BYTES = 256 * MIB
NUM_RANKS = 2
LINK_MBIT = 1000
DEADLINE_S = 300.0
PROMPT = [5, 17, 3, 60]
CONFIG: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FULL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12}
QUICK = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}


# --- vLLM's own path -----------------------------------------------------------------------------------------------


class GlooGroup:
    """A pair group of gloo: the trainer is rank 0, the engine rank 1."""

    def __init__(self, path: str, rank: int, interface: str) -> None:
        store = torch.distributed.FileStore(path, 2)
        options = torch.distributed.ProcessGroupGloo._Options()
        options._devices = [torch.distributed.ProcessGroupGloo.create_device(interface=interface)]
        options._timeout = timedelta(seconds=DEADLINE_S)
        self._group = torch.distributed.ProcessGroupGloo(store, rank, 2, options)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Send or receive a tensor."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()


def chunks(sizes: list[int]) -> Iterator[range]:
    """Yield the indices of the tensors of each chunk."""
    begin, total = 0, 0
    for index, size in enumerate(sizes):
        if total and total + size > CHUNK_BYTES:
            yield range(begin, index)
            begin, total = index, 0
        total += size
    yield range(begin, len(sizes))


def register_gloo() -> None:
    """Register the backend `gloo`, which receives as vLLM's `nccl` does."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class InitInfo(WeightTransferInitInfo):
        path: str
        interface: str

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):
        names: list[str]
        shapes: list[list[int]]

    class GlooEngine(WeightTransferEngine):  # type: ignore[misc]
        init_info_cls, update_info_cls = InitInfo, UpdateInfo

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            self.group = GlooGroup(init_info.path, 1, init_info.interface)

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: UpdateInfo) -> None:
            counts = [torch.Size(shape).numel() for shape in update_info.shapes]
            for held in chunks([2 * count for count in counts]):
                packed = torch.empty(sum(counts[index] for index in held), dtype=torch.bfloat16)
                self.group.broadcast(packed)
                parts = packed.split([counts[index] for index in held])
                self.model.load_weights(
                    [
                        (update_info.names[index], part.view(update_info.shapes[index]))
                        for index, part in zip(held, parts, strict=True)
                    ]
                )

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

    WeightTransferEngineFactory.register_engine("gloo", GlooEngine)


# --- engines -------------------------------------------------------------------------------------------------------


def serve(folder: str, backend: str, pipe: Connection) -> None:
    """Run an engine, and call its methods as the pipe says; answer with the seconds of each call and its result."""
    import vllm.model_executor.layers.utils as layers
    from vllm import LLM, SamplingParams
    from vllm.config.weight_transfer import WeightTransferConfig

    # As on GPUs, weights are used as they are.
    layers.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(
        layer, "cpu_linear", torch.nn.functional.linear
    )
    if backend == "gloo":
        register_gloo()
    llm = LLM(
        folder,
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=128,
        kv_cache_memory_bytes=64 * MIB,
        weight_transfer_config=WeightTransferConfig(backend=backend),
    )

    def sample() -> list[float]:
        llm.reset_prefix_cache()
        greedy = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        (answer,) = llm.generate([{"prompt_token_ids": PROMPT * 8}], greedy, use_tqdm=False)
        return [next(iter(one.values())).logprob for one in answer.prompt_logprobs[1:]]

    methods = {"sample": sample, "enter": enter}
    pipe.send(None)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        begin = time.perf_counter()
        result = methods.get(name, getattr(llm, name, None))(*arguments)  # type: ignore[misc]
        pipe.send((begin, time.perf_counter(), result))


class Engine:
    """An engine in a process of its own, at the other end of a pipe; also the client that a trainer calls."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.began_at = self.ended_at = 0.0
        """When the first call of an update began in the engine, and when the last one ended."""

    def begin(self, name: str, *arguments: Any) -> None:
        """Start a call."""
        self._pipe.send((name, arguments))

    def end(self) -> Any:
        """Return the result of the call."""
        began, self.ended_at, result = self._answer()
        self.began_at = self.began_at or began
        return result

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method, and return its result."""
        self.begin(name, *arguments)
        return self.end()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the trainer."""
        self.call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update."""
        self.began_at = 0.0
        self.call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Receive, or switch."""
        self.call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update."""
        self.call("finish_weight_update", weight_version)

    @property
    def pause_s(self) -> float:
        """Seconds of the last update in which the engine could not generate."""
        return self.ended_at - self.began_at

    def _answer(self) -> Any:
        if not self._pipe.poll(DEADLINE_S):
            raise SystemExit("an engine does not answer")
        try:
            return self._pipe.recv()
        except EOFError as error:
            raise SystemExit("an engine has ended") from error


# --- the trainer ---------------------------------------------------------------------------------------------------


class Trainer:
    """One rank of a trainer with FSDP."""

    def __init__(self, rank: int, folder: Path, engines: Mapping[str, Engine]) -> None:
        torch.set_num_threads(1)
        meeting = f"file://{folder}/trainer"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=NUM_RANKS)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).requires_grad_(False)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        self._rank, self._engines, self._model = rank, engines, model
        self._folder, self._host, self._num_meetings = folder, "127.0.0.1", 0
        self._group: GlooGroup | None = None
        self._meet("lo")

    def move(self, trainer: Host, engines: Host) -> None:
        """Move this rank and the engines to two hosts; the ranks stay connected with each other."""
        enter(trainer.namespace)
        self._host = trainer.address
        for engine in self._engines.values():
            engine.call("enter", engines.namespace)
        self._meet("eth0")

    def _meet(self, interface: str) -> None:
        """Have the engine of the other side join this trainer by a network interface."""
        if self._rank:
            return
        self._num_meetings += 1
        path = str(self._folder / f"meeting-{self._num_meetings}")
        info = {"init_info": {"path": path, "interface": interface}}
        self._engines["gloo"].begin("init_weight_transfer_engine", info)
        self._group = GlooGroup(path, 0, interface)
        self._engines["gloo"].end()

    def change(self, share: float, seed: int) -> None:
        """Change a share of all elements, spread over every tensor."""
        generator = torch.Generator().manual_seed(seed * NUM_RANKS + self._rank)
        for parameter in self._model.parameters():
            local = parameter.to_local()
            num = local.numel() if share == 1 else max(1, round(share * local.numel()))
            where = slice(None) if share == 1 else torch.randint(local.numel(), (num,), generator=generator)
            local.view(-1)[where] += 0.01 * torch.randn(num, generator=generator).to(local.dtype)

    def send_whole(self) -> None:
        """Gather and send whole tensors, as vLLM's trainer side of `nccl` does."""
        named = list(self._model.named_parameters())
        engine = self._engines["gloo"] if self._rank == 0 else None
        if engine is not None:
            info = {"names": [name for name, _ in named], "shapes": [list(tensor.shape) for _, tensor in named]}
            engine.start_weight_update()
            engine.begin("update_weights", {"update_info": info})
        for held in chunks([2 * tensor.numel() for _, tensor in named]):
            full = [named[index][1].full_tensor().reshape(-1) for index in held]  # type: ignore[attr-defined]
            if self._group is not None:
                self._group.broadcast(torch.cat(full))
        if engine is not None:
            engine.end()
            engine.finish_weight_update()

    def measure(self, share: float, delta_versions: int | None, rounds: int) -> dict[str, list[float]]:
        """Return the seconds and pauses of each round by side; on rank 0."""
        found: dict[str, list[float]] = {}
        ours, theirs = (self._engines.get(side) for side in ("starling", "gloo"))
        options = SenderOptions(host=self._host, delta_versions=delta_versions)
        sender = WeightSender(self._model, ours, rank=self._rank, options=options)
        for number in range(rounds + 1):  # the first warms up: connections, pages, staging
            self.change(share, number)
            dist.barrier()
            begin = time.perf_counter()
            sender.send()
            middle = time.perf_counter()
            self.send_whole()
            end = time.perf_counter()
            if ours is not None and theirs is not None and sender.report is not None:
                seconds = {
                    "starling": middle - begin,
                    "starling_pause": ours.pause_s,
                    "gloo": end - middle,
                    "gloo_pause": theirs.pause_s,
                }
                self._compare()
                sizes = [sum(pull.bytes_by_source.values()) for pull in sender.report.pulls.values()]
                told = ", ".join(f"{side} {value:.3f} s" for side, value in seconds.items())
                progress(f"round {number} of {rounds}: {told}, starling sent {sum(sizes) / 1e6:.1f} MB")
                if number:
                    for side, value in seconds.items():
                        found.setdefault(side, []).append(value)
        sender.close()
        return found

    def _compare(self) -> None:
        """Check that both engines compute the same."""
        logprobs = [torch.tensor(engine.call("sample")) for engine in self._engines.values()]
        if not torch.allclose(*logprobs, atol=1e-3):
            raise SystemExit(f"the engines compute differently: {logprobs}")


@dataclass(frozen=True)
class Kind:
    """One comparison."""

    share: float
    """Of the elements, which change."""
    delta_versions: int | None
    goal: float | None
    on_link: bool = False
    """Whether trainer and engines are on two hosts; such kinds are the last ones."""


KINDS = {
    "dense": Kind(1.0, 0, 3.0),
    "unchanged_99": Kind(0.01, None, None),
    "unchanged_99_deltas": Kind(0.01, 2, None),
    f"unchanged_99_on_{LINK_MBIT // 1000}_gbit_s": Kind(0.01, None, 10.0, on_link=True),
}


def train(
    rank: int, folder: Path, pipes: Mapping[str, Connection], hosts: Sequence[Host], rounds: int, answer: Connection
) -> None:
    """Run one rank of the trainer; rank 0 answers with what it measured. Without `hosts` there is no link."""
    trainer = Trainer(rank, folder, {side: Engine(pipe) for side, pipe in pipes.items()})
    found = {}
    has_moved = False
    for name, kind in KINDS.items():
        if kind.on_link and not hosts:
            continue
        if kind.on_link and not has_moved:
            trainer.move(*hosts)
            has_moved = True
        found[name] = trainer.measure(kind.share, kind.delta_versions, rounds)
    if rank == 0:
        answer.send(found)
    dist.destroy_process_group()


def measure(folder: Path, hosts: Sequence[Host], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds and pauses of each round, by kind of change and side."""
    context = multiprocessing.get_context("spawn")
    processes = []
    pipes: dict[str, Connection] = {}
    try:
        for backend in ("starling", "gloo"):
            pipes[backend], theirs = context.Pipe()
            processes.append(context.Process(target=serve, args=(str(folder), backend, theirs), daemon=True))
            processes[-1].start()
            theirs.close()
        for pipe in pipes.values():
            if not pipe.poll(DEADLINE_S):
                raise SystemExit("an engine has not started")
            pipe.recv()
        mine, answer = context.Pipe()
        for rank in range(NUM_RANKS):
            given = pipes if rank == 0 else {}
            arguments = (rank, folder, given, hosts, rounds, answer)
            processes.append(context.Process(target=train, args=arguments, daemon=True))
            processes[-1].start()
        answer.close()
        if not mine.poll(2 * DEADLINE_S):
            raise SystemExit("the trainer does not answer")
        found: dict[str, dict[str, list[float]]] = mine.recv()
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()


def main() -> None:
    """Measure and print."""
    os.environ.update(ENVIRONMENT)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a third of the layers, and three rounds instead of nine")
    quick = parser.parse_args().quick
    rounds = 3 if quick else 9
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = transformers.AutoConfig.for_model("qwen2", **CONFIG, **(QUICK if quick else FULL))
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | {"dtype": "bfloat16"}))
        num_bytes = (folder / "model.safetensors").stat().st_size
        with ExitStack() as stack:
            problem, hosts = missing(), list[Host]()
            if not problem:
                try:
                    hosts = stack.enter_context(network(2, LINK_MBIT))
                except (RuntimeError, OSError, SubprocessError) as error:
                    problem = str(error)
            found = measure(folder, hosts, rounds)
    for name, kind in KINDS.items():
        if name not in found:
            reason = {"reason": problem}
            print_figure(
                "weightsync_vllm",
                f"{name}_over_gloo",
                None,
                unit="ratio",
                goal=kind.goal,
                better="higher",
                detail=reason,
            )
            continue
        seconds = found[name]
        detail = {
            "num_bytes": num_bytes,
            "num_ranks": NUM_RANKS,
            "rounds": rounds,
            "link_mbit_per_s": LINK_MBIT if kind.on_link else None,
            "seconds": {side: rounded(median(values)) for side, values in seconds.items()},
            **machine(),
            "versions": versions("torch", "transformers"),
        }
        ratio = median(b / a for a, b in zip(seconds["starling"], seconds["gloo"], strict=True))
        print_figure(
            "weightsync_vllm", f"{name}_over_gloo", ratio, unit="ratio", goal=kind.goal, better="higher", detail=detail
        )
        pause = median(a / b for a, b in zip(seconds["starling_pause"], seconds["gloo_pause"], strict=True))
        print_figure(
            "weightsync_vllm", f"{name}_pause_over_gloo", pause, unit="ratio", goal=0.1, better="lower", detail=detail
        )


if __name__ == "__main__":
    sys.exit(main())
