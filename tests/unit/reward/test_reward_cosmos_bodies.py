"""Bodies of clients of Cosmos-RL: what they hold, what is refused, and the documents of results."""

from __future__ import annotations

import asyncio
import io
import json
import re
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from starling.common.wire.messages import Status
from starling.reward.core.requests import RequestResult
from starling.reward.http.cosmos.enqueue import MAX_LINE_BYTES, read_header, split_body
from starling.reward.http.cosmos.forms import FORM, read_form, short_field
from starling.reward.http.cosmos.latents import read_attributes
from starling.reward.http.cosmos.pushed import PushedScores
from starling.reward.http.cosmos.refusals import RefusalLog
from starling.reward.http.cosmos.request import Enqueued, KnownTypes, read_enqueue
from starling.reward.http.cosmos.results import render, render_failure
from starling.reward.http.cosmos.routes import scorers_by_type
from starling.reward.http.errors import HttpError
from starling.reward.http.stores.store import FinishedRequest
from starling.reward.score.workers.shared import MediaMemory

SCORERS = {"dance_grpo": 0, "hpsv3": 1, "models.py:Judge": 1}
Array = npt.NDArray[Any]


def npy(array: Array) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def body(array: Array | bytes, num: int = 1, **header: Any) -> bytes:
    described = {"prompts": [f"p{index}" for index in range(num)], "reward_fn": {"dance_grpo": 1.0}, **header}
    line = json.dumps({name: value for name, value in described.items() if value is not None})
    return line.encode() + b"\n" + (array if isinstance(array, bytes) else npy(array))


def read(data: bytes, memory: MediaMemory | None = None) -> Enqueued:
    known = KnownTypes(SCORERS, ("mine",), ("dance_grpo", "hpsv3", "mine"))
    return read_enqueue(data, "id", known, memory or MediaMemory())


