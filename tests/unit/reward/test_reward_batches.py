"""Scorers that are classes, with real workers: batches, groups, several scores, failures, and further tries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scoring import PATIENCE_S, completions, scored, scorers_in, settings_of, task

from starling.common.errors import ConfigError
from starling.common.wire.messages import Status
from starling.reward.core.samples import PromptText, Sample, Score, ScoreTask
from starling.reward.score.pool.check import check_scorers
from starling.reward.score.pool.forms import ScorerForms
from starling.reward.score.pool.pool import ScoringPool
from starling.reward.score.scorers.batch import ScorerForm
from starling.reward.score.scorers.registry import check_scorer, load_scorer
from starling.reward.score.workers.protocol import WorkerReady
from starling.reward.settings import RewardSettings

CLASSES = Path(__file__).with_name("batch_scorers.py")


def settings(*classes: str, scorer: dict[str, Any] | None = None, **others: Any) -> RewardSettings:
    return settings_of(*scorers_in(CLASSES, *classes, **(scorer or {})), **others)


def scores_of(one: ScoreTask, with_settings: RewardSettings) -> list[Score]:
    with ScoringPool(with_settings) as pool:
        return scored(pool, one)


@pytest.fixture(scope="module")
def acting() -> Iterator[ScoringPool]:
    with ScoringPool(settings("Acting", scorer={"retries": 0}, timeout_s=PATIENCE_S)) as shared:
        yield shared


@pytest.mark.parametrize(
    ("key", "offset", "batch_size", "expected"),
    [
        ("length", 0.0, None, [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]),
        ("batch", 0.0, None, [4.0, 4.0, 4.0, 4.0, 2.0, 2.0]),
        ("batch", 0.0, 5, [5.0, 5.0, 5.0, 5.0, 5.0, 1.0]),
        ("length+batch", 0.5, 6, [7.5, 8.5, 9.5, 7.5, 8.5, 9.5]),
    ],
)
def test_value_is_the_sum_of_the_scores_that_key_names(
    key: str, offset: float, batch_size: int | None, expected: list[float]
) -> None:
    scorer = {"key": key, "options": {"offset": offset}, "batch_size": batch_size}
    found = scores_of(task("a", "bb", "ccc", "a", "bb", "ccc"), settings("Lengths", scorer=scorer))
    assert [score.value for score in found] == expected


def test_groupwise_scorer_gets_the_completions_of_each_prompt_together() -> None:
    prompts = (PromptText("p", "r", {}), PromptText("q", "r", {}))
    texts = completions("ccc", "a", "dddd", "bb", "")
    samples = tuple(Sample(index, index % 2, text) for index, text in enumerate(texts))
    found = scores_of(ScoreTask("t", prompts, samples, (0,)), settings("Rank"))
    assert [score.value for score in found] == [1.0, 0.0, 2.0, 1.0, 0.0]


def test_batch_has_all_fields_of_its_completions() -> None:
    one = task("a", "b", "c", prompt=PromptText("p", "r", {"k": 1}))
    assert [score.problem for score in scores_of(one, settings("Fields"))] == [""] * 3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("raise", "raised ValueError: a bad one ("),
        ("nan", "returned nan."),
        ("few", "returned no list of 1 scores as 'score'."),
        ("text", "returned no list of 1 scores as 'score'."),
        ("keys", "returned the keys ['other'], not ['score']."),
        ("list", "returned a list, not a dictionary of scores by key."),
        ("none", "returned None."),
        ("reason", "gave no score: it is too long."),
        ("exit", "ended its worker process (exit status 3)."),
    ],
)
def test_one_bad_completion_leaves_the_others_of_its_batch_unharmed(
    acting: ScoringPool, text: str, problem: str
) -> None:
    found = scored(acting, task("good", "good", text, "good"))
    assert [score.value for score in found] == [1.0, 1.0, None, 1.0]
    assert found[2].status is Status.REWARD_ERROR
    assert found[2].problem.startswith(f"scorer 'Acting' {problem}")


def test_completion_that_hangs_a_batch_is_found_and_alone_fails() -> None:
    found = scores_of(task("good", "hang", "good"), settings("Acting", scorer={"retries": 0}, timeout_s=1.0))
    assert [score.value for score in found] == [1.0, None, 1.0]
    assert found[1].status is Status.REWARD_TIMEOUT


def test_groupwise_batch_fails_as_a_whole() -> None:
    scorer = {"options": {"scope": "groupwise", "offset": "no number"}, "key": "length"}
    found = scores_of(task("a", "b"), settings("Lengths", scorer=scorer))
    assert [score.status for score in found] == [Status.REWARD_ERROR] * 2
    assert all("raised TypeError" in score.problem for score in found)


@pytest.mark.parametrize(("retries", "value"), [(0, None), (1, 2.0)])
def test_completion_whose_worker_ended_is_tried_again(tmp_path: Path, retries: int, value: float | None) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)  # the worker's user is another one
    scorer = {"retries": retries, "needs": {"writable_paths": [str(tmp_path)]}}
    (score,) = scores_of(task(str(tmp_path / "tries")), settings("OnceLost", scorer=scorer))
    assert score.value == value
    assert (tmp_path / "tries").read_text().count("tried") == 1 + retries


def test_function_is_called_for_each_completion_of_a_batch() -> None:
    scorer = {"name": "exact_match", "label": "right", "batch_size": 4}
    one = task("r", "s", "r", "r", "x", prompt=PromptText("p", "r", {}))
    with ScoringPool(settings_of(scorer)) as pool:
        assert [score.value for score in scored(pool, one)] == [1.0, 0.0, 1.0, 1.0, 0.0]
        assert pool.gauges()["workers_replaced"] == 0


def test_quick_function_is_called_for_many_completions_at_a_time_and_one_that_hangs_alone_fails() -> None:
    act = {"name": f"{CLASSES.with_name('misbehaving.py')}:act", "retries": 0}
    with ScoringPool(settings_of(act, timeout_s=2.0)) as pool:
        scored(pool, task(*["good"] * 200))  # it turns out to be quick
        pool.submit(one := task(*["good"] * 3, "hang", *["good"] * 3))
        scores, waits = list[Score](), set[str]()
        while len(scores) < len(one.samples):
            waits |= {wait.what for wait in pool.waits()}
            scores += pool.poll(PATIENCE_S)
    assert any("completions from" in what for what in waits), waits
    assert any("on completion 3" in what for what in waits), waits
    found = {score.completion: (score.value, score.status) for score in scores}
    assert found.pop(3) == (None, Status.REWARD_TIMEOUT)
    assert set(found.values()) == {(1.0, Status.OK)}


def test_batch_without_a_score_that_does_not_count_is_not_repeated() -> None:
    found = scores_of(task("a", "b", "c"), settings("HalfNone", scorer={"key": "calls"}))
    assert [score.value for score in found] == [1.0, 1.0, 1.0], "the first call had all three"
    assert found[0].parts == (("calls", 1.0), ("none", None))


@pytest.mark.parametrize(("label", "parts"), [("brightness", ()), ("light", (("brightness", 0.5),))])
def test_score_with_a_name_is_a_part_unless_the_scorer_has_that_name(label: str, parts: tuple[Any, ...]) -> None:
    (found,) = scores_of(task("a"), settings("Named", scorer={"label": label}))
    assert (found.value, found.parts) == (0.5, parts)


def test_problem_of_a_large_group_is_reported_whole_or_shortened() -> None:
    """One text for each of 4,096 completions would be longer than a worker's report may be."""
    found = scores_of(task(*["raise-long"] * 4096), settings("LongProblem", scorer={"retries": 0}))
    assert {score.status for score in found} == {Status.REWARD_ERROR}
    assert all(score.problem.startswith("scorer 'LongProblem' raised ValueError: xxx") for score in found)


