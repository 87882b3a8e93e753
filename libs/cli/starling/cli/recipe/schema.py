"""Recipe: the configuration of a whole run, from which every service reads its own sections."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import AfterValidator, Field, model_validator

from starling.algo.algorithm import compares_scores
from starling.algo.diffusion.settings import SamplerSettings
from starling.cli.launch.hosts import HostSettings
from starling.cli.launch.launchers import check_launcher
from starling.cli.launch.settings import KubernetesSettings, RaySettings, SlurmSettings
from starling.cli.model.scratch import ScratchSettings
from starling.cli.recipe.chat_template import check_chat_template
from starling.cli.recipe.diffusion import check_diffusion_recipe
from starling.cli.recipe.pools import PooledRolloutSettings, variants
from starling.common.counts import counted
from starling.common.errors import ConfigError, WeightsError
from starling.common.pipeline_folder import check_pipeline_folder
from starling.common.ranges import MAX_COUNT, MAX_PROCESSES
from starling.common.secret_settings import without_passwords, without_secrets
from starling.common.service import check_model_folder
from starling.common.settings import ModelSettings, Seconds, SettingsSection, WeightsSettings, load, shown
from starling.controller.core.training.train_groups import step_problem
from starling.controller.settings import ControllerProcess, TrainedScorerSettings
from starling.policy.settings.policy import PolicySettings, check_adapters, check_elastic, check_transport
from starling.reward.settings import RewardSettings
from starling.rollout.engine.registry import check_name as check_engine
from starling.rollout.settings import RolloutSettings, TeacherSettings
from starling.weightsync.transports.endpoints import choose_transport

IMPORTS_S = 60.0
"""Time for the imports of an engine's or a policy's process, before it starts."""
MODEL_FOLDER = "model"
"""Folder of a [model.scratch] model, in the folder of an attempt."""
MAX_PORT = 65535


class RecipeModel(ModelSettings):
    """The model: a folder, or a small one with random weights."""

    scratch: ScratchSettings | None = None
    """Make a small model and its tokenizer in the run's folder, instead of reading `path`."""


