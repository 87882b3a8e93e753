"""Prompts of rows, and the stream: each row once per epoch, resumable, without held-out rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.errors import ConfigError
from starling.common.wire.messages import ChatMessage, Prompt
from starling.controller.data.prompts import (
    MAX_EXAMPLES_BYTES,
    MAX_PROMPT_BYTES,
    PromptSource,
    load_prompts,
    make_prompt,
)
from starling.controller.data.settings import DataSettings
from starling.controller.data.sources import DataRow

USER = ChatMessage(role="user", content="Why?")
SYSTEM = ChatMessage(role="system", content="Be brief.")
TALK = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]


def make(columns: dict[str, Any], **changes: Any) -> Prompt:
    return make_prompt(DataRow(columns), 4, DataSettings(source="rows.jsonl", **changes))


def stream(num_rows: int, *, shuffle: bool = True, seed: int = 0) -> PromptSource:
    train = {row: Prompt(id="", text=f"row {row}") for row in range(num_rows)}
    return PromptSource(train, {}, shuffle=shuffle, seed=seed)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (r'{"question": "\ud800"}', "half of a surrogate pair .*, which is no text"),
        (r'{"question": "Why?", "m": {"\udfff": 1}}', "half of a surrogate pair"),
        (f'{{"question": "Why?", "m": {"9" * 40}}}', "a number beyond 64 bits"),
        (f'{{"question": "Why?", "m": {"[" * 70}{"]" * 70}}}', "more than 64 lists or tables in each other"),
        (f'{{"question": "Why?", "m": {"[" * 900}{"]" * 900}}}', "more than 64 lists|no message can carry"),
    ],
)
def test_row_that_no_message_can_carry_is_refused(text: str, complaint: str) -> None:
    """The controller would end with it at its start, or when it sends it."""
    columns = json.loads(text)
    with pytest.raises(ConfigError, match=f"row 4 of 'rows.jsonl' has .*{complaint}"):
        make(columns, reference_column="", metadata_columns=("m",) if "m" in columns else ())


@pytest.mark.parametrize("column", ["question", "m"])
def test_row_that_is_larger_than_a_prompt_is_refused(column: str) -> None:
    columns = {"question": "Why?", "m": "", column: "x" * (MAX_PROMPT_BYTES + 1)}
    refusal = r"row 4 of 'rows.jsonl' has 125\d+ bytes .* and a prompt can have 12582912: shorten the row"
    with pytest.raises(ConfigError, match=refusal):
        make(columns, reference_column="", metadata_columns=("m",))


def test_examples_of_a_step_that_no_message_holds_are_refused() -> None:
    sizes = {row: 1 << 20 if row in (3, 4, 5) else 5 << 20 if row in (8, 9) else 10 for row in range(10)}
    for shuffle in (False, True):
        train = {row: Prompt(id="", text="x" * size) for row, size in sizes.items()}
        source = PromptSource(train, {}, shuffle=shuffle, seed=1)
        for per_step in (1, 3, 10, 25):
            sums = [sum(len(source.prompt(i).text) for i in range(s * per_step, (s + 1) * per_step)) for s in range(6)]
            too_large = [step for step, size in enumerate(sums, 1) if size > MAX_EXAMPLES_BYTES]
            if not too_large:
                source.check_steps(6, per_step, "sft.examples_per_step")
                continue
            source.check_steps(too_large[0] - 1, per_step, "sft.examples_per_step")
            refusal = (
                rf"of step {too_large[0]} have \d+ bytes, and .*: lower sft.examples_per_step, or .* \(row 8 has 5"
            )
            with pytest.raises(ConfigError, match=refusal):
                source.check_steps(6, per_step, "sft.examples_per_step")


# --- a row becomes a prompt ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "changes", "messages", "text"),
    [
        ({"question": "Why?"}, {}, (USER,), ""),
        ({"question": "Why?"}, {"system": "Be brief."}, (SYSTEM, USER), ""),
        ({"ask": "Why?"}, {"prompt_column": "ask"}, (USER,), ""),
        ({"question": TALK}, {}, (USER, ChatMessage(role="assistant", content="So.")), ""),
        ({"question": TALK[:1]}, {"system": "Be brief."}, (SYSTEM, USER), ""),
        (
            {"question": [{"role": "system", "content": "Own."}, TALK[0]]},
            {"system": "Be brief."},
            (ChatMessage(role="system", content="Own."), USER),
            "",
        ),
        ({"question": "Why?"}, {"format": "Q: {question}\n"}, (), "Q: Why?\n"),
        ({"question": "Why?", "hint": ""}, {"format": "{hint}{question}"}, (), "Why?"),
        ({}, {"format": "Say something."}, (), "Say something."),
        ({"a": 2, "b": {"c": [5]}}, {"format": "{a:03}{{{b[c][0]}}}"}, (), "002{5}"),
    ],
)
def test_prompt(columns: dict[str, Any], changes: dict[str, Any], messages: tuple[ChatMessage, ...], text: str) -> None:
    prompt = make(columns, reference_column="", **changes)
    assert (prompt.messages, prompt.text, prompt.reference, prompt.metadata) == (messages, text, "", {})


@pytest.mark.parametrize(("value", "reference"), [("42", "42"), (42, "42"), (0.5, "0.5"), ("", "")])
def test_reference(value: object, reference: str) -> None:
    assert make({"question": "Why?", "answer": value}).reference == reference


def test_metadata_has_chosen_columns_and_source_metadata() -> None:
    row = DataRow({"question": "Why?", "tests": ["a"], "other": 1}, {"reasoning_gym": {"task": "t"}})
    settings = DataSettings(source="rows.jsonl", reference_column="", metadata_columns=("tests",))
    assert make_prompt(row, 0, settings).metadata == {"reasoning_gym": {"task": "t"}, "tests": ["a"]}


@pytest.mark.parametrize(
    ("columns", "changes", "complaint"),
    [
        ({"questions": "Why?"}, {}, "has no column 'question', which prompt_column names; nearest: questions"),
        ({"question": "Why?", "anwser": "x"}, {}, "no column 'answer', which reference_column .*nearest: anwser"),
        ({"question": "Why?"}, {"format": "{quesion}"}, "no column 'quesion', which format names; nearest: question"),
        ({"question": "Why?"}, {"format": "{question[word]}"}, "does not fit format"),
        ({"question": {"a": 1}}, {"format": "{question[word]}"}, "does not fit format .*KeyError"),
        ({"question": ""}, {"format": "{question}"}, "gives an empty prompt"),
        ({"question": ""}, {"format": "Q: {question}"}, "gives an empty prompt"),
        ({"question": None}, {"format": "Q: {question}"}, "has no value in 'question', which format names"),
        ({"question": {"word": None}}, {"format": "{question[word]}>"}, r"has no value in 'question\[word\]'"),
        ({"question": ""}, {}, "holds '': give a text or a list"),
        ({"question": None}, {}, "holds None: give a text"),
        ({"question": []}, {}, r"holds \[\]: give a text"),
        ({"question": ["Why?"]}, {}, "holds the message 'Why"),
        ({"question": [{"role": "user", "content": ["part"]}]}, {}, "a message has a role and a content"),
        ({"question": "Why?", "answer": ["a"]}, {}, r"holds \['a'\]: a reference is a text or a number"),
        ({"question": "Why?", "answer": True}, {}, "a reference is a text or a number"),
        ({"question": "Why?", "answer": "x"}, {"metadata_columns": ("test",)}, "which metadata_columns names"),
        (
            {"question": "Why?", "answer": "x", "tests": {1, 2}},
            {"metadata_columns": ("tests",)},
            "not JSON values .*choose other columns",
        ),
    ],
)
def test_make_prompt_rejects_a_row(columns: dict[str, Any], changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        make(columns, **changes)
    assert "row 4 of 'rows.jsonl'" in str(caught.value)


def test_make_prompt_keeps_a_prompt_of_the_user() -> None:
    own = Prompt(id="mine", text="Why?", reference="So.", metadata={"a": 1})
    settings = DataSettings(source="m:f", format="{question}")
    assert make_prompt(own, 0, settings) == own
    with pytest.raises(ConfigError, match="without messages and text"):
        make_prompt(Prompt(id="mine"), 0, settings)


# --- the stream ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(0, 5), st.integers(0, 2**40))
def test_prompt_source_visits_every_row_once_per_epoch(num_rows: int, pass_: int, seed: int) -> None:
    source = stream(num_rows, seed=seed)
    prompts = [source.prompt(pass_ * num_rows + offset) for offset in range(len(source))]
    assert sorted(prompt.text for prompt in prompts) == sorted(f"row {row}" for row in range(num_rows))
    assert {prompt.id for prompt in prompts} == {f"train/{pass_}/{row}" for row in range(num_rows)}
    assert all(prompt.id.rpartition("/")[2] == prompt.text.removeprefix("row ") for prompt in prompts)


@given(st.integers(1, 40), st.lists(st.integers(0, 500), max_size=20), st.booleans())
def test_prompt_source_depends_on_the_position_only(num_rows: int, positions: list[int], shuffle: bool) -> None:
    whole = stream(num_rows, shuffle=shuffle)
    expected = [whole.prompt(position) for position in range(501)]
    resumed = stream(num_rows, shuffle=shuffle)
    assert [resumed.prompt(position) for position in positions] == [expected[position] for position in positions]


def test_prompt_source_shuffles_by_epoch_and_seed() -> None:
    orders = {
        tuple(stream(50, seed=seed).prompt(pass_ * 50 + offset).text for offset in range(50))
        for seed in range(3)
        for pass_ in range(3)
    }
    assert len(orders) == 9


def test_prompt_source_without_shuffle_keeps_order() -> None:
    ids = [stream(3, shuffle=False).prompt(position).id for position in range(5)]
    assert ids == ["train/0/0", "train/0/1", "train/0/2", "train/1/0", "train/1/1"]


def test_prompt_source_order_is_stable_across_versions() -> None:
    """Recorded once: a run that resumes after an upgrade must see the same prompts."""
    assert [stream(6, seed=3).prompt(position).id for position in range(6)] == [
        f"train/0/{row}" for row in (1, 2, 5, 0, 3, 4)
    ]


def test_prompt_source_rejects_negative_positions() -> None:
    with pytest.raises(ValueError, match="index_in_run = -1"):
        stream(3).prompt(-1)


# --- held out ------------------------------------------------------------------------------------------------------


def write_words(path: Path, words: list[str]) -> str:
    path.write_text("".join(json.dumps({"question": word, "answer": "x"}) + "\n" for word in words), "utf-8")
    return str(path)


@given(words=st.lists(st.integers(0, 30), min_size=2, max_size=40), data=st.data())
def test_held_out_prompts_are_never_trained(
    tmp_path_factory: pytest.TempPathFactory, words: list[int], data: st.DataObject
) -> None:
    source = write_words(tmp_path_factory.mktemp("data") / "rows.jsonl", [f"word {word}" for word in words])
    held_out = data.draw(st.integers(0, len(set(words)) - 1))
    prompts = load_prompts(DataSettings(source=source, held_out=held_out, format="{question}"))
    trained = [prompts.prompt(position) for position in range(len(prompts))]
    evaluated = prompts.held_out_prompts()
    assert len(evaluated) == held_out
    assert not {prompt.text for prompt in trained} & {prompt.text for prompt in evaluated}
    for prompt in (*trained, *evaluated):
        assert prompt.text == f"word {words[int(prompt.id.rpartition('/')[2])]}"
    assert {f"word {word}" for word in words} == {prompt.text for prompt in (*trained, *evaluated)}


def test_held_out_rows_do_not_depend_on_the_seed(tmp_path: Path) -> None:
    source = write_words(tmp_path / "rows.jsonl", [f"word {word}" for word in range(30)])
    first, second = (load_prompts(DataSettings(source=source, held_out=5, seed=seed)) for seed in (0, 1))
    assert first.held_out_prompts() == second.held_out_prompts()
    assert len(first.held_out_prompts()) == 5
    assert all(prompt.id.startswith("eval/") for prompt in first.held_out_prompts())
    assert [first.prompt(i) for i in range(25)] != [second.prompt(i) for i in range(25)]


@pytest.mark.parametrize("held_out", [3, 4])
def test_load_prompts_rejects_holding_out_all_rows(tmp_path: Path, held_out: int) -> None:
    source = write_words(tmp_path / "rows.jsonl", ["a", "b", "c"])
    with pytest.raises(ConfigError, match=f"held_out = {held_out} leaves no training rows of the 3 rows"):
        load_prompts(DataSettings(source=source, held_out=held_out))


def test_load_prompts_rejects_equal_questions_in_both_sets(tmp_path: Path) -> None:
    source = write_words(tmp_path / "rows.jsonl", ["a", "a", "a"])
    with pytest.raises(ConfigError, match="has the same question as one of the 1 held-out"):
        load_prompts(DataSettings(source=source, held_out=1))


def test_load_prompts_of_reasoning_gym_with_a_format() -> None:
    settings = DataSettings(
        source="reasoning_gym:spell_backward",
        size=2000,
        options={"min_word_len": 3, "max_word_len": 4},
        format="{metadata[word]}>",
        held_out=100,
    )
    prompts = load_prompts(settings)
    trained = [prompts.prompt(position) for position in range(len(prompts))]
    evaluated = prompts.held_out_prompts()
    assert len(evaluated) == 100
    assert not {prompt.text for prompt in trained} & {prompt.text for prompt in evaluated}
    for prompt in trained:
        assert prompt.text == prompt.reference[::-1] + ">"
        assert prompt.metadata["reasoning_gym"]["entry"]["answer"] == prompt.reference