def test_cancelled_calls_do_not_wait_for_a_worker() -> None:
    with ScoringPool(settings("Acting", timeout_s=PATIENCE_S)) as pool:
        for number in range(50):  # before any worker is ready
            pool.submit(ScoreTask(f"early{number}", *_parts("good")))
            pool.cancel(f"early{number}")
        assert len(pool._queues) <= 1
        pool.submit(ScoreTask("hanging", *_parts("hang")))
        while not pool.waits() or "Acting" not in pool.waits()[0].what:
            pool.poll(0.1)
        for number in range(50):
            pool.submit(ScoreTask(f"late{number}", *_parts(*["good"] * 100)))
            pool.cancel(f"late{number}")
        assert len(pool._queues) <= 100
        assert pool.gauges()["queue_depth"] == 1


def _parts(*texts: str) -> tuple[tuple[PromptText, ...], tuple[Sample, ...], tuple[int, ...]]:
    one = task(*texts)
    return one.prompts, one.samples, one.scorers


def test_worker_of_one_kind_that_cannot_start_does_not_delay_those_of_another(tmp_path: Path) -> None:
    """A judge whose second worker finds no memory must not keep crashed workers of other scorers from their start."""
    broken = {"name": f"{CLASSES}:Failing", "label": "broken", "needs": {"max_tasks": 100}}
    good = {"name": f"{CLASSES}:Acting", "label": "good", "retries": 0}
    one = task("exit", "good", "good")
    with ScoringPool(settings_of(good, broken)) as pool:
        assert [score.value for score in scored(pool, one)] == [None, 1.0, 1.0]


