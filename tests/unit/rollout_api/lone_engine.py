"""An engine with an HTTP server and nothing else, to be run in a process of its own."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers import AutoTokenizer

from starling.common.observe import log
from starling.common.settings import load
from starling.rollout.api.model import served_model
from starling.rollout.api.server import ApiServer
from starling.rollout.engine.base import EngineSpec
from starling.rollout.engine.model_config import end_token_ids
from starling.rollout.engine.queue import EngineQueue
from starling.rollout.engine.registry import make_engine
from starling.rollout.settings import RolloutProcess


def run(model: Path, folder: Path, flags: tuple[str, ...], pipe: Connection) -> None:
    """Serve until False arrives; answer True with the numbers of sampled tokens and of running sequences."""
    torch.set_num_threads(1)
    log.configure("rollout-0")
    settings = load(RolloutProcess, (), flags)
    wake, ended = threading.Event(), threading.Event()
    tokenizer = AutoTokenizer.from_pretrained(model)
    spec = EngineSpec(
        path=model,
        model=settings.model,
        rollout=settings.rollout,
        weights=settings.weights,
        name="rollout-0",
        eos_token_ids=end_token_ids(tokenizer, model),
        max_model_len=settings.rollout.max_model_len,
        wake=wake.set,
    )
    engine = make_engine(spec)
    engine_queue = EngineQueue(wake.set)
    served = served_model(spec, tokenizer, engine.max_model_len, lambda: engine.version)
    server = ApiServer(engine_queue, served, settings.rollout.api, replica="rollout-0", folder=folder)

    def answer() -> None:
        while pipe.recv():
            pipe.send((engine.num_tokens, engine.num_running))
        ended.set()
        wake.set()

    threading.Thread(target=answer, daemon=True).start()
    while not ended.is_set():
        wake.clear()
        engine_queue.serve(engine, admit=True)
        if engine.ready:
            for result in engine.step():
                engine_queue.settle(result)
        else:
            wake.wait(1.0)
    engine_queue.close()
    server.close()