def refusal(call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(HttpError) as caught:
        call(*arguments, **named)
    assert caught.value.status == 422
    return json.dumps(caught.value.body)


def samples_of(found: Enqueued) -> list[Array]:
    """Return the media of each sample, as a worker has them."""
    arrays = []
    for sample in found.request.samples:
        assert sample.media is not None
        tensor = found.request.media[sample.media.tensor]
        data = tensor.buffer.read(tensor.offset_of(sample.media.row), tensor.form.size_bytes)
        kind = "<u2" if tensor.form.dtype == "bfloat16" else tensor.form.dtype
        arrays.append(np.frombuffer(data, kind).reshape(tensor.form.shape))
    return arrays


def test_images_are_videos_of_one_frame() -> None:
    images = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    found = read(body(images, 2, media_type="image"))
    assert [tensor.form.fps for tensor in found.request.media] == [0.0]
    assert all(np.array_equal(one, image[None]) for one, image in zip(samples_of(found), images, strict=True))
    assert found.info["input_info"] == {"shape": [2, 4, 5, 3], "dtype": "torch.uint8", "min": "0.000", "max": "119.000"}


@pytest.mark.parametrize("media_type", ["video", "latent", None, "other", 7])
def test_three_channels_are_pixels_whatever_their_type(media_type: Any) -> None:
    videos = np.arange(2 * 3 * 4 * 2 * 5, dtype=np.uint8).reshape(2, 3, 4, 2, 5)
    found = read(body(videos, 2, media_type=media_type))
    for one, video in zip(samples_of(found), videos, strict=True):
        assert np.array_equal(one, video.transpose(1, 2, 3, 0))
    assert {tensor.form.kind for tensor in found.request.media} == {"pixels"}


@pytest.mark.parametrize("media_type", ["video", "latent", None, "other"])
@pytest.mark.parametrize("channels", [16, 48])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_channels_of_a_vae_are_latents_whatever_their_type(media_type: Any, channels: int, dtype: str) -> None:
    latents = np.linspace(-1.5, 2.25, 2 * channels * 2 * 3 * 2).reshape(2, channels, 2, 3, 2).astype(dtype)
    found = read(body(latents, 2, media_type=media_type))
    (tensor,) = found.request.media
    kept = "float16" if dtype == "float16" else "float32"
    assert (tensor.form.kind, tensor.form.dtype, tensor.form.fps) == ("latents", kept, 16.0)
    assert all(np.array_equal(one, given.astype(kept)) for one, given in zip(samples_of(found), latents, strict=True))
    info = {"shape": [2, channels, 2, 3, 2], "dtype": f"torch.{kept}", "min": "-1.500", "max": "2.250"}
    assert found.info["input_info"] == info


def test_uint8_latents_are_the_bytes_of_bfloat16() -> None:
    numbers = np.array([1.0, -2.5, 0.15625, 3.0e38], np.float32)
    bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    latents = np.resize(bits, (1, 16, 1, 2, 4)).view(np.uint8)
    found = read(body(latents))
    (tensor,) = found.request.media
    assert (tensor.form.dtype, tensor.form.shape) == ("bfloat16", (16, 1, 2, 4))
    assert np.array_equal(samples_of(found)[0], latents.view(np.uint16)[0])
    info = found.info["input_info"]
    assert (info["shape"], info["dtype"], info["min"]) == ([1, 16, 1, 2, 4], "torch.bfloat16", "-2.500")


def test_fortran_order_is_the_same_array() -> None:
    latents = np.arange(2 * 16 * 2 * 3 * 2, dtype=np.float32).reshape(2, 16, 2, 3, 2)
    found = read(body(np.asfortranarray(latents), 2))
    assert all(np.array_equal(one, given) for one, given in zip(samples_of(found), latents, strict=True))


def test_frame_rates_are_those_of_each_sample() -> None:
    videos = np.arange(4 * 3 * 1 * 1 * 5, dtype=np.uint8).reshape(4, 3, 1, 1, 5)
    infos = [{"video_fps": 24.0}, {"video_fps": 24}, {"fps": 8}, {}]
    found = read(body(videos, 4, video_infos=infos))
    rates = [found.request.media[sample.media.tensor].form.fps for sample in found.request.samples if sample.media]
    assert rates == [24.0, 24.0, 8.0, 16.0]
    assert len(found.request.media) == 3
    for one, video in zip(samples_of(found), videos, strict=True):
        assert np.array_equal(one, video.transpose(1, 2, 3, 0))
    assert found.info["input_info"]["video_infos"] == infos


def test_types_are_scorers_and_others_that_are_pushed() -> None:
    types = {"hpsv3": 0.5, "dance_grpo": 0, "mine": 2, "models.py:Judge": 1e-9}
    found = read(body(np.zeros((1, 16, 1, 1, 1), np.float32), reward_fn=types))
    assert found.request.only == (1,)
    assert (found.info["types"], found.info["pushed"]) == (["hpsv3", "models.py:Judge"], ["mine"])


def test_further_fields_are_metadata_and_equal_prompts_are_one() -> None:
    array = np.zeros((3, 1, 1, 3), np.uint8)
    extras = {"geneval_tags": ["counting", "colors", "counting"], "ocr_use_gpu": False}
    found = read(body(array, 3, media_type="image", prompts=["a", "b", "a"], **extras))
    assert [prompt.text for prompt in found.request.prompts] == ["a", "b"]
    assert [prompt.metadata for prompt in found.request.prompts] == [
        {"geneval_tags": "counting", "ocr_use_gpu": False},
        {"geneval_tags": "colors", "ocr_use_gpu": False},
    ]
    assert [sample.prompt for sample in found.request.samples] == [0, 1, 0]


INTEGERS = ("bool", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "complex64")
ZEROS = np.zeros((1, 16, 1, 1, 2), np.float32)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "no line feed"),
        (b"x" * 100, "no line feed"),
        (b"\n", "not JSON"),
        (b"{}\n", "Field required"),
        (b"[" * 100_000 + b"\n", "nested|not JSON"),
        (b'{"prompts": ["\\ud800"], "reward_fn": {"dance_grpo": 1}}\n', "not JSON"),
        (body(ZEROS, prompts=[]), "at least 1 item"),
        (body(ZEROS, prompts="a"), "valid list"),
        (body(ZEROS, prompts=["a"] * 4097), "at most 4096"),
        (body(ZEROS, reward_fn={"hpsv4": 1}), "there is no scorer 'hpsv4' here.*dance_grpo, hpsv3, mine"),
        (body(ZEROS, reward_fn={"dance_grpo": 0, "hpsv3": -1}), "no weight above 0"),
        (body(ZEROS, reward_fn={}), "no weight above 0"),
        (body(ZEROS, reward_fn={"dance_grpo": "1"}), "valid number"),
        (body(ZEROS, reward_fn={"dance_grpo": True}), "valid number"),
        (body(ZEROS, reward_fn={"dance_grpo": float("nan")}), "not JSON"),
        (body(ZEROS, video_infos=[{}, {}]), "one element for each of the 1 prompts"),
        (body(ZEROS, video_infos=[{"video_fps": 0}]), "`video_fps` of sample 0"),
        (body(ZEROS, video_infos=[{"video_fps": "16"}]), "`video_fps` of sample 0"),
        (body(ZEROS, video_infos=[{"video_fps": 16, "n": 1 << 70}]), "cannot be encoded"),
        (body(ZEROS, geneval_tags=["a", "b"]), "one element for each"),
        (body(ZEROS, geneval_tags="counting"), "one element for each"),
        (body(ZEROS, extra=1 << 70), "cannot be encoded"),
        (body(ZEROS, extra=json.loads("[" * 70 + "]" * 70)), "more than 64 deep"),
        (body(ZEROS, 2), "first dimension must be the 2 prompts"),
        (body(ZEROS[:0]), "first dimension"),
        (body(np.zeros((1, 16, 0, 1, 1), np.float32)), "holds nothing"),
        (body(np.float32(1.0)), "first dimension"),
        (body(b""), "no .npy file"),
        (body(b"PK\x03\x04torch.save"), "no .npy file"),
        (body(npy(ZEROS)[:-1]), "bytes of elements"),
        (body(npy(ZEROS) + b"\0"), "bytes of elements"),
        *((body(np.zeros((1, 16, 1, 1, 2), kind)), "elements of type|latents are float16.*not") for kind in INTEGERS),
        *((body(np.zeros((1, 3, 1, 1, 2), kind)), "elements of type|pixels of videos") for kind in INTEGERS),
        (body(np.zeros((1, 16, 1, 1, 3), np.uint8)), "no whole number"),
        (body(np.zeros((1, 3, 1, 1, 1), np.float32)), "pixels of videos"),
        (body(np.zeros((1, 12, 1, 1, 1), np.float32), media_type="video"), "12 channels"),
        (body(np.zeros((1, 4, 4, 3), np.uint8)), "five dimensions"),
        (body(np.zeros((1, 4, 4, 3), np.float32), media_type="image"), "images are uint8"),
        (body(np.zeros((1, 3, 4, 4), np.uint8), media_type="image"), "images are uint8"),
        (body(np.full((1, 16, 1, 1, 2), np.nan, np.float16)), "NaN or infinities"),
        (body(np.full((1, 16, 1, 1, 2), -np.inf, np.float32)), "NaN or infinities"),
        (body(np.full((1, 16, 1, 1, 2), 1e300, np.float64)), "NaN or infinities"),
        (body(np.full((1, 16, 1, 1, 2), 0x7F, np.uint8).view(np.uint8) | np.uint8(0x80)), "NaN or infinities"),
    ],
)
def test_what_cannot_be_scored_is_refused_with_the_reason(data: bytes, problem: str) -> None:
    memory = MediaMemory()
    text = refusal(read, data, memory)
    assert re.search(problem, text), text
    assert memory.num_buffers == 0


