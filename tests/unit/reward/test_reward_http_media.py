"""Media in the bodies of requests: from base64 to one buffer, what is refused, and what is left of it."""

from __future__ import annotations

import base64
import gc
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from starling.reward.core.media import Input, MediaForm
from starling.reward.core.requests import RewardRequest
from starling.reward.core.rewards import WeightedScorer
from starling.reward.http import media as media_module
from starling.reward.http import schema as schema_module
from starling.reward.http.errors import HttpError
from starling.reward.http.npy import npy_header
from starling.reward.http.schema import AskedRewards, RewardsReader, memory_of, rewards_schema
from starling.reward.score.decode.geometry import VaeGeometry, pixel_bytes
from starling.reward.score.workers.arrays import array_in
from starling.reward.score.workers.shared import MediaMemory

TEXT, PIXELS, LATENTS = (WeightedScorer(name, 1.0) for name in ("text", "pixels", "latents"))


def npy(array: np.ndarray) -> str:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return base64.b64encode(stream.getvalue()).decode()


def pixels(array: np.ndarray, **others: Any) -> dict[str, Any]:
    return {"kind": "pixels", "npy": npy(array), **others}


def latents(array: np.ndarray, **others: Any) -> dict[str, Any]:
    return {"kind": "latents", "npy": npy(array), **others}


def body(*media: dict[str, Any] | None, **sample: Any) -> bytes:
    samples = [{**({} if one is None else {"media": one}), **({"completion": ""} | sample)} for one in media]
    return json.dumps({"samples": samples}).encode()


@pytest.fixture
def memory() -> Iterator[MediaMemory]:
    """Memory that must be empty after the test, whose locals have gone by then."""
    found = MediaMemory(4)
    yield found
    gc.collect()
    assert (found.num_buffers, found.size_bytes) == (0, 0)


def reader(
    memory: MediaMemory, *scorers: WeightedScorer, inputs: tuple[Input | None, ...] = (), room: int = 1 << 30
) -> RewardsReader:
    def check_room(num_bytes: int) -> None:
        if memory.size_bytes + num_bytes > room:
            raise HttpError(429, "no room")

    return RewardsReader(scorers, lambda: inputs, memory, check_room)


def read(memory: MediaMemory, data: bytes) -> AskedRewards:
    return reader(memory).read(data, memory_of(data))


def arrays_of(request: RewardRequest) -> list[np.ndarray | None]:
    """Return the media of each sample, as a worker has them."""
    found: list[np.ndarray | None] = []
    for sample in request.samples:
        if sample.media is None:
            found.append(None)
            continue
        tensor = request.media[sample.media.tensor]
        offset = tensor.offset_of(sample.media.row)
        found.append(array_in(tensor.buffer.read(offset, tensor.form.size_bytes), 0, tensor.form))
    return found


