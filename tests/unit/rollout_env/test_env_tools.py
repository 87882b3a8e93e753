"""The environments `tools` and `gym`: the prompt, the results of calls, and the loss mask."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_chat import Script, chat, completion, encode, episode, tokenizer

from starling.algo.text import encode_prompt
from starling.common.errors import ConfigError
from starling.common.wire.messages import Prompt, Sampling, Status
from starling.rollout.env.base import EpisodeOutcome
from starling.rollout.env.episodes.trajectory import group_trajectories
from starling.rollout.env.registry import LoadedEnvironment, make_environment
from starling.rollout.settings import EnvironmentSettings

HERE = Path(__file__).with_name("some_tools.py")
TOOLS: list[Any] = [
    f"{HERE}:add",
    f"{HERE}:fails",
    f"{HERE}:long",
    f"{HERE}:table",
    {"function": f"{HERE}:never_returns", "timeout_s": 0.3},
    {"function": f"{HERE}:later", "name": "reverse", "description": "Turn it round.",
     "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
]  # fmt: skip


def make(kind: str, options: dict[str, Any]) -> LoadedEnvironment:
    made = make_environment(EnvironmentSettings(kind=kind, options=options))
    assert made is not None
    return made


@pytest.fixture(scope="module")
def chosen() -> Iterator[LoadedEnvironment]:
    options = {"tools": TOOLS, "timeout_s": 60.0, "max_result_chars": 100, "max_calls": 3}
    made = make("tools", options)
    yield made
    made.close()


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(
    chosen: LoadedEnvironment, *texts: str, prompt: Prompt | None = None, **changes: Any
) -> tuple[EpisodeOutcome, Any, Script]:
    """Run an episode with scripted replies; return its outcome, the episode and the model's requests."""
    prompt = prompt or chat("hello")
    script = Script(*(completion(encode("qwen3", text + "<|im_end|>")) for text in texts))
    ids = encode_prompt(tokenizer("qwen3"), prompt, chosen.tools)
    fields = {"sampling": Sampling(max_tokens=2000), "max_model_len": 5000, **changes}
    one = episode("qwen3", prompt, ids, script, tools=chosen.tools, **fields)
    outcome = asyncio.run(chosen.environment(one))
    assert isinstance(outcome, EpisodeOutcome)
    return outcome, one, script


def text_of(ids: list[int]) -> str:
    return str(tokenizer("qwen3").decode(ids, skip_special_tokens=False))


def test_prompt_describes_tools(chosen: LoadedEnvironment) -> None:
    text = text_of(encode_prompt(tokenizer("qwen3"), chat("hello"), chosen.tools))
    for name in ("add", "fails", "never_returns", "reverse"):
        assert f'"name": "{name}"' in text
    assert "Add two numbers." in text
    assert "Turn it round." in text
    assert chosen.tools[0]["function"]["parameters"]["properties"]["a"] == {
        "type": "number", "description": "the first."
    }  # fmt: skip


def test_tool_results_are_not_trained(chosen: LoadedEnvironment) -> None:
    first, last = call("add", a=40, b=2), "it is 42"
    outcome, one, script = play(chosen, first, last)
    assert outcome == EpisodeOutcome(metrics={"tool_calls": 1, "tool_errors": 0})
    asked = text_of(script.asked[1].prompt_ids)
    assert asked.endswith(
        f"{first}<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    (made,) = group_trajectories("t0", [0], [one.end(outcome)], temperature=1.0, min_version=0, tensors={}).trajectories
    sampled = text_of(made.token_ids[made.loss_mask == 1].tolist())
    assert sampled == f"{first}<|im_end|>{last}<|im_end|>"
    environment_text = text_of(made.token_ids[made.loss_mask == 0].tolist())
    assert (
        environment_text
        == "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert (made.status, made.num_turns, made.reward) == (Status.OK, 2, None)
    assert [message["role"] for message in one.messages] == ["user", "assistant", "tool", "assistant"]
    assert one.messages[2] == {"role": "tool", "name": "add", "content": "42"}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (call("reverse", text="abc"), "cba"),
        (call("table"), '{"rows": [1, 2], "é": null}'),
        (call("fails", what="map"), "Error: LookupError: there is no map"),
        (call("add", a=1), "Error: TypeError: add() missing 1 required positional argument: 'b'"),
        (call("sub"), "Error: there is no function 'sub'; there are add, fails, long, table, never_returns, reverse"),
        ("<tool_call>{</tool_call>", "Error: the call is no JSON: "),
        (call("add", a=1 << 70, b=1), "Error: its arguments cannot be passed on (OverflowError"),
        (call("reverse", text="\ud800"), "Error: the call has half of a surrogate pair"),
        (call("long"), "x" * 100 + " ... (99900 more characters)"),
    ],
)
def test_model_gets_result_or_error(chosen: LoadedEnvironment, text: str, answer: str) -> None:
    outcome, one, _ = play(chosen, text, "well")
    assert one.messages[2]["content"].startswith(answer)
    assert outcome.metrics == {"tool_calls": 1, "tool_errors": int(answer.startswith("Error"))}


