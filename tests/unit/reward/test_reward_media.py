"""Media in the pool, with real workers: what scorers get, failures, and that no descriptor and no memory is left."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sandbox_levels import ALL
from scoring import PATIENCE_S, collect, completions, scored, scorers_in, settings_of

from starling.common.errors import ConfigError
from starling.common.sandbox.launch import Mechanism, problem_of
from starling.common.wire.messages import Status
from starling.reward.core.media import MediaForm, MediaKind, MediaRow, MediaTensor, form_problem
from starling.reward.core.samples import PromptText, Sample, ScoreTask
from starling.reward.score.pool.check import check_scorers
from starling.reward.score.pool.pool import ScoringPool
from starling.reward.score.scorers.registry import load_scorer
from starling.reward.score.workers.places import offsets_of, padded
from starling.reward.score.workers.shared import MediaMemory, TooManyBuffersError
from starling.reward.settings import RewardSettings

CLASSES = Path(__file__).with_name("media_scorers.py")
BFLOAT16 = "bfloat16"


def settings(*classes: str, scorer: dict[str, Any] | None = None, **others: Any) -> RewardSettings:
    return settings_of(*scorers_in(CLASSES, *classes, **(scorer or {})), **{"timeout_s": PATIENCE_S, **others})


def pixels_settings(**others: Any) -> RewardSettings:
    return settings("Pixels", scorer={"key": "sum"}, **others)


def clip(value: int, num_frames: int = 2, height: int = 3, width: int = 4) -> np.ndarray:
    return np.full((num_frames, height, width, 3), value, np.uint8)


def tensors_of(memory: MediaMemory, *arrays: np.ndarray, dtype: str = "", fps: float = 0.0) -> tuple[MediaTensor, ...]:
    """Return a tensor for each array, all in one buffer."""
    places, _ = offsets_of(array.nbytes for array in arrays)
    buffer = memory.share(padded((array.tobytes(),) for array in arrays))
    kinds: dict[str, MediaKind] = {"uint8": "pixels", "int32": "token_ids"}
    forms = [MediaForm(kinds.get(str(one.dtype), "latents"), dtype or str(one.dtype), one.shape, fps) for one in arrays]
    return tuple(MediaTensor(form, 1, buffer, place) for form, place in zip(forms, places, strict=True))


def task(
    media: tuple[MediaTensor, ...],
    *texts: str,
    rows: list[MediaRow | None] | None = None,
    num_scorers: int = 1,
    id: str = "request/0",
    prompt: str = "p",
    groups: list[int] | None = None,
) -> ScoreTask:
    """Return the task of samples whose media are in one tensor each, or at `rows`."""
    rows = rows or [MediaRow(index) for index in range(len(texts))]
    groups = groups or [0] * len(texts)
    samples = tuple(
        Sample(index, groups[index], completion, rows[index]) for index, completion in enumerate(completions(*texts))
    )
    prompts = tuple(PromptText(f"{prompt}{number}", "r", {}) for number in range(max(groups) + 1))
    return ScoreTask(id, prompts, samples, tuple(range(num_scorers)), media)


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    with ScoringPool(pixels_settings()) as shared:
        yield shared


@pytest.fixture
def memory() -> Iterator[MediaMemory]:
    """Memory that must be empty after the test, whose locals have gone by then."""
    found = MediaMemory(64)
    yield found
    gc.collect()
    assert (found.num_buffers, found.size_bytes) == (0, 0)


def test_scorer_gets_pixels_of_each_sample(pool: ScoringPool, memory: MediaMemory) -> None:
    media = tensors_of(memory, clip(1), clip(2, 1, 5, 7), clip(3), fps=16.0)
    scores = scored(pool, task(media, "a", "b", "c"))
    assert [score.value for score in scores] == [72.0, 210.0, 216.0]
    assert [dict(score.parts)["fps"] for score in scores] == [16.0] * 3
    assert [dict(score.parts)["batch"] for score in scores] == [3.0] * 3, "one call, over tensors of two forms"


def test_samples_may_be_rows_of_one_tensor_in_any_order(pool: ScoringPool, memory: MediaMemory) -> None:
    batch = np.stack([clip(value) for value in (1, 2, 3, 4, 5)])
    form = MediaForm("pixels", "uint8", clip(0).shape)
    media = (MediaTensor(form, 4, memory.share([bytes(64), batch[1:].tobytes()]), 64),)
    rows: list[MediaRow | None] = [MediaRow(0, 3), MediaRow(0, 0), MediaRow(0, 2), MediaRow(0, 0), MediaRow(0, 1)]
    scores = scored(pool, task(media, *"abcde", rows=rows))
    assert [score.value for score in scores] == [5 * 72.0, 2 * 72.0, 4 * 72.0, 2 * 72.0, 3 * 72.0]


def test_task_may_have_several_buffers(pool: ScoringPool, memory: MediaMemory) -> None:
    media = (*tensors_of(memory, clip(1)), *tensors_of(memory, clip(2)), *tensors_of(memory, clip(3)))
    assert [score.value for score in scored(pool, task(media, "a", "b", "c"))] == [72.0, 144.0, 216.0]


def test_latents_of_any_type_are_float32(memory: MediaMemory) -> None:
    exact = np.full((16, 1, 2, 2), -1.5, np.float32)
    with ScoringPool(settings("Latents")) as pool:
        for array in (exact, exact.astype(np.float16)):
            assert scored(pool, task(tensors_of(memory, array), "a"))[0].value == -1.5
        bits = (exact.view("<u4") >> 16).astype("<u2")
        form = MediaForm("latents", BFLOAT16, exact.shape)
        media = (MediaTensor(form, 1, memory.share([bits.tobytes()])),)
        assert scored(pool, task(media, "a"))[0].value == -1.5


def test_scorer_gets_token_ids_of_each_completion(memory: MediaMemory) -> None:
    ids = [np.array(one, np.int32) for one in ([1, 2, 151_643], [], [2**31 - 1])]
    with ScoringPool(settings("TokenIds")) as pool:
        scores = scored(pool, task(tensors_of(memory, *ids), "a", "b", "c"))
    assert [score.value for score in scores] == [151_646.0, 0.0, float(2**31 - 1)]


def test_scorers_of_text_and_media_share_workers(memory: MediaMemory) -> None:
    mixed = RewardSettings.model_validate(
        {
            "scorers": [{"name": "length", "options": {"max_tokens": 8}}, {"name": f"{CLASSES}:Acting"}],
            "num_workers": 1,
        }
    )
    with ScoringPool(mixed) as pool:
        media = tensors_of(memory, clip(1))
        scores = scored(pool, task(media, "a", "b", rows=[MediaRow(0), None], num_scorers=2))
        assert pool.form_of(0).media == "text"
        assert pool.form_of(1).media == "pixels"
    assert [score.value is None for score in scores] == [False, False, False, True]
    assert scores[1].value == 72.0
    assert scores[3].status is Status.REWARD_ERROR
    assert scores[3].problem.endswith("reads pixels, and the completion has none; send them with it.")


def test_sample_with_other_media_fails_alone(pool: ScoringPool, memory: MediaMemory) -> None:
    media = tensors_of(memory, np.zeros((16, 1, 2, 2), np.float32), clip(1))
    latents, pixels = scored(pool, task(media, "a", "b"))
    assert (latents.value, latents.status) == (None, Status.REWARD_ERROR)
    assert latents.problem.endswith("nothing decodes latents here: set reward.decoder.folders, or send pixels.")
    assert (pixels.value, pixels.status) == (72.0, Status.OK)


def test_group_is_compared_only_if_all_have_media(memory: MediaMemory) -> None:
    with ScoringPool(settings("Brightest")) as pool:
        media = tensors_of(memory, clip(1), clip(2), clip(3))
        rows = [MediaRow(0), MediaRow(1), MediaRow(2), None]
        scores = scored(pool, task(media, *"abcd", rows=rows, groups=[0, 0, 1, 1]))
    assert [score.value for score in scores] == [0.0, 1.0, None, None]
    assert "another completion of its group has none" in scores[2].problem
    assert "the completion has none" in scores[3].problem


def test_killed_workers_calls_still_have_their_media(memory: MediaMemory, tmp_path: Path) -> None:
    """The first call ends its worker once; it and those that were sent with it are made by the next one."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)  # the worker's user is another one
    marked = settings("Acting", scorer={"needs": {"writable_paths": [str(tmp_path)]}})
    with ScoringPool(marked) as pool:
        media = tensors_of(memory, *(clip(value) for value in range(5)))
        scores = scored(pool, task(media, f"exit-once {tmp_path / 'mark'}", "b", "c", "d", "e"))
        assert [score.value for score in scores] == [0.0, 72.0, 144.0, 216.0, 288.0]
        assert pool.gauges()["workers_replaced"] == 1


