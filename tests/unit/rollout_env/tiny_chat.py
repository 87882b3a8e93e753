"""Small tokenizers with the chat templates of real models, and a model with scripted replies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from starling.common.wire.messages import ChatMessage, Prompt, Sampling, Status
from starling.rollout.engine.base import Completion, GroupRequest, GroupResult
from starling.rollout.env.episodes.episode import EpisodeTask, TokenEpisode

CHATML = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

QWEN3 = """{%- if tools -%}<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == "user" -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == "assistant" -%}
{%- set content = message.content -%}
{%- if "</think>" in content -%}{%- set content = content.split("</think>")[-1].lstrip("\n") -%}{%- endif -%}
<|im_start|>assistant
{% if loop.index0 > ns.last -%}<think>

</think>

{% endif -%}{{ content }}<|im_end|>
{% elif message.role == "tool" -%}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" -%}<|im_start|>user{%- endif -%}
{{ "\\n<tool_response>\\n" ~ message.content ~ "\\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" -%}<|im_end|>
{% endif -%}
{%- else -%}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

LLAMA3 = """{%- for message in messages -%}
<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|start_header_id|>assistant<|end_header_id|>

{% endif -%}"""

TEMPLATES = {"chatml": (CHATML, "<|im_end|>"), "qwen3": (QWEN3, "<|im_end|>"), "llama3": (LLAMA3, "<|eot_id|>")}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|endoftext|>"]
CORPUS = [
    "the weather in Paris is sunny, and the answer is forty two",
    "user assistant system tool name arguments tool_call tool_response get_weather city",
    "no. try again. the number is greater than that, or less than that. well done!",
] * 4


@functools.cache
def tokenizer(style: str = "chatml") -> Any:
    """Return a byte-level BPE tokenizer of about 350 tokens with the chat template of `style`."""
    template, eos = TEMPLATES[style]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=350, special_tokens=SPECIAL, initial_alphabet=alphabet)
    made.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos, chat_template=template)


def encode(style: str, text: str) -> list[int]:
    return list(tokenizer(style).encode(text, add_special_tokens=False))


def chat(*contents: str, **fields: Any) -> Prompt:
    """Return a conversation of alternating user and assistant messages."""
    roles = ("user", "assistant")
    messages = tuple(ChatMessage(role=roles[at % 2], content=text) for at, text in enumerate(contents))
    return Prompt(id="train/0/0", messages=messages, **fields)


def completion(ids: Sequence[int], status: Status = Status.OK, version: int = 3) -> Completion:
    return Completion(
        token_ids=np.array(ids, np.int32),
        logprobs=np.linspace(-0.5, -1.5, len(ids), dtype=np.float32),
        versions=np.full(len(ids), version, np.int32),
        status=status,
    )


class Script:
    """A model with scripted replies that records its requests."""

    def __init__(self, *replies: Completion) -> None:
        self._replies, self.asked = list(replies), list[GroupRequest]()

    async def ask(self, request: GroupRequest, enough: Callable[[], bool]) -> GroupResult:
        """Answer like the engine: token by token, until `enough` accepts the reply."""
        self.asked.append(request)
        whole = self._replies.pop(0)
        if request.listener is not None:
            for at, token in enumerate(whole.token_ids.tolist()):
                request.listener(0, [token], [float(whole.logprobs[at])])
                if enough():
                    part = completion(whole.token_ids[: at + 1].tolist())
                    kept = whole.kept.take(slice(0, at + 1)) if whole.kept is not None else None
                    nats = None if whole.truncation_nats is None else whole.truncation_nats[: at + 1]
                    whole = replace(part, kept=kept, truncation_nats=nats)
                    break
        return GroupResult(request.lease, np.array(request.prompt_ids, np.int32), (whole,))


def episode(style: str, prompt: Prompt, prompt_ids: Iterable[int], script: Script, **changes: Any) -> TokenEpisode:
    """Return an episode over `script`; `changes` are fields of its task."""
    fields: dict[str, Any] = {
        "sampling": Sampling(max_tokens=200, seed=7),
        "max_turns": 8,
        "turn_max_tokens": 0,
        "max_model_len": 1000,
    }
    task = EpisodeTask(lease="generate:t0", prompt=prompt, prompt_ids=list(prompt_ids), **{**fields, **changes})
    return TokenEpisode(task, 1, tokenizer(style), script.ask)
