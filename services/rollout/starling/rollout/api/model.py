"""The model that the endpoint serves: what is known of it, and how a conversation becomes its tokens."""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starling.algo.text import conversation_text, decode, encode_text
from starling.common.errors import ConfigError
from starling.common.wire.messages import Sampling
from starling.rollout.api.errors import ApiError
from starling.rollout.api.messages import ReadCalls, reader_of
from starling.rollout.api.requests import RequestOptions
from starling.rollout.engine.base import EngineSpec, GroupRequest


def served_model(spec: EngineSpec, tokenizer: Any, max_model_len: int, version: Callable[[], int]) -> ServedModel:
    """Return what the endpoint serves of an engine that was made of `spec`; `version` is that in use."""
    return ServedModel(
        name=spec.path.name,
        tokenizer=copy.deepcopy(tokenizer),  # one does not stand two threads
        max_model_len=max_model_len,
        max_rows=spec.rollout.max_rows,
        eos_token_ids=spec.eos_token_ids,
        version=version,
        since=int(time.time()),
        read_calls=reader_of(spec.rollout.api.tool_parser, tokenizer.chat_template),
    )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the endpoint knows of the model; the engine has the rest."""

    name: str
    """As /v1/models tells it."""
    tokenizer: Any
    max_model_len: int
    """Most tokens of a prompt with its completion."""
    max_rows: int
    """Most completions of one request."""
    eos_token_ids: tuple[int, ...]
    version: Callable[[], int]
    """The weight version in use; -1 for none yet."""
    since: int
    """When it began to be served, in seconds since 1970."""
    read_calls: ReadCalls
    """Finds the calls of tools in a reply."""

    def request(self, ask: RequestOptions, prompt_ids: list[int], *, score_prompt: bool = False) -> GroupRequest:
        """Return what the engine is to do; the lease is still to be given."""
        room = self.max_model_len - len(prompt_ids)
        sampling = Sampling(
            # Engines sample one token at least, also where none is wanted.
            max_tokens=room if ask.max_tokens is None else max(1, min(ask.max_tokens, room)),
            temperature=ask.temperature,
            top_p=ask.top_p,
            top_k=ask.top_k,
            stop_token_ids=ask.stop_token_ids,
            # Without a seed each request draws anew, as clients expect.
            seed=secrets.randbits(62) if ask.seed is None else ask.seed,
        )
        return GroupRequest("", prompt_ids, ask.num_completions, sampling, score_prompt=score_prompt)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens without special ones."""
        return decode(self.tokenizer, token_ids)

    def prompt_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of a prompt's tokens, of special ones too: they were asked about."""
        return str(self.tokenizer.decode(list(token_ids)))

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, of a special one too."""
        return str(self.tokenizer.decode([token_id]))

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a conversation up to where the assistant speaks.

        Raises:
            ApiError: there is no chat template, or it refuses the conversation.
        """
        try:
            text = conversation_text(self.tokenizer, messages, tools, of="messages")
        except ConfigError as error:
            raise ApiError(str(error), parameter="messages") from None
        return encode_text(self.tokenizer, text)

    def text_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the tokens of a text, or token ids as they are."""
        if isinstance(prompt, str):
            return encode_text(self.tokenizer, prompt)
        return list(prompt)

    def check(self, ask: RequestOptions, prompt_ids: Sequence[int], parameter: str) -> None:
        """Raise ApiError unless the engine has room for what is asked for."""
        if not prompt_ids:
            raise ApiError(f"{parameter} is empty; give at least one token", parameter=parameter)
        if len(prompt_ids) >= self.max_model_len:
            raise ApiError(
                f"this model's maximum context length is {self.max_model_len} tokens, and the prompt has "
                f"{len(prompt_ids)}; shorten it",
                "context_length_exceeded",
                parameter,
            )
        if ask.num_completions > self.max_rows:
            raise ApiError(
                f"n = {ask.num_completions}: at most {self.max_rows} completions are generated together; "
                "ask for fewer, or raise rollout.max_rows",
                parameter="n",
            )