def test_lost_sample_has_its_media(memory: MediaMemory) -> None:
    with ScoringPool(settings("Acting", scorer={"retries": 0})) as pool:
        scored(pool, task(tensors_of(memory, clip(7), clip(9)), "a", "exit"))
        (lost,) = pool.take_lost()
    ((tensor, row),) = lost.media
    assert tensor.read(row) == clip(9).tobytes()


def test_scorer_cannot_write_into_media(memory: MediaMemory) -> None:
    with ScoringPool(settings("Acting")) as pool:
        (score,) = scored(pool, task(tensors_of(memory, clip(1)), "write"))
    assert "raised ValueError: cannot set WRITEABLE flag to True" in score.problem


def test_media_that_a_scorer_keeps_stay_readable(memory: MediaMemory) -> None:
    with ScoringPool(settings("Keeping")) as pool:
        values = [scored(pool, task(tensors_of(memory, clip(1)), "a"))[0].value for _ in range(3)]
        assert memory.num_buffers <= 1, "the worker's mapping does not need the service's descriptor"
    assert values == [72.0, 144.0, 216.0]


def test_nothing_is_left_of_hundreds_of_requests_killed_workers_and_cancellations(tmp_path: Path) -> None:
    memory = MediaMemory(64)
    acting = settings("Acting", scorer={"retries": 0, "timeout_s": 0.4}, num_workers=2)
    with ScoringPool(acting) as pool:
        scored(pool, task(tensors_of(memory, clip(1)), "warm"))
        before = open_descriptors()
        for number in range(300):
            media = tensors_of(memory, clip(number % 256), clip(1))
            pool.submit(task(media, "a", "b", id=f"request/{number}"))
            if number % 3 == 0:  # before, while or after its calls are made
                pool.cancel(f"request/{number}")
                pool.poll(0.0)
            else:
                assert all(score.value is not None for score in collect(pool, 2))
        for number, text in enumerate(("exit", "hang", "exit", "hang")):
            id = f"ending/{number}"
            pool.submit(task(tensors_of(memory, clip(1), clip(2)), text, "b", id=id))
            if number % 2:
                while not pool.waits():
                    pool.poll(0.01)
                pool.cancel(id)
                while pool.waits():  # the call that hangs is ended at its limit
                    pool.poll(0.1)
            else:
                assert [score.value for score in collect(pool, 2)] == [None, 144.0]
        del media
        pool.take_lost()
        while not pool.is_ready or len(pool.worker_pids()) < 2:
            pool.poll(0.1)
        gc.collect()
        assert (memory.num_buffers, memory.size_bytes) == (0, 0)
        assert open_descriptors() == before