class LaunchSettings(SettingsSection):
    """Replicas that `starling run` starts, and the launcher that places them."""

    launcher: Annotated[str, AfterValidator(check_launcher)] = "local"
    """What places the replicas: `local`, as processes of this machine; `ssh`, on `hosts` (`docs/how-to/scale.md`);
    `slurm`, `kubernetes` or `ray`, by that engine, whose section says how (`docs/how-to/deploy/`)."""
    hosts: tuple[HostSettings, ...] = ()
    """Machines of the launcher `ssh`."""
    ssh_options: tuple[str, ...] = ()
    """Options of ssh, such as `["-p", "2222"]`; better are those in `~/.ssh/config`."""
    num_policies: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Policy replicas, which make each step together; see `policy.parallel.elastic`."""
    gpus_per_policy: int = Field(default=0, ge=0, le=MAX_PROCESSES)
    """GPUs of each policy, by CUDA_VISIBLE_DEVICES and in the order of the policies, before those of
    `gpus_per_rollout`. 0: each policy sees all GPUs."""
    num_rollouts: int = Field(default=1, ge=0, le=MAX_PROCESSES)
    """Rollout replicas; with `[[rollout.pools]]` the sum of their counts. 0 where other machines bring them: then set
    `controller.num_rollouts`."""
    gpus_per_rollout: int = Field(default=0, ge=0, le=MAX_PROCESSES)
    """GPUs of each rollout, by CUDA_VISIBLE_DEVICES and in the order of the rollouts. 0: each rollout sees all GPUs."""
    num_rewards: int = Field(default=1, ge=0, le=MAX_PROCESSES)
    """Reward replicas; none where the recipe has no scorers. 0 where other machines bring them: then set
    `controller.num_rewards`."""
    num_teachers: int = Field(default=1, ge=0, le=MAX_PROCESSES)
    """Teachers, where the recipe has a [teacher]."""
    policy_nodes: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Hosts that the ranks of a policy are on. `slurm` and `ray` place all of them. Otherwise this machine is the
    first; start `starling policy` on each other one, as the run says at its start (`docs/how-to/several-hosts.md`)."""
    policy_rdzv: str = ""
    """`host:port` at which the other hosts of the policy join it on this machine; needed with `policy_nodes`, unless a
    launcher places them."""
    rollout_nodes: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Hosts that the workers of a rollout's vLLM are on. `slurm`, `kubernetes` and `ray` place all of them. Otherwise
    as `policy_nodes`; start `starling rollout` on each other one (`docs/how-to/vllm.md`)."""
    rollout_rdzv: str = ""
    """`host:port` at which the other hosts of the rollout join it on this machine; needed with `rollout_nodes`, unless
    a launcher places them."""
    colocate: bool = False
    """Policy and rollouts share their devices in turn: the inactive ones keep their tensors in the memory of the host.
    With `rl.max_staleness` above 0, rollouts hand back unfinished groups whenever a step is full."""
    fan_out: bool = False
    """In a run that trains nothing: one process reads the weights in `model.path`, and all rollouts pull them from it
    and from each other, also those that join later. Otherwise each rollout reads the folder itself."""
    num_threads: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Compute threads of each process (OMP_NUM_THREADS). Processes that spin on shared cores are very slow."""
    screen: Literal["auto", "live", "plain"] = "auto"
    """`live`: one screen that is redrawn. `plain`: lines. `auto`: live on a terminal."""
    dashboard: bool = False
    """Serve the run's web page on this machine as long as the run lasts (`docs/how-to/dashboard.md`). Its address,
    which has the token, is printed, and is in `dashboard.url` of the run's folder."""
    dashboard_port: int = Field(default=0, ge=0, le=65535)
    """Port of the page; 0 for a free one."""
    stop_s: Seconds = 300.0
    """How long a graceful stop may take (the current step, the checkpoint) before everything is killed."""
    max_restarts: int = Field(default=3, ge=0, le=MAX_COUNT)
    """Restarts of each process that dies within `restart_window_s`, before the run fails."""
    restart_window_s: Seconds = 600.0
    """Window in which restarts are counted."""
    slurm: SlurmSettings = SlurmSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    ray: RaySettings = RaySettings()

    def places_nodes_of(self, role: str) -> bool:
        """Return whether the launcher places all nodes of each replica of `role`."""
        engines = {"slurm": self.slurm.roles, "kubernetes": self.kubernetes.roles, "ray": self.ray.roles}
        roles = engines.get(self.launcher, ())
        return role in roles

    @property
    def single_roles(self) -> tuple[Literal["policy", "rollout"], ...]:
        """Roles of which one replica can be placed: its nodes, which others start, meet at one address."""
        nodes: dict[Literal["policy", "rollout"], int] = {"policy": self.policy_nodes, "rollout": self.rollout_nodes}
        return tuple(role for role, num in nodes.items() if num > 1 and not self.places_nodes_of(role))


