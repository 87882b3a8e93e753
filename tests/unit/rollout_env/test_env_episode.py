"""An episode is one sequence of tokens: sampled ones stay as they were, and the mask marks them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_chat import TEMPLATES, Script, chat, completion, encode, episode, tokenizer

from starling.algo.text import encode_prompt
from starling.algo.truncation import KeptTokens, kept_problem
from starling.common.wire.messages import Prompt, Status
from starling.rollout.engine.base import GroupRequest, GroupResult
from starling.rollout.engine.queue import LEASE_PREFIX, GenerationError
from starling.rollout.env.base import EpisodeOutcome, EpisodeOver
from starling.rollout.env.episodes.episode import EpisodeError, TokenEpisode, turn_seed
from starling.rollout.env.episodes.trajectory import PlayedGroup, group_trajectories

USER = {"role": "user", "content": "try again"}
TEXT = Prompt(id="train/0/1", text="the weather")


def start(style: str, prompt: Prompt, script: Script, **changes: Any) -> TokenEpisode:
    return episode(style, prompt, encode_prompt(tokenizer(style), prompt), script, **changes)


def played(*episodes: TokenEpisode, **outcome: Any) -> PlayedGroup:
    ended = [one.end(EpisodeOutcome(**outcome)) for one in episodes]
    return group_trajectories("t0", [0], ended, temperature=1.0, min_version=2, tensors={})


def sampled(style: str, text: str) -> list[int]:
    return encode(style, text + TEMPLATES[style][1])


@pytest.mark.parametrize("style", TEMPLATES)
def test_turns_form_one_token_sequence(style: str) -> None:
    first, second = sampled(style, "<think>so</think>\n\nno"), sampled(style, "forty two")
    script = Script(completion(first), completion(second, version=4))
    one = start(style, chat("hello"), script)

    async def play() -> None:
        assert (await one.reply()).text == "<think>so</think>\n\nno"
        one.say(USER)
        reply = await one.reply()
        assert (reply.text, reply.token_ids, reply.finish) == ("forty two", tuple(second), "stop")

    asyncio.run(play())
    prompt = encode_prompt(tokenizer(style), chat("hello"))
    between = script.asked[1].prompt_ids[len(prompt) + len(first) :]
    assert script.asked[1].prompt_ids[: len(prompt) + len(first)] == [*prompt, *first]
    assert "try again" in tokenizer(style).decode(between)
    assert tokenizer(style).decode(between, skip_special_tokens=False).count(TEMPLATES[style][1]) == 1, "the user's"
    result = played(one)
    (made,) = result.trajectories
    assert result.prompt_ids.tolist() == prompt
    assert made.token_ids.tolist() == [*first, *between, *second]
    assert made.loss_mask.tolist() == [1] * len(first) + [0] * len(between) + [1] * len(second)
    assert made.versions.tolist() == [3] * (len(first) + len(between)) + [4] * len(second)
    assert made.logprobs[made.loss_mask == 0].tolist() == [0.0] * len(between)
    assert made.logprobs[: len(first)].tolist() == completion(first).logprobs.tolist()
    assert (made.status, made.num_turns) == (Status.OK, 2)
    assert [message["role"] for message in one.messages] == ["user", "assistant", "user", "assistant"]


def test_kept_tokens_follow_the_sampled_ones() -> None:
    """Of two replies, the first cut after its stop text, and the second begun by an empty one."""
    rows = [np.array([token, 400 + at]) for at, token in enumerate(encode("chatml", "well done!"))]
    nats = np.linspace(0.25, 4.0, len(rows), dtype=np.float32)
    first = replace(
        completion(encode("chatml", "well done!"), Status.TRUNCATED),
        kept=KeptTokens.from_rows(rows),
        truncation_nats=nats,
    )
    nothing = replace(completion([], Status.OK), kept=KeptTokens.from_rows([]))
    ids = sampled("chatml", "no")
    last = replace(
        completion(ids),
        kept=KeptTokens.from_rows([np.array([token]) for token in ids]),
        truncation_nats=np.full(len(ids), 2.0, np.float32),
    )
    script = Script(first, nothing, last)
    one = start("chatml", chat("hello"), script)

    async def play() -> None:
        for _ in range(3):
            await one.reply(stop=["done"])
            one.say(USER)

    asyncio.run(play())
    (made,) = played(one).trajectories
    assert made.kept is not None
    num = int(made.loss_mask.argmin())
    assert 0 < num < len(rows), "the first reply ends with its stop text"
    assert len(made.kept) == len(made.token_ids)
    assert not kept_problem(made.kept, made.token_ids, made.loss_mask == 1)
    found = [row.tolist() for row in made.kept.rows()]
    assert found[:num] == [row.tolist() for row in rows[:num]]
    assert found[-len(ids) :] == [[token] for token in ids]
    assert made.kept.counts[made.loss_mask == 0].tolist() == [0] * (len(made.token_ids) - num - len(ids))
    expected = (nats[:num].sum() + 2.0 * len(ids)) / (num + len(ids))
    assert made.truncation_nats == pytest.approx(expected), "the mean over the tokens that are trained"


class RoutedScript(Script):
    """A model whose only router chooses, for each token that it computes, the number of the request."""

    async def ask(self, request: GroupRequest, enough: Callable[[], bool]) -> GroupResult:
        result = await super().ask(request, enough)
        (one,) = result.completions
        prompt = np.full((len(request.prompt_ids), 1, 1), len(self.asked), np.uint8)
        own = np.concatenate([np.full((len(one.token_ids) - 1, 1, 1), len(self.asked), np.uint8), NO_EXPERTS])
        return replace(result, completions=(replace(one, routing=own),), prompt_routing=prompt)


NO_EXPERTS = np.full((1, 1, 1), 255, np.uint8)


def test_experts_are_those_of_the_pass_that_the_next_token_was_sampled_from() -> None:
    """A reply's last token and the environment's tokens are computed for the next reply."""
    first, second = sampled("chatml", "well done! and more"), sampled("chatml", "no")
    one = start("chatml", chat("hello"), RoutedScript(completion(first), completion(second)))
    two = start("chatml", chat("hello there"), RoutedScript(completion(second)))

    async def play() -> None:
        await one.reply(stop=["done"])
        one.say(USER)
        await one.reply()
        await two.reply()

    asyncio.run(play())
    result = played(one, two)
    made, other = result.trajectories
    assert made.routing is not None
    assert other.routing is not None
    assert result.prompt_routing is not None
    assert result.prompt_routing.flatten().tolist() == [1] * len(result.prompt_ids)
    said = len(other.token_ids) - len(second)
    assert other.routing.flatten().tolist() == [1] * (said + len(second) - 1) + [255]
    found = made.routing.flatten().tolist()
    assert len(found) == len(made.token_ids)
    assert found[-1] == 255
    at = found.index(2)
    assert found == [1] * at + [2] * (len(found) - at - 1) + [255]
    whole = len(encode_prompt(tokenizer("chatml"), chat("hello"))) - len(result.prompt_ids)
    assert at == whole + num_sampled_first(made) - 1, "all but the last token of the first reply"


def num_sampled_first(made: Any) -> int:
    """Return the tokens of the first reply: of the first run of sampled ones."""
    begin = int(made.loss_mask.argmax())
    return int(made.loss_mask[begin:].argmin())


def test_sampled_tokens_are_not_reencoded() -> None:
    """Encoding their text again would give fewer tokens; the sequence keeps the sampled ones."""
    letters = [encode("chatml", letter)[0] for letter in "weather"]
    assert len(encode("chatml", "weather")) < len(letters)
    script = Script(completion(letters, Status.TRUNCATED), completion(sampled("chatml", "well")))
    one = start("chatml", chat("hello"), script, turn_max_tokens=7)

    async def play() -> None:
        assert (await one.reply()).finish == "length"
        one.say(USER)
        await one.reply()

    asyncio.run(play())
    (made,) = played(one).trajectories
    assert made.token_ids[:7].tolist() == letters
    whole = [*script.asked[1].prompt_ids, *sampled("chatml", "well")]
    again = encode("chatml", tokenizer("chatml").decode(whole, skip_special_tokens=False))
    assert len(again) < len(whole), "the re-encoded sequence would have other probabilities"
    # The turn was cut off: its end is the template's, and not to be trained.
    end = encode("chatml", "<|im_end|>")[0]
    assert made.token_ids[7] == end
    assert made.loss_mask[7] == 0
    assert made.status is Status.OK, "the last reply ended with a sampled token"


def test_no_token_spans_two_turns() -> None:
    """Encoding the whole text could merge tokens across turns; the sequence splits them at the end of the reply."""
    one = start("chatml", TEXT, script := Script(completion(encode("chatml", " is su")), completion([1])))

    async def play() -> None:
        await one.reply()
        one.say_text("nny")
        await one.reply()

    asyncio.run(play())
    assert encode("chatml", "the weather is sunny") != script.asked[1].prompt_ids
    assert tokenizer("chatml").decode(script.asked[1].prompt_ids) == "the weather is sunny"
    assert script.asked[1].prompt_ids == [*encode("chatml", "the weather"), *encode("chatml", " is su"),
                                          *encode("chatml", "nny")]  # fmt: skip


def test_shared_beginning_belongs_to_prompt() -> None:
    first = sampled("chatml", "go")
    ones = [start("chatml", chat("hello"), Script(completion(first))) for _ in range(3)]

    async def play(one: TokenEpisode, text: str) -> None:
        one.say({"role": "user", "content": text})
        await one.reply()

    for one, text in zip(ones, ["the map", "the map", "the map"], strict=True):
        asyncio.run(play(one, text))
    same = played(*ones)
    assert "the map" in tokenizer("chatml").decode(same.prompt_ids)
    assert all(made.token_ids.tolist() == first and made.loss_mask.all() for made in same.trajectories)
    other = start("chatml", chat("hello"), Script(completion(first)))
    asyncio.run(play(other, "the sea"))
    result = played(ones[0], other)
    assert tokenizer("chatml").decode(result.prompt_ids).endswith("the")
    for made in result.trajectories:
        size = len(made.token_ids) - len(first)
        assert size > 0
        assert made.loss_mask.tolist() == [0] * size + [1] * len(first)
        assert made.versions.tolist() == [3] * len(made.token_ids)
    texts = [tokenizer("chatml").decode([*result.prompt_ids, *made.token_ids]) for made in result.trajectories]
    assert ["the map" in texts[0], "the sea" in texts[1]] == [True, True]


def test_group_without_common_beginning_fails() -> None:
    empty = Prompt(id="train/0/2", text="")
    ones = [start("chatml", empty, Script(completion([9]))) for _ in range(2)]

    async def play(one: TokenEpisode, text: str) -> None:
        one.say_text(text)
        await one.reply()

    for one, text in zip(ones, ["x", "y"], strict=True):
        asyncio.run(play(one, text))
    for made in played(*ones).trajectories:
        assert made.status is Status.ENV_ERROR
        assert "begin with different tokens: give the dataset a prompt" in made.problem


def test_token_and_turn_limits() -> None:
    prompt = encode_prompt(tokenizer("chatml"), TEXT)
    script = Script(*(completion([9] * size, Status.TRUNCATED) for size in (4, 3, 2, 1)))
    one = start("chatml", TEXT, script, max_turns=3, turn_max_tokens=4, max_model_len=len(prompt) + 10)

    async def play() -> None:
        assert one.tokens_left == 10
        await one.reply()
        await one.reply(max_tokens=3)
        assert one.tokens_left == 3
        await one.reply()
        with pytest.raises(EpisodeOver, match="its 3 turns"):
            await one.reply()

    asyncio.run(play())
    assert [request.sampling.max_tokens for request in script.asked] == [4, 3, 3]
    assert len({request.lease for request in script.asked}) == 3
    assert [request.sampling.seed for request in script.asked] == [turn_seed(7, 1, turn) for turn in range(3)]
    assert played(one).trajectories[0].status is Status.TRUNCATED


@pytest.mark.parametrize("bound", ["context", "max_tokens"])
def test_episode_out_of_tokens_is_truncated(bound: str) -> None:
    from starling.common.wire.messages import Sampling

    prompt = encode_prompt(tokenizer("chatml"), chat("hello"))
    reply = sampled("chatml", "go")
    changes: dict[str, Any] = {
        "context": {"max_model_len": len(prompt) + len(reply) + 2},
        "max_tokens": {"sampling": Sampling(max_tokens=len(reply))},
    }[bound]
    one = start("chatml", chat("hello"), Script(completion(reply)), **changes)

    async def play() -> None:
        await one.reply()
        one.say(USER)
        with pytest.raises(EpisodeOver, match="no token is left"):
            await one.reply()

    asyncio.run(play())
    (made,) = played(one, reward=0.5).trajectories
    assert (made.status, made.reward) == (Status.TRUNCATED, 0.5)
    assert made.token_ids.tolist() == reply, "unanswered messages are not in the sequence"


STOP_REPLY = "is sunny</tool_call> and more"


@pytest.mark.parametrize("listening", [True, False])
def test_reply_ends_at_token_that_completes_stop_text(listening: bool) -> None:
    ids = encode("chatml", STOP_REPLY)
    script = Script(completion(ids, Status.TRUNCATED), completion(sampled("chatml", "done")))
    one = start("chatml", chat("hello"), script)

    async def play() -> None:
        reply = await one.reply(stop=("</tool_call>", "never"))
        assert reply.finish == "stop"
        assert "</tool_call>" in reply.text
        assert "</tool_call>" not in tokenizer("chatml").decode(reply.token_ids[:-1])
        assert list(reply.token_ids) == ids[: len(reply.token_ids)]
        one.say(USER)
        await one.reply()

    asyncio.run(play())
    cut = len(one.turns[0].token_ids)
    at = len(script.asked[0].prompt_ids) + cut
    assert script.asked[1].prompt_ids[at] == encode("chatml", "<|im_end|>")[0], "the end of the turn is the template's"


def test_texts_are_encoded_where_they_were_added() -> None:
    script = Script(*(completion(encode("chatml", text)) for text in ("so", "well", "done")))
    one = start("chatml", chat("hello"), script)

    async def play() -> None:
        one.say_text("<think>")
        await one.reply()
        one.say_text("</think>")
        await one.reply()
        one.say(USER)
        one.say_text("ok: ")
        await one.reply()

    asyncio.run(play())
    assert [message["content"] for message in one.messages] == [
        "hello",
        "<think>so</think>well",
        "try again",
        "ok: done",
    ]
    text = tokenizer("chatml").decode([*script.asked[2].prompt_ids], skip_special_tokens=False)
    assert text == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think>so</think>well<|im_end|>\n"
        "<|im_start|>user\ntry again<|im_end|>\n<|im_start|>assistant\nok: "
    )


def test_failed_reply_can_be_retried() -> None:
    """The added text is in the sequence once, followed by the reply."""

    class Failing(Script):
        async def ask(self, *asked: Any) -> Any:
            if len(self.asked) == 1 and self.num_failed == 0:
                self.num_failed = 1
                raise GenerationError("the logits are not finite")
            return await super().ask(*asked)

        num_failed = 0

    script = Failing(*(completion(sampled("chatml", text)) for text in ("so", "well")))
    one = start("chatml", chat("hello"), script)

    async def play() -> None:
        await one.reply()
        one.say(USER)
        with pytest.raises(GenerationError):
            await one.reply()
        await one.reply()

    asyncio.run(play())
    assert [message["content"] for message in one.messages] == ["hello", "so", "try again", "well"]
    assert tokenizer("chatml").decode(script.asked[1].prompt_ids).count("try again") == 1


def test_retried_reply_has_new_lease() -> None:
    """The queue drops an abandoned request by its lease, possibly after the next request was submitted."""
    gave_up = asyncio.Event()

    class Slow(Script):
        async def ask(self, *asked: Any) -> Any:
            if not gave_up.is_set():
                leases.append(asked[0].lease)
                gave_up.set()
                await asyncio.Event().wait()
            return await super().ask(*asked)

    leases: list[str] = []
    script = Slow(completion(sampled("chatml", "so")))
    one = start("chatml", chat("hello"), script)

    async def play() -> None:
        asking = asyncio.create_task(one.reply())
        await gave_up.wait()
        asking.cancel()
        await asyncio.wait({asking})
        await one.reply()

    asyncio.run(play())
    assert script.asked[0].lease not in leases
    assert script.asked[0].lease.startswith(LEASE_PREFIX)


def test_episode_errors_are_described() -> None:
    async def play() -> None:
        one = start("chatml", TEXT, Script(completion([9])))
        with pytest.raises(EpisodeError, match=r"'train/0/1' is plain text, .* or use say_text"):
            one.say(USER)
        with pytest.raises(EpisodeError, match="a reply of 0 tokens"):
            await one.reply(max_tokens=0)
        begun, go = asyncio.Event(), asyncio.Event()

        class Slow(Script):
            async def ask(self, *asked: Any) -> Any:
                begun.set()
                await go.wait()
                return await super().ask(*asked)

        slow = start("chatml", TEXT, Slow(completion([9])))
        first = asyncio.create_task(slow.reply())
        await begun.wait()
        with pytest.raises(EpisodeError, match="while another one is in progress"):
            await slow.reply()
        go.set()
        assert (await first).token_ids == (9,)
        late = start("chatml", chat("hello"), Script())
        late.say_text("I say:")
        with pytest.raises(EpisodeError, match="add the messages first"):
            late.say(USER)

    asyncio.run(play())


def test_episode_without_sampled_token_fails() -> None:
    one = start("chatml", TEXT, Script())
    (made,) = played(one).trajectories
    assert made.status is Status.ENV_ERROR
    assert made.problem == "the environment ended without a reply of the model: ask for one"
    full = start("chatml", TEXT, Script(), max_model_len=2)
    with pytest.raises(EpisodeOver):
        asyncio.run(full.reply())
    assert "leaves no room in the context of 2" in played(full).trajectories[0].problem


def test_turn_seeds_differ() -> None:
    seeds = {turn_seed(seed, index, turn) for seed in range(4) for index in range(8) for turn in range(8)}
    assert len(seeds) == 256
    assert all(0 <= seed < 1 << 63 for seed in seeds)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("reply"), st.lists(st.integers(6, 300), min_size=1, max_size=5), st.booleans()),
        st.tuples(st.just("say"), st.sampled_from(["no", "try again", ""]), st.none()),
        st.tuples(st.just("text"), st.sampled_from([" hm", "<think>"]), st.none()),
    ),
    max_size=10,
)


@pytest.mark.parametrize("style", TEMPLATES)
@given(actions=ACTIONS)
def test_sequence_only_grows_and_mask_is_exact(style: str, actions: list[Any]) -> None:
    """For any texts and replies: each request continues the previous one, and the mask is 1 at sampled tokens."""
    replies = [
        completion(ids, Status.TRUNCATED) if cut else completion([*ids, *encode(style, TEMPLATES[style][1])])
        for kind, ids, cut in actions
        if kind == "reply"
    ]
    script = Script(*replies)
    one = start(style, chat("hello"), script, max_turns=20, max_model_len=5000)

    async def play() -> None:
        for kind, value, _ in actions:
            if kind == "reply":
                await one.reply()
            elif kind == "text":
                one.say_text(value)
            else:
                try:
                    one.say({"role": "user", "content": value})
                except EpisodeError:
                    continue

    asyncio.run(play())
    if not replies:
        return
    for before, after, made in zip(script.asked, script.asked[1:], replies, strict=False):
        grown = [*before.prompt_ids, *made.token_ids.tolist()]
        assert after.prompt_ids[: len(grown)] == grown
    result = played(one)
    (whole,) = result.trajectories
    flat = [token for made in replies for token in made.token_ids.tolist()]
    assert whole.token_ids[whole.loss_mask == 1].tolist() == flat
    last = [*script.asked[-1].prompt_ids, *replies[-1].token_ids.tolist()]
    assert [*result.prompt_ids, *whole.token_ids] == last
    assert whole.loss_mask[0] == 1
    assert whole.loss_mask[-1] == 1