def test_object_arrays_are_not_unpickled() -> None:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert "elements of type" in refusal(read, body(file.getvalue()))


def test_line_of_json_has_a_limit() -> None:
    assert split_body(b" " * MAX_LINE_BYTES + b"\nrest") == (b" " * MAX_LINE_BYTES, b"rest")
    assert "no line feed" in refusal(split_body, b" " * (MAX_LINE_BYTES + 1) + b"\nrest")


def test_further_fields_are_not_multiplied_by_the_prompts() -> None:
    num, text = 256, "x" * (1 << 20)
    pixels = np.zeros((num, 3, 1, 1, 1), np.uint8)
    data = body(pixels, num, rubric=text)
    tracemalloc.start()
    try:
        refused = refusal(read, data)
        taken = read(body(pixels, num, prompts=["same"] * num, rubric=text, geneval_tags=None))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert "the further fields take 1 MiB, and each of the 256 prompts gets them" in refused
    assert [prompt.metadata for prompt in taken.request.prompts] == [{"rubric": text}]


def test_many_further_fields_are_not_multiplied_by_the_prompts() -> None:
    num = 2048
    fields = {f"{index:x}": 0 for index in range(10_000)}
    assert "each of the 2048 prompts gets them" in refusal(
        read, body(np.zeros((num, 3, 1, 1, 1), np.uint8), num, **fields, geneval_tags=list(range(num)))
    )