class Recipe(ControllerProcess):
    """All settings of a run."""

    launch: LaunchSettings = LaunchSettings()
    model: RecipeModel = RecipeModel()
    diffusion: SamplerSettings | None = None
    """Samples of a diffusion model; without it the model is a language model."""
    weights: WeightsSettings = WeightsSettings()
    policy: PolicySettings = PolicySettings()
    rollout: PooledRolloutSettings = PooledRolloutSettings()
    reward: RewardSettings | None = None
    teacher: TeacherSettings | None = None

    @model_validator(mode="after")
    def _check_recipe(self) -> Self:
        self._check_model()
        self._check_pools()
        check_diffusion_recipe(self)
        check_adapters(self.model, self.policy, self.weights)
        self._check_source()
        self._check_transports()
        if self.generates:
            self._check_replicas()
        if self.kind.only_scores and self.reward is None:
            raise ValueError("this run evaluates completions and nothing scores them; add [[reward.scorers]]")
        if self.generates and self.kind.is_scored and self.reward is None and self.teacher is None:
            raise ValueError(
                "this run generates completions and nothing scores them; add [[reward.scorers]], or a [teacher] to "
                "learn from"
            )
        launch = self.launch
        self._check_nodes("policy", launch.policy_nodes, launch.policy_rdzv, launch.num_policies, "num_policies")
        self._check_nodes("rollout", launch.rollout_nodes, launch.rollout_rdzv, self.num_rollouts, "num_rollouts")
        self._check_ranks()
        self._check_gpus()
        if self.launch.colocate:
            self._check_colocated()
        if self.launch.fan_out:
            self._check_fan_out()
        if self.teacher is not None and not self.kind.reads_trajectories:
            self._check_teacher(self.teacher)
        if self.generates:
            self._check_rows()
        if self.sampling.routing == "replayed":
            self._check_replay()
        if self.kind.has_rl_steps and self.kind.trains and compares_scores(self.policy.algorithm.name):
            self._check_scores()
        return self

    def _check_scores(self) -> None:
        """An algorithm that normalises the scores of each scorer has some to compare, and no bounds of their sum."""
        name, reward = self.policy.algorithm.name, self.reward
        if self.plan().num_steps == 0:
            return
        trained = () if reward is None else reward.trained_scorers()
        pairs = itertools.combinations(trained, 2)
        if not any(not one.tasks or not other.tasks or {*one.tasks} & {*other.tasks} for one, other in pairs):
            which = f"those of this recipe ({', '.join(scorer.title for scorer in trained) or 'none'}) do not"
            raise ValueError(
                f"policy.algorithm.name = {name!r} normalises each scorer by itself, so two of [[reward.scorers]] must "
                f"score the same prompts with a weight other than 0, and {which}; add one, or choose 'grpo'"
            )
        if reward is not None and (reward.clip_min is not None or reward.clip_max is not None):
            raise ValueError(
                f"policy.algorithm.name = {name!r} never adds up the scores of a completion, so reward.clip_min and "
                "reward.clip_max would bound nothing; set clip_min and clip_max of the scorers"
            )
        scorers = tuple(scorer.to_core() for scorer in self.scores_to_train)
        num, size, has_teacher = self.rl.prompts_per_step, self.rl.group_size, self.teacher is not None
        if problem := step_problem(num, size, self.sampling.to_wire(), has_teacher=has_teacher, scorers=scorers):
            raise ValueError(problem)

    @property
    def scores_to_train(self) -> tuple[TrainedScorerSettings, ...]:
        """Scorers whose scores the policy gets one by one; none if the algorithm takes only rewards."""
        if self.reward is None or not self.kind.trains or compares_scores(self.policy.algorithm.name) is False:
            return ()
        return tuple(
            TrainedScorerSettings(
                label=one.title, weight=one.weight, clip_min=one.clip_min, clip_max=one.clip_max, tasks=one.tasks
            )
            for one in self.reward.trained_scorers()
        )

    def _check_replay(self) -> None:
        """Rollouts can record the experts of their tokens, and the policy can be made to choose them."""
        if self.policy.memory.compile and self.kind.trains:
            raise ValueError(
                "sampling.routing = 'replayed' replaces the choice of the routers inside each block, which "
                "policy.memory.compile = true replaces by compiled code: set one of them to its default"
            )
        for _, rollout in self.rollout_variants if self.generates else ():
            if rollout.engine == "vllm":
                self._check_recorded_routing(rollout)

    def _check_recorded_routing(self, rollout: RolloutSettings) -> None:
        """An engine that records the experts of its tokens computes them where it can."""
        if not rollout.vllm.enforce_eager:
            raise ValueError(
                "sampling.routing = 'replayed' needs the experts of each token, and those of tokens that CUDA graphs "
                "compute are not recorded; set rollout.vllm.enforce_eager = true"
            )
        if rollout.vllm.speculative:
            raise ValueError(
                "sampling.routing = 'replayed' needs the experts of each token, and those of drafted tokens are not "
                "recorded; remove rollout.vllm.speculative"
            )

    def _check_model(self) -> None:
        """There is one model, and its weights where the run needs some."""
        if not self.model.path and self.model.scratch is None:
            raise ValueError("model.path is missing; give a model folder, or [model.scratch] to make a small one")
        if self.model.path and self.model.scratch is not None:
            raise ValueError(f"model.path = {self.model.path!r} and [model.scratch] exclude each other; remove one")
        if self.model.scratch is not None and self.model.lora is not None:
            raise ValueError("[model.scratch] has no weights that [model.lora] could adapt; give the path of a model")
        if self.model.scratch is not None and not self.kind.trains:
            raise ValueError(
                f"[model.scratch] has no weights, and run.kind = {self.run.kind!r} has no policy to initialise them; "
                "give the path of a model"
            )
        pipeline = "" if self.model.scratch is None else self.model.scratch.pipeline
        if pipeline and self.diffusion is None:
            raise ValueError(
                f"model.scratch.pipeline = {pipeline!r} makes a diffusion model, and the recipe has no [diffusion]; "
                "add that section, or remove model.scratch.pipeline"
            )
        if self.model.scratch is not None and self.diffusion is not None and not pipeline:
            raise ValueError(
                "[diffusion] needs a pipeline of diffusers, and [model.scratch] makes a language model; set "
                "model.scratch.pipeline to 'wan' or 'cosmos'"
            )

    def _check_replicas(self) -> None:
        """Rollouts of a run that generates have slots."""
        for key, rollout in self.rollout_variants:
            if rollout.num_slots == 0:
                raise ValueError(
                    f"{key}.num_slots = 0 is for replicas that only follow a run (`starling serve --from`), and those "
                    "of this run would get no work; set at least 1"
                )

    def _check_transports(self) -> None:
        """Weights that leave the machine are encrypted where they must be, and other machines can read them."""
        check_transport(self.policy, self.network)
        check_elastic(self.launched_policy, self.network)
        try:
            choose_transport(self.rollout.transport, self.network.host, encrypt=self.network.encrypt_weights)
        except WeightsError as error:
            raise ValueError(f"rollout.transport with network.encrypt_weights = true: {error}") from error

    def _check_source(self) -> None:
        """Weights elsewhere than in the model's folder need a policy, which alone reads them."""
        source = self.policy.weights_from
        if source and self.model.scratch is not None:
            raise ValueError(
                f"policy.weights_from = {shown(source)} with [model.scratch] would not be read; remove one"
            )
        if source and not (self.kind.trains or self.launch.fan_out):
            raise ValueError(
                f"policy.weights_from = {shown(source)} is read by a policy, and this run has none; set "
                "launch.fan_out = true"
            )

    def _check_nodes(self, role: str, num: int, rdzv: str, num_replicas: int, name: str) -> None:
        """The nodes of a replica know where they meet. `name`: of the setting with the number of replicas."""
        if num == 1 and rdzv:
            raise ValueError(
                f"launch.{role}_rdzv = {rdzv!r} is not used with launch.{role}_nodes = 1; set {role}_nodes to the "
                f"number of hosts, or remove {role}_rdzv"
            )
        if num > 1 and self.launch.places_nodes_of(role):
            if rdzv:
                raise ValueError(
                    f"launch.{role}_rdzv = {rdzv!r}, but the launcher {self.launch.launcher} chooses where the nodes "
                    "of each replica meet; remove it"
                )
            return
        host, _, port = rdzv.rpartition(":")
        if num > 1 and not (host and port.isdecimal() and len(port) <= 5 and 0 < int(port) <= MAX_PORT):
            given = f"{rdzv!r} is no address" if rdzv else "is missing"
            raise ValueError(
                f"launch.{role}_nodes = {num}, and launch.{role}_rdzv {given}; give host:port of this machine, where "
                f"the other nodes join, with a port from 1 to {MAX_PORT}"
            )
        if num > 1 and role == "rollout" and self.controller.autoscale.max > 1:
            raise ValueError(
                f"controller.autoscale.max = {self.controller.autoscale.max}, but launch.rollout_nodes = {num} is for "
                "one rollout; remove [controller.autoscale], or use a launcher that places all nodes of each rollout"
            )
        if num > 1 and num_replicas > 1:
            raise ValueError(
                f"launch.{role}_nodes = {num} is for one {role}, and launch.{name} = {num_replicas}; set one of them "
                "to 1, and start further replicas by hand, each with an address of its own"
            )

    def _check_ranks(self) -> None:
        """The nodes of the policy have equal numbers of ranks."""
        num, num_ranks = self.launch.policy_nodes, self.policy.parallel.num_ranks
        if num_ranks % num:
            raise ValueError(
                f"launch.policy_nodes = {num} does not divide the {counted(num_ranks, 'rank')} of policy.parallel; "
                f"set sizes whose product is a multiple of {num}, or start node 0 by hand, with --ranks-per-node"
            )

    def _check_gpus(self) -> None:
        """A policy has a GPU for each of its ranks on this machine, and no others, which nothing would use."""
        num_gpus, parallel = self.launch.gpus_per_policy, self.policy.parallel
        num_ranks = parallel.num_ranks // self.launch.policy_nodes
        if num_gpus and self.kind.trains and num_gpus != num_ranks:
            raise ValueError(
                f"launch.gpus_per_policy = {num_gpus}, and a policy has {counted(num_ranks, 'rank')} on this machine, "
                f"with one GPU each; set it to {num_ranks}, or sizes of policy.parallel, such as dp_shard, whose "
                f"product is {num_gpus * self.launch.policy_nodes}"
            )

    def _check_fan_out(self) -> None:
        """Weights that one process reads are those of a whole model, in a run that has no other policy."""
        if self.launch.num_policies > 1:
            raise ValueError(
                f"launch.num_policies = {self.launch.num_policies}, but with launch.fan_out = true one process reads "
                "the weights; remove it"
            )
        if self.kind.trains:
            raise ValueError(
                f"launch.fan_out = true, but run.kind = {self.run.kind!r} has a policy that publishes its weights; "
                "remove it"
            )
        if self.model.lora is not None:
            raise ValueError(
                "launch.fan_out = true is not compatible with [model.lora]: every replica reads the base weights from "
                "model.path; remove one of the two"
            )

    def _check_colocated(self) -> None:
        """Policy and rollouts share devices; the policy publishes while it has them, not while the rollouts do."""
        if not self.kind.publishes(self.plan()):
            raise ValueError(
                f"launch.colocate = true, but run.kind = {self.run.kind!r} has no policy and rollouts to share "
                "devices; remove it"
            )
        for name, is_set in (("sync_every", self.rl.sync_every == 0), ("sync_every_s", self.rl.sync_every_s > 0)):
            if is_set:
                raise ValueError(
                    f"rl.{name} = {getattr(self.rl, name):g} with launch.colocate = true would take the devices from "
                    f"the rollouts amid their groups in order to publish; remove rl.{name}"
                )
        for _, rollout in self.rollout_variants:
            if rollout.engine == "vllm":
                self._check_sleep(rollout)

    def _check_sleep(self, rollout: RolloutSettings) -> None:
        """An engine that shares its devices must free their memory."""
        wanted = rollout.vllm.engine_args.get("enable_sleep_mode", True)
        if wanted is not True:
            raise ValueError(
                f"launch.colocate = true, but rollout.vllm.engine_args.enable_sleep_mode = {wanted!r}: vllm would "
                "never give its memory to the policy; remove one of the two"
            )

    def _check_teacher(self, teacher: TeacherSettings) -> None:
        """A teacher scores the groups of reinforcement learning, all of them."""
        if self.plan().num_steps == 0 or not self.kind.keeps_tokens:
            raise ValueError(
                f"[teacher] scores generated completions, and run.kind = {self.run.kind!r} has no such steps; "
                "remove it, or set run.kind = 'rl' and rl.num_steps"
            )
        if not teacher.path:
            raise ValueError("teacher.path is missing; give the folder of a model with the policy's tokenizer")
        if self.launch.num_teachers == 0:
            raise ValueError("launch.num_teachers = 0, but the recipe has a [teacher]; set at least 1, or remove it")
        if self.reward is None:
            self._check_unscored()

    @property
    def launched_policy(self) -> PolicySettings:
        """Settings of the policies that this machine starts."""
        if self.launch.num_policies == 1:
            return self.policy
        parallel = self.policy.parallel.model_copy(update={"elastic": True})
        return self.policy.model_copy(update={"parallel": parallel})

    @property
    def generates(self) -> bool:
        """Whether rollouts generate completions."""
        return self.kind.needs_rollouts(self.plan())

    @property
    def replicas(self) -> dict[str, int]:
        """How many replicas of each role a run on this machine has."""
        policy = {"policy": self.launch.num_policies} if self.kind.trains or self.launch.fan_out else {}
        if not self.generates:
            return policy
        scores = self.reward is not None and self.kind.is_scored
        return policy | {
            "rollout": self.num_rollouts,
            "reward": self.launch.num_rewards if scores else 0,
            "teacher": self.launch.num_teachers if self.teacher is not None else 0,
        }

    @property
    def num_rollouts(self) -> int:
        """How many rollouts this run starts."""
        pools = self.rollout.pools
        return sum(pool.count for pool in pools) if pools else self.launch.num_rollouts

    @property
    def rollout_variants(self) -> list[tuple[str, RolloutSettings]]:
        """The settings of the rollouts of each pool, and the key that names the pool."""
        return variants(self.rollout)

    def _check_pools(self) -> None:
        """The settings of each pool are settings of rollouts."""
        variants(self.rollout)  # raises

    def _check_rows(self) -> None:
        """A group is generated in one batch, so it must fit."""
        sizes = {"rl.group_size": self.rl.group_size if self.plan().num_steps else 0}
        if self.evaluation.at_start or self.evaluation.at_end or self.kind.answers_each_prompt:
            sizes["evaluation.num_completions"] = self.evaluation.num_completions
        for key, size in sizes.items():
            for name, rollout in self.rollout_variants:
                if size > rollout.max_rows:
                    raise ValueError(
                        f"{key} = {size} is more than {name}.max_rows = {rollout.max_rows}, the sequences that a "
                        f"rollout generates together; lower {key} or raise {name}.max_rows"
                    )


