"""Reward models: Hugging Face models that classify sequences, whose output is the score of a conversation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, Literal, get_args

from starling.common.errors import ConfigError

Form = Literal["chat", "response", "text", "pair"]
TooLong = Literal["fail", "cut"]
DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
MESSAGES: Final = "messages"
"""Key of the conversation in a prompt's metadata, in place of its text."""
_TITLE: Final = "Scorer 'reward_model'"


class SequenceRewardModel:
    """Scores completions by a model with a classification layer, in batches padded on the right.

    Args:
        folder: of the model and its tokenizer, in Hugging Face format, as a run of kind `reward_model` saves it.
        form: what the model reads. ``chat``: the conversation with the completion as the assistant's message, by the
            chat template. ``response``: the prompt by the chat template up to the start of the assistant's turn, the
            completion, and the end-of-sequence token, which is what a run of kind `reward_model` trains with
            conversations. ``text``: the same without a template, as with plain prompts. ``pair``: prompt and completion
            as the tokenizer's pair.
        chat_template: Jinja template in place of the tokenizer's own; or a file that has it.
        dtype: of the weights; ``auto``: that of the folder.
        device: of the model; ``auto``: a GPU if this process sees one (``needs = { devices = ["gpu"] }``).
        max_length: most tokens; 0: as many as the model's configuration says.
        too_long: what happens to longer inputs. ``fail``: they have no score. ``cut``: their beginning is left out.
        output: index of the model's output, where it has several.
        num_threads: of the processors, without a GPU.
        trust_remote_code: run Python code from the folder.

    Raises:
        ConfigError: an option is not valid; on `setup`, the folder cannot be used.
    """

    batch_size = 16

    def __init__(
        self,
        folder: str,
        form: str = "chat",
        chat_template: str = "",
        dtype: str = "auto",
        device: str = "auto",
        max_length: int = 0,
        too_long: str = "fail",
        output: int | None = None,
        num_threads: int = 1,
        trust_remote_code: bool = False,
    ) -> None:
        for name, value, known in (
            ("form", form, get_args(Form)),
            ("dtype", dtype, DTYPES),
            ("too_long", too_long, get_args(TooLong)),
        ):
            if value not in known:
                raise ConfigError(f"{_TITLE}: {name} must be one of {', '.join(known)}, not {value!r}.")
        for name, number, least in (("max_length", max_length, 0), ("num_threads", num_threads, 1)):
            if type(number) is not int or number < least:
                raise ConfigError(f"{_TITLE}: {name} must be an integer from {least} on, not {number!r}.")
        if output is not None and (type(output) is not int or output < 0):
            raise ConfigError(f"{_TITLE}: output must be an index from 0 on, not {output!r}.")
        self._folder, self._form, self._chat_template = Path(folder).expanduser(), form, chat_template
        self._dtype, self._device, self._num_threads = dtype, device, num_threads
        self._max_length, self._too_long, self._output = max_length, too_long, output
        self._trusts = bool(trust_remote_code)

    def setup(self) -> None:
        """Load tokenizer and model."""
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if not (self._folder / "config.json").is_file():
            raise ConfigError(
                f"{_TITLE}: {str(self._folder)!r} is no model folder here: give its path, and declare it with "
                f'`needs = {{ paths = ["{self._folder}"] }}`.'
            )
        closed = [path.name for path in self._folder.iterdir() if not os.access(path, os.R_OK)]
        if closed:
            raise ConfigError(
                f"{_TITLE}: {closed[0]!r} in the folder {str(self._folder)!r} cannot be read by the user of the "
                f"sandbox: `chmod -R o+rX {self._folder}`."
            )
        where: dict[str, Any] = {"local_files_only": True, "trust_remote_code": self._trusts}
        self._tokenizer = AutoTokenizer.from_pretrained(self._folder, **where)
        self._template = self._read_template()
        torch.set_num_threads(self._num_threads)
        device = self._device if self._device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        model, info = AutoModelForSequenceClassification.from_pretrained(
            self._folder, dtype=self._dtype, output_loading_info=True, **where
        )
        if info["missing_keys"] or info["mismatched_keys"]:
            names = sorted(str(name) for name in (*info["missing_keys"], *info["mismatched_keys"]))
            raise ConfigError(
                f"{_TITLE}: the folder {str(self._folder)!r} has no trained {names[0]!r}: it is no reward model."
            )
        num_outputs = int(model.config.num_labels)
        if (self._output is None and num_outputs != 1) or (self._output or 0) >= num_outputs:
            raise ConfigError(
                f"{_TITLE}: the model has {num_outputs} outputs: name one with `output`, from 0 to {num_outputs - 1}."
            )
        self._model = model.eval().requires_grad_(False).to(device)
        self._longest = self._max_length or int(getattr(model.config, "max_position_embeddings", 0) or 0)

    def score(self, batch: Any) -> dict[str, list[float | str]]:
        """Return the score of each completion of a batch, or the reason why it has none."""
        encoded = [self._encode(*one) for one in zip(batch.prompts, batch.completions, batch.metadata, strict=True)]
        inputs = [one for one in encoded if not isinstance(one, str)]
        found = iter(self._forward(inputs) if inputs else ())
        return {"score": [one if isinstance(one, str) else next(found) for one in encoded]}

    def _read_template(self) -> str | None:
        """Return the chat template, None for the tokenizer's own. Raises ConfigError if there is none."""
        given = self._chat_template
        if given and "{" not in given:
            try:
                return Path(given).expanduser().read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"{_TITLE}: the chat template {given!r} cannot be read ({error.strerror}).") from None
        if not given and self._form in ("chat", "response") and not self._tokenizer.chat_template:
            raise ConfigError(
                f"{_TITLE}: the tokenizer has no chat template: give chat_template, or form 'text' or 'pair'."
            )
        return given or None

    def _encode(self, prompt: str, completion: str, metadata: dict[str, Any]) -> dict[str, list[int]] | str:
        """Return the model's input by name, each a list of integers, or why it is none: it is too long."""
        if self._form == "pair":
            encoding = self._tokenizer(prompt, completion)
            named = {name: list(encoding[name]) for name in encoding if name != "attention_mask"}
        else:
            named = {"input_ids": self._tokens(prompt, completion, metadata)}
        excess = len(named["input_ids"]) - self._longest if self._longest else 0
        if excess > 0 and self._too_long == "fail":
            num = len(named["input_ids"])
            return f"it has {num} tokens with its prompt, and the model takes {self._longest}; see too_long"
        return {name: ids[max(0, excess) :] for name, ids in named.items()}

    def _tokens(self, prompt: str, completion: str, metadata: dict[str, Any]) -> list[int]:
        if self._form == "text":
            return [*self._plain(prompt), *self._plain(completion), *self._end()]
        messages = metadata.get(MESSAGES)
        if not isinstance(messages, list) or not messages:
            messages = [{"role": "user", "content": prompt}]
        if self._form == "response":
            return [*self._plain(self._render(messages, begins=True)), *self._plain(completion), *self._end()]
        whole = [*messages, {"role": "assistant", "content": completion}]
        return self._plain(self._render(whole, begins=False))

    def _render(self, messages: list[Any], *, begins: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=False, add_generation_prompt=begins
            )
        )

    def _plain(self, text: str) -> list[int]:
        """Return the tokens of a text, to which a chat template has given its special tokens."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def _end(self) -> list[int]:
        end = self._tokenizer.eos_token_id
        return [] if end is None else [int(end)]

    def _forward(self, inputs: list[dict[str, list[int]]]) -> list[float]:
        """Return the model's output for each input."""
        import torch

        lengths = [len(one["input_ids"]) for one in inputs]
        longest, pad = max(lengths), self._padding()
        named = {
            name: torch.tensor(
                [[*one[name], *[pad if name == "input_ids" else 0] * (longest - len(one[name]))] for one in inputs],
                device=self._model.device,
            )
            for name in inputs[0]
        }
        mask = [[1] * length + [0] * (longest - length) for length in lengths]
        named["attention_mask"] = torch.tensor(mask, device=self._model.device)
        with torch.inference_mode():
            logits = self._logits(named, torch.tensor(lengths, device=self._model.device) - 1)
        return [float(value) for value in logits[:, self._output or 0].float().cpu()]

    def _logits(self, named: dict[str, Any], last: Any) -> Any:
        """Return the outputs, [N, outputs].

        A decoder's are read at the last token that is no padding. Its own `forward` would look for the last one that
        differs from the padding token, which is the end-of-sequence token in many folders, and so one token too early.
        """
        import torch

        head, base = getattr(self._model, "score", None), self._model.base_model
        if not isinstance(head, torch.nn.Linear) or base is self._model:
            return self._model(**named).logits
        hidden = base(**named).last_hidden_state
        return head(hidden[torch.arange(len(last), device=last.device), last])

    def _padding(self) -> int:
        for token in (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        return 0
