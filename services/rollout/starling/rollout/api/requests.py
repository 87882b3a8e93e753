"""Requests: parsing and validation of bodies. Every parameter takes effect or is rejected by name; none is ignored.

The few that are accepted without effect, in `ACCEPTED_VALUES`, cannot have one here, such as `user`, or have the value
of the default behaviour, such as `frequency_penalty = 0`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from starling.common.settings import nearest
from starling.rollout.api.errors import ApiError
from starling.rollout.api.messages import read_messages, read_tools

ANYTHING: Final = object()

ACCEPTED_VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "user": (ANYTHING,),
    "metadata": (ANYTHING,),
    "safety_identifier": (ANYTHING,),
    "prompt_cache_key": (ANYTHING,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "parallel_tool_calls": (True,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "skip_special_tokens": (True,),
}
"""Parameters that are accepted with these values only, which change nothing."""

MAX_STOP_TEXTS: Final = 16
MAX_STOP_CHARACTERS: Final = 1000
"""Limit on each stop text: with each new token as much text is searched for it."""
MAX_STOP_TOKENS: Final = 1024
"""Engines compare each sampled token with all stop tokens of all sequences that run."""
MAX_PROMPTS: Final = 4096
"""Prompts of one request: each is tokenized, and a group of its own."""
SHOWN_CHARACTERS: Final = 80
MAX_SEED: Final = (1 << 63) - 1
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, default=str)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Parameters that both kinds of requests share."""

    model: str
    num_completions: int
    max_tokens: int | None
    """None for what the context leaves room for."""
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    logprobs: bool
    stream: bool
    include_usage: bool
    given: frozenset[str]
    """Names of the parameters that the request sets."""


@dataclass(frozen=True, slots=True)
class ChatCompletionRequest:
    """A request of ``/v1/chat/completions``."""

    options: RequestOptions
    messages: tuple[dict[str, Any], ...]
    """In the form of chat templates; see `read_messages`."""
    tools: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request of ``/v1/completions``."""

    options: RequestOptions
    prompts: tuple[str | tuple[int, ...], ...]
    """Each a text or token ids."""
    echo: bool
    """Put the prompt before each completion, with its log-probabilities if those are requested."""
    top_logprobs: bool
    """Return the most likely token at each position as well."""


def read_body(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in `raw`. Raises ApiError."""
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise ApiError(f"the body is not JSON ({error}); send a JSON object", "invalid_json") from None
    except UnicodeDecodeError as error:  # `repr` of it, as the log of a failure has it, contains the body
        raise ApiError(f"the body is not UTF-8 ({error.reason}); send a JSON object", "invalid_json") from None
    except RecursionError:
        raise too_deep() from None
    if not isinstance(body, dict):
        raise ApiError(f"the body is {as_json(body)}; send a JSON object", "invalid_json")
    return body


def too_deep() -> ApiError:
    """Return the error of a body that is nested too deeply, wherever that is noticed."""
    return ApiError("the body is nested too deeply; send a flatter JSON object", "invalid_json")


def read_chat(body: Mapping[str, Any]) -> ChatCompletionRequest:
    """Parse a request of ``/v1/chat/completions``.

    Raises:
        ApiError: names the first parameter that is invalid or unsupported.
    """
    parameters = _Parameters(body)
    messages = read_messages(parameters.take("messages"))
    tools = read_tools(parameters.take("tools"))
    choice = parameters.take("tool_choice")
    if choice not in (None, "auto", "none"):
        raise _unsupported("tool_choice", choice, "the model decides: give auto or none")
    if parameters.take("top_logprobs"):
        raise _unsupported(
            "top_logprobs", body["top_logprobs"], "only the sampled token's log-probability is known: give 0"
        )
    longest = parameters.integer("max_completion_tokens", least=1)
    older = parameters.integer("max_tokens", least=1)
    options = _read_common(parameters, longest if longest is not None else older, parameters.flag("logprobs"))
    return ChatCompletionRequest(options, messages, tools if choice != "none" else ())


def read_text(body: Mapping[str, Any]) -> CompletionRequest:
    """Parse a request of ``/v1/completions``.

    Raises:
        ApiError: names the first parameter that is invalid or unsupported.
    """
    parameters = _Parameters(body)
    prompts = _read_prompts(parameters.take("prompt"))
    echo = parameters.flag("echo")
    # Zero tokens with echo scores the prompt alone.
    longest = parameters.integer("max_tokens", least=0 if echo else 1)
    logprobs = parameters.integer("logprobs", least=0)
    if logprobs and (logprobs > 1 or (longest != 0 and body.get("temperature") != 0)):
        raise _unsupported(
            "logprobs", logprobs, "of sampled tokens only their own is known: give 0, or 1 with temperature = 0"
        )
    best_of = parameters.integer("best_of", least=1)
    if best_of is not None and best_of != (body.get("n") or 1):
        raise _unsupported("best_of", best_of, "no selection among completions is made: leave it out")
    options = _read_common(parameters, 16 if longest is None else longest, logprobs is not None)
    if echo and options.stream:
        raise _unsupported("echo", True, "the prompt comes with the whole answer: leave out stream")
    return CompletionRequest(options, prompts, echo, bool(logprobs))


