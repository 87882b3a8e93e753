"""Tests of chat templates: limits of the process that renders them, and the same text as transformers renders."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from starling.algo import chat_template
from starling.algo.text import conversation_text
from starling.common.errors import ConfigError

MESSAGES = [{"role": "user", "content": "hi \ud800 ü"}, {"role": "assistant", "content": "{{ 7 * 7 }}"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
PLAIN = (
    "{% for m in messages %}{{ bos_token }}{{ m['role'] }}: {{ m.content | trim }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}a:{% endif %}"
)
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"


def tokenizer(template: Any) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="</s>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="</s>", chat_template=template
    )


@pytest.mark.parametrize("template", [PLAIN, {"default": PLAIN, "tool_use": "with {{ tools[0].function.name }}"}])
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_conversation_is_rendered_as_by_transformers(template: Any, tools: list[dict[str, Any]]) -> None:
    made = tokenizer(template)
    expected = made.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, tools=tools or None)
    assert conversation_text(made, MESSAGES, tools, of="it") == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize("template", [ENDLESS, "{{ 10 ** (10 ** 10) }}"], ids=["loops", "constant"])
def test_template_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(chat_template, "CPU_S", 1)
    with pytest.raises(ConfigError, match=r"cannot render p \(it took more than 1 s of processor time\); change"):
        conversation_text(tokenizer(template), MESSAGES, of="p")
    assert conversation_text(tokenizer(PLAIN), MESSAGES[1:], of="it") == "<s>assistant: {{ 7 * 7 }}\na:"


@pytest.mark.sample(1)
@pytest.mark.parametrize("template", [DOUBLED, "{{ 'a' * 10 ** 11 }}", "{{ 'a' | center(10 ** 11) }}"])
def test_template_that_takes_all_memory_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot render it \(it took more than 1024 MiB of memory\); change"):
        conversation_text(tokenizer(template), MESSAGES, of="it")


def test_template_that_writes_too_much_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"it wrote 9000000 characters, and at most 1\d{6} are accepted"):
        conversation_text(tokenizer("{{ 'a' * 9000000 }}"), MESSAGES, of="it")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system') }}", "TemplateError: no system"),
        ("{% for %}", "TemplateSyntaxError: "),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError: Range too big"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError: "),
    ],
)
def test_refusal_of_a_template_names_its_reason(template: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        conversation_text(tokenizer(template), MESSAGES, of="it")
    assert f"cannot render it ({reason}" in str(caught.value)


def test_message_that_json_cannot_express_is_refused() -> None:
    with pytest.raises(ConfigError, match="TypeError: Object of type bytes is not JSON serializable"):
        conversation_text(tokenizer(PLAIN), [{"role": "user", "content": b"raw"}], of="it")


def test_renderer_that_was_killed_is_replaced() -> None:
    made = tokenizer(PLAIN)
    first = conversation_text(made, MESSAGES, of="it")
    assert chat_template._current is not None
    chat_template._current._process.kill()
    with pytest.raises(ConfigError, match="the process that renders it ended with status -9"):
        conversation_text(made, MESSAGES, of="it")
    assert conversation_text(made, MESSAGES, of="it") == first


def _rendered(number: int) -> str:
    return chat_template.render("{{ messages[0] }}", [{"n": number}], {})  # type: ignore[dict-item]


def test_threads_and_forked_processes_get_their_own_texts() -> None:
    texts: dict[int, str] = {}
    threads = [threading.Thread(target=lambda n=n: texts.__setitem__(n, _rendered(n))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        forked = pool.map(_rendered, range(8))
    assert forked == [texts[n] for n in range(8)] == [str({"n": n}) for n in range(8)]


def test_renderer_ends_with_its_parent() -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        _rendered(0)
        assert chat_template._current is not None
        os.write(write, str(chat_template._current._process.pid).encode())
        signal.pause()  # until it is killed, so that nothing of it can end the renderer
    os.close(write)
    with os.fdopen(read, "rb", buffering=0) as file:
        renderer = os.pidfd_open(int(file.read(20)))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert select.select([renderer], [], [], 60.0)[0], "the renderer has not ended"
    os.close(renderer)
