"""Files of a quarantine with media: what is written within the limit, and read again strictly."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from starling.common.errors import ConfigError
from starling.common.wire.messages import CompletionText, Status
from starling.reward.core.media import MediaForm, MediaTensor
from starling.reward.core.samples import LostCall, PromptText
from starling.reward.score.workers.shared import MediaMemory
from starling.reward.settings import RewardSettings
from starling.reward.shell.quarantine import Quarantine, read_quarantined

CLIPS = np.arange(3 * 2 * 4 * 5 * 3, dtype=np.uint8).reshape(3, 2, 4, 5, 3)
PROMPT = PromptText("a cat", "", {"task": "video"})


def quarantine(folder: Path, mb: int = 1) -> Quarantine:
    settings = {"scorers": [{"name": "exact_match", "label": "judge/one"}], "quarantine_mb": mb}
    return Quarantine(folder, "reward-0", RewardSettings.model_validate(settings))


def lost(*rows: int, clips: np.ndarray = CLIPS, dtype: str = "uint8", kind: Any = "pixels") -> LostCall:
    tensor = MediaTensor(
        MediaForm(kind, dtype, clips.shape[1:], 16.0),
        len(clips),
        MediaMemory(1).share([bytes(64), clips.tobytes()]),
        64,
    )
    completions = tuple(CompletionText(text=str(row), status=Status.OK, num_tokens=0) for row in rows)
    return LostCall(0, PROMPT, completions, "it ended its worker.", tuple((tensor, row) for row in rows))


def test_media_are_beside_their_call_and_read_again(tmp_path: Path) -> None:
    quarantine(tmp_path).add(lost(2, 0))
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == [f"reward-0-000001-judge_one.{end}" for end in ("0.npy", "1.npy", "json")]
    np.testing.assert_array_equal(np.load(tmp_path / names[0]), CLIPS[2], strict=True)
    scorer, prompt, completions, media = read_quarantined(tmp_path / names[2])
    assert (scorer, prompt.text, [one.text for one in completions]) == ("judge/one", "a cat", ["2", "0"])
    assert [form for form, _ in media] == [MediaForm("pixels", "uint8", (2, 4, 5, 3), 16.0)] * 2
    assert [bytes(data) for _, data in media] == [CLIPS[2].tobytes(), CLIPS[0].tobytes()]


def test_latents_of_bfloat16_are_read_again(tmp_path: Path) -> None:
    bits = np.full((1, 16, 1, 2, 2), 0x3FC0, "<u2")
    quarantine(tmp_path).add(lost(0, clips=bits, dtype="bfloat16", kind="latents"))
    ((form, data),) = read_quarantined(tmp_path / "reward-0-000001-judge_one.json").media
    assert form == MediaForm("latents", "bfloat16", (16, 1, 2, 2), 16.0)
    assert bytes(data) == bits.tobytes()


def test_media_count_for_the_limit_also_of_former_processes(tmp_path: Path) -> None:
    large = np.zeros((1, 1, 100, 2000, 3), np.uint8)  # 0.6 MB
    quarantine(tmp_path).add(lost(0, clips=large))
    assert len(list(tmp_path.iterdir())) == 2
    again = quarantine(tmp_path)
    again.add(lost(0, clips=large))
    assert len(list(tmp_path.iterdir())) == 2, "above the limit, neither the media nor the call are written"
    again.add(lost(0))
    assert (tmp_path / "reward-0-000002-judge_one.json").exists()


def test_call_whose_media_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "reward-0-000001-judge_one.1.npy").write_bytes(b"another's")
    quarantine(tmp_path).add(lost(0, 1))
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".json"] == ["reward-0-000002-judge_one.json"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data[:-1], "bytes of elements"),
        (lambda data: b"", "it is no .npy file"),
        (lambda data: data.replace(b"False", b"True "), "are not in C order"),
        (lambda data: data.replace(b"|u1", b"<f8").ljust(len(data) + 7 * 120, b"\0"), "have dtype float64"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_file_of_media_that_is_none_is_refused(tmp_path: Path, change: Any, problem: str) -> None:
    quarantine(tmp_path).add(lost(1))
    media = tmp_path / "reward-0-000001-judge_one.0.npy"
    if change is None:
        media.unlink()
    else:
        media.write_bytes(change(media.read_bytes()))
    with pytest.raises(ConfigError) as raised:
        read_quarantined(media.with_name("reward-0-000001-judge_one.json"))
    assert str(raised.value).startswith(str(media))
    assert problem in str(raised.value)


def test_media_of_some_completions_only_are_refused(tmp_path: Path) -> None:
    quarantine(tmp_path).add(lost(1, 2))
    file = tmp_path / "reward-0-000001-judge_one.json"
    contents = json.loads(file.read_text())
    file.write_text(json.dumps({**contents, "media": contents["media"][:1]}))
    with pytest.raises(ConfigError, match="it has media of some completions only"):
        read_quarantined(file)


def test_fifo_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    """It would be waited for, for ever."""
    quarantine(tmp_path).add(lost(0))
    file, media = (tmp_path / f"reward-0-000001-judge_one.{end}" for end in ("json", "0.npy"))
    for one in (media, file):
        one.unlink()
        os.mkfifo(one)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_quarantined(file)
