"""Translation of replicas: how many there are, how each is divided over GPUs, and the engine of rollouts."""

from __future__ import annotations

from typing import Final

from starling.cli.migrate.draft import Draft
from starling.cli.migrate.source import Source
from starling.common.settings import shown

_SIZES: Final = {
    "tp_size": "tp",
    "cp_size": "cp",
    "ep_size": "ep",
    "pp_size": "pp",
    "dp_replicate_size": "dp_replicate",
}
_SCHEDULES: Final = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved"}
_HOST_GPUS: Final = 8
"""GPUs of the usual host."""


def add_policies(source: Source, draft: Draft, *, generates: bool) -> None:
    """Set the number of policies and the parallelism of each. `generates`: whether there are rollouts, too."""
    parallel, ours = "policy.parallelism", "policy.parallel"
    num = source[f"{parallel}.n_init_replicas"]
    draft.set("launch.num_policies", num)
    shards = source[f"{parallel}.dp_shard_size"]
    note = f"it was {shards}: all GPUs that are left; set it" if shards < 1 else ""
    draft.set(f"{ours}.dp_shard", max(shards, 1), note)
    ranks = max(shards, 1)
    for theirs, name in _SIZES.items():
        size = source[f"{parallel}.{theirs}"]
        ranks *= size if theirs != "ep_size" else 1
        if size != 1 or theirs == "tp_size":
            draft.set(f"{ours}.{name}", size)
    if not source.has(f"{parallel}.tp_size"):
        draft.note(f"{ours}.tp", "the default of Cosmos-RL, which the file does not change; 1 is the default here")
    has_stages = source[f"{parallel}.pp_size"] > 1
    schedule = source[f"{parallel}.pp_schedule"]
    if has_stages:
        draft.set(f"{ours}.schedule", _SCHEDULES.get(schedule, "1f1b"))
    reshard = source["train.fsdp_reshard_after_forward"]
    if reshard != "default":
        keeps = has_stages and reshard == "always"
        text = "it was always, which stages of a pipeline do not allow"
        draft.set(f"{ours}.reshard", "default" if keeps else reshard, text if keeps else "")
    colocated = generates and source["mode"] in ("colocated", "colocated_separated")
    if colocated:
        draft.set("launch.colocate", True)
    elif shards >= 1:
        draft.set("launch.gpus_per_policy", ranks)


def note_hosts(draft: Draft) -> None:
    """Say so where the replicas have more GPUs than the usual host."""
    launch = draft.tree["launch"]
    names = (("num_policies", "gpus_per_policy"), ("num_rollouts", "gpus_per_rollout"))
    counts = [launch.get(num, 0) * launch.get(gpus, 0) for num, gpus in names]
    if sum(counts) > _HOST_GPUS:
        hosts = "on several hosts see docs/how-to/several-hosts.md and several-machines.md"
        draft.note("launch", f"{sum(counts)} GPUs in all, {counts[0]} of them of policies: {hosts}")


def add_rollouts(source: Source, draft: Draft) -> None:
    """Set the rollouts, their engine and their sampling."""
    parallel = "rollout.parallelism"
    num, tp, pp = (source[f"{parallel}.{name}"] for name in ("n_init_replicas", "tp_size", "pp_size"))
    draft.set("launch.num_rollouts", num)
    if draft.get("launch.colocate") is None:
        draft.set("launch.gpus_per_rollout", tp * pp)
    engine = source["rollout.backend"]
    note = "" if engine in ("vllm", "vllm_async") else f"it was {shown(engine)}, which is not available"
    draft.set("rollout.engine", "vllm", note)
    draft.set("rollout.max_model_len", source["policy.model_max_length"])
    draft.set("rollout.vllm.tensor_parallel_size", tp)
    if not source.has(f"{parallel}.tp_size"):
        draft.note(
            "rollout.vllm.tensor_parallel_size",
            "the default of Cosmos-RL, which the file does not change; here it is 1",
        )
    if pp > 1:
        draft.set("rollout.vllm.pipeline_parallel_size", pp)
    draft.set("rollout.vllm.gpu_memory_utilization", source["rollout.gpu_memory_utilization"])
    draft.set("rollout.vllm.enforce_eager", source["rollout.enforce_eager"])
    if source.has("rollout.enable_chunked_prefill"):
        arguments = {"enable_chunked_prefill": source["rollout.enable_chunked_prefill"]}
        draft.set("rollout.vllm.engine_args", arguments)
    _add_rows(source, draft)
    _add_quantisation(source, draft)
    _add_sampling(source, draft)
    _add_turns(source, draft)


def _add_rows(source: Source, draft: Draft) -> None:
    size = draft.get("rl.group_size")
    if source.has("rollout.async_config.max_concurrent_requests"):
        draft.set("rollout.num_slots", max(source["rollout.async_config.max_concurrent_requests"] // size, 1))
    if size > 128:
        draft.set("rollout.max_rows", size)


def _add_quantisation(source: Source, draft: Draft) -> None:
    if source["rollout.quantization"] == "none":
        return
    if draft.get("model.lora") is not None:
        draft.note("model.lora", "rollout.quantization: adapters are published without base weights, unquantised")
        return
    wanted = source["rollout.quantization"]
    draft.set("weights.quantise", "mxfp4" if wanted == "mxfp4" else "fp8_row")


def _add_sampling(source: Source, draft: Draft) -> None:
    sampling = "rollout.sampling_config"
    draft.set("sampling.max_tokens", source["rollout.max_response_length"])
    temperature, trained = source[f"{sampling}.temperature"], source["train.train_policy.temperature"]
    note = f"training divided the logits by {trained}; here it uses the temperature of sampling"
    draft.set("sampling.temperature", temperature, note if trained != temperature else "")
    draft.set("sampling.top_p", source[f"{sampling}.top_p"])
    draft.set("sampling.top_k", max(source[f"{sampling}.top_k"], 0))


def _add_turns(source: Source, draft: Draft) -> None:
    turns = "rollout.multi_turn_config"
    if not source[f"{turns}.enable"]:
        return
    if not source[f"{turns}.enable_tools"]:
        text = "conversations of several turns that a data packer of yours continues: see docs/how-to/environments.md"
        draft.note("rollout", text)
        return
    draft.set("rollout.environment.kind", "tools", "name your functions in options: see docs/how-to/environments.md")
    draft.set("rollout.environment.max_turns", source[f"{turns}.max_assistant_turns"])
