"""A replica without a controller in this process: engine thread, HTTP server and episodes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from api_lone import DEADLINE_S, forward_logprobs
from transformers import AutoTokenizer

from starling.algo.text import encode_prompt
from starling.common.settings import load
from starling.common.wire import messages as wire
from starling.rollout.api.model import served_model
from starling.rollout.api.server import ApiServer
from starling.rollout.engine.base import EngineSpec
from starling.rollout.engine.model_config import end_token_ids
from starling.rollout.engine.preparation import PreparedPrompt
from starling.rollout.engine.queue import EngineQueue
from starling.rollout.engine.registry import make_engine
from starling.rollout.env.episodes.trajectory import PlayedGroup, Trajectory
from starling.rollout.env.registry import make_environment
from starling.rollout.env.runner import EpisodeRunner
from starling.rollout.settings import RolloutProcess


class EpisodeStage:
    """Runs episodes of groups with the parts of a replica."""

    def __init__(self, model: Path, *flags: str) -> None:
        flags = ("--rollout.load-weights", "true", "--model.device", "cpu", *flags)
        settings = load(RolloutProcess, (), flags)
        self._wake, self._ended = threading.Event(), threading.Event()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        spec = EngineSpec(
            path=model,
            model=settings.model,
            rollout=settings.rollout,
            weights=settings.weights,
            name="rollout-0",
            eos_token_ids=end_token_ids(self.tokenizer, model),
            max_model_len=None,
            wake=self._wake.set,
        )
        self._engine = make_engine(spec)
        self._engine_queue = EngineQueue(self._wake.set)
        served = served_model(spec, self.tokenizer, self._engine.max_model_len, lambda: self._engine.version)
        self.server = ApiServer(self._engine_queue, served, settings.rollout.api, replica="rollout-0", folder=None)
        chosen = make_environment(settings.rollout.environment)
        assert chosen is not None
        assert chosen.connect is not None
        chosen.connect(self.server)
        self._played: queue.Queue[Any] = queue.Queue()
        self._runner = EpisodeRunner(
            settings.rollout.environment,
            chosen,
            self.tokenizer,
            self._engine_queue,
            self._played.put,
            max_model_len=self._engine.max_model_len,
        )
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self._num_groups = 0

    def play(self, prompt: wire.Prompt, num_completions: int, **sampling: Any) -> PlayedGroup:
        """Run the episodes of one group to their end."""
        self._num_groups += 1
        message = wire.GenerateGroup(
            lease=f"generate:{self._num_groups}",
            purpose="train",
            prompt=prompt,
            num_completions=num_completions,
            sampling=wire.Sampling(**{"max_tokens": 64, "seed": 5, **sampling}),
            min_version=0,
        )
        prepared = PreparedPrompt(message, encode_prompt(self.tokenizer, prompt))
        self._runner.begin(prepared)
        played: PlayedGroup = self._played.get(timeout=DEADLINE_S)
        assert self._runner.take(message.lease)
        return played

    def close(self) -> None:
        self._runner.close()
        self._ended.set()
        self._wake.set()
        self._thread.join(DEADLINE_S)
        self._engine_queue.close()
        self.server.close()

    def _serve(self) -> None:
        while not self._ended.is_set():
            self._wake.clear()
            self._engine_queue.serve(self._engine, admit=True)
            if self._engine.ready:
                for result in self._engine.step():
                    self._engine_queue.settle(result)
            else:
                self._wake.wait(1.0)


@contextmanager
def stage(model: Path, *flags: str) -> Iterator[EpisodeStage]:
    made = EpisodeStage(model, *flags)
    try:
        yield made
    finally:
        made.close()


def check(model: Path, played: PlayedGroup, trajectory: Trajectory, temperature: float = 1.0) -> None:
    """Assert that the log-probabilities of a trajectory's sampled tokens equal the model's at their positions."""
    prompt, tokens = played.prompt_ids.tolist(), trajectory.token_ids.tolist()
    expected = forward_logprobs(model, prompt, tokens, temperature).numpy()
    mask = trajectory.loss_mask.astype(bool)
    np.testing.assert_allclose(trajectory.logprobs[mask], expected[mask], atol=1e-5)
    assert not trajectory.logprobs[~mask].any()
    assert mask[-1], "unanswered messages are not in the trajectory"
    assert torch.isfinite(torch.from_numpy(trajectory.logprobs)).all()
