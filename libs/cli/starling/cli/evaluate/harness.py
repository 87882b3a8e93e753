"""Evaluation with lm-eval (`starling evaluate --tasks lm-eval:TASK`): a served model, and the harness as its client.

The run is of kind `serve` with one instance. The harness is one of its processes; the run ends with it, and its results
are converted to the format of the other evaluations.

| file | holds |
|---|---|
| `lm-eval/` | the files of the harness |
| `summary.json` | the harness with its version; for each task its prompts, and each metric's value and standard error |
| `answers.jsonl` | one line for each prompt: the completions, or the choices with their log-probabilities |
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from starling.cli.console import Console
from starling.cli.evaluate.results import ANSWERS, SUMMARY
from starling.cli.evaluate.tasks import absolute
from starling.cli.recipe.schema import Recipe
from starling.cli.run.attempt import Attempt
from starling.cli.run.processes import ServiceProcess
from starling.cli.run.screen import short_path
from starling.cli.run.supervisor import InterruptedRunError, Supervisor
from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.files import write_whole

PREFIX: Final = "lm-eval:"
MODULE: Final = "lm_eval"
FOLDER: Final = "lm-eval"
NUM_CONCURRENT: Final = 64
"""Concurrent requests of the harness; the engine batches them."""
ANSWER_S: Final = 5.0
DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Bypasses any proxy of the environment: it would see the key, and cannot reach this machine's own address."""


@dataclass(frozen=True)
class HarnessOptions:
    """Options of the harness from the command line."""

    tasks: tuple[str, ...]
    """Names of the harness's tasks, or YAML files."""
    model: str
    """The model's folder, for its tokenizer."""
    limit: int = 0
    plain: bool = False
    system: str = ""
    temperature: float = 0.0
    max_tokens: int = 1024
    """For tasks without a limit of their own."""
    seed: int = 0


def harness_tasks(tasks: str | None) -> tuple[str, ...]:
    """Return the tasks of the harness in the command line's list; empty when all are Starling's.

    Raises:
        ConfigError: there are both, or the harness is not installed.
    """
    names = [name for name in (tasks or "").split(",") if name]
    found = tuple(absolute(name.removeprefix(PREFIX)) for name in names if name.startswith(PREFIX))
    if not found:
        return ()
    if "" in found:
        raise ConfigError(f"--tasks {tasks} names no task of lm-eval; write lm-eval:TASK, such as lm-eval:arc_easy")
    if len(found) < len(names):
        other = next(name for name in names if not name.startswith(PREFIX))
        raise ConfigError(f"--tasks names {other!r} together with tasks of lm-eval; use a separate command")
    if importlib.util.find_spec(MODULE) is None:
        raise ConfigError("lm-eval is not installed here; install starling-cli[lm-eval]")
    return found


class HarnessRun(Supervisor):
    """Serves a model until the harness has finished."""

    def __init__(self, recipe: Recipe, attempt: Attempt, asked: HarnessOptions) -> None:
        """Prepare; nothing is started yet."""
        super().__init__(recipe, attempt)
        self._asked = asked
        self._harness: ServiceProcess | None = None
        self.complete = False
        """Whether the harness has finished."""

    def on_poll(self) -> None:
        """Start the harness when the model is served, and end the run with it."""
        if self._harness is None:
            served = None if self.stopping else served_model(self.attempt.folder)
            if served is not None:
                arguments = _arguments(self._asked, self.attempt, served)
                key = {"OPENAI_API_KEY": served["api_key"]}
                self._harness = self.children.start("harness", "harness", arguments, module=MODULE, environment=key)
        elif self._harness.code == 0 and not self.complete:
            self.complete = True
            if not self.stopping:  # a second call would kill
                self.stop()


