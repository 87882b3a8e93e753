"""The served model as the HTTP server sees it: name, limits, and the tokens of prompts and conversations."""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starling.algo.text import conversation_text, decode, encode_text
from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.wire.messages import Sampling
from starling.rollout.api.errors import ApiError
from starling.rollout.api.messages import ReadCalls, make_call_reader
from starling.rollout.api.requests import RequestOptions
from starling.rollout.engine.base import EngineSpec, GroupRequest


def served_model(spec: EngineSpec, tokenizer: Any, max_model_len: int, version: Callable[[], int]) -> ServedModel:
    """Return the served model of an engine that was built from `spec`; `version` returns the version in use."""
    return ServedModel(
        name=spec.path.name,
        tokenizer=copy.deepcopy(tokenizer),  # tokenizers are not thread-safe
        max_model_len=max_model_len,
        max_rows=spec.rollout.max_rows,
        eos_token_ids=spec.eos_token_ids,
        version=version,
        created_s=int(time.time()),
        read_calls=make_call_reader(spec.rollout.api.tool_parser, tokenizer.chat_template),
    )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts about the model for the HTTP server."""

    name: str
    """Its name in /v1/models."""
    tokenizer: Any
    max_model_len: int
    """Limit on the tokens of a prompt with its completion."""
    max_rows: int
    """Limit on the completions of one request."""
    eos_token_ids: tuple[int, ...]
    version: Callable[[], int]
    """Returns the weight version in use; -1 for none yet."""
    created_s: int
    """When serving began, in seconds since 1970."""
    read_calls: ReadCalls
    """Parser of tool calls in replies."""

    def request(self, options: RequestOptions, prompt_ids: list[int], *, score_prompt: bool = False) -> GroupRequest:
        """Return the engine's request, without a lease yet."""
        room = self.max_model_len - len(prompt_ids)
        sampling = Sampling(
            # Engines sample at least one token, which `without_tokens` removes where none is requested.
            max_tokens=room if options.max_tokens is None else max(1, min(options.max_tokens, room)),
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            stop_token_ids=options.stop_token_ids,
            # Without a seed each request is sampled anew, as clients expect.
            seed=secrets.randbits(62) if options.seed is None else options.seed,
        )
        return GroupRequest("", prompt_ids, options.num_completions, sampling, score_prompt=score_prompt)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return decode(self.tokenizer, token_ids)

    def prompt_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of a prompt's tokens, special tokens included, for `echo`."""
        return str(self.tokenizer.decode(list(token_ids)))

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, a special token included."""
        return str(self.tokenizer.decode([token_id]))

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a conversation with the generation prompt.

        Raises:
            ApiError: there is no chat template, or it refuses the conversation.
        """
        try:
            text = conversation_text(self.tokenizer, messages, tools, of="messages")
        except ConfigError as error:
            raise ApiError(str(error), parameter="messages") from None
        return encode_text(self.tokenizer, text)

    def text_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the tokens of a text; token ids are returned as they are."""
        if isinstance(prompt, str):
            return encode_text(self.tokenizer, prompt)
        return list(prompt)

    def check(self, options: RequestOptions, prompt_ids: Sequence[int], parameter: str) -> None:
        """Raise ApiError when the request exceeds the model's or the engine's limits."""
        if not prompt_ids:
            raise ApiError(f"{parameter} is empty; give at least one token", parameter=parameter)
        if len(prompt_ids) >= self.max_model_len:
            raise ApiError(
                f"this model's maximum context length is {counted(self.max_model_len, 'token')}, and the prompt has "
                f"{len(prompt_ids)}; shorten it",
                "context_length_exceeded",
                parameter,
            )
        if options.num_completions > self.max_rows:
            raise ApiError(
                f"n = {options.num_completions}: at most {counted(self.max_rows, 'completion')} can be generated "
                "together; ask for fewer, or raise rollout.max_rows",
                parameter="n",
            )
