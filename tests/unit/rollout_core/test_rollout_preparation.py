"""Preparation of prompts with images beside the sampling: results, time limits, cancellation."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest

from starling.common.errors import ConfigError
from starling.common.wire.messages import GenerateGroup, Media, Prompt, Sampling
from starling.rollout.engine.preparation import NUM_THREADS, PreparedPrompt, PromptPreparation

WITHIN_S = 20.0


def group(lease: str, *, media: bool = True) -> GenerateGroup:
    shown = (Media(kind="image", uri="a.png"),) if media else ()
    return GenerateGroup(
        lease=lease,
        purpose="train",
        prompt=Prompt(id=lease, text=lease, media=shown),
        num_completions=1,
        sampling=Sampling(max_tokens=1),
        min_version=0,
    )


class PreparationHarness:
    """Preparation with a function that blocks until released, and its results."""

    def __init__(self) -> None:
        self.put: queue.Queue[Any] = queue.Queue()
        self.released = threading.Event()
        self.begun: queue.Queue[str] = queue.Queue()
        self.preparation = PromptPreparation(self.encode, self.put.put, 60.0)

    def encode(self, prompt: Prompt) -> tuple[list[int], dict[str, Any]]:
        if prompt.media:
            self.begun.put(prompt.id)
            assert self.released.wait(WITHIN_S)
        if prompt.id == "bad":
            raise ConfigError("it does not decode")
        if prompt.id == "worse":
            raise KeyError("an unexpected error")
        return [len(prompt.id)], {}


@pytest.fixture
def harness() -> Any:
    made = PreparationHarness()
    yield made
    made.released.set()
    made.preparation.close()


def test_text_is_prepared_at_once_while_images_are_read(harness: PreparationHarness) -> None:
    assert harness.preparation.begin(group("image")) is None
    assert harness.preparation.begin(group("text", media=False)) == PreparedPrompt(group("text", media=False), [4], {})
    assert harness.put.empty()
    harness.released.set()
    assert harness.put.get(timeout=WITHIN_S) == PreparedPrompt(group("image"), [5], {})
    assert harness.preparation.take("image")
    assert not harness.preparation.take("image")


def test_handed_over_prompts_are_dropped(harness: PreparationHarness) -> None:
    leases = [f"image{number}" for number in range(NUM_THREADS + 1)]
    for lease in leases:
        harness.preparation.begin(group(lease))
    assert harness.preparation.cancel_all() == leases
    assert harness.preparation.waits(time.monotonic()) == ()
    assert not any(harness.preparation.take(lease) for lease in leases)


def test_any_exception_costs_one_prompt(harness: PreparationHarness) -> None:
    harness.released.set()
    assert harness.preparation.begin(group("bad", media=False)) == PreparedPrompt(
        group("bad", media=False), problem="it does not decode"
    )
    harness.preparation.begin(group("bad"))
    assert harness.put.get(timeout=WITHIN_S).problem == "it does not decode"
    harness.preparation.begin(group("worse"))
    problem = "it cannot be encoded (KeyError: 'an unexpected error'): change it"
    assert harness.put.get(timeout=WITHIN_S) == PreparedPrompt(group("worse"), problem=problem)
    assert harness.preparation.begin(group("worse", media=False)) == PreparedPrompt(
        group("worse", media=False), problem=problem
    )


def test_cancelled_prompt_is_dropped(harness: PreparationHarness) -> None:
    harness.preparation.begin(group("image"))
    harness.preparation.cancel("image")
    harness.released.set()
    assert harness.put.get(timeout=WITHIN_S).message.lease == "image"
    assert not harness.preparation.take("image")


def test_slow_media_are_reported_and_then_cancelled(harness: PreparationHarness) -> None:
    assert harness.preparation.waits(0.0) == ()
    harness.preparation.begin(group("image"))
    assert harness.begun.get(timeout=WITHIN_S) == "image"
    (wait,) = harness.preparation.waits(1e12)
    assert (wait.on, wait.seconds_left) == ("disk", 0.0)
    assert harness.preparation.expire(0.0) == []
    assert harness.preparation.expire(1e12) == [("image", "its images and videos could not be read within 60 s")]
    assert harness.preparation.expire(1e12) == []
    harness.released.set()
    harness.put.get(timeout=WITHIN_S)
    assert not harness.preparation.take("image")


def occupy_threads(harness: PreparationHarness) -> None:
    """Occupy every thread with a prompt that does not finish."""
    for number in range(NUM_THREADS):
        harness.preparation.begin(group(f"held-{number}"))
    assert {harness.begun.get(timeout=WITHIN_S) for _ in range(NUM_THREADS)} == {"held-0", "held-1"}


@pytest.mark.parametrize("late", [False, True])
def test_cancelled_prompt_in_queue_is_never_begun(harness: PreparationHarness, late: bool) -> None:
    occupy_threads(harness)
    harness.preparation.begin(group("queued"))
    if late:
        assert [lease for lease, _ in harness.preparation.expire(1e12)] == ["held-0", "held-1", "queued"]
    else:
        harness.preparation.cancel("queued")
    harness.released.set()
    harness.preparation.begin(group("next"))
    put = {harness.put.get(timeout=WITHIN_S).message.lease for _ in range(NUM_THREADS + 1)}
    assert put == {"held-0", "held-1", "next"}
    assert harness.begun.get(timeout=WITHIN_S) == "next"


def test_wait_of_queued_prompts_restarts_when_a_thread_begins() -> None:
    begun: queue.Queue[str] = queue.Queue()
    permits = threading.Semaphore(0)

    def encode(prompt: Prompt) -> tuple[list[int], dict[str, Any]]:
        begun.put(prompt.id)
        assert permits.acquire(timeout=WITHIN_S)
        return [], {}

    leases = [f"held-{number}" for number in range(NUM_THREADS)]
    preparation = PromptPreparation(encode, queue.Queue[Any]().put, 60.0)
    for lease in (*leases, "next", "queued"):
        preparation.begin(group(lease))
    assert sorted(begun.get(timeout=WITHIN_S) for _ in leases) == leases
    released_at = time.monotonic()
    permits.release()
    assert begun.get(timeout=WITHIN_S) == "next"
    for lease in (*leases, "next"):
        preparation.cancel(lease)
    (wait,) = preparation.waits(0.0)
    assert -wait.since_s >= released_at
    permits.release(NUM_THREADS + 1)
    preparation.close()


def test_texts_of_a_diffusion_model_are_prepared_in_threads() -> None:
    """And what is said of slow ones names their embeddings."""
    put: queue.Queue[Any] = queue.Queue()
    released, main = threading.Event(), threading.current_thread()

    def encode(prompt: Prompt) -> tuple[list[int], dict[str, Any]]:
        assert threading.current_thread() is not main
        assert released.wait(WITHIN_S)
        return [0], {"text_embeddings": prompt.text}

    preparation = PromptPreparation(encode, put.put, 60.0, product="embeddings", has_texts=True)
    late, text = group("late", media=False), group("text", media=False)
    assert preparation.begin(late) is None
    (wait,) = preparation.waits(1e12)
    assert wait.what == "embeddings of prompts"
    assert preparation.expire(1e12) == [("late", "its embeddings could not be read within 60 s")]
    assert preparation.begin(text) is None
    released.set()
    found = {done.message.lease: done for done in (put.get(timeout=WITHIN_S), put.get(timeout=WITHIN_S))}
    assert found["text"] == PreparedPrompt(text, [0], {"text_embeddings": "text"})
    assert preparation.take("text")
    assert not preparation.take("late")
    preparation.close()