def test_tries_of_a_completion_that_always_ends_its_worker_are_limited() -> None:
    with ScoringPool(settings("Acting", scorer={"retries": 2})) as pool:
        (score,) = scored(pool, task("exit"))
        assert (score.value, score.status) == (None, Status.REWARD_ERROR)
        assert pool.gauges()["workers_replaced"] == 3


@pytest.mark.parametrize(
    ("name", "scorer", "problem"),
    [
        ("NoScore", {}, "is a class without a plain method"),
        ("Failing", {}, "cannot be set up: OSError: no such model"),
        ("Lengths", {}, "has several scores, length, batch: set `key`"),
        ("Lengths", {"key": "width"}, "has no score 'width': set `key` to one of length, batch"),
        ("Lengths", {"key": "length+"}, "has no score ''"),
        ("Rank", {"key": "rank"}, "has no score 'rank': set `key` to one of score"),
        ("Rank", {"options": {"by": 3}}, "has no option 'by'"),
        ("Declaring", {"options": {"keys": []}}, "its `keys` must be 1 to 64 names"),
        ("Declaring", {"options": {"keys": "score"}}, "its `keys` must be 1 to 64 names"),
        ("Declaring", {"options": {"keys": ["a", "a"]}}, "must differ"),
        ("Declaring", {"options": {"keys": ["a+b"]}}, "must be a short text without"),
        ("Declaring", {"options": {"keys": [3]}}, "must be a short text without"),
        ("Declaring", {"options": {"scope": "wide"}}, "its `scope` must be"),
        ("Declaring", {"options": {"batch_size": 0}}, "its `batch_size` must be 1 to"),
        ("Declaring", {"options": {"batch_size": True}}, "its `batch_size` must be 1 to"),
    ],
)
@pytest.mark.sample(4)
def test_class_that_cannot_be_a_scorer_is_refused_at_the_start(name: str, scorer: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace("(", r"\(")):
        check_scorers(settings(name, scorer=scorer))


def test_check_of_a_recipe_does_not_set_a_class_up() -> None:
    check_scorer(f"{CLASSES}:Failing", {})
    with pytest.raises(ConfigError, match="no option"):
        check_scorer(f"{CLASSES}:Failing", {"limit": 3})
    with pytest.raises(ConfigError, match="cannot be set up"):
        load_scorer(f"{CLASSES}:Failing", {})


@pytest.mark.parametrize(
    "reported",
    [
        (),
        ((1, ScorerForm()),),
        ((0, ScorerForm()), (0, ScorerForm())),
        ((0, ScorerForm(batch_size=0)),),
        ((0, ScorerForm(keys=())),),
        ((0, ScorerForm(keys=("x",) * 2)),),
    ],
)
def test_form_that_no_worker_declares_is_not_believed(reported: Any) -> None:
    """A scorer's module may write into its worker's socket while it is imported."""
    forms = ScorerForms(settings("Rank").scorers)
    assert forms.learn({0}, WorkerReady(reported))
    assert not forms.learn({0}, WorkerReady(((0, ScorerForm(scope="groupwise")),)))
    assert forms.learn({0}, WorkerReady(((0, ScorerForm()),)))


def test_installed_package_offers_a_scorer_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # the worker's user is another one
    (tmp_path / "judges_for_all.py").write_text(CLASSES.read_text())
    (tmp_path / "judges_for_all-1.0.dist-info").mkdir()
    (tmp_path / "judges_for_all-1.0.dist-info" / "METADATA").write_text("Name: judges-for-all\nVersion: 1.0\n")
    entries = "[starling.scorers]\nrank = judges_for_all:Rank\n"
    (tmp_path / "judges_for_all-1.0.dist-info" / "entry_points.txt").write_text(entries)
    with pytest.raises(ConfigError, match="no scorer 'rank'"):
        load_scorer("rank", {})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert load_scorer("rank", {}).form == ScorerForm(scope="groupwise")
    with pytest.raises(ConfigError, match="'rank'"):
        load_scorer("rnak", {})
    found = scores_of(task("bb", "a"), RewardSettings.model_validate({"scorers": [{"name": "rank"}]}))
    assert [score.value for score in found] == [1.0, 0.0]
