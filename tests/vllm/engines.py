"""Tiny checkpoints, vLLM engines for them, and a publisher process."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_sizes import CONTEXT, GROUPED, VOCAB, WIDE
from warm import process_context

from starling.algo.architecture import auto_class
from starling.common.settings import LoraSettings, ModelSettings, WeightsSettings
from starling.common.wire.messages import Sampling
from starling.policy.train.model.load import load_model, version_tensors
from starling.rollout.engine.base import Engine, EngineSpec, GroupFailed, GroupRequest, GroupResult
from starling.rollout.engine.vllm.engine import VllmEngine
from starling.rollout.settings import RolloutSettings
from starling.weightsync.offers.offer import Offer, Transport, decode_offer
from starling.weightsync.plan.layout import Layout, decode_layout, encode
from starling.weightsync.plan.planner import Plan, decode_plan, make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.quantise.recipe import FUSED_BY_VLLM, linear_weights
from starling.weightsync.tensors.adapters import add_adapters, base_digest, published_tensors
from starling.weightsync.tensors.modules import layout_of
from starling.weightsync.transports.endpoints import ServingOptions

torch.set_num_threads(1)

DEADLINE_S = 240.0
"""Deadline for operations that are slow on a busy machine."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GROUPED),
    "qwen2": ("qwen2", WIDE),
    "qwen3": ("qwen3", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "qwen3_moe",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": []},
    ),
    "qwen3 of 26 MB": ("qwen3", {**GROUPED, "hidden_size": 256, "intermediate_size": 4096}),
    # Its experts fill no whole block of the kernels for CPUs.
    "qwen3_moe of odd sizes": (
        "qwen3_moe",
        {
            **GROUPED,
            "hidden_size": 96,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [],
        },
    ),
}


def has_avx512() -> bool:
    """Return whether this CPU has AVX-512, which vLLM's CPU build needs for some of its features."""
    return "avx512f" in Path("/proc/cpuinfo").read_text()


def checkpoint(folder: Path, family: str, seed: int) -> Path:
    """Write a random model of `family`; return its folder."""
    kind, settings = FAMILIES[family]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **settings))
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases, which begin as ones and zeros
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"dtype": "float32"}))
    return folder


def publish_experts(file: Path) -> None:
    """Transpose the experts in `file` as in the published files of Qwen3-VL; transformers writes another layout."""
    full = load_file(file)
    save_file({name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in full.items()}, file)


def read_model(folder: Path) -> Any:
    """Read a checkpoint with transformers."""
    auto = auto_class(transformers.AutoConfig.from_pretrained(folder))
    return auto.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


def adapted_model(folder: Path, lora: LoraSettings, seed: int) -> Any:
    """Read a checkpoint with transformers, and add peft adapters with values drawn from `seed`."""
    model = read_model(folder)
    add_adapters(model, lora, seed=0)
    generator = torch.Generator().manual_seed(seed)
    for tensor in published_tensors(model, dict(model.named_parameters())).values():
        tensor.data.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model.requires_grad_(False)


def spec_of(
    folder: Path,
    wake: Any = None,
    lora: LoraSettings | None = None,
    *,
    quantise: str = "",
    dtype: str = "float32",
    **rollout: Any,
) -> EngineSpec:
    """Return the spec of an engine; `rollout` are fields of `RolloutSettings`, with those of `vllm` as a mapping."""
    vllm = {"kv_cache_mb": 16, "enforce_eager": True, "start_timeout_s": 500.0, **rollout.pop("vllm", {})}
    return EngineSpec(
        path=folder,
        model=ModelSettings.model_validate({"path": str(folder), "dtype": dtype, "lora": lora}),
        rollout=RolloutSettings.model_validate({"engine": "vllm", "max_rows": 16, "vllm": vllm, **rollout}),
        weights=WeightsSettings.model_validate({"quantise": quantise}),
        name="rollout-0",
        eos_token_ids=(),
        max_model_len=CONTEXT,
        wake=wake or (lambda: None),
        serving=ServingOptions("ucx", "127.0.0.1"),
    )


class EngineDriver:
    """An engine that is stepped by the calling thread."""

    def __init__(
        self, folder: Path, *, has_own_weights: bool = False, make_spec: Any = spec_of, **rollout: Any
    ) -> None:
        self._wake = threading.Event()
        spec = make_spec(folder, self._wake.set, **rollout)
        self.spec: EngineSpec = dataclasses.replace(spec, has_own_weights=has_own_weights)
        self.engine: Engine = VllmEngine(self.spec)
        self.results: dict[str, GroupResult | GroupFailed] = {}

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def step(self, timeout_s: float = 1.0) -> None:
        """Step the engine, waiting at most `timeout_s`, and collect finished groups."""
        if not self.engine.ready:
            self._wake.wait(timeout_s)
        self._wake.clear()
        for result in self.engine.step():
            assert result.lease not in self.results
            self.results[result.lease] = result

    def finish(self, *leases: str) -> list[GroupResult]:
        """Step until these groups have ended; return their results."""
        end = time.monotonic() + DEADLINE_S
        while not set(leases) <= set(self.results):
            assert time.monotonic() < end, f"{set(leases) - set(self.results)} did not end"
            self.step()
        found = [self.results.pop(lease) for lease in leases]
        for result in found:
            assert isinstance(result, GroupResult), result
        return found  # type: ignore[return-value]

    def generate(self, prompt: list[int], count: int = 1, lease: str = "one", **sampling: Any) -> GroupResult:
        """Generate one group."""
        self.engine.add(request(lease, prompt, count, **sampling))
        return self.finish(lease)[0]