def _check_launched(recipe: Recipe) -> None:
    """A run that generates has rollouts, and rewards if the recipe has scorers: of this machine or of others."""
    given, num = recipe.launch.num_rollouts, recipe.num_rollouts
    if recipe.rollout.pools and recipe.is_given("launch.num_rollouts") and given != num:
        raise ConfigError(
            f"launch.num_rollouts = {given}, and the counts of {len(recipe.rollout.pools)} [[rollout.pools]] add up to "
            f"{num}; remove launch.num_rollouts"
        )
    work = {"num_rollouts": "generates"} if recipe.generates and not recipe.rollout.pools else {}
    if recipe.generates and recipe.kind.is_scored and recipe.reward is not None:
        work["num_rewards"] = "scores"
    for count, does in work.items():
        if getattr(recipe.launch, count) == 0 and not recipe.is_given(f"controller.{count}"):
            raise ConfigError(
                f"launch.{count} = 0, but this run {does} completions; set at least 1, or controller.{count} to the "
                "number that other machines bring"
            )


def load_recipe(files: Sequence[Path], flags: Sequence[str]) -> Recipe:
    """Read a recipe and resolve what follows from it. Raises ConfigError."""
    recipe = load(Recipe, files, flags)
    _check_launched(recipe)
    _check_models(recipe)
    rollout = _resolved_rollout(recipe)
    follows = {
        **_replica_counts(recipe),
        **_model_limits(recipe, rollout),
        **_scoring(recipe),
        "start_s": _start_s(recipe, rollout),
        "colocate": recipe.launch.colocate,
        "fan_out": recipe.launch.fan_out,
        "single_roles": recipe.launch.single_roles,
    }
    controller = recipe.controller.model_copy(update=follows)
    launch = recipe.launch.model_copy(update={"num_rollouts": recipe.num_rollouts})
    return recipe.model_copy(
        update={"controller": controller, "policy": recipe.launched_policy, "rollout": rollout, "launch": launch}
    )


