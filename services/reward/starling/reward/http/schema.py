"""Bodies of requests, with their limits, and the core's form of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, NamedTuple, Self, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from starling.common.wire.messages import CompletionText, Status
from starling.reward.core.media import Input
from starling.reward.core.requests import RewardRequest, lacking_media
from starling.reward.core.rewards import WeightedScorer
from starling.reward.core.samples import PromptText, Sample
from starling.reward.http.errors import HttpError
from starling.reward.http.media import MediaBody, SharedMedia, share_media
from starling.reward.http.stores.store import MAX_SAMPLES, FinishedRequest
from starling.reward.score.decode.geometry import NO_VAES, Geometries, no_decoder
from starling.reward.score.workers.shared import MediaMemory

MAX_WAIT_S: Final = 60.0
MAX_GROUP_CHARACTERS: Final = 200
MAX_TOKENS: Final = 1 << 22
"""Of one completion."""
MAX_DEPTH: Final = 64
"""Of lists and objects in each other, in the metadata of a sample."""
OBJECT_BYTES: Final = 64
_COUNTED_BYTES: Final = 1 << 18
MAX_TEXT_MIB: Final = 100
"""Of a body without its media. Numbers may take twice the room on their way to a worker, which has a limit."""
MAX_DETAILS: Final = 20
"""Problems of a body that are reported."""

_Model = TypeVar("_Model", bound=BaseModel)
Wait = Annotated[float, Field(ge=0.0, le=MAX_WAIT_S, allow_inf_nan=False)]
"""How long the answer may take, in seconds; beyond it, the answer says that the request is pending."""


def _whole(value: object) -> object:
    """Return 3 for 3.0: JSON has one kind of numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _all_whole(values: object) -> object:
    """Return a list with whole numbers in place of floats that are such."""
    if not isinstance(values, list) or float not in set(map(type, values)):
        return values
    return [_whole(value) for value in values]


TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class SampleBody(BaseModel):
    """A completion to score."""

    model_config = ConfigDict(extra="forbid", strict=True)

    completion: str = ""
    """Its text; only a sample with media may have none."""
    prompt: str = ""
    reference: str = ""
    """The right answer, for scorers that compare."""
    metadata: dict[str, Any] = {}
    """What scorers want to know of the prompt, as the tests of a program; its `task` chooses the scorers."""
    num_tokens: Annotated[int, Field(ge=0, le=1 << 40), BeforeValidator(_whole)] = 0
    truncated: bool = False
    """Whether the length limit ended it."""
    environment_reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    media: MediaBody | None = None
    """The image, video or latents that were generated."""
    token_ids: Annotated[list[TokenId] | None, Field(max_length=MAX_TOKENS), BeforeValidator(_all_whole)] = None
    """Those of the completion, for scorers that read them."""
    group: Annotated[str, Field(max_length=MAX_GROUP_CHARACTERS)] = ""
    """Completions of one prompt have one name here, or none and the same prompt, reference and metadata."""

    @model_validator(mode="after")
    def _has_contents(self) -> Self:
        if self.media is None and "completion" not in self.model_fields_set:
            raise ValueError("completion is missing; send one, or media")
        if self.media is not None and self.token_ids is not None:
            raise ValueError("it has both media and token_ids; send one of them")
        return self


class RewardsBody(BaseModel):
    """A request for rewards."""

    model_config = ConfigDict(extra="forbid", strict=True)

    samples: Annotated[list[SampleBody], Field(min_length=1, max_length=MAX_SAMPLES)]
    wait_s: Annotated[Wait, Field(strict=False)] = 0.0
    evaluate: bool = True
    """Whether evaluation scorers score them, too."""

    @model_validator(mode="after")
    def _metadata_is_flat(self) -> Self:
        for index, sample in enumerate(self.samples):
            if is_deeper(sample.metadata, MAX_DEPTH):
                raise ValueError(f"the metadata of sample {index} is nested more than {MAX_DEPTH} deep")
        return self

    @model_validator(mode="after")
    def _groups_agree(self) -> Self:
        prompts: dict[str, tuple[str, str, dict[str, Any]]] = {}
        for index, sample in enumerate(self.samples):
            prompt = sample.prompt, sample.reference, sample.metadata
            if sample.group and prompts.setdefault(sample.group, prompt) != prompt:
                raise ValueError(
                    f"sample {index} of group {sample.group!r} has another prompt, reference or metadata than the "
                    "first of the group"
                )
        return self


def memory_of(data: bytes) -> int:
    """Return about how many bytes a body takes once it is decoded: each value and key is an object."""
    # Part by part: other threads wait while Python counts.
    parts = range(0, len(data), _COUNTED_BYTES)
    marks = (b"[", b"{", b",", b":")
    return len(data) + OBJECT_BYTES * sum(data.count(mark, at, at + _COUNTED_BYTES) for at in parts for mark in marks)


def read_rewards(data: bytes) -> RewardsBody:
    """Read the body of a request for rewards. Raises HttpError."""
    return read_json(data, RewardsBody, "the body", "the body is not a request for rewards")


def read_json(data: bytes, model: type[_Model], name: str, problem: str) -> _Model:
    """Read JSON that a client has sent.

    Not by FastAPI: Python's own reader takes texts that UTF-8 cannot encode, and numbers that are none.

    Args:
        data: the JSON.
        model: what it describes.
        name: of the data, for the errors.
        problem: the error for JSON that describes something else; what is wrong with each field is added.

    Raises:
        HttpError: it is not JSON, or not of this model (422).
    """
    try:
        return model.model_validate(msgspec.json.decode(data))
    except ValidationError as error:
        details = [
            {"type": one["type"], "loc": ["body", *one["loc"]], "msg": one["msg"]}
            for one in error.errors(include_url=False, include_input=False, include_context=False)[:MAX_DETAILS]
        ]
        raise HttpError(422, problem, details=details) from None
    except RecursionError:
        raise HttpError(422, f"{name} is nested too deeply") from None
    except ValueError as error:  # msgspec's errors are such, too
        raise HttpError(422, f"{name} is not JSON: {error}") from None