@examples(60)
@given(
    st.lists(st.none() | st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.booleans()), max_size=6),
    st.sampled_from([4, 8, 4 << 18]),
)
def test_samples_have_the_media_that_were_sent(shapes: list[Any], part_characters: int) -> None:
    """Whatever the sizes of the files and of the parts in which base64 is decoded."""
    memory = MediaMemory(4)
    sent: list[np.ndarray | None] = []
    for number, shape in enumerate([*shapes, None]):
        if shape is None:
            sent.append(None)
            continue
        *dims, is_fortran = shape
        numbers = np.arange(np.prod(dims) * 3, dtype=np.uint8).reshape(*dims, 3) + np.uint8(number)
        sent.append(np.asfortranarray(numbers) if is_fortran else numbers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(media_module, "_PART_CHARACTERS", part_characters)
        data = body(*(None if one is None else pixels(one, fps=8.0) for one in sent))
        request = read(memory, data).request
    for one, found in zip(sent, arrays_of(request), strict=True):
        if one is None:
            assert found is None
        else:
            np.testing.assert_array_equal(found, one, strict=True)
    assert len(request.media) == len({one.shape for one in sent if one is not None})
    assert {tensor.form.fps for tensor in request.media} <= {8.0}
    assert memory.num_buffers <= 1
    del request
    gc.collect()
    assert memory.num_buffers == 0


def test_latents_keep_their_type_and_images_become_clips(memory: MediaMemory) -> None:
    half = np.full((16, 1, 2, 2), 1.5, np.float16)
    opaque = (half.astype("<f4").view("<u4") >> 16).astype("<u2").view("V2")
    image = np.full((5, 4, 3), 7, np.uint8)
    asked = read(memory, body(latents(half), latents(opaque), latents(half.astype("f4")), pixels(image)))
    assert [tensor.form for tensor in asked.request.media] == [
        MediaForm("latents", "float16", half.shape),
        MediaForm("latents", "bfloat16", half.shape),
        MediaForm("latents", "float32", half.shape),
        MediaForm("pixels", "uint8", (1, 5, 4, 3)),
    ]
    for found in arrays_of(asked.request)[:3]:
        np.testing.assert_array_equal(found, half.astype("f4"), strict=True)
    # What it takes is counted with its media, and without their base64.
    assert asked.request.media_bytes <= asked.num_bytes < asked.request.media_bytes + 4000
    del asked


CLIP = np.zeros((1, 2, 2, 3), np.uint8)
GOOD = npy(CLIP)


@pytest.mark.parametrize(
    ("media", "problem"),
    [
        (pixels(CLIP[..., :2]), "the pixels of sample 1 have shape [1, 2, 2, 2]; send [T, H, W, 3]"),
        (pixels(CLIP.astype("f4")), "the pixels of sample 1 have dtype float32; send uint8"),
        (latents(CLIP), "the latents of sample 1 have dtype uint8; send float16 or bfloat16 or float32"),
        (latents(CLIP.astype("f8")), "the latents of sample 1 have dtype float64; send float16"),
        (pixels(CLIP[:0]), "the pixels of sample 1 are empty"),
        ({"kind": "pixels", "npy": GOOD[:-1]}, "media.npy of sample 1 is no base64; send it with padding"),
        ({"kind": "pixels", "npy": GOOD[:-2] + "\n="}, "media.npy of sample 1 is no base64"),
        ({"kind": "pixels", "npy": "é" * 8}, "media.npy of sample 1 is no base64; send it with padding"),
        ({"kind": "pixels", "npy": GOOD[:100] + "=" + GOOD[101:]}, "media.npy of sample 1 is no base64"),
        ({"kind": "pixels", "npy": GOOD[:100] + "*" + GOOD[101:]}, "media.npy of sample 1 is no base64"),
        ({"kind": "pixels", "npy": ""}, "media.npy of sample 1: it is no .npy file"),
        ({"kind": "pixels", "npy": base64.b64encode(b"x" * 300).decode()}, "sample 1: it is no .npy file"),
        ({"kind": "pixels", "npy": GOOD[:-4]}, "has 10 bytes of elements, and shape [1, 2, 2, 3] of uint8 has 12"),
        ({"kind": "pixels", "npy": GOOD + "AAAA"}, "media.npy of sample 1 is no base64"),
        ({"kind": "pixels", "npy": GOOD.replace("=", "A")}, "has 13 bytes of elements"),
        (latents(np.full((16, 1, 2, 2), np.nan, "f4")), "the latents of sample 1 have infinities or NaN"),
        (latents(np.full((16, 1, 2, 2), np.inf, "f2")), "the latents of sample 1 have infinities or NaN"),
        (latents(np.full((4, 1, 2, 2), 0x7FC0, "<u2").view("V2")), "the latents of sample 1 have infinities or NaN"),
        (latents(np.full((4, 1, 2, 2), 0xFF80, "<u2").view("V2")), "the latents of sample 1 have infinities or NaN"),
    ],
)
def test_media_that_are_none_are_refused(memory: MediaMemory, media: dict[str, Any], problem: str) -> None:
    with pytest.raises(HttpError) as raised:
        read(memory, body(latents(np.zeros((16, 1, 1, 1), "f4")), media))
    assert raised.value.status == 422
    assert problem in str(raised.value)
    del raised


@pytest.mark.parametrize(
    ("media", "place"),
    [
        ({"kind": "text", "npy": GOOD}, ["kind"]),
        ({"kind": "pixels"}, ["npy"]),
        ({"kind": "pixels", "npy": 3}, ["npy"]),
        ({"kind": "pixels", "npy": GOOD, "fps": -1}, ["fps"]),
        ({"kind": "pixels", "npy": GOOD, "fps": 1e9}, ["fps"]),
        ({"kind": "pixels", "npy": GOOD, "more": 1}, ["more"]),
    ],
)
def test_fields_of_media_are_checked(memory: MediaMemory, media: dict[str, Any], place: list[str]) -> None:
    with pytest.raises(HttpError) as raised:
        read(memory, body(media))
    assert raised.value.status == 422
    assert [one["loc"] for one in raised.value.body["detail"]] == [["body", "samples", 0, "media", *place]]


def test_exponents_of_finite_numbers_are_finite(memory: MediaMemory) -> None:
    """All bits but one of the exponent, and all others: the largest numbers."""
    half = np.full((1, 1, 1, 1), 0xFBFF, "<u2").view("<f2")
    brain = np.full((1, 1, 1, 1), 0xFF7F, "<u2").view("V2")
    single = np.full((1, 1, 1, 1), np.finfo("f4").min)
    request = read(memory, body(latents(half), latents(brain), latents(single))).request
    assert len(request.media) == 3
    del request


def test_stored_body_waits_for_room_with_its_media(memory: MediaMemory) -> None:
    clip = np.zeros((4, 64, 64, 3), np.uint8)
    data = body(pixels(clip), pixels(clip))
    held = read(memory, data).request
    assert held.media_bytes == memory.size_bytes == 2 * clip.nbytes < len(data)
    with pytest.raises(HttpError) as raised:
        reader(memory, room=len(data) + 1000).read_again(data, "again")
    assert raised.value.status == 429
    assert memory.size_bytes == 2 * clip.nbytes
    del held, raised


def test_text_is_limited_apart_from_media(memory: MediaMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text goes to the workers in messages, which have a limit."""
    monkeypatch.setattr(schema_module, "MAX_TEXT_MIB", 1)
    clip = np.zeros((1, 1024, 1024, 3), np.uint8)
    assert read(memory, body(pixels(clip))).request.media_bytes == clip.nbytes
    with pytest.raises(HttpError) as raised:
        read(memory, body(pixels(clip), completion="x" * (1 << 20)))
    assert raised.value.status == 413
    del raised


def test_number_of_requests_with_media_is_limited(memory: MediaMemory) -> None:
    held = [read(memory, body(pixels(CLIP))).request for _ in range(4)]
    with pytest.raises(HttpError, match="4 requests with media are held; try again later") as raised:
        read(memory, body(pixels(CLIP)))
    assert (raised.value.status, raised.value.retry_after_s) == (429, 1)
    assert read(memory, body(None)).request.media == ()
    del held, raised


@pytest.mark.parametrize(
    ("scorers", "inputs", "refused"),
    [
        ((TEXT, PIXELS), ("text", "pixels"), "sample 1 has no pixels, which scorer 'pixels' reads"),
        ((LATENTS,), ("latents",), "sample 0 has no latents, which scorer 'latents' reads"),
        ((TEXT, PIXELS), ("text", None), ""),  # a worker has not loaded it yet
        ((TEXT, PIXELS), (), ""),
        ((TEXT,), ("text",), ""),
        ((TEXT, WeightedScorer("observed", 0.0)), ("text", "pixels"), ""),
        ((TEXT, WeightedScorer("others", 1.0, tasks=("video",))), ("text", "pixels"), ""),
    ],
)
def test_sample_without_media_that_a_scorer_reads_is_refused(
    memory: MediaMemory, scorers: tuple[WeightedScorer, ...], inputs: tuple[Input | None, ...], refused: str
) -> None:
    one = reader(memory, *scorers, inputs=inputs)
    data = body(pixels(CLIP), None, metadata={"task": "other"})
    if not refused:
        assert len(one.read(data, memory_of(data)).request.samples) == 2
        return
    with pytest.raises(HttpError) as raised:
        one.read(data, memory_of(data))
    assert raised.value.status == 422
    assert str(raised.value).startswith(refused)
    del raised


def test_text_may_be_missing_only_with_media(memory: MediaMemory) -> None:
    data = json.dumps({"samples": [{"media": pixels(CLIP)}]}).encode()
    assert read(memory, data).request.samples[0].completion.text == ""
    with pytest.raises(HttpError) as raised:
        read(memory, b'{"samples": [{"prompt": "p"}]}')
    assert "completion is missing; send one, or media" in raised.value.body["detail"][0]["msg"]


@pytest.mark.parametrize("lists", [[[1, 2, 3], [2**31 - 1]], [[], []], [[0], []], [list(range(5000))], [[1.0, 2]]])
def test_completions_have_their_token_ids(memory: MediaMemory, lists: list[list[float]]) -> None:
    samples: list[dict[str, Any]] = [{"completion": "a", "token_ids": ids} for ids in lists]
    data = json.dumps({"samples": [*samples, {"completion": "b"}, {"media": pixels(CLIP)}]}).encode()
    request = read(memory, data).request
    *found, nothing, clip = arrays_of(request)
    for ids, array in zip(lists, found, strict=True):
        np.testing.assert_array_equal(array, np.array(ids, np.int32), strict=True)
    assert nothing is None
    np.testing.assert_array_equal(clip, CLIP, strict=True)
    alone = read(memory, json.dumps({"samples": samples}).encode()).request
    assert alone.media[0].buffer.size_bytes > 0, "an empty one cannot be mapped"
    del request, alone


@pytest.mark.parametrize("ids", [[-1], [2**31], [1.5], ["1"], 3])
def test_token_ids_are_checked(memory: MediaMemory, ids: object) -> None:
    with pytest.raises(HttpError) as raised:
        read(memory, json.dumps({"samples": [{"completion": "a", "token_ids": ids}]}).encode())
    assert raised.value.status == 422


def test_sample_has_media_or_token_ids(memory: MediaMemory) -> None:
    with pytest.raises(HttpError) as raised:
        read(memory, body(pixels(CLIP), token_ids=[1]))
    assert "it has both media and token_ids" in raised.value.body["detail"][0]["msg"]


def test_stored_body_is_read_again_under_its_id(memory: MediaMemory) -> None:
    request = reader(memory).read_again(body(pixels(CLIP)), "mine")
    assert request.id == "mine"
    assert request.media[0].form == MediaForm("pixels", "uint8", CLIP.shape)
    del request


def test_description_of_a_body_is_in_one_piece() -> None:
    text = json.dumps(rewards_schema())
    assert "$ref" not in text
    assert "npy" in rewards_schema()["properties"]["samples"]["items"]["properties"]["media"]["anyOf"][0]["properties"]


def test_header_of_unusual_length_is_read(memory: MediaMemory) -> None:
    """The elements need not begin at a multiple of three bytes, where a part of base64 ends."""
    for num in range(4):
        header = npy_header("uint8", CLIP.shape)
        longer = (int.from_bytes(header[8:10], "little") + num).to_bytes(2, "little")
        file = header[:8] + longer + header[10:-1] + b" " * num + b"\n" + bytes(range(12))
        text = base64.b64encode(file).decode()
        (found,) = arrays_of(read(memory, body({"kind": "pixels", "npy": text})).request)
        assert found is not None
        assert found.tobytes() == bytes(range(12))


WAN = VaeGeometry(Path("/vae"), "AutoencoderKLWan", channels=16, spatial=8, temporal=4)


@pytest.mark.parametrize(
    ("shape", "refused"),
    [
        ((16, 2, 1, 1), ""),
        ((4, 2, 1, 1), "latents of 4 channels are not decoded here: add the folder of their VAE to reward.decoder"),
    ],
)
def test_latents_are_enough_for_scorers_of_pixels_where_they_are_decoded(
    memory: MediaMemory, shape: tuple[int, ...], refused: str
) -> None:
    one = RewardsReader([PIXELS], lambda: ("pixels",), memory, lambda num_bytes: None, {16: WAN})
    data = body(latents(np.ones(shape, np.float16)))
    if not refused:
        request = one.read(data, memory_of(data)).request
        assert pixel_bytes(request, [PIXELS], ("pixels",), {16: WAN}) == 5 * 8 * 8 * 3
        assert pixel_bytes(request, [PIXELS], ("latents",), {16: WAN}) == 0
        for unknown in ((None,), ()):
            assert pixel_bytes(request, [PIXELS], unknown, {16: WAN}) == 5 * 8 * 8 * 3
        assert pixel_bytes(request, [PIXELS], ("pixels",), {48: WAN}) == 0
        return
    with pytest.raises(HttpError) as raised:
        one.read(data, memory_of(data))
    assert raised.value.status == 422
    assert refused in str(raised.value)
    del raised


def test_latents_without_any_decoder_are_refused_with_the_setting(memory: MediaMemory) -> None:
    data = body(latents(np.ones((16, 1, 1, 1), np.float16)))
    with pytest.raises(HttpError, match=r"scorer 'pixels' reads pixels of sample 0: latents of 16 channels.*folders"):
        reader(memory, PIXELS, inputs=("pixels",)).read(data, memory_of(data))