def _engines(recipe: Recipe) -> set[str]:
    return {rollout.engine for _, rollout in recipe.rollout_variants}


def _check_models(recipe: Recipe) -> None:
    """Raise ConfigError for an engine, a model folder or a chat template that cannot be used."""
    untrained = not recipe.kind.trains
    if recipe.generates:
        for engine in sorted(_engines(recipe)):
            check_engine(engine)
    if recipe.model.scratch is None:
        wanted = (untrained or recipe.policy.init == "pretrained") and not recipe.policy.weights_from
        if recipe.diffusion is not None:
            check_pipeline_folder(recipe.model.path, weights=wanted, may_draw=not untrained, reads_weights=False)
        else:
            check_model_folder(
                recipe.model.path,
                weights=wanted,
                may_draw=not untrained,
                reads_weights=False,
                runs_code=recipe.model.trust_remote_code,
            )
    if recipe.teacher is not None:
        check_model_folder(recipe.teacher.path, weights=True, key="teacher.path", reads_weights=False)
    check_chat_template(recipe)


def _replica_counts(recipe: Recipe) -> dict[str, int]:
    """Return the settings of the controller that say how many replicas of each role there are."""
    launched = recipe.replicas
    num_policies = max(launched.get("policy", 1), recipe.controller.num_policies)  # others may join from elsewhere
    counts = {"num_teachers": launched.get("teacher", 0), "num_policies": num_policies}
    for role in ("rollout", "reward"):
        num = launched.get(role, 1)
        is_elsewhere = num == 0 and recipe.is_given(f"controller.num_{role}s")
        counts |= {} if is_elsewhere else {f"num_{role}s": num}
    return counts


