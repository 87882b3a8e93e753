"""What a request asks for: its body, read and checked. A parameter is obeyed or refused by name, never passed over.

The few that are accepted without effect have none here by their nature, as `user`, or are given as what happens in any
case, as `frequency_penalty = 0`; `NEUTRAL` lists them.
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

NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
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
"""Parameters that are accepted with these values, as they then change nothing."""

MOST_STOPS: Final = 16
SEEDS: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How to generate, and how to answer."""

    model: str
    num_completions: int
    max_tokens: int | None
    """None for what the context leaves."""
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
    """The parameters that the request gave itself, for those who have to overrule some."""


@dataclass(frozen=True, slots=True)
class ChatCompletionRequest:
    """A request of ``/v1/chat/completions``."""

    ask: RequestOptions
    messages: tuple[dict[str, Any], ...]
    """In the form that chat templates take; see `read_messages`."""
    tools: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request of ``/v1/completions``."""

    ask: RequestOptions
    prompts: tuple[str | tuple[int, ...], ...]
    """Each a text or token ids."""
    echo: bool
    """The prompt stands before each completion, with its log-probabilities where those are asked for."""
    top_logprobs: bool
    """Tell the likeliest token of each place, too."""


def read_body(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in `raw`. Raises ApiError."""
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise ApiError(f"the body is not JSON ({error}); send a JSON object", "invalid_json") from None
    except RecursionError:
        raise ApiError("the body is nested too deeply; send a flatter JSON object", "invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(f"the body is {shown(body)}; send a JSON object", "invalid_json")
    return body


def read_chat(body: Mapping[str, Any]) -> ChatCompletionRequest:
    """Read a request of ``/v1/chat/completions``.

    Raises:
        ApiError: names the first parameter that cannot be obeyed.
    """
    rest = _Rest(body)
    messages = read_messages(rest.take("messages"))
    tools = read_tools(rest.take("tools"))
    choice = rest.take("tool_choice")
    if choice not in (None, "auto", "none"):
        raise _unsupported("tool_choice", choice, "the model decides: give auto or none")
    if rest.take("top_logprobs"):
        raise _unsupported(
            "top_logprobs", body["top_logprobs"], "only the sampled token's log-probability is known: give 0"
        )
    longest = rest.integer("max_completion_tokens", least=1)
    older = rest.integer("max_tokens", least=1)
    ask = _read_common(rest, longest if longest is not None else older, rest.flag("logprobs"))
    return ChatCompletionRequest(ask, messages, tools if choice != "none" else ())


def read_text(body: Mapping[str, Any]) -> CompletionRequest:
    """Read a request of ``/v1/completions``.

    Raises:
        ApiError: names the first parameter that cannot be obeyed.
    """
    rest = _Rest(body)
    prompts = _read_prompts(rest.take("prompt"))
    echo = rest.flag("echo")
    # Without anything to sample it is the prompt alone that is asked about.
    longest = rest.integer("max_tokens", least=0 if echo else 1)
    logprobs = rest.integer("logprobs", least=0)
    if logprobs and (logprobs > 1 or (longest != 0 and body.get("temperature") != 0)):
        raise _unsupported(
            "logprobs", logprobs, "of sampled tokens only their own is known: give 0, or 1 with temperature = 0"
        )
    best_of = rest.integer("best_of", least=1)
    if best_of is not None and best_of != (body.get("n") or 1):
        raise _unsupported("best_of", best_of, "completions are not chosen among: leave it out")
    ask = _read_common(rest, 16 if longest is None else longest, logprobs is not None)
    if echo and ask.stream:
        raise _unsupported("echo", True, "the prompt comes with the whole answer: leave out stream")
    return CompletionRequest(ask, prompts, echo, bool(logprobs))


def _read_common(rest: _Rest, max_tokens: int | None, logprobs: bool) -> RequestOptions:
    model = rest.take("model")
    if not isinstance(model, str) or not model:
        raise ApiError("model is missing; give one that /v1/models lists", parameter="model")
    stream = rest.flag("stream")
    options = rest.take("stream_options")
    if options is not None and (not stream or not isinstance(options, dict) or options.keys() - {"include_usage"}):
        raise ApiError(
            f"stream_options = {shown(options)}: it goes with stream = true and holds include_usage alone",
            parameter="stream_options",
        )
    ask = RequestOptions(
        model=model,
        num_completions=rest.integer("n", least=1) or 1,
        max_tokens=max_tokens,
        temperature=rest.number("temperature", 1.0, least=0.0, most=100.0),
        top_p=rest.number("top_p", 1.0, least=0.0, most=1.0, without_least=True),
        top_k=max(0, rest.integer("top_k", least=-1) or 0),
        seed=rest.integer("seed", least=-SEEDS, most=SEEDS),
        stop=rest.texts("stop"),
        stop_token_ids=rest.integers("stop_token_ids"),
        logprobs=logprobs,
        stream=stream,
        include_usage=bool(options and options.get("include_usage")),
        given=rest.given,
    )
    rest.close()
    return ask


def _read_prompts(prompt: Any) -> tuple[str | tuple[int, ...], ...]:
    """Read a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt:
        if _is_token_ids(prompt):
            return (tuple(prompt),)
        if all(isinstance(one, str) or _is_token_ids(one) for one in prompt):
            return tuple(one if isinstance(one, str) else tuple(one) for one in prompt)
    raise ApiError(
        f"prompt = {shown(prompt)}: give a text, a list of token ids, or a list of either", parameter="prompt"
    )


class _Rest:
    """The parameters of a body that nobody has read yet; null counts as absent, as OpenAI's clients mean it."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self._known = set(NEUTRAL)
        self.given = frozenset(self._left)

    def take(self, name: str) -> Any:
        """Return the parameter, or None."""
        self._known.add(name)
        return self._left.pop(name, None)

    def integer(self, name: str, *, least: int, most: int | None = None) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if not _is_integer(value) or value < least or (most is not None and value > most):
            bound = f"a whole number of at least {least}" if most is None else "a whole number of 64 bits"
            raise ApiError(f"{name} = {shown(value)}: give {bound}", parameter=name)
        return int(value)

    def number(self, name: str, default: float, *, least: float, most: float, without_least: bool = False) -> float:
        value = self.take(name)
        if value is None:
            return default
        right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not right or not least <= value <= most or (without_least and value == least):
            begin = f"above {least:g}" if without_least else f"from {least:g}"
            raise ApiError(f"{name} = {shown(value)}: give a number {begin} to {most:g}", parameter=name)
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise ApiError(f"{name} = {shown(value)}: give true or false", parameter=name)
        return bool(value)

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.take(name)
        texts = [value] if isinstance(value, str) else value or []
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise ApiError(f"{name} = {shown(value)}: give a text, or a list of texts", parameter=name)
        if len(texts) > MOST_STOPS:
            raise ApiError(f"{name} has {len(texts)} texts; give at most {MOST_STOPS}", parameter=name)
        return tuple(texts)

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.take(name) or []
        if not isinstance(value, list) or not all(_is_integer(token) and token >= 0 for token in value):
            raise ApiError(f"{name} = {shown(value)}: give a list of token ids", parameter=name)
        return tuple(value)

    def close(self) -> None:
        """Refuse what is left, unless it changes nothing."""
        for name, value in self._left.items():
            if name not in NEUTRAL:
                like = nearest(name, sorted(self._known))
                hint = f"did you mean {like}?" if like else "leave it out"
                raise ApiError(f"{name} is not supported here; {hint}", "unsupported_parameter", name)
            if ANYTHING not in NEUTRAL[name] and value not in NEUTRAL[name]:
                accepted = " or ".join(json.dumps(one) for one in NEUTRAL[name])
                raise _unsupported(name, value, f"leave it out, or give {accepted}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_integer(token) for token in value)


def _unsupported(name: str, value: Any, remedy: str) -> ApiError:
    return ApiError(f"{name} = {shown(value)} is not supported here; {remedy}", "unsupported_parameter", name)


def shown(value: Any) -> str:
    """Return `value` as JSON, cut to what a sentence holds."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
