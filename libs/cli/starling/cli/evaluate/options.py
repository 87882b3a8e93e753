"""Options of the commands that run a model without a policy: the model, and how each prompt is answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter


@dataclass(frozen=True)
class ModelOptions:
    """The model, and the instances of the engine that share the work."""

    model: Annotated[str, Parameter(metavar="DIR", help="The model's folder.")] = ""
    num_gpus: Annotated[int | None, Parameter(help="GPUs of all instances; all by default, 1 without GPUs.")] = None
    tp_size: Annotated[int, Parameter(help="GPUs that share one instance.")] = 1
    engine: Annotated[str, Parameter(help="transformers, vllm, or module:Class.")] = "transformers"
    seed: Annotated[int, Parameter(help="Seed of every sampled token.")] = 0


@dataclass(frozen=True)
class AnswerOptions:
    """How each prompt is answered, once."""

    num_completions: Annotated[
        int | None, Parameter(help="Completions of each prompt: 1 by default; for a run, as in its recipe.")
    ] = None
    temperature: Annotated[float, Parameter(help="0: the most likely token at each position.")] = 0.0
    max_tokens: Annotated[int, Parameter(help="Maximum tokens of each completion.")] = 1024
    limit: Annotated[int, Parameter(help="Only the first prompts (of each task); 0 for all.")] = 0
    plain: Annotated[bool, Parameter(help="Prompts are plain text, not turns of a conversation.")] = False
    system: Annotated[str, Parameter(help="System message of each conversation that has none.")] = ""

    @property
    def group_size(self) -> int:
        """Completions of each prompt."""
        return 1 if self.num_completions is None else self.num_completions


DEFAULT_MODEL = ModelOptions()
DEFAULT_ANSWERS = AnswerOptions()
