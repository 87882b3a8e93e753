"""A real engine with a request queue, stepped by its own thread as in the rollout's shell."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tiny_chat import tokenizer
from transformers import AutoModelForCausalLM, Qwen3Config

from starling.common.wire.messages import GenerateGroup, Prompt, Sampling
from starling.rollout.engine.embedded.engine import TransformersEngine
from starling.rollout.engine.preparation import PreparedPrompt
from starling.rollout.engine.queue import EngineQueue

CONTEXT = 160
IDLE_S = 0.5


def make_model(seed: int = 0) -> Any:
    """Return a tiny random Qwen3 over the vocabulary of `tiny_chat`."""
    config = Qwen3Config(
        vocab_size=350,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


class DrivenEngine:
    """An engine and the thread that steps it."""

    def __init__(self, model: Any) -> None:
        eos = tokenizer("chatml").eos_token_id
        self.engine = TransformersEngine(model, eos_token_ids=(eos,), max_rows=16, version=5)
        self._news = threading.Event()
        self.engine_queue = EngineQueue(self._news.set)
        self.inbox: queue.Queue[Any] = queue.Queue()
        self._over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            self.engine_queue.serve(self.engine, admit=True)
            if self.engine.num_running or self.engine.num_waiting:
                for result in self.engine.step():
                    assert self.engine_queue.settle(result)
            else:
                self._news.wait(IDLE_S)
                self._news.clear()

    def close(self) -> None:
        self._over = True
        self._news.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.engine_queue.close()


@contextmanager
def driven_engine(model: Any) -> Iterator[DrivenEngine]:
    made = DrivenEngine(model)
    try:
        yield made
    finally:
        made.close()


def prepared_group(
    prompt: Prompt, ids: list[int], num: int = 2, lease: str = "generate:t0", **sampling: Any
) -> PreparedPrompt:
    """Return a group after the encoding of its prompt."""
    message = GenerateGroup(
        lease=lease,
        purpose="train",
        prompt=prompt,
        num_completions=num,
        sampling=Sampling(**{"max_tokens": 24, "seed": 3, **sampling}),
        min_version=4,
    )
    return PreparedPrompt(message, ids)
