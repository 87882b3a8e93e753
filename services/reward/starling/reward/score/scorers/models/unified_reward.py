"""UnifiedReward (arXiv:2503.05236): a vision-language model behind an OpenAI-compatible API rates images from 1 to 5.

It is asked to reason, and to end with `Final Score: 4`; the score is a fifth of that. An answer without one fails.
"""

from __future__ import annotations

import base64
import io
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from starling.common.errors import ConfigError
from starling.reward.score.scorers.judge.client import JudgeClient, RetryableError, has_time, pause_before
from starling.reward.score.scorers.models.options import check_range, checked_num_frames

QUESTION: Final = (
    "An image was generated from this caption: [{prompt}]\n"
    "Judge, first, how well it shows what the caption says: the objects, their attributes and how they relate; and "
    "second, how good it looks: sharp, detailed, with natural colours, pleasant. Explain your judgement, and end with "
    "one number from 1 (bad) to 5 (perfect) after 'Final Score:'."
)
BEST: Final = 5.0
_SCORE: Final = re.compile(r"Final Score:\W*([0-9]+(?:\.[0-9]+)?)", re.IGNORECASE)


class UnifiedReward:
    """Scores images, or some frames of videos.

    Args:
        endpoint_url: of the service, as `http://judge:8000/v1`.
        endpoint_api_key: its key, if it wants one.
        model: name of the model there.
        question: what the model is asked; `{prompt}` in it becomes the sample's prompt.
        num_frames: how many frames of a video, evenly spaced, it sees together.
        time_limit_s: limit of one sample, with all its tries, in seconds.
        retries: how often a question without an answer is asked again.
        max_tokens: limit on an answer.
        concurrency: most questions at a time, of each worker.
        device, dtype, model_path, download_path: not used; configuration files of Cosmos-RL have them.
    """

    keys = ("unified_reward",)
    media = "pixels"

    def __init__(
        self,
        endpoint_url: str,
        endpoint_api_key: str = "",
        model: str = "UnifiedReward-7b-v1.5",
        question: str = QUESTION,
        num_frames: int = 1,
        time_limit_s: float = 60.0,
        retries: int = 3,
        max_tokens: int = 4096,
        concurrency: int = 8,
        device: str = "",
        dtype: str = "",
        model_path: str = "",
        download_path: str = "",
    ) -> None:
        if not endpoint_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"Scorer 'unified_reward': endpoint_url is {endpoint_url!r}; give an address as http://judge:8000/v1."
            )
        self._num_frames = checked_num_frames("unified_reward", num_frames)
        check_range("unified_reward", "time_limit_s", time_limit_s, 0.1, 3600.0)
        check_range("unified_reward", "retries", retries, 0, 100)
        check_range("unified_reward", "concurrency", concurrency, 1, 1024)
        self._server = endpoint_url, endpoint_api_key, concurrency
        self._model, self._question, self._max_tokens = model, question, max_tokens
        self._time_limit_s, self._retries = time_limit_s, retries
        self.batch_size = concurrency

    def setup(self) -> None:
        """Make the client."""
        self._client = JudgeClient(*self._server)

    def score(self, batch: Any) -> dict[str, list[float]]:
        """Return the score of each sample; the questions of a batch are asked at once."""
        with ThreadPoolExecutor(len(batch)) as threads:
            return {"unified_reward": list(threads.map(self._judge, batch.pixels, batch.prompts))}

    def _judge(self, pixels: Any, prompt: str) -> float:
        num = min(self._num_frames, len(pixels))
        frames = [pixels[number * len(pixels) // num] for number in range(num)]
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": png_url(one)}} for one in frames]
        content.append({"type": "text", "text": self._question.replace("{prompt}", prompt)})
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0.0,
            "max_tokens": self._max_tokens,
        }
        return score_of(self._answer(body))

    def _answer(self, body: dict[str, Any]) -> str:
        """Ask until there is an answer. Raises JudgeError when there is none in time."""
        until = time.monotonic() + self._time_limit_s
        for attempt in range(self._retries + 1):
            try:
                return self._client.ask(body, until - time.monotonic())
            except RetryableError as error:
                pause_s = pause_before(attempt, error)
                if attempt == self._retries or not has_time(until - pause_s):
                    raise
                time.sleep(pause_s)
        raise AssertionError("the last try raises")


def score_of(answer: str) -> float:
    """Return the score in an answer, from 0.2 to 1. Raises ValueError when there is none."""
    found = _SCORE.findall(answer)
    if not found:
        raise ValueError(f"the answer has no 'Final Score:': {answer[-200:]!r}")
    if not 1.0 <= float(found[-1]) <= BEST:
        raise ValueError(f"the final score is {found[-1]}, not from 1 to {BEST:g}")
    return float(found[-1]) / BEST


def png_url(frame: Any) -> str:
    """Return a frame [H, W, 3] as a data URL."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(frame).save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
