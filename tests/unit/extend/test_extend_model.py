"""The example model of docs/how-to/extend/model.md in the policy and in the rollout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers.dynamic_module_utils
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

from starling.common.errors import ConfigError
from starling.common.wire.messages import Sampling
from starling.policy.train.data.packing import PromptBlock, pack_sequences, to_tensors
from starling.policy.train.loss.logprobs import token_logprobs
from starling.policy.train.model.layout import attention_plan
from starling.policy.train.model.load import load_model, longest_sequence, version_tensors
from starling.rollout.engine.base import GroupFailed, GroupRequest, GroupResult
from starling.rollout.engine.embedded.engine import TransformersEngine
from starling.rollout.engine.embedded.model import build_model
from starling.rollout.engine.teacher import num_shared_token_ids

torch.set_num_threads(1)
PAGE = Path(__file__).parents[3] / "docs/how-to/extend/model.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the page's code and configuration into a folder, as a reader would."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    found = dict(re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    model = tmp_path / "parallel"
    model.mkdir()
    (model / "modeling_parallel.py").write_text(found["python"])
    (model / "config.json").write_text(found["json"])
    return model


def both(folder: Path) -> tuple[Any, Any]:
    """Return the policy's model, and the rollout's with its weights."""
    policy = load_model(folder, init="random", seed=3, trust_remote_code=True)
    rollout = build_model(folder, dtype="float32", device="cpu", weights=False, trust_remote_code=True)
    theirs = dict(rollout.named_parameters())
    assert list(theirs) == list(version_tensors(policy))
    with torch.no_grad():
        for name, tensor in version_tensors(policy).items():
            # Wide weights: positions and attention then decide the logits.
            theirs[name].copy_(tensor.mul_(5) if tensor.ndim > 1 else tensor)
    return policy, rollout


def generate(model: Any, prompts: list[list[int]]) -> list[GroupResult]:
    engine = TransformersEngine(model, eos_token_ids=(1,))
    for number, prompt in enumerate(prompts):
        engine.add(GroupRequest(f"g{number}", prompt, 3, Sampling(max_tokens=4 + 3 * number, seed=number)))
    results: dict[str, GroupResult] = {}
    while engine.num_running or engine.num_waiting:
        for ended in engine.step():
            assert not isinstance(ended, GroupFailed), ended.reason
            results[ended.lease] = ended
    return [results[lease] for lease in sorted(results)]


def test_rollout_and_policy_agree_on_rows_of_a_user_model(folder: Path) -> None:
    policy, rollout = both(folder)
    assert longest_sequence(policy) == 256
    results = generate(rollout, [[5, 6, 7], [9] * 12, [3, 4]])
    completions = [completion for result in results for completion in result.completions]
    token_ids = np.concatenate([completion.token_ids for completion in completions])
    ends = np.cumsum([len(completion.token_ids) for completion in completions]).tolist()
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    prompted = [PromptBlock(result.prompt_ids, tuple(spans[3 * n : 3 * n + 3])) for n, result in enumerate(results)]
    assert attention_plan(policy).layout == "rows"  # its attention is not that of transformers
    batch = pack_sequences(prompted, token_ids, 1000, layout="rows")
    (microbatch,) = batch.plan
    inputs = to_tensors(batch, microbatch)
    logprobs, _ = token_logprobs(policy, inputs, chunk_tokens=16)
    found = np.empty(len(token_ids), np.float32)
    found[inputs.tokens] = logprobs.detach().numpy()
    np.testing.assert_allclose(found, np.concatenate([c.logprobs for c in completions]), rtol=0, atol=1e-5)
    with torch.no_grad():
        for item in prompted:
            for start, stop in item.spans:
                ids = torch.from_numpy(np.concatenate([item.prompt_ids, token_ids[start:stop]]).astype(np.int64))[None]
                logits = policy(ids).logits[0, len(item.prompt_ids) - 1 : -1]
                alone = logits.log_softmax(-1).gather(-1, ids[0, len(item.prompt_ids) :, None])[:, 0]
                np.testing.assert_allclose(found[start:stop], alone.numpy(), rtol=0, atol=1e-5)


def test_code_of_a_model_folder_runs_only_if_allowed(folder: Path) -> None:
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_model(folder, init="random")
    with pytest.raises(ConfigError, match="trust_remote_code"):
        build_model(folder, dtype="float32", device="cpu", weights=False)


def test_teacher_scores_tokens_of_a_user_model(folder: Path, tmp_path: Path) -> None:
    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    teacher = tmp_path / "teacher"
    LlamaConfig(vocab_size=8).save_pretrained(teacher)
    for path in (folder, teacher):
        PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>").save_pretrained(path)
    assert num_shared_token_ids(teacher, folder, trust_remote_code=True) == 64
    with pytest.raises(ConfigError, match=r"set model\.trust_remote_code = true"):
        num_shared_token_ids(teacher, folder)
