"""The scorer `reward_model`: the scores of models that classify sequences, on models of a few thousand parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scoring import batch_of, scored, settings_of, task
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig

from starling.algo.text import encode_prompt, encode_response
from starling.cli.model.scratch import ScratchSettings, make_model_folder
from starling.common.errors import ConfigError
from starling.common.wire.messages import ChatMessage, Prompt
from starling.policy.train.checkpoint.huggingface import save_hf
from starling.policy.train.model.load import load_model
from starling.reward.core.samples import PromptText
from starling.reward.score.pool.pool import ScoringPool
from starling.reward.score.scorers.batch import Batch
from starling.reward.score.scorers.models.sequence import SequenceRewardModel
from starling.reward.score.scorers.registry import check_scorer, load_scorer

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIG = {**SIZES, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True, "initializer_range": 0.5}
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}>{{ m.content }}b{% endfor %}{% if add_generation_prompt %}a>{% endif %}"
)
COMPLETIONS = ["abc", "", "a", "cbacbacbacba", "abcabc", "b"]
PROMPTS = ["ab", "cab", "bbb", "a", "cccccc", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a reward model's folder, as a run of kind `reward_model` saves it."""
    base, saved = tmp_path_factory.mktemp("base") / "model", tmp_path_factory.mktemp("saved") / "step-1"
    settings = ScratchSettings(config=CONFIG, alphabet="abcus>", max_length=64, chat_template=TEMPLATE)
    make_model_folder(settings, base)
    model = load_model(base, init="random", seed=3, scores=True)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    save_hf(model, AutoTokenizer.from_pretrained(base), saved)
    return saved


def batch(prompts: list[str], completions: list[str], metadata: list[dict[str, Any]] | None = None) -> Batch:
    num = len(prompts)
    given = {"prompts": tuple(prompts), "completions": tuple(completions), "metadata": tuple(metadata or [{}] * num)}
    return batch_of(num, **given)


def loaded(folder: Path, **options: Any) -> SequenceRewardModel:
    scorer = SequenceRewardModel(str(folder), **options)
    scorer.setup()
    return scorer


