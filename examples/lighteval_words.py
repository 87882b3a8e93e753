"""A lighteval task on a local dataset: spell words backwards.

    lighteval endpoint litellm endpoint.yaml "words|0" --custom-tasks examples/lighteval_words.py

The environment variable `WORDS` names the folder of the dataset, with a file `validation.jsonl` of lines such as
``{"question": "cat>", "answer": "tac"}``.
"""

import os

from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc


def prompt(row: dict[str, str], task_name: str = "") -> Doc:
    """Return the lighteval document of a row."""
    return Doc(task_name=task_name, query=row["question"], choices=[row["answer"]], gold_index=0)


TASKS_TABLE = [
    LightevalTaskConfig(
        name="words",
        prompt_function=prompt,
        hf_repo=os.environ["WORDS"],
        hf_subset="default",
        hf_avail_splits=["validation"],
        evaluation_splits=["validation"],
        metrics=[Metrics.exact_match],
        generation_size=8,
    )
]
