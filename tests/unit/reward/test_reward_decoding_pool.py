"""Latents that are decoded once for the scorers that read pixels, with real decoders in real workers."""

from __future__ import annotations

import gc
import os
import signal
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_vae import decode, save_wan

from starling.common.errors import ConfigError
from starling.common.wire.messages import CompletionText, Status
from starling.reward.core.media import MediaForm, MediaKind, MediaRow, MediaTensor
from starling.reward.core.samples import PromptText, Sample, Score, ScoreTask
from starling.reward.score.decode.geometry import read_geometry
from starling.reward.score.decode.pool import DecodingPool
from starling.reward.score.decode.start import check_pool, open_pool
from starling.reward.score.pool.pool import ScoringPool
from starling.reward.score.workers.shared import MediaMemory, SharedBuffer
from starling.reward.settings import RewardSettings

CLASSES = Path(__file__).with_name("pixel_scorers.py")
PATIENCE_S = 240.0
SHAPE = (16, 4, 8, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def wan(folder: Path) -> Any:
    return save_wan(folder / "wan2.1")


@pytest.fixture(scope="module")
def wan22(folder: Path) -> Any:
    return save_wan(folder / "wan2.2", channels=48)


def settings(folder: Path, *classes: str, vaes: Sequence[str] = ("wan2.1",), **decoder: Any) -> RewardSettings:
    scorers = [
        {"name": f"{CLASSES}:{one}", "label": one, **({"key": "digest"} if one == "Digest" else {})} for one in classes
    ]
    folders = [str(folder / one) for one in vaes]
    decoder = {"folders": folders, "timeout_s": PATIENCE_S, "start_timeout_s": PATIENCE_S, **decoder}
    tree = {"scorers": scorers, "num_workers": 1, "timeout_s": PATIENCE_S, "start_timeout_s": PATIENCE_S}
    return RewardSettings.model_validate({**tree, "decoder": decoder})


@pytest.fixture(scope="module")
def memory() -> MediaMemory:
    """Memory of `pool`."""
    return MediaMemory()


@pytest.fixture(scope="module")
def pool(folder: Path, wan: Any, wan22: Any, memory: MediaMemory) -> Iterator[DecodingPool]:
    chosen = settings(folder, "Digest", "Darkest", "FirstLatent", vaes=("wan2.1", "wan2.2"), batch_size=3)
    with opened(chosen, memory) as pool:
        yield pool


def opened(chosen: RewardSettings, memory: MediaMemory | None = None) -> DecodingPool:
    pool = open_pool(chosen, memory or MediaMemory())
    assert isinstance(pool, DecodingPool)
    return pool


def random_latents(seed: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def task(
    arrays: Sequence[np.ndarray],
    scorers: Sequence[int] = (0,),
    *,
    id: str = "request/0",
    groups: Sequence[int] = (),
    memory: MediaMemory | None = None,
    fps: float = 0.0,
) -> ScoreTask:
    """Return the task of samples with one array each."""
    buffer = (memory or MediaMemory()).share([one.tobytes() for one in arrays])
    media, offset = list[MediaTensor](), 0
    for one in arrays:
        kind: MediaKind = "pixels" if one.dtype == np.uint8 else "latents"
        media.append(MediaTensor(MediaForm(kind, str(one.dtype), one.shape, fps), 1, buffer, offset))
        offset += one.nbytes
    groups = groups or [0] * len(arrays)
    samples = tuple(
        Sample(index, group, CompletionText(text="", status=Status.OK, num_tokens=0), MediaRow(index))
        for index, group in enumerate(groups)
    )
    prompts = tuple(PromptText(f"prompt {number}", "", {}) for number in range(max(groups) + 1))
    return ScoreTask(id, prompts, samples, tuple(scorers), tuple(media))


def collect(pool: DecodingPool, num: int) -> dict[tuple[int, int], Score]:
    """Return `num` scores by scorer and completion."""
    scores = dict[tuple[int, int], Score]()
    until = time.monotonic() + PATIENCE_S
    while len(scores) < num:
        assert time.monotonic() < until, f"only {len(scores)} scores came in {PATIENCE_S} s"
        for score in pool.poll(1.0):
            assert score.task == "request/0"
            assert (score.scorer, score.completion) not in scores
            scores[score.scorer, score.completion] = score
    return scores


def await_busy_decoder(pool: DecodingPool) -> None:
    until = time.monotonic() + PATIENCE_S
    while not any("decoder vae-16 on" in wait.what for wait in pool.waits()):
        assert time.monotonic() < until
        pool.poll(0.01)


def digests(vae: Any, arrays: Sequence[np.ndarray]) -> list[float]:
    """Return the checksums of what diffusers decodes, one by one."""
    return [float(zlib.crc32(decode(vae, one[None])[0])) for one in arrays]


def test_pixels_are_those_of_diffusers_bit_for_bit(pool: DecodingPool, wan: Any) -> None:
    batch = np.stack([random_latents(seed) for seed in range(3)])
    expected = decode(wan, batch)
    assert expected.shape == (3, 13, 64, 64, 3)
    assert expected.std() > 20, "nearly uniform pixels would prove little"
    pool.submit(task(list(batch), fps=16.0))
    scores = collect(pool, 3)
    assert [scores[0, index].value for index in range(3)] == [float(zlib.crc32(one)) for one in expected]
    assert all(dict(score.parts)["frames"] == 13.0 for score in scores.values())
    assert all(dict(score.parts)["fps"] == 16.0 for score in scores.values())
    assert all(score.decode_s > 0.0 for score in scores.values())


def test_scorers_share_one_decoding_and_latents_do_not_wait_for_it(pool: DecodingPool) -> None:
    arrays = [random_latents(seed) for seed in range(4)]
    before = pool.gauges()["samples_decoded"]
    pool.submit(task(arrays, (0, 1, 2), groups=[0, 0, 1, 1]))
    scores = collect(pool, 12)
    assert pool.gauges()["samples_decoded"] - before == 4.0
    order = [scorer for scorer, _ in scores]
    assert set(order[:4]) == {2}, "scorers of latents come first: they need no pixels"
    assert [scores[2, index].value for index in range(4)] == [float(one.flat[0]) for one in arrays]
    assert sum(scores[1, index].value or 0.0 for index in (0, 1)) == 1.0
    assert all(scores[2, index].decode_s == 0.0 for index in range(4))


def test_channels_choose_the_vae_and_pixels_stay_as_they_are(pool: DecodingPool, wan: Any, wan22: Any) -> None:
    clip = np.random.default_rng(0).integers(0, 256, (2, 4, 6, 3), dtype=np.uint8)
    small, large = random_latents(1, (16, 1, 2, 3)), random_latents(2, (48, 2, 2, 2))
    pool.submit(task([large, clip, small]))
    scores = collect(pool, 3)
    assert scores[0, 0].value == digests(wan22, [large])[0]
    assert scores[0, 1].value == float(zlib.crc32(clip))
    assert scores[0, 2].value == digests(wan, [small])[0]
    assert [dict(scores[0, index].parts)["frames"] for index in range(3)] == [5.0, 2.0, 1.0]


def test_latents_that_decode_to_nan_fail_alone_or_with_their_group(pool: DecodingPool) -> None:
    arrays = [random_latents(seed) for seed in range(4)]
    arrays[1][15, 0, 0, 0] = 3e38  # finite, as the service demands, and its product with the standard deviation is not
    pool.submit(task(arrays, (0, 1), groups=[0, 0, 1, 1]))
    scores = collect(pool, 8)
    assert [scores[0, index].status for index in range(4)] == [Status.OK, Status.REWARD_ERROR, Status.OK, Status.OK]
    assert "scorer 'Digest' got no pixels: decoder 'vae-16' raised" in scores[0, 1].problem
    assert "not finite" in scores[0, 1].problem
    assert [scores[1, index].value is None for index in range(4)] == [True, True, False, False]


def test_latents_of_other_channels_fail_with_what_to_configure(pool: DecodingPool) -> None:
    pool.submit(task([random_latents(0, (4, 1, 2, 2)), random_latents(1, (16, 1, 2, 2))]))
    scores = collect(pool, 2)
    assert "latents of 4 channels are not decoded here: add the folder of their VAE" in scores[0, 0].problem
    assert scores[0, 1].status is Status.OK


def test_cancelled_task_gives_no_scores_and_frees_its_memory(pool: DecodingPool, memory: MediaMemory) -> None:
    pool.submit(task([random_latents(0)]))  # now it is known what the scorers read
    collect(pool, 1)
    gc.collect()
    before = memory.size_bytes
    pool.submit(task([random_latents(0, (16, 8, 8, 8)) for _ in range(4)]))
    assert memory.size_bytes > before
    pool.cancel("request/0")
    with pytest.raises(AssertionError, match="only 0 scores"):
        collect_within(pool, 1.0)
    pool.submit(task([random_latents(0)]))
    collect(pool, 1)
    gc.collect()
    assert memory.size_bytes == before


def test_pixels_take_the_room_that_was_reserved_for_them(pool: DecodingPool, memory: MediaMemory, folder: Path) -> None:
    pool.submit(task([random_latents(0)]))  # now it is known what the scorers read
    collect(pool, 1)
    gc.collect()
    before = memory.size_bytes
    one = task([random_latents(0)], memory=memory)
    latents = one.media[0].buffer
    assert isinstance(latents, SharedBuffer)
    wanted = read_geometry(folder / "wan2.1").pixels_of(one.media[0].form).size_bytes
    latents.reserve(wanted)
    assert memory.size_bytes == before + latents.size_bytes + wanted
    pool.submit(one)
    assert memory.size_bytes == before + latents.size_bytes + wanted, "not twice"
    collect(pool, 1)


def collect_within(pool: DecodingPool, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert not pool.poll(0.1)
    raise AssertionError("only 0 scores came")


def test_decoder_that_is_killed_is_replaced_and_its_samples_decoded_again(folder: Path, wan: Any) -> None:
    arrays = [random_latents(seed, (16, 6, 12, 12)) for seed in range(3)]
    with opened(settings(folder, "Digest")) as pool:
        pool.submit(task(arrays))
        await_busy_decoder(pool)
        (pid,) = pool.decoder_pids()
        os.kill(pid, signal.SIGKILL)
        scores = collect(pool, 3)
        assert [scores[0, index].value for index in range(3)] == digests(wan, arrays)
        assert pool.gauges()["decoders_replaced"] == 1.0
        assert pool.decoder_pids() != (pid,)


def test_decoder_that_exceeds_the_limit_fails_its_sample_with_a_timeout(folder: Path, wan: Any) -> None:
    slow, fast = random_latents(0, (16, 40, 24, 24)), random_latents(1, (16, 1, 1, 1))
    with opened(settings(folder, "Digest", timeout_s=3.0, retries=0)) as pool:
        pool.submit(task([slow, fast]))
        scores = collect(pool, 2)
        assert scores[0, 0].status is Status.REWARD_TIMEOUT
        assert "got no pixels: decoder 'vae-16' took longer than 3 s" in scores[0, 0].problem
        assert scores[0, 1].value == digests(wan, [fast])[0]


def test_raw_latents_are_not_multiplied_with_the_standard_deviation(folder: Path, wan: Any) -> None:
    latents = random_latents(0, (16, 2, 4, 4))
    expected = float(zlib.crc32(decode(wan, latents[None], mean_std=False)[0]))
    with opened(settings(folder, "Digest", latents="raw")) as pool:
        pool.submit(task([latents]))
        assert collect(pool, 1)[0, 0].value == expected


def test_no_memory_for_pixels_fails_the_scorers_that_read_them(folder: Path, wan: Any) -> None:
    memory = MediaMemory(max_buffers=1)
    with opened(settings(folder, "Digest", "FirstLatent"), memory) as pool:
        pool.submit(task([random_latents(0)], (0, 1), memory=memory))
        scores = collect(pool, 2)
        assert "there is no memory for them" in scores[0, 0].problem
        assert scores[1, 0].status is Status.OK


def break_weights(folder: Path) -> Path:
    broken = folder / "broken"
    broken.mkdir(exist_ok=True)
    (broken / "config.json").write_bytes((folder / "wan2.1" / "config.json").read_bytes())
    (broken / "diffusion_pytorch_model.safetensors").write_bytes(b"no weights")
    return broken


def test_vae_with_broken_weights_stops_the_service_at_its_start(folder: Path, wan: Any) -> None:
    break_weights(folder)
    with pytest.raises(ConfigError, match=r"the VAE in .*broken' cannot be loaded"):
        check_pool(settings(folder, "FirstLatent", vaes=("broken",)))


@pytest.mark.campaign
def test_decoder_that_cannot_start_any_more_fails_scorers_of_pixels_only(folder: Path, wan: Any) -> None:
    break_weights(folder)
    with opened(settings(folder, "Digest", "FirstLatent", vaes=("broken",))) as pool:
        latents = random_latents(0)
        pool.submit(task([latents], (0, 1)))
        scores = collect(pool, 2)
        assert list(scores) == [(1, 0), (0, 0)]
        assert scores[1, 0].value == float(latents.flat[0])
        assert "scorer 'Digest' got no pixels: decoder 'vae-16' is quarantined" in scores[0, 0].problem
        assert "vae-16" in pool.quarantined()


def test_without_folders_there_is_no_decoder(folder: Path) -> None:
    with open_pool(settings(folder, "FirstLatent", vaes=()), MediaMemory()) as pool:
        assert isinstance(pool, ScoringPool)