def alone(folder: Path, ids: list[int]) -> float:
    """Return transformers' own score of one sequence, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32").eval()
    model.config.pad_token_id = None  # it reads the last token then
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


FORMS: dict[str, Callable[[Any, str, str], list[int]]] = {
    "chat": lambda tokenizer, prompt, completion: tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}], return_dict=False
    ),
    "response": lambda tokenizer, prompt, completion: (
        encode_prompt(tokenizer, Prompt(id="x", messages=(ChatMessage(role="user", content=prompt),)))
        + encode_response(tokenizer, Prompt(id="x", text="", reference=completion or "a"))[0 if completion else 1 :]
    ),
    "text": lambda tokenizer, prompt, completion: (
        encode_prompt(tokenizer, Prompt(id="x", text=prompt))
        + encode_response(tokenizer, Prompt(id="x", text="", reference=completion or "a"))[0 if completion else 1 :]
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_scores_are_those_of_transformers_and_independent_of_padding(folder: Path, form: str) -> None:
    scorer, tokenizer = loaded(folder, form=form), AutoTokenizer.from_pretrained(folder)
    expected = [
        alone(folder, FORMS[form](tokenizer, *pair)) for pair in zip(PROMPTS, COMPLETIONS, strict=True)
    ]  # fmt: skip
    scores = scorer.score(batch(PROMPTS, COMPLETIONS))["score"]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 3) for score in expected}) == len(expected)
    backwards = scorer.score(batch(PROMPTS[::-1], COMPLETIONS[::-1]))["score"]
    assert backwards[::-1] == pytest.approx(expected, abs=1e-5)
    one = [scorer.score(batch([p], [c]))["score"][0] for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert one == pytest.approx(expected, abs=1e-5)


def test_conversation_of_the_metadata_takes_the_place_of_the_prompt(folder: Path) -> None:
    scorer = loaded(folder)
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    whole = [*messages, {"role": "assistant", "content": "abc"}]
    expected = alone(folder, tokenizer.apply_chat_template(whole, return_dict=False))
    found = scorer.score(batch(["ignored"], ["abc"], [{"messages": messages}]))["score"]
    assert found == pytest.approx([expected], abs=1e-5)


def test_chat_template_may_be_given_as_text_or_file(folder: Path, tmp_path: Path) -> None:
    template = "{{ messages[-1].content }}"
    (tmp_path / "template.jinja").write_text(template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = alone(folder, tokenizer.encode("abc", add_special_tokens=False))
    for given in (template, str(tmp_path / "template.jinja")):
        assert loaded(folder, chat_template=given).score(batch(["b"], ["abc"]))["score"] == pytest.approx(
            [expected], abs=1e-5
        )
    with pytest.raises(ConfigError, match="the chat template '/no/such' cannot be read"):
        loaded(folder, chat_template="/no/such")


def test_what_is_too_long_has_no_score_or_is_cut_at_its_beginning(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    long, short = "abcabcabcabc", "ab"
    assert loaded(folder, form="text", max_length=8).score(batch(["", ""], [long, short]))["score"] == [
        "it has 13 tokens with its prompt, and the model takes 8; see too_long",
        pytest.approx(alone(folder, FORMS["text"](tokenizer, "", short)), abs=1e-5),
    ]
    cut = loaded(folder, form="text", max_length=8, too_long="cut").score(batch([""], [long]))["score"]
    assert cut == pytest.approx([alone(folder, FORMS["text"](tokenizer, "", long)[-8:])], abs=1e-5)
    (alone_too,) = loaded(folder, form="text", max_length=8).score(batch([""], [long]))["score"]
    assert isinstance(alone_too, str)


def test_encoder_reads_a_pair_and_one_of_its_outputs(folder: Path, tmp_path: Path) -> None:
    sizes = {**SIZES, "vocab_size": len(AutoTokenizer.from_pretrained(folder)), "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(BertConfig(**sizes, num_labels=2, initializer_range=0.5))
    model.eval().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path)
    expected = []
    for pair in zip(PROMPTS[:5], COMPLETIONS[:5], strict=True):
        with torch.no_grad():
            expected.append(float(model(**tokenizer(*pair, return_tensors="pt")).logits[0, 1]))
    scorer = loaded(tmp_path, form="pair", output=1)
    assert scorer.score(batch(PROMPTS[:5], COMPLETIONS[:5]))["score"] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ConfigError, match="the model has 2 outputs: name one with `output`, from 0 to 1"):
        loaded(tmp_path, form="pair")


def test_folder_without_a_trained_layer_is_refused(tmp_path: Path) -> None:
    make_model_folder(ScratchSettings(config=CONFIG, alphabet="abcus>", max_length=64), tmp_path / "model")
    save_hf(load_model(tmp_path / "model", init="random"), None, tmp_path / "saved")
    AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"has no trained 'score.weight': it is no reward model"):
        loaded(tmp_path / "saved", form="text")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"form": "x"}, "form must be one of chat, response, text, pair, not 'x'"),
        ({"dtype": "int8"}, "dtype must be one of auto, float32, bfloat16, float16, not 'int8'"),
        ({"too_long": "x"}, "too_long must be one of fail, cut, not 'x'"),
        ({"max_length": -1}, "max_length must be an integer from 0 on, not -1"),
        ({"num_threads": 0}, "num_threads must be an integer from 1 on, not 0"),
        ({"output": -1}, "output must be an index from 0 on, not -1"),
        ({"dropout": 1}, "has no option 'dropout'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_scorer("reward_model", {"folder": "/m", **options})


def test_folder_that_is_not_declared_is_named_with_the_remedy() -> None:
    with pytest.raises(
        ConfigError, match=r"'/no/model' is no model folder here.*`needs = \{ paths = \[\"/no/model\"\]"
    ):
        load_scorer("reward_model", {"folder": "/no/model"})


def test_worker_scores_with_the_declared_folder(folder: Path) -> None:
    for parent in (folder, *folder.parents[:3]):
        parent.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)
    scorer = {
        "name": "reward_model", "options": {"folder": str(folder), "form": "text"}, "needs": {"paths": [str(folder)]},
        "timeout_s": 120.0,
    }  # fmt: skip
    with ScoringPool(settings_of(scorer, start_timeout_s=300.0)) as pool:
        scores = scored(pool, task(*COMPLETIONS, prompt=PromptText("ab", "", {})), 300.0)
    found = [score.value for score in scores]
    expected = loaded(folder, form="text").score(batch(["ab"] * len(COMPLETIONS), COMPLETIONS))["score"]
    assert found == pytest.approx(expected, abs=1e-5)