@contextmanager
def engine_driver(folder: Path, **rollout: Any) -> Iterator[EngineDriver]:
    """Create an engine, and close it afterwards."""
    made = EngineDriver(folder, **rollout)
    try:
        yield made
    finally:
        made.engine.close()


def request(lease: str, prompt: list[int], count: int = 1, **rest: Any) -> GroupRequest:
    """Return a request; `rest` are fields of `Sampling`, `partial`, `listener` and `score_prompt`."""
    others = {name: rest.pop(name) for name in ("partial", "listener", "score_prompt") if name in rest}
    sampling = Sampling(**{"max_tokens": 16, "temperature": 1.0, "seed": 1, **rest})
    return GroupRequest(lease, prompt, count, sampling, **others)


def random_prompt(length: int, seed: int) -> list[int]:
    """Return random token ids."""
    drawn: list[int] = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return drawn


def forward_logprobs(
    model: Any, prompt: list[int], sampled: list[int], temperature: float = 1.0
) -> npt.NDArray[np.float32]:
    """Return the log-probability of each sampled token by one forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1].float()
    scaled = torch.log_softmax(logits / (temperature or 1.0), -1)
    found: npt.NDArray[np.float32] = scaled.gather(-1, torch.tensor(sampled)[:, None])[:, 0].numpy()
    return found


def read_weights(folder: Path, dtype: str = "float32") -> dict[str, torch.Tensor]:
    """Read a checkpoint's tensors."""
    weights = load_file(folder / "model.safetensors")
    return {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}


def _publish(
    folders: list[Path], transport: Transport, lora: LoraSettings | None, quantise: str, dtype: str, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    base = ""
    if lora is not None:
        models = [adapted_model(folder, lora, seed) for seed, folder in enumerate(folders)]
        weights = [published_tensors(model, dict(model.named_parameters())) for model in models]
        base = base_digest(models[0], lora)
    elif dtype == "float32":
        weights = [version_tensors(load_model(folder)) for folder in folders]
    else:
        weights = [read_weights(folder, dtype) for folder in folders]
    recipe = linear_weights(quantise, FUSED_BY_VLLM) if quantise else None
    with Publisher(layout_of(weights[0], "policy-0", base=base), transport=transport, quantise=recipe) as publisher:
        pipe.send_bytes(encode(publisher.layout))
        while (wanted := pipe.recv()) is not None:
            version, plan = wanted
            root_plans = {"": decode_plan(plan)} if plan else {}
            snapshot = publisher.snapshot(version, weights[version % len(weights)], root_plans)
            pipe.send_bytes(encode(snapshot.offer()))
            pipe.send_bytes(snapshot.layout_roots().get("", "").encode())


class PublisherProcess:
    """A publisher process: version v has the weights of folder number v modulo the number of folders.

    With `lora` it publishes the adapters of `adapted_model` with that number as seed; list the same folder repeatedly.
    """

    def __init__(
        self,
        folders: list[Path],
        transport: Transport = "ucx",
        lora: LoraSettings | None = None,
        *,
        quantise: str = "",
        dtype: str = "float32",
    ) -> None:
        context = process_context()
        self._pipe, child_pipe = context.Pipe()
        arguments = (folders, transport, lora, quantise, dtype, child_pipe)
        self._process = context.Process(target=_publish, args=arguments, daemon=True)
        self._process.start()
        child_pipe.close()
        self.layout: Layout = decode_layout(self._answer())
        self.layout_root = ""
        """The layout root of the destination for which a version was published last."""

    def publish(self, version: int, plan: Plan | None = None) -> Offer:
        """Publish `version`, and return its offer. Keeps the layout root of the destination of `plan`."""
        self._pipe.send((version, b"" if plan is None else encode(plan)))
        offer = decode_offer(self._answer())
        self.layout_root = self._answer().decode()
        return offer

    def plan(self, engine: Engine) -> Plan:
        """Return the plan of transfers to an engine."""
        return make_plan(self.layout, engine.layout())

    def pull(self, engine: Engine, plan: Plan, version: int, **options: Any) -> Any:
        """Publish `version` and have `engine` pull it; return the report."""
        named = {"deadline_s": DEADLINE_S, "cancelled": lambda: False, "progress": lambda _: None, **options}
        return engine.pull(self.publish(version, plan), plan, **named)

    def close(self) -> None:
        """End the process, even if it hangs."""
        self._process.kill()
        self._process.join(DEADLINE_S)

    def _answer(self) -> bytes:
        assert self._pipe.poll(DEADLINE_S), "the publisher does not answer"
        return self._pipe.recv_bytes()


@contextmanager
def publisher_process(
    folders: list[Path],
    transport: Transport = "ucx",
    lora: LoraSettings | None = None,
    *,
    quantise: str = "",
    dtype: str = "float32",
) -> Iterator[PublisherProcess]:
    """Start a publisher process, and end it afterwards."""
    made = PublisherProcess(folders, transport, lora, quantise=quantise, dtype=dtype)
    try:
        yield made
    finally:
        made.close()
