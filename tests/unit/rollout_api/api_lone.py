"""A tiny model with random weights, an engine with an HTTP server in a process of its own, and expected results."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from forks import forked
from lone_engine import run
from transformers import AutoConfig, AutoModelForCausalLM

from starling.cli.model.scratch import ScratchSettings, make_model_folder

torch.set_num_threads(1)

DEADLINE_S = 120.0
"""Deadline of each wait, longer than any operation here takes on a busy machine."""
CONTEXT = 2048
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
CHAT = (
    "{% for tool in tools or [] %}{{ '[' + tool.function.name + ']' }}{% endfor %}"
    "{% for message in messages %}{{ message.role[0] + ':' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<' + call.function.name }}"
    "{{ call.function.arguments | tojson + '>' }}{% endfor %}"
    "{{ ';' }}{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)


def make_model(folder: Path) -> Path:
    """Write a model with random weights and a tokenizer of single characters."""
    make_model_folder(ScratchSettings(config=SMALL, chat_template=CHAT, max_length=CONTEXT), folder)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class LoneEngine:
    """A process with an engine and an HTTP endpoint."""

    base_url: str
    api_key: str
    model: str
    pipe: Connection

    def sampled(self) -> tuple[int, int]:
        """Return the number of sampled tokens and of running sequences."""
        self.pipe.send(True)
        assert self.pipe.poll(DEADLINE_S), "the engine does not answer"
        num_tokens, num_running = self.pipe.recv()
        return num_tokens, num_running


@contextmanager
def lone_engine(model: Path, folder: Path, *flags: str) -> Iterator[LoneEngine]:
    """Start the engine; at the exit the process must end without error."""
    flags = ("--rollout.load-weights", "true", "--rollout.max-rows", "64", "--model.device", "cpu", *flags)
    with forked(run, model, folder, flags) as child:
        file = folder / "api" / "rollout-0.json"
        until = time.monotonic() + DEADLINE_S
        while not file.is_file():
            assert child.process.is_alive(), "the process ended before it listened"
            assert time.monotonic() < until, "the endpoint did not start to listen"
            time.sleep(0.05)
        assert file.stat().st_mode & 0o777 == 0o600
        address = json.loads(file.read_text())
        yield LoneEngine(address["base_url"], address["api_key"], address["model"], child.pipe)
        child.pipe.send(False)
        assert child.exit_code() == 0
        assert not file.exists(), "the address file was removed at the end"


def forward_logprobs(folder: Path, prompt: Sequence[int], sampled: Sequence[int], temperature: float) -> torch.Tensor:
    """Return the log-probabilities of tokens after a prompt by one forward pass of the model in `folder`, [tokens]."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sampled]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(sampled)[:, None])[:, 0]
