"""A rollout process with vLLM, a fake controller, and a publisher of weights, for one tiny model."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import torch
import transformers
from engines import PublisherProcess, forward_logprobs, publisher_process, read_model
from fake_hub import DEADLINE_S, FakeHub
from replica_processes import replica
from tiny_sizes import GROUPED

from starling.cli.model.scratch import ScratchSettings, make_model_folder
from starling.common.wire import messages as wire
from starling.weightsync.plan.layout import decode_layout, encode
from starling.weightsync.plan.planner import Plan, make_plan

NAME = "rollout-0"
CONTEXT = 2048
ROWS = 16
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
"""A single token, so that a model with random weights samples it now and then."""
CHAT = (
    "{% for tool in tools or [] %}{{ '[' + tool.function.name + ']' }}{% endfor %}"
    "{% for message in messages %}{{ message.role[0] + ':' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '(' + call.function.name + ')' }}{% endfor %}"
    "{{ ';' }}{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
OWNED = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def make_checkpoints(base: Path, num: int = 2) -> list[Path]:
    """Create checkpoints of one model with different random weights; each character and `CALL` are tokens."""
    config = {name: value for name, value in GROUPED.items() if name not in OWNED}
    first = base / "tiny-0"
    make_model_folder(ScratchSettings(config=config, chat_template=CHAT, max_length=CONTEXT), first)
    tokenizer = transformers.AutoTokenizer.from_pretrained(first)
    tokenizer.add_tokens([transformers.AddedToken(CALL, special=False, normalized=False)])
    tokenizer.save_pretrained(first)
    described = transformers.AutoConfig.from_pretrained(first)
    described.vocab_size = len(tokenizer)
    folders = [first, *(base / f"tiny-{index}" for index in range(1, num))]
    for seed, folder in enumerate(folders):
        if folder != first:
            shutil.copytree(first, folder)
        torch.manual_seed(seed)
        transformers.AutoModelForCausalLM.from_config(described).save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | {"dtype": "float32"}))
    return folders


@dataclass
class Service:
    """A rollout process that has adopted `version`, and models with the weights of each version."""

    hub: FakeHub
    process: subprocess.Popen[str]
    source: PublisherProcess
    plan: Plan
    models: list[Any]
    base_url: str
    api_key: str
    model: str
    folders: list[Path]
    """The checkpoints; the first one is version 0."""
    version: int = 0

    def client(self, **more: Any) -> openai.OpenAI:
        """Return an OpenAI client of its endpoint."""
        return openai.OpenAI(**self.address, **more)

    def async_client(self, **more: Any) -> openai.AsyncOpenAI:
        """Return an asynchronous client of its endpoint."""
        return openai.AsyncOpenAI(**self.address, **more)

    @property
    def address(self) -> dict[str, Any]:
        """Arguments of every client."""
        return {"base_url": self.base_url, "api_key": self.api_key, "max_retries": 0, "timeout": DEADLINE_S}

    def adopt(self) -> None:
        """Publish the next version, and command the rollout to adopt it."""
        offer = self.source.publish(self.version + 1)
        order = wire.AdoptWeights(lease=self.hub.lease("adopt"), version=offer.version, source="policy-0")
        adopted, _ = self.hub.ask(NAME, order, wire.WeightsAdopted, (encode(offer), encode(self.plan)))
        assert (adopted.version, adopted.root) == (offer.version, offer.root)
        self.version = offer.version

    def logprobs(self, version: int, prompt: list[int], ids: list[int], temperature: float = 1.0) -> Any:
        """Return the log-probabilities of `ids` after a prompt, under the weights of `version`."""
        return forward_logprobs(self.models[version % len(self.models)], prompt, ids, temperature)

    def check(self, prompt: list[int], starling: Any, logprobs: list[float], temperature: float = 1.0) -> set[int]:
        """Compare log-probabilities with forward passes over the weights of their versions; return the versions."""
        ids, found = starling["token_ids"], np.array(logprobs)
        assert len(ids) == len(found)
        ends = [0, *(span["end"] for span in starling["versions"])]
        assert ends[:-1] == [span["start"] for span in starling["versions"]]
        assert ends[-1] == len(ids)
        for span in starling["versions"]:
            here = slice(span["start"], span["end"])
            wanted = self.logprobs(span["version"], prompt, ids, temperature)
            np.testing.assert_allclose(found[here], wanted[here], atol=1e-4)
        return {span["version"] for span in starling["versions"]}


def settings(kind: str, folder: Path) -> tuple[str, ...]:
    """Return the flags of a rollout on vLLM that begins with the weights of `folder`, in a run of some kind."""
    rollout = {
        "load-weights": "true",
        "engine": "vllm",
        "max-rows": str(ROWS),
        "adoption": "recompute",
        "vllm.kv-cache-mb": "32",
        "vllm.enforce-eager": "true",
    }
    flags = [text for name, value in rollout.items() for text in (f"--rollout.{name}", value)]
    return ("--run.kind", kind, "--model.path", str(folder), "--model.dtype", "float32", *flags)


def alone(hub: FakeHub, folder: Path, flags: tuple[str, ...]) -> AbstractContextManager[Any]:
    """Start nothing beside the rollout."""
    return nullcontext()


@contextmanager
def service(
    base: Path, *flags: str, beside: Callable[[FakeHub, Path, tuple[str, ...]], AbstractContextManager[Any]] = alone
) -> Iterator[Service]:
    """Start the rollout, with the first checkpoint as version 0.

    `beside`: started before it, with the hub, its folder and its flags, and ended after it.
    """
    folders = make_checkpoints(base)
    run = base / "run"
    api = ("--rollout.api.enabled", "true", "--rollout.api.key", "a key of mine")
    common = (*settings("rl", folders[0]), *api, *flags)
    hub = FakeHub()
    try:
        with (
            publisher_process(folders) as publisher,
            beside(hub, run, common),
            replica(hub, NAME, run, *common, fresh=True) as process,
        ):
            hello, (layout,) = hub.hello(NAME)
            assert hello.version == 0
            hub.heartbeat(NAME, lambda _: (run / "api/rollout-0.json").is_file())
            endpoint = json.loads((run / "api/rollout-0.json").read_text())
            plan = make_plan(publisher.layout, decode_layout(layout))
            models = [read_model(folder) for folder in folders]
            yield Service(hub, process, publisher, plan, models, **endpoint, folders=folders)
    finally:
        hub.close()