def test_hanging_tool_times_out(chosen: LoadedEnvironment) -> None:
    outcome, one, _ = play(chosen, call("never_returns", marker="none"), "well")
    assert one.messages[2]["content"] == "Error: it took longer than 0.3 s"
    assert one.end(outcome).status is Status.OK


def test_calls_are_answered_in_order(chosen: LoadedEnvironment) -> None:
    outcome, one, _ = play(chosen, "".join(call("add", a=n, b=0) for n in range(5)), "well")
    contents = [message["content"] for message in one.messages[2:-1]]
    assert contents == ["0", "1", "2", *["Error: at most 3 calls are made at a time"] * 2]
    assert outcome.metrics == {"tool_calls": 5, "tool_errors": 2}


def test_last_turn_may_be_a_call(chosen: LoadedEnvironment) -> None:
    outcome, one, _ = play(chosen, call("add", a=1, b=1), max_turns=1)
    assert outcome.metrics == {"tool_calls": 1, "tool_errors": 0}
    ended = one.end(outcome)
    assert ended.status is Status.OK
    assert all(ended.sampled), "unanswered messages are not in the sequence"


def test_plain_text_prompt_gets_results(chosen: LoadedEnvironment) -> None:
    prompt = Prompt(id="p", text="40 + 2 =")
    _, _, script = play(chosen, call("add", a=40, b=2), "42", prompt=prompt)
    assert text_of(script.asked[1].prompt_ids).endswith("<|im_end|>\n<tool_response>\n42\n</tool_response>\n")


def test_duplicate_tool_names_are_rejected() -> None:
    with pytest.raises(ConfigError, match="Two tools are called 'add': give one of them another `name`"):
        make("tools", {"tools": [TOOLS[0], TOOLS[0]]})


PARSER = """
from starling.rollout.env.parsers import Call

def parse(text):
    return [Call("add", {"a": float(text[1:]), "b": 1})] if text.startswith("=") else []
"""


def test_user_parser_is_used(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PARSER)
    options = {"tools": TOOLS[:1], "parser": f"{tmp_path}/mine.py:parse", "timeout_s": 60.0}
    chosen = make("tools", options)
    try:
        _, one, _ = play(chosen, "=41", "42")
    finally:
        chosen.close()
    assert one.messages[2]["content"] == "42.0"


WORLD: dict[str, Any] = {"environment": f"{HERE}:Guess", "arguments": {"most": 4}, "timeout_s": 60.0}


def world(**changes: Any) -> LoadedEnvironment:
    return make("gym", {**WORLD, **changes})


@pytest.mark.parametrize("conversation", [True, False])
def test_gym_sums_rewards_of_steps(conversation: bool) -> None:
    chosen = world()
    given: dict[str, Any] = {"metadata": {"seed": 6}}
    prompt = chat("guess it", **given) if conversation else Prompt(id="p", text="guess it: ", **given)
    try:
        outcome, one, script = play(chosen, "1", "0", "2", prompt=prompt)
    finally:
        chosen.close()
    assert outcome == EpisodeOutcome(reward=0.5, metrics={"guesses": 3.0})
    assert "a number below 4" in text_of(script.asked[0].prompt_ids)
    assert text_of(script.asked[2].prompt_ids).count("no") == 2
    (made,) = group_trajectories("t0", [0], [one.end(outcome)], temperature=1.0, min_version=0, tensors={}).trajectories
    assert text_of(made.token_ids[made.loss_mask == 1].tolist()) == "1<|im_end|>0<|im_end|>2<|im_end|>"


def test_gym_without_end_stops_at_turn_limit() -> None:
    chosen = world()
    try:
        outcome, _, _ = play(chosen, "1", "0", max_turns=2, prompt=chat("guess", metadata={"seed": 6}))
    finally:
        chosen.close()
    assert outcome == EpisodeOutcome(reward=-0.5, metrics={"guesses": 2.0})


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"environment": f"{HERE}:Broken"}, r"step\(\) returned '1': return \(text, a finite reward"),
        ({"environment": f"{HERE}:Silent"}, r"reset\(\) returned '3': return the text"),
        ({"arguments": {"least": 1}}, "TypeError: .*unexpected keyword argument 'least'"),
        ({"arguments": {"slow": 3600.0}, "timeout_s": 0.5}, "it took longer than 0.5 s"),
        ({"environment": f"{HERE}:Measuring"}, "the steps have 1001 numbers in their info: return at most 1000"),
    ],
)
def test_gym_failures_are_described(changes: dict[str, Any], problem: str) -> None:
    from starling.rollout.env.sandbox.sandbox import SandboxError

    chosen = world(**changes)
    try:
        with pytest.raises(SandboxError, match=problem):
            play(chosen, "1")
    finally:
        chosen.close()


def test_gym_group_shares_its_seed() -> None:
    from starling.rollout.env.environments.gym import seed_of

    one, other = chat("x"), Prompt(id="train/0/1", text="x")
    assert seed_of(one) == seed_of(chat("another text"))
    assert seed_of(one) != seed_of(other)
    assert seed_of(chat("x", metadata={"seed": 17})) == 17