def test_latents_of_other_vaes_are_taken_where_they_are_called_so() -> None:
    found = read(body(np.ones((1, 12, 1, 1, 2), np.float32), media_type="latent"))
    assert found.request.media[0].form.shape == (12, 1, 1, 2)


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for whole in (data, body(data), body(npy(ZEROS)[:64] + data)):
        with pytest.raises(HttpError) as caught:
            read(whole)
        assert caught.value.status == 422


def test_header_has_the_types_in_their_order() -> None:
    assert read_header(b'{"prompts": ["a"], "reward_fn": {"b": 1, "a": 2, "c": 0}}').types == ("b", "a")


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        (b"uuid=a&type=ocr", {"uuid": "a", "type": "ocr"}),
        (b"uuid=a%20b+c&type=", {"uuid": "a b c", "type": ""}),
        (b"uuid=%E2%82%AC", {"uuid": "\u20ac"}),
        (b"uuid=a&uuid=b", {"uuid": "b"}),
    ],
)
def test_form_is_read(data: bytes, fields: dict[str, str]) -> None:
    assert read_form(data, f"{FORM}; charset=utf-8", ("uuid",)) == fields


@pytest.mark.parametrize(
    ("data", "content_type", "problem"),
    [
        (b'{"uuid": "a"}', "application/json", "send a form"),
        (b"uuid=a", "", "send a form"),
        (b"", FORM, "Field required"),
        (b"type=ocr", FORM, "Field required"),
        (b"uuid", FORM, "no form"),
        (b"uuid=%ED%A0%80", FORM, "no form"),
        (b"uuid=\xff", FORM, "no form"),
        (b"&".join(b"a%d=1" % number for number in range(17)), FORM, "no form"),
    ],
)
def test_what_is_no_form_is_refused(data: bytes, content_type: str, problem: str) -> None:
    assert problem in refusal(read_form, data, content_type, ("uuid",))


def test_uuids_are_short() -> None:
    assert "201 characters" in refusal(short_field, {"uuid": "a" * 201}, "uuid")


def finished(scores: dict[str, Any], **more: Any) -> FinishedRequest:
    num = len(next(iter(scores.values())))
    result = RequestResult("id", (1.0,) * num, (Status.OK,) * num, ((),) * num, scores, **more)
    return FinishedRequest(result=result, info={}, duration_s=2.786)


def test_document_of_a_type_byte_for_byte() -> None:
    scores = {
        "judge": (1.0, 2.0),
        "judge/overall_reward": (1.0, 2.0),
        "judge/vq_reward": (0.5, None),
        "judged": (9.0, 9.0),
    }
    info = {"shape": [2, 16, 1, 2, 2], "dtype": "torch.bfloat16", "min": "-1.000", "max": "1.000"}
    assert render(finished(scores, decode_s=2.016), "dance_grpo", "judge", info) == (
        b'{"scores":{"overall_reward":[1.0,2.0],"vq_reward":[0.5,null]},'
        b'"input_info":{"shape":[2,16,1,2,2],"dtype":"torch.bfloat16","min":"-1.000","max":"1.000"},'
        b'"duration":"0.77","decoded_duration":"2.02","type":"dance_grpo"}'
    )


def test_score_without_a_name_has_that_of_its_type() -> None:
    document = msgspec.json.decode(render(finished({"light": (0.5,)}), "brightness", "light", {}))
    assert document["scores"] == {"brightness": [0.5]}


