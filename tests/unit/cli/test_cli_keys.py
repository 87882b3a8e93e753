"""The command `starling keys`: the folders that it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from starling.cli.main import main


@pytest.mark.parametrize("given", ["mine", "mine/attempt-10"])
@pytest.mark.parametrize("action", ["make", "revoke"])
def test_folder_of_a_run_is_refused_with_that_of_its_keys(
    action: str, given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (9, 10):
        assert main(["keys", "make", str(tmp_path / f"mine/attempt-{number}/keys"), "rollout-0"]) == 0
    capsys.readouterr()
    assert main(["keys", action, str(tmp_path / given), "rollout-1"]) == 2
    assert f"its keys are in {tmp_path}/mine/attempt-10/keys; give that" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / given).iterdir()) in (["attempt-10", "attempt-9"], ["keys"])


def test_list_of_the_keys_of_a_run_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "make", str(tmp_path / "keys"), "rollout-0"]) == 0
    assert main(["keys", "list", str(tmp_path)]) == 2
    assert f"its keys are in {tmp_path}/keys; give that" in capsys.readouterr().err
    assert main(["keys", "list", str(tmp_path / "keys")]) == 0