def test_messages_that_wait_for_the_socket_keep_their_media_in_order(memory: MediaMemory) -> None:
    """Each prompt is larger than the socket's buffer, so most messages are sent in pieces, and buffers wait."""
    num = 24
    with ScoringPool(settings("Pixels", scorer={"key": "sum", "batch_size": 1}, num_workers=2)) as pool:
        for number in range(num):
            media = tensors_of(memory, clip(number))
            pool.submit(task(media, "a", id=f"request/{number:02d}", prompt="x" * 1_000_000))
        scores = collect(pool, num)
    assert [score.value for score in scores] == [72.0 * number for number in range(num)]


def test_workers_for_texts_do_not_import_numpy(memory: MediaMemory) -> None:
    with ScoringPool(settings("has_numpy")) as pool:
        (score,) = scored(pool, task(tensors_of(memory, clip(1)), "a"))
    assert score.value == 0.0


def test_workers_for_media_import_numpy_before_their_first_call(memory: MediaMemory) -> None:
    """On a busy machine it takes longer than many a time limit."""
    with ScoringPool(settings("has_numpy", "Acting")) as pool:
        (score,) = scored(pool, task((), "a", rows=[None]))
    assert score.value == 1.0


def test_worker_for_media_without_numpy_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"Scorers that read media get them as arrays of numpy, .*: install it"):
        check_scorers(settings("WithoutNumpy"))


@pytest.mark.parametrize(("scorer", "refused"), [({}, True), ({"weight": 0.0}, False), ({"tasks": ["video"]}, False)])
def test_run_without_media_refuses_scorers_of_media_at_the_start(scorer: dict[str, Any], refused: bool) -> None:
    needed = {"scorers": [{"name": "exact_match"}, {"name": "brightness", **scorer}]}
    check_scorers(RewardSettings.model_validate(needed))
    if not refused:
        check_scorers(RewardSettings.model_validate(needed), inputs=("text",))
        return
    with pytest.raises(ConfigError, match="Scorer 'brightness' reads pixels, and the completions of a run are texts"):
        check_scorers(RewardSettings.model_validate(needed), inputs=("text",))


