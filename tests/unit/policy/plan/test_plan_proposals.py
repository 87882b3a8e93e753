"""Proposed meshes: what fits, in which order, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from starling.common.errors import ConfigError
from starling.policy.plan.proposals import AXES, USABLE, Hardware, StepSize, proposal_of, propose, written
from starling.policy.plan.sizes import model_sizes
from starling.policy.plan.stages import sizes_of_rank
from starling.policy.plan.traffic import Update, num_copies, traffic_of, traffic_of_place
from starling.policy.settings.parallel import ParallelSettings
from starling.weightsync.layouts.presets import PRESETS

STEP = StepSize(1 << 20, 1 << 14, 1 << 14)
SIZES = {name: model_sizes(PRESETS[name]) for name in ("qwen3-0.6b", "qwen3-8b", "qwen2.5-7b", "qwen3-30b-a3b")}


@pytest.mark.campaign
@examples(40)
@given(
    name=st.sampled_from(sorted(SIZES)),
    num_gpus=st.sampled_from([1, 2, 3, 6, 8, 12, 64, 96, 1024]),
    gpus_per_host=st.sampled_from([1, 4, 8]),
    memory_gb=st.sampled_from([24.0, 80.0, 192.0]),
)
def test_proposals_fit_and_are_ordered(name: str, num_gpus: int, gpus_per_host: int, memory_gb: float) -> None:
    hardware = Hardware(gpus_per_host=gpus_per_host, memory_gb=memory_gb)
    try:
        found = propose(SIZES[name], num_gpus, STEP, hardware)
    except ConfigError:
        least = propose(SIZES[name], num_gpus, STEP, replace(hardware, memory_gb=1e6))
        assert all(one.memory.total > USABLE * memory_gb * 1e9 for one in least)
        return
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    assert len({(one.parallel, one.recomputes) for one in found}) == len(found)
    for one in found:
        assert prod(getattr(one.parallel, axis) for axis in AXES) == num_gpus
        assert one.memory.total <= USABLE * memory_gb * 1e9
        assert gpus_per_host % one.parallel.tp == 0
        assert SIZES[name].heads % one.parallel.tp == 0
        axes = {axis for axis in (*AXES, "ep") if getattr(one.parallel, axis) > 1}
        assert set(one.traffic) - {"efsdp"} == axes
        assert ("efsdp" in one.traffic) == ("ep" in axes and num_copies(one.parallel) > 1)


def test_model_that_fits_one_gpu_is_copied() -> None:
    best = propose(SIZES["qwen3-0.6b"], 8, STEP, Hardware())[0]
    assert best.parallel.tp == 1
    assert not best.recomputes


def test_larger_model_is_sharded() -> None:
    best = propose(SIZES["qwen3-8b"], 64, STEP, Hardware())[0]
    assert best.parallel.dp_shard > 1
    with pytest.raises(ConfigError, match=r"no mesh of 1 GPUs fits .* 1 rank needs least, \d+\.\d GB; give more GPUs"):
        propose(SIZES["qwen3-8b"], 1, STEP, Hardware())


def test_recomputation_trades_time_for_memory() -> None:
    one, other = (
        proposal_of(SIZES["qwen3-8b"], ParallelSettings(dp_shard=8), STEP, Hardware(), recomputes=recomputes)
        for recomputes in (False, True)
    )
    assert other.compute_s == pytest.approx(one.compute_s * 4 / 3)
    assert other.memory.activations < one.memory.activations / 4


def test_compute_is_divided_and_slow_links_are_waited_for() -> None:
    fast = proposal_of(SIZES["qwen3-8b"], ParallelSettings(dp_shard=8, tp=8), STEP, Hardware(), recomputes=False)
    slow = proposal_of(
        SIZES["qwen3-8b"], ParallelSettings(dp_shard=8, tp=8), STEP, Hardware(gpus_per_host=4), recomputes=False
    )
    alone = proposal_of(SIZES["qwen3-8b"], ParallelSettings(), STEP, Hardware(), recomputes=False)
    assert fast.compute_s == slow.compute_s == pytest.approx(alone.compute_s / 64)
    assert alone.waiting_s == 0.0 < fast.waiting_s < slow.waiting_s
    assert written(fast.parallel) == "dp_shard 8 x tp 8"


def test_traffic_of_known_sizes() -> None:
    # 2 passes: the weights twice but for the last block, in bfloat16, and gradients once in float32; 7 of 8 parts.
    sizes = SIZES["qwen3-8b"]
    sent = traffic_of(sizes, ParallelSettings(dp_shard=8), Update(2, 4096, 2))["dp_shard"]
    weights, block = 8190735360, 192946432
    ends = weights - 36 * block
    gathered = ends + (2 * 36 - 1) * block
    assert sizes.num_parameters == weights
    assert sent.num_bytes == pytest.approx(2 * 7 / 8 * (2 * gathered + 4 * weights), rel=1e-6)
    # 8 exchanges in each of 36 blocks and 4 at the ends, of 4096 x 4096 elements in bfloat16; 3 of 4 parts.
    sent = traffic_of(sizes, ParallelSettings(tp=4), Update(1, 4096, 2))["tp"]
    assert sent.num_bytes == pytest.approx((36 * 8 + 4) * 4096 * 4096 * 2 * 3 / 4, rel=1e-3)


@pytest.mark.parametrize("reshard", ["default", "always", "never"])
def test_resharding_decides_how_often_weights_are_gathered(reshard: str) -> None:
    parallel = ParallelSettings.model_validate({"dp_shard": 2, "reshard": reshard})
    sent = traffic_of(SIZES["qwen3-8b"], parallel, Update(1, 4096, 2))["dp_shard"]
    gathers = {"default": 35, "always": 36, "never": 0}[reshard]
    assert sent.num_calls == 2 * 37 + gathers


def test_tokens_are_divided_where_a_microbatch_does_not_fit() -> None:
    step = StepSize(1 << 20, 1 << 17, 1 << 17)
    best = propose(SIZES["qwen3-8b"], 64, step, Hardware())[0]
    assert best.parallel.cp > 1
    alone, divided = (
        proposal_of(SIZES["qwen3-8b"], ParallelSettings(dp_shard=64 // cp, cp=cp), step, Hardware(), recomputes=True)
        for cp in (1, 8)
    )
    assert divided.memory.activations == pytest.approx(alone.memory.activations / 8)
    assert divided.memory.states == alone.memory.states


def test_stages_wait_for_the_first_and_the_last_microbatch() -> None:
    step = StepSize(1 << 18, 1 << 14, 1 << 14)  # 16 microbatches
    found = {
        schedule: proposal_of(
            SIZES["qwen3-8b"],
            ParallelSettings.model_validate({"pp": 4, "schedule": schedule}),
            step,
            Hardware(),
            recomputes=False,
        )
        for schedule in ("gpipe", "1f1b", "interleaved", "zbv")
    }
    pass_s = found["1f1b"].compute_s / 16
    assert found["gpipe"].bubble_s == found["1f1b"].bubble_s == pytest.approx(3 * pass_s)
    assert found["interleaved"].bubble_s == pytest.approx(3 / 2 * pass_s, rel=0.1)
    assert found["zbv"].bubble_s == 0.0
    activations = {schedule: one.memory.activations for schedule, one in found.items()}
    assert activations["1f1b"] < activations["interleaved"] < activations["gpipe"]


def test_pipeline_divides_blocks_and_sends_hidden_states() -> None:
    sizes, update = SIZES["qwen3-8b"], Update(8, 4096, 2)
    assert sum(sizes_of_rank(sizes, ParallelSettings(pp=4), place).num_blocks for place in range(4)) == 36
    hidden = 4096 * 4096 * 2
    sent = [traffic_of_place(sizes, ParallelSettings(pp=4), update, place)["pp"] for place in range(4)]
    assert [one.num_bytes for one in sent] == [8 * hidden, 16 * hidden, 16 * hidden, 8 * hidden]
    # A stage is gathered once, whatever the number of microbatches.
    parallel = ParallelSettings(pp=4, dp_shard=2)
    once, more = (traffic_of(sizes, parallel, Update(number, 4096, 2))["dp_shard"] for number in (4, 8))
    assert once == more


def test_experts_are_sent_tokens() -> None:
    sizes, update = SIZES["qwen3-30b-a3b"], Update(1, 4096, 2)
    sent = traffic_of(sizes, ParallelSettings(dp_shard=8, ep=8), update)
    # 48 blocks, of 8 experts for each token, forward and backward, there and back; 7 of 8 parts.
    assert sent["ep"].num_bytes == pytest.approx(48 * 4 * 8 * 4096 * 2048 * 2 * 7 / 8, rel=1e-3)
    assert "efsdp" not in sent
    shared = traffic_of(sizes, ParallelSettings(dp_shard=8, ep=4), update)
    whole = traffic_of(sizes, ParallelSettings(dp_shard=8), update)
    assert sent["dp_shard"].num_bytes < whole["dp_shard"].num_bytes / 10
    assert 0.0 < shared["efsdp"].num_bytes < whole["dp_shard"].num_bytes / 4