def _read_common(parameters: _Parameters, max_tokens: int | None, logprobs: bool) -> RequestOptions:
    model = parameters.take("model")
    if not isinstance(model, str) or not model:
        raise ApiError("model is missing; give one that /v1/models lists", parameter="model")
    stream = parameters.flag("stream")
    stream_options = parameters.take("stream_options")
    if stream_options is not None and (
        not stream or not isinstance(stream_options, dict) or stream_options.keys() - {"include_usage"}
    ):
        raise ApiError(
            f"stream_options = {as_json(stream_options)}: it goes with stream = true and holds include_usage alone",
            parameter="stream_options",
        )
    options = RequestOptions(
        model=model,
        num_completions=parameters.integer("n", least=1) or 1,
        max_tokens=max_tokens,
        temperature=parameters.number("temperature", 1.0, least=0.0, most=100.0),
        top_p=parameters.number("top_p", 1.0, least=0.0, most=1.0, without_least=True),
        top_k=max(0, parameters.integer("top_k", least=-1) or 0),
        seed=parameters.integer("seed", least=-MAX_SEED, most=MAX_SEED),
        stop=parameters.texts("stop"),
        stop_token_ids=parameters.integers("stop_token_ids"),
        logprobs=logprobs,
        stream=stream,
        include_usage=bool(stream_options and stream_options.get("include_usage")),
        given=parameters.given,
    )
    parameters.close()
    return options


def _read_prompts(prompt: Any) -> tuple[str | tuple[int, ...], ...]:
    """Parse a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt:
        if _is_token_ids(prompt):
            return (tuple(prompt),)
        if len(prompt) > MAX_PROMPTS:
            raise ApiError(f"prompt has {len(prompt)} prompts; give at most {MAX_PROMPTS}", parameter="prompt")
        if all(isinstance(one, str) or _is_token_ids(one) for one in prompt):
            return tuple(one if isinstance(one, str) else tuple(one) for one in prompt)
    raise ApiError(
        f"prompt = {as_json(prompt)}: give a text, a list of token ids, or a list of either", parameter="prompt"
    )


class _Parameters:
    """The parameters of a body that were not taken yet; null counts as absent, as in OpenAI's clients."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self._known = set(ACCEPTED_VALUES)
        self.given = frozenset(self._left)

    def take(self, name: str) -> Any:
        """Return the parameter and remove it, or None."""
        self._known.add(name)
        return self._left.pop(name, None)

    def integer(self, name: str, *, least: int, most: int | None = None) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if not _is_integer(value) or value < least or (most is not None and value > most):
            bound = f"a whole number of at least {least}" if most is None else "a whole number of 64 bits"
            raise ApiError(f"{name} = {as_json(value)}: give {bound}", parameter=name)
        return int(value)

    def number(self, name: str, default: float, *, least: float, most: float, without_least: bool = False) -> float:
        value = self.take(name)
        if value is None:
            return default
        right = _is_integer(value) or (isinstance(value, float) and math.isfinite(value))  # an integer has any size
        if not right or not least <= value <= most or (without_least and value == least):
            begin = f"above {least:g}" if without_least else f"from {least:g}"
            raise ApiError(f"{name} = {as_json(value)}: give a number {begin} to {most:g}", parameter=name)
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise ApiError(f"{name} = {as_json(value)}: give true or false", parameter=name)
        return bool(value)

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.take(name)
        texts = [value] if isinstance(value, str) else value or []
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise ApiError(f"{name} = {as_json(value)}: give a text, or a list of texts", parameter=name)
        if len(texts) > MAX_STOP_TEXTS:
            raise ApiError(f"{name} has {len(texts)} texts; give at most {MAX_STOP_TEXTS}", parameter=name)
        longest = max(map(len, texts), default=0)
        if longest > MAX_STOP_CHARACTERS:
            raise ApiError(
                f"{name} has a text of {longest} characters; give at most {MAX_STOP_CHARACTERS}", parameter=name
            )
        return tuple(texts)

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.take(name) or []
        if not isinstance(value, list) or not all(_is_integer(token) and token >= 0 for token in value):
            raise ApiError(f"{name} = {as_json(value)}: give a list of token ids", parameter=name)
        if len(value) > MAX_STOP_TOKENS:
            raise ApiError(f"{name} has {len(value)} tokens; give at most {MAX_STOP_TOKENS}", parameter=name)
        return tuple(value)

    def close(self) -> None:
        """Refuse what is left, unless it changes nothing."""
        for name, value in self._left.items():
            if name not in ACCEPTED_VALUES:
                name = name[:SHOWN_CHARACTERS]  # a name may have the size of a body
                like = nearest(name, sorted(self._known))
                hint = f"did you mean {like}?" if like else "leave it out"
                raise ApiError(f"{name} is not supported here; {hint}", "unsupported_parameter", name)
            if ANYTHING not in ACCEPTED_VALUES[name] and value not in ACCEPTED_VALUES[name]:
                accepted = " or ".join(json.dumps(one) for one in ACCEPTED_VALUES[name])
                raise _unsupported(name, value, f"leave it out, or give {accepted}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_integer(token) for token in value)


def _unsupported(name: str, value: Any, remedy: str) -> ApiError:
    return ApiError(f"{name} = {as_json(value)} is not supported here; {remedy}", "unsupported_parameter", name)


def as_json(value: Any) -> str:
    """Return `value` as JSON, shortened for an error."""
    text = ""
    for part in _ENCODER.iterencode(value):  # only as far as it is shown: a value may have the size of a body
        text += part[: SHOWN_CHARACTERS + 1]
        if len(text) > SHOWN_CHARACTERS:
            return f"{text[: SHOWN_CHARACTERS - 3]}..."
    return text
