"""What lies beside the weights in a model's folder and goes with every export of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from starling.policy.train.checkpoint import Saveable

PROCESSOR_FILES: Final = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""How images and videos are read. The policy makes no processor, so these are copied as they are."""


class Companions:
    """A tokenizer, and the settings of the processors: with them an export is a model folder like the one before."""

    def __init__(self, tokenizer: Saveable, folder: Path) -> None:
        """Take the tokenizer, and the folder of the model that is trained."""
        self._tokenizer, self._folder = tokenizer, folder

    def save_pretrained(self, save_directory: str) -> None:
        """Write all of it into `save_directory`."""
        self._tokenizer.save_pretrained(save_directory)
        for name in PROCESSOR_FILES:
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, Path(save_directory, name))
