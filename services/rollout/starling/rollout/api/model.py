"""The served model as the HTTP server sees it: name, limits, and the tokens of prompts and conversations."""

from __future__ import annotations

import copy
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starling.algo.text import conversation_text, decode, encode_text
from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.wire.messages import Sampling
from starling.rollout.api.errors import ApiError
from starling.rollout.api.messages import ReadCalls, make_call_reader
from starling.rollout.api.requests import RequestOptions
from starling.rollout.engine.base import EngineSpec, GroupRequest

SURE_CHARACTERS: Final = 8
"""Texts of at most so many characters for each token of the context are encoded without an estimate before."""
PIECE_CHARACTERS: Final = 1 << 14


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
            self._check_texts([prompt], "prompt")
            return encode_text(self.tokenizer, prompt)
        return list(prompt)

    def check_conversation(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a conversation that exceeds the context by far, before the chat template and the tokenizer get it.

        They take minutes for some ten megabytes, in which no other request is answered.

        Raises:
            ApiError: it has more messages than the context has tokens, or its texts twice as many tokens.
        """
        for name, given in (("messages", messages), ("tools", tools)):
            if len(given) > self.max_model_len:
                raise self._too_long(f"{len(given)} {name}", name)
        calls = (call for message in messages for call in message.get("tool_calls", ()))
        written = [json.dumps(one, ensure_ascii=False, default=str) for one in (*calls, *tools)]
        self._check_texts([*(str(message["content"]) for message in messages), *written], "messages")

    def _check_texts(self, texts: Sequence[str], parameter: str) -> None:
        """Refuse texts that have twice as many tokens as the context: counted in pieces, at most as far as that."""
        if sum(map(len, texts)) <= SURE_CHARACTERS * self.max_model_len:
            return
        num_tokens, limit = 0, 2 * self.max_model_len
        for text in texts:
            for begin in range(0, len(text), PIECE_CHARACTERS):
                num_tokens += len(encode_text(self.tokenizer, text[begin : begin + PIECE_CHARACTERS]))
                if num_tokens > limit:
                    raise self._too_long(f"more than {limit} tokens", parameter)

    def _too_long(self, what: str, parameter: str) -> ApiError:
        return ApiError(
            f"this model's maximum context length is {counted(self.max_model_len, 'token')}, and the prompt has "
            f"{what}; shorten it",
            "context_length_exceeded",
            parameter,
        )

    def check(self, options: RequestOptions, prompt_ids: Sequence[int], parameter: str) -> None:
        """Raise ApiError when the request exceeds the model's or the engine's limits."""
        if not prompt_ids:
            raise ApiError(f"{parameter} is empty; give at least one token", parameter=parameter)
        if len(prompt_ids) >= self.max_model_len:
            raise self._too_long(str(len(prompt_ids)), parameter)
        if options.num_completions > self.max_rows:
            raise ApiError(
                f"n = {options.num_completions}: at most {counted(self.max_rows, 'completion')} can be generated "
                "together; ask for fewer, or raise rollout.max_rows",
                parameter="n",
            )