def test_scores_of_tables_are_nested() -> None:
    scores = {
        "g": (1.0,),
        "g/gen_eval_score": (1.0,),
        "g/gen_eval_group/colors": (-10.0,),
        "g/gen_eval_group/two": (0.5,),
    }
    document = msgspec.json.decode(render(finished(scores), "gen_eval", "g", {}))
    assert document["scores"] == {"gen_eval_score": [1.0], "gen_eval_group": {"colors": [-10.0], "two": [0.5]}}


@pytest.mark.parametrize("keys", [("colours", "colours/red"), ("colours/red", "colours")])
def test_score_that_is_named_as_a_table_is_beside_those_of_the_table(keys: tuple[str, ...]) -> None:
    scores = {"g": (1.0,), **{f"g/{key}": (0.5,) for key in keys}}
    document = msgspec.json.decode(render(finished(scores), "gen_eval", "g", {}))
    assert document["scores"] == {key: [0.5] for key in keys}


def test_type_that_failed_for_every_sample_has_no_scores() -> None:
    failures = {"judge": ("it fell.", "it fell.")}
    document = msgspec.json.decode(render(finished({"judge": (None, None)}, failures=failures), "ocr", "judge", {}))
    assert (document["scores"], document["error"], document["type"]) == (None, "it fell.", "ocr")


def test_sample_that_failed_has_a_null_and_a_reason() -> None:
    found = finished(
        {"judge": (1.0, None), "other": (None, None)}, failures={"judge": ("", "it fell."), "other": ("x", "y")}
    )
    document = msgspec.json.decode(render(found, "ocr", "judge", {}))
    assert (document["scores"], document["error"]) == ({"ocr": [1.0, None]}, "sample 1: it fell.")
    assert msgspec.json.decode(render(found, "o", "other", {}))["error"] == "sample 0: x sample 1: y"


def test_request_that_was_not_scored_says_why() -> None:
    result = RequestResult("id", (None,) * 2, (Status.REWARD_ERROR,) * 2, (("it is damaged.",),) * 2, {})
    document = msgspec.json.decode(render(FinishedRequest(result=result, info={}, duration_s=0.0), "ocr", "judge", {}))
    assert (document["scores"], document["error"]) == (None, "it is damaged.")
    renamed = finished({"judge": (1.0,)})
    assert msgspec.json.decode(render(renamed, "ocr", "ocr", {}))["error"] == "scorer 'ocr' gave no scores."


def test_failure_has_all_fields() -> None:
    document = msgspec.json.decode(render_failure("ocr", {"shape": [1]}, "no"))
    assert list(document) == ["scores", "input_info", "duration", "decoded_duration", "type", "error"]


def test_scorers_are_found_by_label_or_by_a_name_that_one_has() -> None:
    found = scorers_by_type([("a", "judge"), ("b", "judge"), ("c", "ocr"), ("ocr", "hpsv3")])
    assert found == {"a": 0, "b": 1, "c": 2, "ocr": 3, "hpsv3": 3}