@pytest.mark.parametrize("level", ALL)
def test_media_reach_scorers_in_each_sandbox(memory: MediaMemory, level: Mechanism) -> None:
    if problem := problem_of(level):
        pytest.skip(problem)
    with ScoringPool(pixels_settings(sandbox=level)) as pool:
        assert scored(pool, task(tensors_of(memory, clip(1)), "a"))[0].value == 72.0


def test_scorer_must_name_its_media() -> None:
    with pytest.raises(ConfigError, match="its `media` must be one of 'text', 'pixels', 'latents', 'token_ids', not"):
        load_scorer(f"{Path(__file__).with_name('batch_scorers.py')}:Declaring", {"media": "video"})


def test_sealed_buffer_cannot_be_changed(memory: MediaMemory) -> None:
    buffer = memory.share([b"abc", memoryview(b"def")])
    assert buffer.size_bytes == memory.size_bytes == 6
    fd = buffer.fileno()
    for change in (
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, 1),
        lambda: os.ftruncate(fd, 10),
        lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        lambda: mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE),
    ):
        with pytest.raises(PermissionError):
            change()
    assert buffer.read(2, 3) == b"cde"
    assert not os.get_inheritable(fd)


def test_number_of_buffers_is_limited() -> None:
    memory = MediaMemory(2)
    held = [memory.share([b"a"]), memory.share([b"b"])]
    with pytest.raises(TooManyBuffersError, match="2 requests with media are held"):
        memory.share([b"c"])
    gc.collect()
    assert memory.num_buffers == 2
    held.pop()
    assert memory.share([b"d"]).size_bytes == 1
    held.clear()
    assert (memory.num_buffers, memory.size_bytes) == (0, 0)


def test_buffer_that_cannot_be_filled_is_freed() -> None:
    memory = MediaMemory(2)

    def parts() -> Iterator[bytes]:
        yield b"abc"
        raise KeyError("no more")

    before = open_descriptors()
    with pytest.raises(KeyError):
        memory.share(parts())
    gc.collect()
    assert (memory.num_buffers, memory.size_bytes) == (0, 0)
    assert open_descriptors() == before


def test_allocated_memory_is_of_fixed_length_and_sealed_only_if_nothing_can_write() -> None:
    memory = MediaMemory(8)
    buffer = memory.allocate(4096)
    assert (memory.num_buffers, memory.size_bytes, buffer.size_bytes) == (1, 4096, 4096)
    for length in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(buffer.fileno(), length)
    os.pwrite(buffer.fileno(), b"abc", 1)
    with mmap.mmap(buffer.fileno(), 0), pytest.raises(ValueError, match="can still be changed"):
        buffer.seal()
    buffer.seal()
    with pytest.raises(PermissionError):
        os.pwrite(buffer.fileno(), b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(buffer.fileno(), 0)
    assert buffer.read(0, 5) == b"\0abc\0"
    hindered = memory.allocate(1)
    fcntl.fcntl(hindered.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    with pytest.raises(ValueError, match="can still be changed"):
        hindered.seal()
    del buffer, hindered
    gc.collect()
    assert (memory.num_buffers, memory.size_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        (MediaForm("pixels", "uint8", (1, 2, 3, 3)), None),
        (MediaForm("latents", "bfloat16", (16, 1, 2, 3), 16.0), None),
        (MediaForm("token_ids", "int32", (0,)), None),
        (MediaForm("token_ids", "int32", (1, 2)), "have shape [1, 2]; send [N]"),
        (MediaForm("pixels", "float32", (1, 2, 3, 3)), "have dtype float32; send uint8"),
        (MediaForm("latents", "uint8", (1, 2, 3, 3)), "have dtype uint8; send float16 or bfloat16 or float32"),
        (MediaForm("pixels", "uint8", (1, 2, 3, 4)), "have shape [1, 2, 3, 4]; send [T, H, W, 3]"),
        (MediaForm("pixels", "uint8", (2, 3, 3)), "have shape [2, 3, 3]; send [T, H, W, 3]"),
        (MediaForm("latents", "float32", (1, 2, 3)), "have shape [1, 2, 3]; send [C, T, H, W]"),
        (MediaForm("latents", "float32", (1, 0, 3, 4)), "are empty, of shape [1, 0, 3, 4]; send at least one frame"),
        (MediaForm("pixels", "uint8", (1, 2, 3, 3), float("nan")), "have nan frames per second; send 0 to 1000"),
        (MediaForm("pixels", "uint8", (1, 2, 3, 3), -1.0), "have -1.0 frames per second; send 0 to 1000"),
    ],
)
def test_form_is_checked(form: MediaForm, problem: str | None) -> None:
    assert form_problem(form) == problem
