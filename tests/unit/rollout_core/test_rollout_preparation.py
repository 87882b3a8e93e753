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


class Desk:
    """Preparation by a function that waits to be let, with all that it puts."""

    def __init__(self) -> None:
        self.put: queue.Queue[Any] = queue.Queue()
        self.let = threading.Event()
        self.begun: queue.Queue[str] = queue.Queue()
        self.preparation = PromptPreparation(self.encode, self.put.put, 60.0)

    def encode(self, prompt: Prompt) -> tuple[list[int], dict[str, Any]]:
        if prompt.media:
            self.begun.put(prompt.id)
            assert self.let.wait(WITHIN_S)
        if prompt.id == "bad":
            raise ConfigError("it does not decode")
        if prompt.id == "worse":
            raise KeyError("what nobody thought of")
        return [len(prompt.id)], {}


@pytest.fixture
def desk() -> Any:
    made = Desk()
    yield made
    made.let.set()
    made.preparation.close()


def test_text_is_prepared_at_once_while_images_are_read(desk: Desk) -> None:
    assert desk.preparation.begin(group("image")) is None
    assert desk.preparation.begin(group("text", media=False)) == PreparedPrompt(group("text", media=False), [4], {})
    assert desk.put.empty()
    desk.let.set()
    assert desk.put.get(timeout=WITHIN_S) == PreparedPrompt(group("image"), [5], {})
    assert desk.preparation.take("image")
    assert not desk.preparation.take("image")


def test_handed_over_prompts_are_dropped(desk: Desk) -> None:
    leases = [f"image{number}" for number in range(NUM_THREADS + 1)]
    for lease in leases:
        desk.preparation.begin(group(lease))
    assert desk.preparation.cancel_all() == leases
    assert desk.preparation.waits(time.monotonic()) == ()
    assert not any(desk.preparation.take(lease) for lease in leases)


def test_any_exception_costs_one_prompt(desk: Desk) -> None:
    desk.let.set()
    assert desk.preparation.begin(group("bad", media=False)) == PreparedPrompt(
        group("bad", media=False), problem="it does not decode"
    )
    desk.preparation.begin(group("bad"))
    assert desk.put.get(timeout=WITHIN_S).problem == "it does not decode"
    desk.preparation.begin(group("worse"))
    problem = "it cannot be encoded (KeyError: 'what nobody thought of'): change it"
    assert desk.put.get(timeout=WITHIN_S) == PreparedPrompt(group("worse"), problem=problem)
    assert desk.preparation.begin(group("worse", media=False)) == PreparedPrompt(
        group("worse", media=False), problem=problem
    )


def test_cancelled_prompt_is_dropped(desk: Desk) -> None:
    desk.preparation.begin(group("image"))
    desk.preparation.cancel("image")
    desk.let.set()
    assert desk.put.get(timeout=WITHIN_S).message.lease == "image"
    assert not desk.preparation.take("image")


def test_slow_media_are_reported_and_then_cancelled(desk: Desk) -> None:
    assert desk.preparation.waits(0.0) == ()
    desk.preparation.begin(group("image"))
    assert desk.begun.get(timeout=WITHIN_S) == "image"
    (wait,) = desk.preparation.waits(1e12)
    assert (wait.on, wait.seconds_left) == ("disk", 0.0)
    assert desk.preparation.expire(0.0) == []
    assert desk.preparation.expire(1e12) == [("image", "its images and videos could not be read within 60 s")]
    assert desk.preparation.expire(1e12) == []
    desk.let.set()
    desk.put.get(timeout=WITHIN_S)
    assert not desk.preparation.take("image")


def hold(desk: Desk) -> None:
    """Give every thread a prompt that it does not come back from."""
    for number in range(NUM_THREADS):
        desk.preparation.begin(group(f"held-{number}"))
    assert {desk.begun.get(timeout=WITHIN_S) for _ in range(NUM_THREADS)} == {"held-0", "held-1"}


@pytest.mark.parametrize("late", [False, True])
def test_cancelled_prompt_in_queue_is_never_begun(desk: Desk, late: bool) -> None:
    hold(desk)
    desk.preparation.begin(group("queued"))
    if late:
        assert [lease for lease, _ in desk.preparation.expire(1e12)] == ["held-0", "held-1", "queued"]
    else:
        desk.preparation.cancel("queued")
    desk.let.set()
    desk.preparation.begin(group("next"))
    put = {desk.put.get(timeout=WITHIN_S).message.lease for _ in range(NUM_THREADS + 1)}
    assert put == {"held-0", "held-1", "next"}
    assert desk.begun.get(timeout=WITHIN_S) == "next"


def test_wait_of_queued_prompts_restarts_when_a_thread_begins() -> None:
    begun: queue.Queue[str] = queue.Queue()
    let = threading.Semaphore(0)

    def encode(prompt: Prompt) -> tuple[list[int], dict[str, Any]]:
        begun.put(prompt.id)
        assert let.acquire(timeout=WITHIN_S)
        return [], {}

    leases = [f"held-{number}" for number in range(NUM_THREADS)]
    preparation = PromptPreparation(encode, queue.Queue[Any]().put, 60.0)
    for lease in (*leases, "next", "queued"):
        preparation.begin(group(lease))
    assert sorted(begun.get(timeout=WITHIN_S) for _ in leases) == leases
    released = time.monotonic()
    let.release()
    assert begun.get(timeout=WITHIN_S) == "next"
    for lease in (*leases, "next"):
        preparation.cancel(lease)
    (wait,) = preparation.waits(0.0)
    assert -wait.since_s >= released
    let.release(NUM_THREADS + 1)
    preparation.close()