def _resolved_rollout(recipe: Recipe) -> PooledRolloutSettings:
    """Return the settings of the rollouts, with what follows for them from those of others."""
    rollout = recipe.rollout
    if not recipe.kind.trains:
        rollout = rollout.model_copy(update={"load_weights": not recipe.launch.fan_out})
    if recipe.kind.serves_requests:
        rollout = rollout.model_copy(update={"api": rollout.api.model_copy(update={"enabled": True})})
    if recipe.launch.colocate and "vllm" in _engines(recipe):
        arguments = {**rollout.vllm.engine_args, "enable_sleep_mode": True}
        rollout = rollout.model_copy(update={"vllm": rollout.vllm.model_copy(update={"engine_args": arguments})})
    return rollout


def _start_s(recipe: Recipe, rollout: PooledRolloutSettings) -> float:
    """Return how long the controller waits for the first replicas, in seconds."""
    start_s = recipe.controller.start_s
    if "vllm" in _engines(recipe):  # it may take longer to start than the run would wait for its rollouts
        start_s = max(start_s, rollout.vllm.start_timeout_s + IMPORTS_S)
    if recipe.launch.policy_nodes > 1:  # and so may a policy whose first node waits for the others
        start_s = max(start_s, recipe.policy.parallel.join_s + IMPORTS_S)
    return start_s