class Pushes(PushedScores):
    """Pushed scores with a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(["mine", "other"], 10.0, 5.0, lambda: self.now)


def test_first_push_counts_and_is_kept_until_it_expires() -> None:
    pushes = Pushes()
    pushes.expect("a", ["mine", "other"], 2, {"shape": [2]})
    pushes.put("a", "mine", '{"scores": {"s": [1, null], "t": {"x": ["Good", "Bad"]}}, "duration": "0.50", "more": 1}')
    pushes.put("a", "mine", '{"scores": {"s": [7, 7]}}')
    document = pushes.find("a", "mine")
    assert document == (
        b'{"scores":{"s":[1.0,null],"t":{"x":["Good","Bad"]}},"input_info":{"shape":[2]},"duration":"0.50",'
        b'"decoded_duration":"0.00","type":"mine"}'
    )
    assert pushes.find("a", "other") is None
    pushes.now = 10.0
    late = msgspec.json.decode(pushes.find("a", "other") or b"")
    assert (late["scores"], late["error"]) == (None, "no reward worker has pushed scores within 10 s.")
    assert pushes.find("a", "mine") == document
    pushes.now = 15.0
    assert pushes.find("a", "mine") is None
    assert pushes.size_bytes == 0


def test_requests_that_wait_for_pushes_are_limited() -> None:
    pushes = Pushes()
    info = {"video_infos": ["x" * (1 << 20)]}
    for number in range(63):
        pushes.expect(str(number), ["mine"], 1, info)
    with pytest.raises(HttpError, match="take 63 MiB") as caught:
        pushes.expect("one more", ["mine"], 1, info)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
    for number in range(63):
        pushes.forget(str(number))
    assert pushes.size_bytes == 0


def test_push_that_no_request_waits_for_is_refused() -> None:
    pushes = Pushes()
    pushes.expect("a", ["mine"], 1, {})
    pushes.expect("b", [], 1, {})
    for id, type in (("b", "mine"), ("c", "mine"), ("a", "other")):
        with pytest.raises(HttpError, match="waits for a push") as caught:
            pushes.put(id, type, '{"scores": {"s": [1]}}')
        assert caught.value.status == 404
    pushes.now = 10.0
    with pytest.raises(HttpError, match="waits for a push"):
        pushes.put("a", "mine", '{"scores": {"s": [1]}}')


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("", "no document"),
        ("[]", "no document"),
        ("{}", "no document"),
        ('{"scores": null}', "no `error`"),
        ('{"scores": {"s": [NaN, 1]}}', "no document"),
        ('{"scores": {"s": [1e999, 1]}}', "no document"),
        ('{"scores": {"s": [true, 1]}}', "no document"),
        ('{"scores": {"s": [1]}}', "1 scores, and the request 2 samples"),
        ('{"scores": {"t": {"s": [1]}}}', "1 scores, and the request 2 samples"),
        ('{"scores": {"": [1, 2]}}', "1 to 100"),
        (json.dumps({"scores": {"k" * 101: [1, 2]}}), "1 to 100|more than 100"),
        (json.dumps({"scores": {"k" * 101: {"s": [1, 2]}}}), "more than 100"),
        (json.dumps({"scores": {f"k{number}": {} for number in range(200)}}), "more than 64"),
        (json.dumps({"scores": {"s": ["x" * 201, 1]}}), "text of more than 200"),
        (json.dumps({"scores": None, "error": "x" * 1001}), "more than 1000"),
        (json.dumps({"scores": {"s": [1, 2]}, "duration": "1" * 21}), "more than 20"),
        ('{"scores": {"s": ["\\ud800", 1]}}', "no document"),
    ],
)
def test_push_that_is_not_valid_is_refused(data: str, problem: str) -> None:
    pushes = Pushes()
    pushes.expect("a", ["mine"], 2, {})
    text = refusal(pushes.put, "a", "mine", data)
    assert re.search(problem, text), text
    assert pushes.find("a", "mine") is None


def test_attributes_of_latents_are_checked() -> None:
    assert read_attributes('{"fps": 16, "vae_pth": "/etc/passwd"}').names == ["vae_pth", "fps"]
    for text in ("", "[]", '{"fps": 0}', '{"height": "8"}', '{"width": 1.5}', '{"fsp": 16}'):
        assert "no attributes of latents" in refusal(read_attributes, text)


def test_refusals_are_logged_with_their_reason_once_in_a_while() -> None:
    times = iter((1.0, 2.0, 12.0))
    answers = [
        (200, b"{}"),
        (422, b'{"detail":"no line"}'),
        (422, b"other"),
        (429, b"full"),
        (401, b"\xff"),
        (413, b"x"),
    ]

    async def application(scope: Any, receive: Any, send: Any) -> None:
        status, text = answers.pop(0)
        await send({"type": "http.response.start", "status": status})
        await send({"type": "http.response.body", "body": text})

    async def receive() -> Any:
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    sent: list[Any] = []
    refusals = RefusalLog(application, "/enqueue", lambda: next(times))
    with capture_logs() as logs:
        for _ in range(5):
            asyncio.run(refusals({"type": "http", "path": "/enqueue"}, receive, send))
        asyncio.run(refusals({"type": "http", "path": "/pull"}, receive, send))
    assert [(one["status"], one["reason"], one["num_others"]) for one in logs] == [
        (422, '{"detail":"no line"}', 0),
        (401, "\ufffd", 1),
    ]
    assert len(sent) == 12
