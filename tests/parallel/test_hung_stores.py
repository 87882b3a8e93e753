"""A replica whose store answers nothing, because its process hangs: others go on without it after a time limit."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from starling.policy.shell.peers import request_state
from starling.policy.train.errors import PeersLostError
from starling.policy.train.parallel.group import serve_store
from starling.policy.train.parallel.replicas import peers
from starling.policy.train.parallel.replicas.peers import PeerGroup


def serve(pipe: Connection) -> None:
    """Serve a store until the end of the test."""
    _store, address = serve_store("127.0.0.1")
    pipe.send(address)
    signal.pause()


@pytest.fixture
def hung() -> Iterator[str]:
    """Return the address of a store whose process was stopped: connections are accepted, and nothing is answered."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    address = ours.recv()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    yield address
    process.kill()
    process.join()


def test_group_with_a_hung_first_replica_is_given_up(hung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "REACH_S", 0.5)
    _store, own = serve_store("127.0.0.1")
    with pytest.raises(PeersLostError, match=rf"are lost: the store at {hung} did not answer within 1 s"):
        PeerGroup([hung, own], 1, "step", 0.5, torch.device("cpu"))


def test_request_for_the_state_of_a_hung_replica_is_given_up(hung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "REACH_S", 0.5)
    with pytest.raises(TimeoutError, match=rf"the store at {hung} did not answer within 0\.5 s"):
        request_state(hung, "127.0.0.1:5000", "lease")
