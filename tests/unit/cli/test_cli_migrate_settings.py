"""What `starling migrate` makes of every setting of Cosmos-RL, one by one."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from starling.cli.migrate.command import load_problem
from starling.cli.migrate.migration import Migration, migrate
from starling.cli.migrate.page import PATH, page
from starling.cli.migrate.settings import Form, Outcome, table
from starling.cli.recipe.schema import Recipe
from starling.common.errors import ConfigError
from starling.common.settings import Tree, iter_settings

ROOT = Path(__file__).parents[3]
PUBLISHED = Path(__file__).with_name("cosmos_rl") / "settings.txt"
BASE = """\
[policy.parallelism]
tp_size = 1
[rollout.parallelism]
tp_size = 1
[train.train_policy]
type = "grpo"
dataset.name = "rows.jsonl"
reward_function = "gsm8k"
"""
SFT = 'train.train_policy.type = "sft"'
DPO = 'train.train_policy.trainer_type = "dpo"'
LORA = "policy.lora.r = 8"
CKPT = "train.ckpt.enable_checkpoint = true"
STEPS = "train.max_num_steps = 200"
TEACHER = "distillation.enable = true"
VALIDATION = "validation.enable = true"
REMOTE = """\
train.train_policy.use_remote_reward = true
train.train_policy.remote_reward.reward_fns = [{ name = "dance_grpo" }]"""
OVERLONG = "train.train_policy.overlong_reward.enable_overlong_penalty = true"
S3 = f'{CKPT}\ntrain.ckpt.upload_s3 = "all"\ntrain.ckpt.s3_bucket = "b"'
TOOLS = "rollout.multi_turn_config.enable = true\nrollout.multi_turn_config.enable_tools = true"
FUNCTION = "[{{ name = 'dance_grpo', {} }}]"
TRAINING: tuple[tuple[str, str, str, Any, str], ...] = (
    ("mode", '"colocated"', "launch.colocate", True, ""),
    ("train.optm_name", '"Adam"', "policy.optimizer.kind", "adamw", ""),
    ("train.optm_lr", "{ global = 1e-5, 'model.visual' = 1e-6 }", "policy.optimizer.learning_rate", 1e-5, ""),
    ("train.optm_lr", "{ global = 1e-5, visual = 1e-6 }", "policy.optimizer.rates", {"visual": 0.1}, ""),
    ("train.optm_lr", "{ global = 1e-5, visual = 0.0 }", "policy.frozen", ["visual"], ""),
    ("train.optm_lr", "[3e-6, 1e-6]", "policy.optimizer.learning_rate", 3e-6, ""),
    ("train.optm_lr", "1e-4", "policy.sft.optimizer.learning_rate", 1e-4, SFT),
    ("train.optm_lr", "1e-4", "policy.dpo.optimizer.learning_rate", 1e-4, DPO),
    ("train.optm_weight_decay", "0.1", "policy.optimizer.weight_decay", 0.1, ""),
    ("train.optm_betas", "[0.8, 0.9]", "policy.optimizer.betas", [0.8, 0.9], ""),
    ("train.optm_warmup_steps", "7", "policy.optimizer.warmup_steps", 7, ""),
    ("train.optm_warmup_steps", "0.1", "policy.optimizer.warmup_steps", 20, STEPS),
    ("train.optm_decay_ratio", "0.25", "policy.optimizer.decay_steps", 50, f'{STEPS}\ntrain.optm_decay_type = "sqrt"'),
    ("train.optm_decay_type", '"sqrt"', "policy.optimizer.decay_shape", "sqrt", "train.optm_decay_ratio = 0.5"),
    ("train.optm_decay_type", '"cosine"', "policy.optimizer.schedule", "cosine", "train.optm_decay_ratio = 1.0"),
    ("train.optm_decay_type", '"cosine"', "policy.optimizer.schedule", "wsd", "train.optm_decay_ratio = 0.5"),
    ("train.optm_decay_type", '"none"', "policy.optimizer.schedule", "constant", "train.optm_decay_ratio = 0.5"),
    (
        "train.optm_min_lr_factor",
        "0.2",
        "policy.optimizer.final_share",
        0.2,
        'train.optm_decay_ratio = 1.0\ntrain.optm_decay_type = "linear"',
    ),
    ("train.optm_grad_norm_clip", "0.5", "policy.optimizer.max_grad_norm", 0.5, ""),
    ("train.ema_enable", "true", "policy.optimizer.ema_decay", 0.9999, ""),
    ("train.ema_decay", "0.99", "policy.optimizer.ema_decay", 0.99, "train.ema_enable = true"),
    ("train.param_dtype", '"float32"', "model.dtype", "float32", ""),
    ("train.param_dtype", '"float16"', "model.dtype", "bfloat16", ""),
    ("train.fsdp_offload", "true", "policy.memory.offload_optimizer", True, ""),
    ("train.fsdp_reshard_after_forward", '"never"', "policy.parallel.reshard", "never", ""),
    (
        "train.fsdp_reshard_after_forward",
        '"always"',
        "policy.parallel.reshard",
        "default",
        "policy.parallelism.pp_size = 2",
    ),
    ("train.train_batch_per_replica", "65", "rl.prompts_per_step", 5, ""),
    ("train.train_batch_per_replica", "64", "rl.prompts_per_step", 8, "policy.parallelism.n_init_replicas = 2"),
    ("train.train_batch_per_replica", "4", "sft.examples_per_step", 8, f"{SFT}\npolicy.parallelism.dp_shard_size = 2"),
    ("train.train_batch_per_replica", "4", "preference.examples_per_step", 4, DPO),
    ("train.epoch", "3", "rl.num_steps", 100, ""),
    ("train.output_dir", '"out"', "run.folder", "out", ""),
    ("train.epsilon", "1e-7", "policy.optimizer.eps", 1e-7, ""),
    ("train.compile", "true", "policy.memory.compile", True, ""),
    ("train.sync_weight_interval", "3", "rl.sync_every", 3, ""),
    ("train.sync_weight_interval", "8", "rl.max_staleness", 7, ""),
    ("train.activation_offload", "true", "policy.memory.offload_activations", True, ""),
    ("train.seed", "5", "run.seed", 5, ""),
    ("train.max_num_steps", "12", "rl.num_steps", 12, ""),
    ("train.max_num_steps", "12", "sft.num_steps", 12, SFT),
    ("train.train_policy.type", '"sft"', "run.kind", "sft", ""),
    ("train.train_policy.trainer_type", '"dpo"', "run.kind", "dpo", ""),
    ("train.train_policy.variant", '"gspo"', "policy.algorithm.name", "gspo", ""),
    ("train.train_policy.variant", '"dapo"', "rl.dynamic_sampling", True, ""),
    ("train.train_policy.dataloader_shuffle", "false", "data.shuffle", False, ""),
    ("train.train_policy.dataloader_seed", "9", "data.seed", 9, ""),
    ("train.train_policy.conversation_column_name", '"talk"', "data.prompt_column", "talk", SFT),
    ("train.train_policy.system_prompt", '"Be brief."', "data.system", "Be brief.", SFT),
    (
        "train.train_policy.load_balanced_max_tokens_for_batch",
        "4096",
        "policy.tokens_per_microbatch",
        4096,
        SFT,
    ),
    ("train.train_policy.prompt_column_name", '"q"', "data.prompt_column", "q", ""),
    ("train.train_policy.response_column_name", '"a"', "data.reference_column", "a", ""),
    ("train.train_policy.reward_function", '"single_choice"', "reward.scorers.0.name", "choice", ""),
    ("train.train_policy.reward_function", '["boxed_math"]', "reward.scorers.0.name", "math", ""),
    ("train.train_policy.reward_function", "{ format = 0.5 }", "reward.scorers.0.weight", 0.5, ""),
    ("train.train_policy.reward_function", '"mine"', "reward.scorers.0.name", "my_rewards.py:mine", ""),
    ("train.train_policy.reward_function", '["gsm8k", "overlong"]', "reward.scorers.1.name", "overlong", ""),
    ("train.train_policy.reward_function", '["overlong"]', "reward.scorers.0.name", "overlong", OVERLONG),
    (
        "train.train_policy.use_remote_reward",
        "true",
        "reward.scorers.0.name",
        "dance_grpo",
        "train.train_policy.reward_function = []",
    ),
    ("train.train_policy.bypass_reward", "true", "policy.distill.reward_coefficient", 0.0, TEACHER),
    ("train.train_policy.temperature", "1.0", "sampling.temperature", 0.7, "rollout.sampling_config.temperature = 0.7"),
    ("train.train_policy.epsilon_low", "0.1", "policy.algorithm.clip_low", 0.1, ""),
    ("train.train_policy.epsilon_high", "0.3", "policy.algorithm.clip_high", 0.3, ""),
    ("train.train_policy.epsilon_low", "-1.0", "policy.algorithm.clip_low", 1.0, ""),
    ("train.train_policy.epsilon_high", "-1.0", "policy.algorithm.clip_high", 1000.0, ""),
    ("train.train_policy.positive_nll_coef", "0.1", "policy.algorithm.positive_nll_coefficient", 0.1, ""),
    ("train.train_policy.lower_bound_ratio", "4.0", "policy.algorithm.dual_clip", 4.0, ""),
    (
        "train.train_policy.loss_type",
        '"seq-mean-token-sum"',
        "policy.algorithm.aggregate",
        "sequence_mean_token_sum",
        "",
    ),
    (
        "train.train_policy.unbiased_loss_max_tokens",
        "512",
        "policy.algorithm.aggregate_tokens",
        512,
        'train.train_policy.loss_type = "seq-mean-token-mean"',
    ),
    ("train.train_policy.unbiased_advantage", "true", "policy.algorithm.advantage_scale", "none", ""),
    ("train.train_policy.algo", '"mine"', "policy.algorithm.name", "grpo", ""),
    ("train.train_policy.kl_beta", "0.01", "policy.algorithm.kl_coefficient", 0.01, ""),
    (
        "train.train_policy.unbiased_kl_estimate",
        "true",
        "policy.algorithm.kl_estimator",
        "unbiased",
        "train.train_policy.kl_beta = 0.1",
    ),
    (
        "train.train_policy.off_policy_masking_delta",
        "0.1",
        "policy.algorithm.corrections.0",
        {"kind": "sequence_mask", "high": 0.1},
        "",
    ),
    ("train.train_policy.aipo_rho", "2.5", "policy.algorithm.max_ratio", 2.5, ""),
    ("train.train_policy.mu_iterations", "2", "policy.algorithm.num_passes", 2, ""),
    (
        "train.train_policy.batch_size_per_optimize",
        "32",
        "policy.algorithm.num_minibatches",
        4,
        "train.train_batch_per_replica = 128",
    ),
    ("train.train_policy.max_token_len_per_mini_batch", "2048", "policy.tokens_per_microbatch", 2048, ""),
    ("train.train_policy.entropy_coeff", "0.01", "policy.algorithm.entropy_coefficient", 0.01, ""),
    ("train.train_policy.allowed_outdated_steps", "2", "rl.max_staleness", 2, ""),
    ("train.train_policy.on_policy", "true", "rl.max_staleness", 0, ""),
    (
        "train.train_policy.reference_reset_interval",
        "50",
        "policy.algorithm.reference_reset_every",
        50,
        "train.train_policy.kl_beta = 0.1",
    ),
    ("train.train_policy.use_decoupled_loss", "true", "policy.algorithm.name", "decoupled_ppo", ""),
    (
        "train.train_policy.behav_imp_weight_cap",
        "3.0",
        "policy.algorithm.corrections.0",
        {"kind": "mask", "high": 3.0},
        "train.train_policy.use_decoupled_loss = true",
    ),
    ("train.train_policy.use_rollout_logprobs_for_loss", "true", "policy.algorithm.old", "rollout", ""),
    ("train.train_policy.use_rollout_logprobs_for_loss", "false", "policy.algorithm.old", "proximal", ""),
    ("train.train_policy.dataset.name", '"org/rows"', "data.source", "hf:org/rows", ""),
    ("train.train_policy.dataset.subset", '"main"', "data.config", "main", ""),
    ("train.train_policy.dataset.split", '["train", "extra"]', "data.split", "train", ""),
    ("train.train_policy.dataset.test_size", "10", "data.held_out", 10, ""),
    ("train.train_policy.dataset.local_dir", '"/data/rows"', "data.source", "hf:/data/rows", ""),
    ("train.train_policy.remote_reward.scale", "2.0", "reward.scale", 2.0, REMOTE),
    ("train.train_policy.remote_reward.reward_clip_min", "-1.0", "reward.clip_min", -1.0, REMOTE),
    ("train.train_policy.remote_reward.reward_clip_max", "1.0", "reward.clip_max", 1.0, REMOTE),
    ("train.train_policy.remote_reward.batch_size", "4", "reward.scorers.0.batch_size", 4, REMOTE),
    (
        "train.train_policy.remote_reward.reward_fns[].name",
        "weight = 1.0",
        "reward.scorers.0.name",
        "dance_grpo",
        REMOTE,
    ),
    ("train.train_policy.remote_reward.reward_fns[].weight", "weight = 0.5", "reward.scorers.0.weight", 0.5, REMOTE),
    (
        "train.train_policy.remote_reward.reward_fns[].score_key",
        "score_key = 'vq_reward'",
        "reward.scorers.0.key",
        "vq_reward",
        REMOTE,
    ),
    (
        "train.train_policy.remote_reward.reward_fns[].clip_min",
        "clip_min = -2.0",
        "reward.scorers.0.clip_min",
        -2,
        REMOTE,
    ),
    (
        "train.train_policy.remote_reward.reward_fns[].clip_max",
        "clip_max = 2.0",
        "reward.scorers.0.clip_max",
        2,
        REMOTE,
    ),
    (
        "train.train_policy.overlong_reward.enable_overlong_penalty",
        "true",
        "reward.scorers.1.options.buffer",
        2048,
        "",
    ),
    ("train.train_policy.overlong_reward.buffer_length", "64", "reward.scorers.1.options.buffer", 64, OVERLONG),
    ("train.train_policy.overlong_reward.penalty_factor", "0.5", "reward.scorers.1.options.scale", 0.5, OVERLONG),
    ("train.ckpt.enable_checkpoint", "false", "controller.save_every", 0, ""),
    ("train.ckpt.save_freq", "30", "controller.save_every", 30, CKPT),
    ("train.ckpt.max_keep", "1", "policy.saving.max_keep", 2, CKPT),
    ("train.ckpt.max_keep", "-1", "policy.saving.max_keep", 1000, CKPT),
    ("train.ckpt.export_safetensors", "true", "policy.saving.hf_every", 20, CKPT),
    ("train.ckpt.upload_s3", '"final"', "policy.saving.folder", "s3://b/outputs", S3),
    ("train.ckpt.s3_bucket", '"c"', "policy.saving.folder", "s3://c/outputs", S3),
    ("train.ckpt.s3_prefix", '"p"', "policy.saving.folder", "s3://b/p", S3),
    ("train.fp8.enable_fp8", "true", "policy.precision.kind", "fp8_rowwise", ""),
    (
        "train.fp8.fp8_recipe",
        '"delayed_scaling"',
        "policy.precision.kind",
        "fp8_rowwise",
        "train.fp8.enable_fp8 = true",
    ),
    (
        "train.fp8.quant_recipe",
        '"tensorwise"',
        "policy.precision.kind",
        "fp8_tensorwise",
        "train.fp8.enable_fp8 = true",
    ),
    (
        "train.fp8.quant_recipe",
        '"tensorwise"',
        "policy.precision.kind",
        "fp8_rowwise",
        "train.fp8.enable_fp8 = true\npolicy.parallelism.tp_size = 2",
    ),
    ("policy.model_name_or_path", '"/models/m"', "model.path", "/models/m", ""),
    ("policy.model_safetensor_path", '"/w"', "policy.weights_from", "/w", ""),
    ("policy.model_max_length", "1024", "rollout.max_model_len", 1024, ""),
    ("policy.model_gradient_checkpointing", "true", "policy.memory.checkpointing", "full", ""),
    ("policy.trainable_map", "{ 'a.b' = false, c = true }", "policy.frozen", [r"a\.b"], ""),
    ("policy.freeze_pattern", "['^visual']", "policy.frozen", ["^visual"], ""),
    ("policy.trainable_pattern", "['lm_head', 'norm']", "policy.frozen", ["^(?!.*(?:lm_head|norm))"], ""),
    ("policy.enable_liger_kernel", "true", "policy.liger", True, ""),
    ("policy.aux_loss_coeff", "0.01", "policy.router_aux_coefficient", 0.01, ""),
    ("policy.parallelism.n_init_replicas", "2", "launch.num_policies", 2, ""),
    ("policy.parallelism.tp_size", "2", "launch.gpus_per_policy", 2, ""),
    ("policy.parallelism.tp_size", "2", "policy.parallel.tp", 2, ""),
    ("policy.parallelism.cp_size", "2", "policy.parallel.cp", 2, ""),
    ("policy.parallelism.ep_size", "2", "policy.parallel.ep", 2, "policy.parallelism.dp_shard_size = 4"),
    ("policy.parallelism.dp_shard_size", "-1", "policy.parallel.dp_shard", 1, ""),
    ("policy.parallelism.dp_shard_size", "4", "launch.gpus_per_policy", 4, ""),
    ("policy.parallelism.pp_size", "2", "policy.parallel.pp", 2, ""),
    ("policy.parallelism.dp_replicate_size", "2", "policy.parallel.dp_replicate", 2, ""),
    (
        "policy.parallelism.pp_schedule",
        '"GPipe"',
        "policy.parallel.schedule",
        "gpipe",
        "policy.parallelism.pp_size = 2",
    ),
    ("policy.lora.r", "64", "model.lora.rank", 64, ""),
    ("policy.lora.lora_path", '"/adapter"', "model.lora.adapter", "/adapter", LORA),
    ("policy.lora.lora_alpha", "16", "model.lora.alpha", 16, LORA),
    ("policy.lora.target_modules", '["q_proj"]', "model.lora.targets", ["q_proj"], LORA),
    ("policy.lora.use_rslora", "true", "model.lora.rslora", True, LORA),
    ("policy.lora.modules_to_save", '["lm_head"]', "model.lora.modules_to_save", ["lm_head"], LORA),
    ("policy.lora.alpha_pattern", "{ q_proj = 4.0 }", "model.lora.alpha_pattern", {"q_proj": 4.0}, LORA),
    ("policy.lora.r_pattern", "{ q_proj = 4 }", "model.lora.rank_pattern", {"q_proj": 4}, LORA),
    ("policy.lora.init_lora_weights", '"gaussian"', "model.lora.init", "gaussian", LORA),
    ("policy.lora.init_lora_weights", '"pissa"', "model.lora.init", "kaiming", LORA),
    ("rollout.enforce_eager", "false", "rollout.vllm.enforce_eager", False, ""),
    ("rollout.gpu_memory_utilization", "0.6", "rollout.vllm.gpu_memory_utilization", 0.6, ""),
    (
        "rollout.enable_chunked_prefill",
        "true",
        "rollout.vllm.engine_args",
        {"enable_chunked_prefill": True},
        "",
    ),
    ("rollout.max_response_length", "99", "sampling.max_tokens", 99, ""),
    ("rollout.n_generation", "4", "rl.group_size", 4, ""),
    ("rollout.n_generation", "1", "rl.group_size", 2, ""),
    ("rollout.n_generation", "256", "rollout.max_rows", 256, ""),
    ("rollout.quantization", '"fp8"', "weights.quantise", "fp8_row", ""),
    ("rollout.backend", '"trtllm"', "rollout.engine", "vllm", ""),
    ("rollout.parallelism.n_init_replicas", "3", "launch.num_rollouts", 3, ""),
    ("rollout.parallelism.tp_size", "4", "launch.gpus_per_rollout", 4, ""),
    ("rollout.parallelism.tp_size", "4", "rollout.vllm.tensor_parallel_size", 4, ""),
    ("rollout.parallelism.pp_size", "2", "rollout.vllm.pipeline_parallel_size", 2, ""),
    ("rollout.sampling_config.temperature", "0.5", "sampling.temperature", 0.5, ""),
    ("rollout.sampling_config.top_p", "0.9", "sampling.top_p", 0.9, ""),
    ("rollout.sampling_config.top_k", "20", "sampling.top_k", 20, ""),
    ("rollout.multi_turn_config.enable", "true", "rollout.environment.kind", "tools", TOOLS),
    ("rollout.multi_turn_config.enable_tools", "true", "rollout.environment.kind", "tools", TOOLS),
    ("rollout.multi_turn_config.max_assistant_turns", "3", "rollout.environment.max_turns", 3, TOOLS),
    ("rollout.async_config.max_concurrent_requests", "64", "rollout.num_slots", 4, ""),
    ("validation.enable", "true", "evaluation.at_end", True, ""),
    ("validation.val_before_train", "true", "evaluation.at_start", True, VALIDATION),
    ("validation.freq", "7", "evaluation.every", 7, VALIDATION),
    ("validation.temperature", "0.3", "evaluation.temperature", 0.3, VALIDATION),
    ("validation.n_generation", "3", "evaluation.num_completions", 3, VALIDATION),
    ("validation.reward_function", '["boxed_math"]', "reward.scorers.1.use", "evaluation", VALIDATION),
    ("validation.dataset.test_size", "50", "data.held_out", 50, VALIDATION),
    ("logging.logger", '["console", "wandb"]', "logging.loggers", ["wandb"], ""),
    ("logging.multi_modal_log_interval", "5", "logging.samples_every", 5, ""),
    ("logging.project_name", '"p"', "logging.project", "p", ""),
    ("logging.experiment_name", '"e"', "run.name", "e", ""),
    ("distillation.enable", "true", "policy.distill.loss", "reverse_kl", ""),
    ("distillation.model_name_or_path", '"/teacher"', "teacher.path", "/teacher", TEACHER),
    ("distillation.param_dtype", '"float32"', "teacher.dtype", "float32", TEACHER),
    ("distillation.max_token_len_per_mini_batch", "4096", "teacher.tokens_per_forward", 4096, TEACHER),
    ("distillation.kl_penalty_coef", "0.5", "policy.distill.coefficient", 0.5, TEACHER),
    ("distillation.kl_discount_factor", "0.9", "policy.distill.discount", 0.9, TEACHER),
    ("distillation.top_k", "8", "policy.distill.loss", "jsd", TEACHER),
    ("distillation.top_k", "8", "teacher.top_k", 8, TEACHER),
    ("distillation.jsd_beta", "0.3", "policy.distill.beta", 0.3, f"{TEACHER}\ndistillation.top_k = 8"),
    ("distillation.parallelism.n_init_replicas", "2", "launch.num_teachers", 2, TEACHER),
    ("custom.dpo_beta", "0.3", "policy.dpo.beta", 0.3, DPO),
    ("custom.dpo_loss_type", '["sigmoid", "sft"]', "policy.dpo.loss", "sigmoid", DPO),
)
"""A setting, its value, the setting of the recipe that it becomes, the value there, and what the file says besides."""
EVALUATION_BASE = 'num_gpus = 1\ndataset.annotation_path = "rows.jsonl"\nmodel.model_name = "/models/m"\n'
EVALUATION: tuple[tuple[str, str, str, Any, str], ...] = (
    ("num_gpus", "8", "launch.num_rollouts", 2, "model.tp_size = 4"),
    ("results_dir", '"out"', "run.folder", "out", ""),
    ("task.type", '"its"', "evaluation.tasks.0.name", "its", ""),
    ("dataset.annotation_path", '"a.json"', "evaluation.tasks.0.data.source", "a.jsonl", ""),
    ("dataset.system_prompt", '"s"', "evaluation.tasks.0.data.system", "s", ""),
    ("model.model_name", '"/other"', "model.path", "/other", ""),
    ("model.save_folder", '"zero shot"', "run.name", "zero-shot", ""),
    ("model.dtype", '"float16"', "model.dtype", "bfloat16", ""),
    ("model.tp_size", "1", "launch.gpus_per_rollout", 1, ""),
    ("model.max_length", "4096", "rollout.max_model_len", 4096, ""),
    ("model.enable_lora", "true", "model.lora.adapter", "/models/m", 'model.base_model_path = "/base"'),
    ("model.base_model_path", '"/base"', "model.path", "/base", "model.enable_lora = true"),
    ("evaluation.answer_type", '"letter"', "reward.scorers.0.name", "choice", ""),
    ("evaluation.answer_type", '"freeform"', "reward.scorers.0.name", "exact_match", ""),
    ("evaluation.seed", "4", "run.seed", 4, ""),
    ("vision.fps", "2", "evaluation.tasks.0.data.video_fps", 2.0, ""),
    ("generation.max_tokens", "64", "sampling.max_tokens", 64, ""),
    ("generation.temperature", "0.4", "evaluation.temperature", 0.4, ""),
    ("generation.top_p", "0.9", "sampling.top_p", 0.9, ""),
    ("generation.top_k", "5", "sampling.top_k", 5, ""),
)


def source_of(base: str, path: str, value: str, more: str) -> Tree:
    """Return a file of Cosmos-RL: `base`, over it the lines `more`, over them one setting."""
    tree = tomllib.loads(base)
    for line in more.splitlines():
        _merge(tree, tomllib.loads(line))
    if "[]." in path:
        _merge(tree, tomllib.loads(f"{path.partition('[]')[0]} = {FUNCTION.format(value)}"))
    else:
        _merge(tree, tomllib.loads(f"{path} = {value}"))
    return tree


def _merge(tree: Tree, other: Tree) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


def value_at(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree[int(name)] if isinstance(tree, list) else tree[name]
    return tree


def migrated(tree: Tree) -> tuple[Migration, Tree]:
    """Translate a file, load the recipe with the settings classes of a run, and return it."""
    migration = migrate(tree, "mine", load_problem)
    recipe = tomllib.loads(migration.recipe)
    assert load_problem(recipe) == "", migration.recipe
    return migration, recipe


@pytest.mark.parametrize(("path", "value", "target", "expected", "more"), TRAINING)
def test_training_setting_becomes_a_setting(path: str, value: str, target: str, expected: Any, more: str) -> None:
    migration, recipe = migrated(source_of(BASE, path, value, more))
    assert value_at(recipe, target) == expected
    assert [entry.outcome for entry in migration.entries if entry.path == path] == [Outcome.TRANSLATED]


@pytest.mark.parametrize(("path", "value", "target", "expected", "more"), EVALUATION)
def test_evaluation_setting_becomes_a_setting(path: str, value: str, target: str, expected: Any, more: str) -> None:
    migration, recipe = migrated(source_of(EVALUATION_BASE, path, value, more))
    assert value_at(recipe, target) == expected
    assert [entry.outcome for entry in migration.entries if entry.path == path] == [Outcome.TRANSLATED]


def test_every_translated_setting_is_in_these_tables() -> None:
    for form, rows in ((Form.TRAINING, TRAINING), (Form.EVALUATION, EVALUATION)):
        translated = {one.path for one in table(form).values() if one.outcome is Outcome.TRANSLATED}
        assert translated == {row[0] for row in rows}


def published(appendix: str) -> set[str]:
    lines = PUBLISHED.read_text().splitlines()
    return {line[2:] for line in lines if line.startswith(f"{appendix} ")}


def test_every_published_setting_is_known() -> None:
    training, generators = published("A") - {"custom"}, published("B")
    assert len(training) > 300
    assert len(generators) > 300
    known = table(Form.TRAINING)
    assert {path for path in training - set(known) if not any(one.startswith(f"{path}[].") for one in known)} == set()
    assert generators - set(table(Form.GENERATORS)) == set()


def others(form: Form) -> Iterator[str]:
    return (one.path for one in table(form).values() if one.outcome is not Outcome.TRANSLATED)


@pytest.mark.parametrize("path", others(Form.TRAINING))
def test_other_training_setting_is_reported_with_a_sentence(path: str) -> None:
    _check_reported(path, Form.TRAINING, tomllib.loads(BASE))


@pytest.mark.parametrize("path", others(Form.EVALUATION))
def test_other_evaluation_setting_is_reported_with_a_sentence(path: str) -> None:
    _check_reported(path, Form.EVALUATION, tomllib.loads(EVALUATION_BASE))


@pytest.mark.parametrize("path", others(Form.GENERATORS))
def test_setting_of_generators_is_reported_with_a_sentence(path: str) -> None:
    _check_reported(path, Form.GENERATORS, {})


def _check_reported(path: str, form: Form, tree: Tree) -> None:
    """A setting with another value than the default stands in the report, with one sentence."""
    setting = table(form)[path]
    names = path.split(".")
    below: Any = tree
    for name in names[:-1]:
        is_list = name.endswith("[]")
        below = below.setdefault(name[:-2], [{}])[0] if is_list else below.setdefault(name, {})
    below[names[-1]] = _other(setting.types[0], setting.default)
    if form is Form.GENERATORS:
        tree.setdefault("job", {}).setdefault("group", "g")
    migration = migrate(tree, "mine", load_problem)
    entry = next(entry for entry in migration.entries if entry.path == path)
    assert (entry.outcome, entry.text) == (setting.outcome, setting.text)
    assert entry.text.endswith(".")
    assert any(line.startswith(f"  {path} = ") and line.endswith(entry.text) for line in migration.report())
    assert bool(migration.recipe) != bool(migration.refusal)


def _other(kind: str, default: Any) -> Any:
    """Return a value of a type that is not the default."""
    if kind == "bool":
        return not default
    values: dict[str, Any] = {"int": 3, "float": 0.3, "str": "x", "list": ["x"], "dict": {"x": 1}, "any": 3}
    return values[kind] if values[kind] != default else 4


def test_texts_name_settings_that_exist() -> None:
    """Every `section.key` that a text names is a setting of a recipe, or a section of some."""
    keys = {re.sub(r"\[\]", "", setting.key) for setting in iter_settings(Recipe)}
    sections = {key.rpartition(".")[0] for key in keys}
    starts = set(Recipe.model_fields)
    for form in Form:
        for setting in table(form).values():
            for name in re.findall(r"`([a-z_]+(?:\[\])?(?:\.[a-z_0-9]+(?:\[\])?)+)", setting.text):
                plain = name.replace("[]", "")
                if plain.partition(".")[0] in starts and plain != "metrics.jsonl":
                    assert plain in keys | sections, f"{setting.path}: {name}"


def test_page_has_the_tables() -> None:
    text = (ROOT / PATH).read_text()
    assert page(text) == text, "run python -m starling.cli.migrate.page"


def test_gpus_of_several_hosts_are_counted() -> None:
    tree = source_of(BASE, "policy.parallelism.dp_shard_size", "8", "policy.parallelism.n_init_replicas = 2")
    notes = dict(migrate(tree, "mine").notes)
    assert notes["launch"].startswith("17 GPUs in all, 16 of them of policies: on several hosts")


def test_wrong_type_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"train.optm_lr = 'fast' must be a list or a table or a number"):
        migrate({"train": {"optm_lr": "fast"}}, "mine")


HOSTILE: tuple[Any, ...] = (
    0,
    -1,
    1 << 40,
    10**400,
    1e300,
    float("nan"),
    float("inf"),
    "",
    "\n[x]",
    [],
    {},
    [{}],
    [[1]],
    {"a": "b"},
)


@pytest.mark.parametrize("form", [Form.TRAINING, Form.EVALUATION])
def test_hostile_values_are_refused_or_written_as_toml(form: Form) -> None:
    """No value makes the translation fail in another way, or write something that is no TOML."""
    for path in table(form):
        for value in HOSTILE:
            tree = tomllib.loads(BASE if form is Form.TRAINING else EVALUATION_BASE)
            *sections, name = path.split(".")
            below: Any = tree
            for section in sections:
                is_list = section.endswith("[]")
                below = below.setdefault(section[:-2], [{}])[0] if is_list else below.setdefault(section, {})
            below[name] = value
            try:
                migration = migrate(tree, "mine")
            except ConfigError:
                continue
            assert tomllib.loads(migration.recipe) or migration.refusal
