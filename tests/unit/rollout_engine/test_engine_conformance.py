"""The conformance suite on the embedded engine, and on the engine of docs/how-to/extend/engine.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from conformance import EngineConformance, Facts, Rig, make_folder

PAGE = Path(__file__).parents[3] / "docs/how-to/extend/engine.md"


class TestTransformers(EngineConformance):
    """The embedded engine, whose groups share batches."""


@pytest.mark.campaign
class TestExclusive(EngineConformance):
    """The embedded engine with one group per batch."""

    rollout: ClassVar[dict[str, Any]] = {"exclusive": True}


class TestEngineOfDocumentationPage(EngineConformance):
    """The engine of the documentation page, loaded by its file name."""

    facts: ClassVar[Facts] = Facts(has_cache=False, scores_prompts=False, records_kept=False)

    @pytest.fixture(scope="class")
    def rig(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
        folder = tmp_path_factory.mktemp("own")
        found = dict(re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
        file = folder / "plain_engine.py"
        file.write_text(found["python"])
        rig = Rig(make_folder(folder / "tiny"), {"engine": f"{file}:PlainEngine"}, self.facts)
        yield rig
        rig.close()
