"""Bodies of requests, with their limits, and the core's form of them."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Final, Self

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from starling.common.wire.messages import CompletionText, Status
from starling.reward.core.requests import RewardRequest
from starling.reward.core.samples import PromptText, Sample
from starling.reward.http.errors import HttpError
from starling.reward.http.stores.store import MAX_SAMPLES, FinishedRequest

MAX_WAIT_S: Final = 60.0
MAX_GROUP_CHARACTERS: Final = 200
MAX_DEPTH: Final = 64
"""Of lists and objects in each other, in the metadata of a sample."""
OBJECT_BYTES: Final = 64
MAX_DETAILS: Final = 20
"""Problems of a body that are reported."""

Wait = Annotated[float, Field(ge=0.0, le=MAX_WAIT_S, allow_inf_nan=False)]
"""How long the answer may take, in seconds; beyond it, the answer says that the request is pending."""


def _whole(value: object) -> object:
    """Return 3 for 3.0: JSON has one kind of numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class SampleBody(BaseModel):
    """A completion to score."""

    model_config = ConfigDict(extra="forbid", strict=True)

    completion: str
    prompt: str = ""
    reference: str = ""
    """The right answer, for scorers that compare."""
    metadata: dict[str, Any] = {}
    """What scorers want to know of the prompt, as the tests of a program; its `task` chooses the scorers."""
    num_tokens: Annotated[int, Field(ge=0, le=1 << 40), BeforeValidator(_whole)] = 0
    truncated: bool = False
    """Whether the length limit ended it."""
    environment_reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    group: Annotated[str, Field(max_length=MAX_GROUP_CHARACTERS)] = ""
    """Completions of one prompt have one name here, or none and the same prompt, reference and metadata."""


class RewardsBody(BaseModel):
    """A request for rewards."""

    model_config = ConfigDict(extra="forbid", strict=True)

    samples: Annotated[list[SampleBody], Field(min_length=1, max_length=MAX_SAMPLES)]
    wait_s: Annotated[Wait, Field(strict=False)] = 0.0

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
    return len(data) + OBJECT_BYTES * sum(map(data.count, (b"[", b"{", b",", b":")))


def read_rewards(data: bytes) -> RewardsBody:
    """Read the body of a request for rewards. Raises HttpError.

    Not by FastAPI: Python's own reader takes texts that UTF-8 cannot encode, and numbers that are none.
    """
    try:
        return RewardsBody.model_validate(msgspec.json.decode(data))
    except ValidationError as error:
        details = [
            {"type": one["type"], "loc": ["body", *one["loc"]], "msg": one["msg"]}
            for one in error.errors(include_url=False, include_input=False, include_context=False)[:MAX_DETAILS]
        ]
        raise HttpError(422, "the body is not a request for rewards", details=details) from None
    except RecursionError:
        raise HttpError(422, "the body is nested too deeply") from None
    except ValueError as error:  # msgspec's errors are such, too
        raise HttpError(422, f"the body is not JSON: {error}") from None


def reward_request(body: RewardsBody, id: str | None = None) -> RewardRequest:
    """Return the request of a body, under `id` or a new one.

    Raises:
        HttpError: its contents cannot be sent to workers.
    """
    try:
        return _request(body, id or secrets.token_hex(16))
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        raise HttpError(422, f"a prompt, its metadata or a completion cannot be encoded: {error}") from None


def read_again(data: bytes, id: str) -> RewardRequest:
    """Read a stored body. Raises HttpError for one that is not a request for rewards."""
    return reward_request(read_rewards(data), id)


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
        }
    )


def _request(body: RewardsBody, id: str) -> RewardRequest:
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
        samples.append(Sample(index, number, completion))
    return RewardRequest(id, tuple(texts), tuple(samples))


def is_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and objects are nested in `value` more than `depth` deep."""
    if not isinstance(value, dict | list):
        return False
    if not depth:
        return True
    return any(is_deeper(one, depth - 1) for one in (value.values() if isinstance(value, dict) else value))