def rewards_schema() -> dict[str, Any]:
    """Return the JSON Schema of a body, in one piece."""
    schema = RewardsBody.model_json_schema()
    parts = schema.pop("$defs")
    sample = schema["properties"]["samples"]["items"] = parts["SampleBody"]
    media = sample["properties"]["media"]
    media["anyOf"] = [parts["MediaBody"] if "$ref" in one else one for one in media["anyOf"]]
    return schema


class AskedRewards(NamedTuple):
    """A body that can be scored."""

    request: RewardRequest
    num_bytes: int
    """About what it takes in memory, its media included."""
    wait_s: float


class RewardsReader:
    """Reads requests for rewards.

    Args:
        scorers: of the service.
        inputs: returns what each of them reads; None if that is not known yet.
        memory: gets the media.
        check_room: raises HttpError if there is no room for so many bytes.
        geometries: of the VAEs that decode latents.
    """

    def __init__(
        self,
        scorers: Sequence[WeightedScorer],
        inputs: Callable[[], Sequence[Input | None]],
        memory: MediaMemory,
        check_room: Callable[[int], None],
        geometries: Geometries = NO_VAES,
    ) -> None:
        self._scorers, self._inputs, self._memory, self._check_room = scorers, inputs, memory, check_room
        self._geometries = geometries

    def read(self, data: bytes, size_bytes: int, id: str | None = None) -> AskedRewards:
        """Read a body as a request.

        Args:
            data: the body.
            size_bytes: about what it takes in memory (`memory_of`), for which there is room. Its media take less.
            id: of the request; a new one if there is none.

        Raises:
            HttpError: it cannot be scored.
        """
        body = read_rewards(data)
        encoded_bytes = sum(len(one.media.npy) for one in body.samples if one.media is not None)
        if len(data) - encoded_bytes > MAX_TEXT_MIB << 20:
            raise HttpError(
                413, f"the body has more than {MAX_TEXT_MIB} MiB besides media; send fewer samples at a time"
            )
        media = share_media([one.token_ids if one.media is None else one.media for one in body.samples], self._memory)
        try:
            request = _request(body, id or secrets.token_hex(16), media)
        except (ValueError, OverflowError, TypeError, RecursionError) as error:
            raise HttpError(422, f"a prompt, its metadata or a completion cannot be encoded: {error}") from None
        check_media(request, self._scorers, self._inputs(), self._geometries)
        return AskedRewards(request, size_bytes - encoded_bytes + request.media_bytes, body.wait_s)

    def read_again(self, data: bytes, id: str) -> RewardRequest:
        """Read a stored body. Raises HttpError for one that cannot be scored, or for which there is no room."""
        size_bytes = memory_of(data)
        self._check_room(size_bytes)
        return self.read(data, size_bytes, id).request


def check_media(
    request: RewardRequest,
    scorers: Sequence[WeightedScorer],
    inputs: Sequence[Input | None],
    geometries: Geometries,
) -> None:
    """Raise HttpError when a sample lacks the media that a scorer reads, without which it could have no reward."""
    lacking = lacking_media(request, scorers, inputs, geometries) if inputs else None
    if lacking is not None and lacking.form is not None and lacking.wanted == "pixels":
        why = no_decoder(lacking.form, geometries)
        raise HttpError(422, f"scorer {scorers[lacking.scorer].label!r} reads pixels of sample {lacking.sample}: {why}")
    if lacking is not None:
        raise HttpError(
            422,
            f"sample {lacking.sample} has no {lacking.wanted}, which scorer {scorers[lacking.scorer].label!r} reads; "
            "send them with it, or a `task` in its metadata that this scorer is not for",
        )


def render_result(finished: FinishedRequest) -> bytes:
    """Return the result of a request as JSON."""
    result = finished.result
    return msgspec.json.encode(
        {
            "id": result.id,
            "status": "done",
            "rewards": result.rewards,
            "statuses": result.statuses,
            "problems": result.problems,
            "scores": result.scores,
            "evaluation_scores": result.evaluation_scores,
        }
    )


def _request(body: RewardsBody, id: str, media: SharedMedia) -> RewardRequest:
    prompts: dict[tuple[str, bytes], int] = {}
    texts: list[PromptText] = []
    samples = []
    for index, sample in enumerate(body.samples):
        contents = sample.prompt, sample.reference, sample.metadata
        encoded = msgspec.msgpack.encode(contents, order="deterministic")
        # The prompt of a named group is that of its first sample, which equals the others.
        key = (sample.group, b"") if sample.group else ("", encoded)
        number = prompts.setdefault(key, len(prompts))
        if number == len(texts):
            texts.append(PromptText(sample.prompt, sample.reference, sample.metadata))
        completion = CompletionText(
            text=sample.completion,
            status=Status.TRUNCATED if sample.truncated else Status.OK,
            num_tokens=sample.num_tokens,
            reward=sample.environment_reward,
        )
        msgspec.msgpack.encode(completion)
        samples.append(Sample(index, number, completion, media.rows[index]))
    return RewardRequest(id, tuple(texts), tuple(samples), media=media.tensors, evaluate=body.evaluate)


def is_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and objects are nested in `value` more than `depth` deep."""
    if not isinstance(value, dict | list):
        return False
    if not depth:
        return True
    return any(is_deeper(one, depth - 1) for one in (value.values() if isinstance(value, dict) else value))