def _model_limits(recipe: Recipe, rollout: PooledRolloutSettings) -> dict[str, Any]:
    """Return the settings of the controller that follow from those of rollouts, teachers and the model."""
    follows: dict[str, Any] = {"rollout_transport": rollout.transport, "denoising": recipe.diffusion is not None}
    # A replica of another recipe, or a broken one, must not make the controller hold more than this recipe allows.
    follows |= {"max_model_len": rollout.max_model_len or 0, "max_media_bytes": rollout.max_media_bytes}
    follows |= {"teacher_top_k": recipe.teacher.top_k} if recipe.teacher is not None else {}
    # Weights that are elsewhere are not in the folder that the controller could read: the policy's digest counts.
    has_folder = not recipe.kind.trains and not recipe.policy.weights_from
    return follows | ({"model_path": recipe.model.path} if has_folder else {})


def _scoring(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of the controller that follow from the scorers and the algorithm."""
    follows: dict[str, Any] = {
        "trained_scorers": recipe.scores_to_train,
        "compares_scores": bool(compares_scores(recipe.policy.algorithm.name)),
    }
    if recipe.reward is not None:
        labels = tuple(scorer.title for scorer in recipe.reward.evaluation_scorers())
        follows |= {"num_scorers": len(recipe.reward.scorers), "evaluation_scorers": labels}
    return follows


def to_toml(recipe: Recipe) -> str:
    """Return the resolved recipe as TOML, which every service can read again."""
    return tomli_w.dumps(_tree(recipe))


def to_shown_toml(recipe: Recipe) -> str:
    """Return the resolved recipe as TOML for people: passwords, tokens and keys are hidden."""
    return tomli_w.dumps(_without_passwords(without_secrets(Recipe, _tree(recipe))))


def _tree(recipe: Recipe) -> dict[str, Any]:
    tree = json.loads(recipe.model_dump_json(exclude_none=True))
    if not recipe.rollout.pools:
        del tree["rollout"]["pools"]  # which services do not know
    without_none: dict[str, Any] = _without_none(tree)
    return without_none


def resolved(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe as the services of the attempt in `folder` read it.

    It has an id of its own, and a [model.scratch] is a model folder, whose weights the policy draws at random.
    """
    run_id = f"{folder.parent.name}/{folder.name}/{secrets.token_hex(4)}"
    rollout = recipe.rollout.model_copy(update={"pools": ()})  # each replica gets those of its pool as flags
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"id": run_id}), "rollout": rollout})
    if recipe.model.scratch is None:
        return recipe
    model = recipe.model.model_copy(update={"path": str(folder / MODEL_FOLDER), "scratch": None})
    policy = recipe.policy.model_copy(update={"init": "random"})
    return recipe.model_copy(update={"model": model, "policy": policy})


def _without_passwords(value: Any) -> Any:
    """Return a copy of a tree whose URLs have no passwords."""
    if isinstance(value, dict):
        return {key: _without_passwords(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_passwords(item) for item in value]
    return without_passwords(value) if isinstance(value, str) else value


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value if item is not None]
    return value
