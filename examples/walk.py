"""The whole loop in one process: the ten stops of the walk, in order, with the functions that the services use.

    python examples/walk.py RECIPE.toml FOLDER [--section.key value ...]

With `rl.max_staleness = 0`, one rollout and `rollout.exclusive = true`, `starling run` makes bitwise the same weights.
"""

import sys
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import AutoTokenizer

from starling.algo.text import decode, encode_prompt
from starling.cli.model.scratch import make_model_folder
from starling.cli.recipe.schema import Recipe, load_recipe
from starling.controller.core.groups.buffer import GroupBuffer
from starling.controller.core.groups.group import GroupState
from starling.controller.core.plan import draw_seed
from starling.controller.core.records import RewardsStored
from starling.controller.data.prompts import load_prompts
from starling.policy.train.checkpoint.huggingface import save_hf
from starling.policy.train.data.groups import ScoredGroup
from starling.policy.train.model.load import load_model, version_tensors
from starling.policy.train.rl import RlTrainer
from starling.reward.score.scorers.registry import resolve_scorer
from starling.rollout.engine.base import GroupRequest, GroupResult
from starling.rollout.engine.embedded.engine import TransformersEngine
from starling.rollout.engine.embedded.model import build_model
from starling.rollout.engine.model_config import end_token_ids
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.modules import layout_of


def scored(result: GroupResult, rewards: tuple[float | None, ...]) -> ScoredGroup:
    """Put a generated group and its rewards together, as the trainer takes them."""
    token_ids, logprobs, versions = (
        np.concatenate([getattr(completion, name) for completion in result.completions])
        for name in ("token_ids", "logprobs", "versions")
    )
    lengths = tuple(len(completion.token_ids) for completion in result.completions)
    return ScoredGroup(
        result.prompt_ids, token_ids, logprobs, versions, lengths, tuple(r for r in rewards if r is not None)
    )


def walk(recipe: Recipe, folder: Path) -> None:
    """Train `recipe` by reinforcement from random weights; leave the model in `folder`/checkpoint."""
    assert recipe.model.scratch is not None, "the walk makes its model from nothing: set [model.scratch]"
    make_model_folder(recipe.model.scratch, path := folder / "model")
    tokenizer, prompts, rl = AutoTokenizer.from_pretrained(path), load_prompts(recipe.data), recipe.rl
    policy = load_model(path, init="random", seed=recipe.run.seed, dtype=recipe.model.dtype)
    trainer = RlTrainer(policy, recipe.policy, total_steps=rl.num_steps)
    engine = TransformersEngine(
        build_model(path, dtype=recipe.model.dtype, device="cpu", weights=False),
        eos_token_ids=end_token_ids(tokenizer, path),
        exclusive=recipe.rollout.exclusive,
    )
    scorers = [(s.weight, resolve_scorer(s.name, s.options)) for s in recipe.reward.scorers] if recipe.reward else []
    source, destination = layout_of(version_tensors(policy), "policy-0"), layout_of(engine.tensors(), "rollout-0")
    publisher, puller, plan = Publisher(source, transport="local"), Puller(destination), make_plan(source, destination)
    buffer = GroupBuffer(num_steps=rl.num_steps, prompts_per_step=rl.prompts_per_step, max_staleness=0, max_tries=0)
    for step in range(1, rl.num_steps + 1):
        offer = publisher.publish(step - 1, version_tensors(policy))  # 9 publish: first the initial weights
        puller.pull(offer, plan, deadline_s=10)  # 10 adopt: pull, switch, prove
        puller.switch(engine.tensors())
        assert puller.attest(engine.tensors(), offer) == offer.root
        engine.set_version(offer.version)
        groups = [buffer.admit(prompts.prompt(buffer.num_admitted)) for _ in range(buffer.num_free_slots())]  # 1 admit
        for group in groups:  # 2 dispatch
            buffer.move(group, GroupState.LEASED)
            seed = draw_seed(recipe.run.seed, group.purpose, group.ordinal, group.tries)
            sampling = msgspec.structs.replace(recipe.sampling.to_wire(), seed=seed)
            engine.add(GroupRequest(group.key, encode_prompt(tokenizer, group.prompt), rl.group_size, sampling))
        results = {}
        while len(results) < len(groups):  # 3 generate: one token of every sequence at a time
            results |= {result.lease: result for result in engine.step()}
        for group in groups:  # 4 interact: a single turn, the completion is the trajectory
            texts, p = [decode(tokenizer, c.token_ids.tolist()) for c in results[group.key].completions], group.prompt
            buffer.move(group, GroupState.GENERATED)
            rewards = [sum(w * score(t, p.reference, p.text, p.metadata) for w, score in scorers) for t in texts]
            buffer.store_rewards(group, RewardsStored(key=group.key, rewards=tuple(rewards)))  # 5 score
        frozen = [scored(results[group.key], group.rewards) for group in buffer.freeze_next(step)]
        metrics = trainer.step(frozen, step=step, temperature=recipe.sampling.temperature)  # 6 credit, 7 pack, 8 learn
        buffer.retire(step)
        print(f"step {step}: reward {metrics['reward_mean']:.3f}")
    publisher.close()
    save_hf(policy, tokenizer, folder / "checkpoint")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    walk(load_recipe([Path(sys.argv[1])], sys.argv[3:]), Path(sys.argv[2]))