def run_harness(recipe: Recipe, attempt: Attempt, asked: HarnessOptions) -> int:
    """Serve, evaluate and report. Returns the exit code. Raises ProcessFailedError."""
    run = HarnessRun(recipe, attempt, asked)
    try:
        run.run()
    except InterruptedRunError as error:
        print(f"starling: {error}", file=sys.stderr)
        return 130
    if not run.complete:
        print("stopped before lm-eval had finished: it cannot be resumed, start it again")
        return 130
    results, samples = read_results(attempt.folder / FOLDER)
    found = summary(results)
    write_whole(attempt.folder / SUMMARY, json.dumps(found, indent=1) + "\n")
    lines = [answer(task, sample) for task, rows in samples.items() for sample in rows]
    write_whole(attempt.folder / ANSWERS, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    console = Console()
    console.print(table_of(found))
    console.print(
        f"answers to {counted(len(lines), 'prompt')}: {short_path(attempt.folder / ANSWERS)}", highlight=False
    )
    return 0


def served_model(folder: Path) -> dict[str, Any] | None:
    """Return address, key and `max_model_len` of the served model of the run in `folder`; None before it is served."""
    try:
        address: dict[str, Any] = json.loads((folder / "api" / "rollout-0.json").read_text())
        request = urllib.request.Request(f"{address['base_url']}/models")
        request.add_header("Authorization", f"Bearer {address['api_key']}")
        with DIRECT.open(request, timeout=ANSWER_S) as reply:
            reported = json.loads(reply.read())["data"][0]["starling"]
    except (OSError, http.client.HTTPException, ValueError):  # not listening yet, or it exited during the reply
        return None
    return {**address, "max_model_len": reported["max_model_len"]} if reported["version"] >= 0 else None


def _arguments(asked: HarnessOptions, attempt: Attempt, served: dict[str, Any]) -> list[str]:
    """Return the command line of the harness."""
    model = {
        "model": served["model"],
        "base_url": f"{served['base_url']}/completions",
        "num_concurrent": NUM_CONCURRENT,
        "tokenizer_backend": "huggingface",
        "tokenizer": absolute(asked.model),
        "max_length": served["max_model_len"],
        # The harness shortens a prompt by this number of tokens.
        "max_gen_toks": min(asked.max_tokens, served["max_model_len"] // 2),
        "timeout": 3600,
        "seed": asked.seed,
    }
    words = ["run", "--model", "local-completions", "--tasks", ",".join(asked.tasks), "--seed", str(asked.seed)]
    words += ["--model_args", json.dumps(model)]  # a path may have a comma
    words += ["--output_path", str(attempt.folder / FOLDER), "--log_samples"]
    words += ["--limit", str(asked.limit)] if asked.limit else []
    words += [] if asked.plain else ["--apply_chat_template"]
    words += [f"--system_instruction={asked.system}"] if asked.system else []  # it may begin with a dash
    words += ["--gen_kwargs", f"temperature={asked.temperature},do_sample=True"] if asked.temperature else []
    return words


def read_results(folder: Path) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Return the results that the harness has written, and the samples of each task.

    Raises:
        ConfigError: there are none.
    """
    files = sorted(folder.rglob("results_*.json"))
    if not files:
        raise ConfigError(f"lm-eval has written no results into {folder}; see logs/harness.log of the run")
    results: dict[str, Any] = json.loads(files[-1].read_text())
    date = files[-1].stem.removeprefix("results_")
    samples = {}
    for task in results["results"]:
        file = files[-1].with_name(f"samples_{task}_{date}.jsonl")
        if file.exists():  # a group of tasks has none of its own
            # Completions may contain other line ends, such as U+2028, which `str.splitlines` takes for ends of samples.
            samples[task] = [json.loads(line) for line in file.read_bytes().splitlines()]
    return results, samples


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """Return the harness's results in the format of summary.json."""
    tasks = {}
    for task, figures in results["results"].items():
        num = results.get("n-samples", {}).get(task, {}).get("effective")
        tasks[task] = {"num_prompts": num, "metrics": _metrics(figures)}
    return {"harness": f"lm-eval {results.get('lm_eval_version', '')}".strip(), "tasks": tasks}


def _metrics(figures: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return each metric's value and standard error; after a filter its name is ``metric/filter``."""
    found: dict[str, dict[str, float | None]] = {}
    for key, value in figures.items():
        metric, comma, kind = key.partition(",")
        if not comma:
            continue
        name = metric.removesuffix("_stderr") + ("" if kind == "none" else f"/{kind}")
        part = "stderr" if metric.endswith("_stderr") else "value"
        number = value if isinstance(value, int | float) else None
        found.setdefault(name, {"value": None, "stderr": None})[part] = number
    return found


def answer(task: str, sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample of the harness as a line of answers.jsonl."""
    asked = [list(arguments.values()) for arguments in sample["arguments"].values()]
    line: dict[str, Any] = {"id": f"{task}/{sample['doc_id']}", "task": task, "text": asked[0][0]}
    if sample["filter"] != "none":
        line["filter"] = sample["filter"]
    line["reference"] = sample["target"]
    if all(isinstance(one, list) and len(one) == 2 for reply in sample["resps"] for one in reply):
        line["choices"] = [
            {"text": arguments[1], "logprob": float(reply[0][0]), "is_greedy": str(reply[0][1]) == "True"}
            for arguments, reply in zip(asked, sample["resps"], strict=True)
        ]
    else:
        line["completions"] = [{"text": str(one)} for reply in sample["resps"] for one in reply]
    line["scores"] = {name: sample[name] for name in sample["metrics"] if name in sample}
    return line


def table_of(found: dict[str, Any]) -> Table:
    """Return the figures as a table, a row for each metric of each task."""
    table = Table(title=f"evaluation by {found['harness']}", title_justify="left")
    table.add_column("task")
    table.add_column("prompts", justify="right")
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("stderr", justify="right")
    for task, one in found["tasks"].items():
        for metric, figures in one["metrics"].items():
            cells = ["" if (value := figures[part]) is None else f"{value:.3f}" for part in ("value", "stderr")]
            num = one["num_prompts"]
            table.add_row(task, "" if num is None else str(num), metric, *cells)
    return table


def check_alone(num_gpus: int | None, tp_size: int, num_completions: int) -> None:
    """Raise ConfigError for options that the harness lacks: it has one instance, and its tasks set the completions."""
    if num_gpus not in (None, tp_size):
        raise ConfigError(
            f"--num-gpus {num_gpus}: lm-eval uses one instance, which has --tp-size {tp_size} GPUs; leave it out"
        )
    if num_completions != 1:
        raise ConfigError(f"--num-completions {num_completions}: a task of lm-eval sets that itself; leave it out")
