"""Tiny pipelines on disk, as a run reads them: transformer with weights, scheduler, VAE's shapes, text encoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tiny_diffusion import tiny
from tiny_text import save_pipeline

from starling.algo.diffusion.folder import PipelineFolder, read_pipeline

SIZE: Final = {"height": 64, "width": 64}
"""Settings of [diffusion] whose latents are 8 x 8."""
TEXT_PARTS: Final = ("tokenizer", "text_encoder")


def save_whole(folder: Path, name: str = "wan", *, texts: bool = True) -> PipelineFolder:
    """Save the whole pipeline of a family, whose transformer is `tiny`. `texts`: with text encoders."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    folder.mkdir(parents=True, exist_ok=True)
    save_pipeline(folder, name, None if texts else {})
    tiny(name).save_pretrained(folder / "transformer")
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(folder / "scheduler")
    return read_pipeline(folder)


def without_texts(folder: Path) -> PipelineFolder:
    """Remove the text encoders from the index of a pipeline."""
    index = json.loads((folder / "model_index.json").read_bytes())
    kept = {name: part for name, part in index.items() if not name.startswith(TEXT_PARTS)}
    (folder / "model_index.json").write_text(json.dumps(kept))
    return read_pipeline(folder)
