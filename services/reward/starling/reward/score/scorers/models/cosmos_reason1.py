"""Cosmos-Reason1 as a critic of videos: the probability that it says "No" when it is asked for anomalies.

A vision-language model of the Qwen2.5-VL family answers with one word; its logits for "Yes" and "No" make the score.
The published model (`nvidia/Cosmos-Reason1-7B-Reward`) was trained with the prompts of its model card: give them as
`system_prompt` and `question` for the scores that it is known for.
"""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any, Final

from starling.common.errors import ConfigError
from starling.reward.score.scorers.models.options import check_range, model_folder

SYSTEM_PROMPT: Final = (
    "You judge videos. Look for what cannot happen in the world: things that break gravity, pass through each other, "
    "appear, vanish or change shape, move without a cause, and bodies with impossible joints. Style, light, blur, cuts "
    "and missing sound are no errors. Answer with one word, Yes or No."
)
QUESTION: Final = "Is anything in this video impossible or broken?"
_TEXT, _VIDEO = 0, 2
"""Kinds of tokens in `mm_token_type_ids`."""
_MIN_TOKENS: Final = 16
"""Of a pair of frames."""


class CosmosReason1:
    """Scores videos, one at a time.

    Args:
        model_path: folder of the model, with its tokenizer and `preprocessor_config.json`.
        system_prompt: what the model is told first.
        question: what it is asked; `{prompt}` in it becomes the sample's prompt.
        yes: the answer of a bad video.
        no: the answer of a good one.
        device: of the model.
        dtype: of its weights.
        max_frames: limit on the frames that it sees: of a longer video every second, every third, and so on.
        max_tokens: limit on the tokens of a video.
        default_fps: frame rate of videos of which it is not known.
        download_path: not used; configuration files of Cosmos-RL have it.
    """

    keys = ("no_score", "yes_logit", "no_logit")
    media = "pixels"

    def __init__(
        self,
        model_path: str,
        system_prompt: str = SYSTEM_PROMPT,
        question: str = QUESTION,
        yes: str = "Yes",
        no: str = "No",
        device: str = "cpu",
        dtype: str = "bfloat16",
        max_frames: int = 160,
        max_tokens: int = 9216,
        default_fps: float = 16.0,
        download_path: str = "",
    ) -> None:
        self._folder = model_folder("cosmos_reason1", model_path, "nvidia/Cosmos-Reason1-7B-Reward")
        check_range("cosmos_reason1", "max_frames", max_frames, 2, 4096)
        check_range("cosmos_reason1", "max_tokens", max_tokens, _MIN_TOKENS, 1 << 20)
        check_range("cosmos_reason1", "default_fps", default_fps, 0.01, 1000.0)
        self._system_prompt, self._question, self._answers = system_prompt, question, (yes, no)
        self._device, self._dtype = device, dtype
        self._max_frames, self._max_tokens, self._default_fps = max_frames, max_tokens, default_fps

    def setup(self) -> None:
        """Load the model. Raises ConfigError when its folder is not complete, or its tokenizer has not the answers."""
        from transformers import AutoModelForImageTextToText, AutoTokenizer

        self._torch: Any = importlib.import_module("torch")
        self._form = _patch_form(self._folder)
        self._tokenizer = AutoTokenizer.from_pretrained(str(self._folder), local_files_only=True)
        self._tokenizer.chat_template = self._tokenizer.chat_template or _chat_template(self._folder)
        model = AutoModelForImageTextToText.from_pretrained(str(self._folder), dtype=self._dtype, local_files_only=True)
        self._model = model.eval().requires_grad_(False).to(self._device)
        self._video_id = model.config.video_token_id
        first = [self._tokenizer.encode(answer, add_special_tokens=False)[:1] for answer in self._answers]
        self._answer_ids = [token for tokens in first for token in tokens]
        if len(set(self._answer_ids)) != len(self._answers):
            raise ConfigError(
                f"Scorer 'cosmos_reason1': its tokenizer does not tell {self._answers[0]!r} from {self._answers[1]!r}; "
                "give the answers as `yes` and `no` that the model was trained with."
            )

    def score(self, batch: Any) -> dict[str, list[float]]:
        """Return the scores of each video."""
        rows = [self._judge(*sample) for sample in zip(batch.pixels, batch.fps, batch.prompts, strict=True)]
        return {key: [row[key] for row in rows] for key in self.keys}

    def _judge(self, pixels: Any, fps: float, prompt: str) -> dict[str, float]:
        inputs = self._inputs(pixels, fps or self._default_fps, prompt)
        logits = self._model(**inputs, logits_to_keep=1, use_cache=False).logits[0, -1].float()
        yes, no = (float(logits[token]) for token in self._answer_ids)
        return {"no_score": _sigmoid(no - yes), "yes_logit": yes, "no_logit": no}

    def _inputs(self, pixels: Any, fps: float, prompt: str) -> dict[str, Any]:
        """Return the inputs of the model. Raises ValueError for a prompt that looks like a video."""
        from starling.reward.score.scorers.models import video

        torch, form = self._torch, self._form
        frames, interval = video.sampled_frames(pixels, self._max_frames, form.temporal_patch_size)
        area = form.factor**2 * form.temporal_patch_size
        size = video.fitted_size(
            *frames.shape[1:3],
            factor=form.factor,
            min_pixels=_MIN_TOKENS * area,
            max_pixels=max(self._max_tokens * area // len(frames), _MIN_TOKENS * area),
        )
        patches = video.patches_of(frames, size, form)
        ids = torch.tensor([self._token_ids(prompt, math.prod(patches.grid) // form.merge_size**2)])
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": torch.where(ids == self._video_id, _VIDEO, _TEXT),
            "pixel_values_videos": torch.from_numpy(patches.values).to(self._model.dtype),
            "video_grid_thw": torch.tensor([patches.grid]),
            "second_per_grid_ts": torch.tensor([form.temporal_patch_size * interval / fps]),
        }
        return {name: value.to(self._device) for name, value in inputs.items()}

    def _token_ids(self, prompt: str, num_video_tokens: int) -> list[int]:
        """Return the tokens of the conversation up to the answer, with the video's places in it."""
        content = [{"type": "video"}, {"type": "text", "text": self._question.replace("{prompt}", prompt)}]
        messages = [{"role": "system", "content": self._system_prompt}, {"role": "user", "content": content}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        found: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if found.count(self._video_id) != 1:
            raise ValueError("the prompt has the token that stands for a video; remove it")
        place = found.index(self._video_id)
        return [*found[:place], *[self._video_id] * num_video_tokens, *found[place + 1 :]]


def _patch_form(folder: Path) -> Any:
    """Return how the model cuts frames. Raises ConfigError."""
    from starling.reward.score.scorers.models.video import PatchForm

    file = folder / "preprocessor_config.json"
    try:
        found = json.loads(file.read_bytes())
        return PatchForm(
            patch_size=int(found["patch_size"]),
            temporal_patch_size=int(found["temporal_patch_size"]),
            merge_size=int(found["merge_size"]),
            mean=tuple(found["image_mean"]),
            std=tuple(found["image_std"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"Scorer 'cosmos_reason1': {str(file)!r} does not say how the model cuts frames ({error!r}); download the "
            "whole folder of the model."
        ) from None


def _chat_template(folder: Path) -> str:
    """Return the template of conversations, where the tokenizer has none. Raises ConfigError."""
    try:
        return str(json.loads((folder / "chat_template.json").read_bytes())["chat_template"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"Scorer 'cosmos_reason1': {str(folder)!r} has no chat template; download the whole folder of the model."
        ) from None


def _sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0.0 else math.exp(value) / (1.0 + math.exp(value))
