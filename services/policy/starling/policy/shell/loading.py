"""Settings of a policy process, and the model that it begins with."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import structlog
from pydantic import model_validator

from starling.algo.diffusion.settings import SamplerSettings
from starling.common.folder_digests import model_digest
from starling.common.kinds import KINDS
from starling.common.settings import ModelSettings, ServiceSettings, WeightsSettings
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.settings.policy import PolicySettings, check_adapters, check_elastic, check_transport

if TYPE_CHECKING:  # they import torch, see `starling.policy.shell.main`
    from starling.policy.train.learner import Learner
    from starling.policy.train.model.deferred import DeferredModel
    from starling.policy.train.parallel.mesh import Mesh
    from starling.weightsync.offers.offer import Transport

log = structlog.get_logger(__name__)


class PolicyProcess(ServiceSettings):
    """All settings of a policy process."""

    model: ModelSettings = ModelSettings()
    weights: WeightsSettings = WeightsSettings()
    diffusion: SamplerSettings | None = None
    """Samples of a diffusion model; without it the model is a language model."""
    policy: PolicySettings = PolicySettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_adapters(self.model, self.policy, self.weights)
        check_transport(self.policy, self.network)
        check_elastic(self.policy, self.network)
        return self


def choose_transport(settings: PolicyProcess) -> tuple[Transport, bool]:
    """Return the transport of weights, and whether it encrypts; warn if it leaves RDMA unused."""
    from starling.weightsync.transports.registry import choose_for_host

    transport, encrypted, unused_rdma = choose_for_host(
        settings.policy.transport, settings.network.host, encrypt=settings.network.encrypt_weights
    )
    if unused_rdma:
        log.warning("rdma_is_not_used", reason=unused_rdma)
    return transport, encrypted


def create_learner(path: Path, settings: PolicyProcess, fetch_to: Path, mesh: Mesh | None = None) -> Learner:
    """Return a learner with version 0 of the model in the folder `path`.

    Args:
        path: of the model.
        settings: of the policy.
        fetch_to: a name for the copy of weights that are elsewhere.
        mesh: of the ranks of the replica; None for a single one.

    Raises:
        ConfigError: the model cannot be loaded, or does not fit the settings.
    """
    from starling.policy.train.checkpoint.state import seed_random

    if settings.diffusion is not None:
        seed_random(settings.run.seed)
        return _diffusion_learner(path, settings, settings.diffusion)
    from starling.policy.train.fit import check_fit
    from starling.policy.train.learner import Learner
    from starling.policy.train.loss.objective import check_objective
    from starling.weightsync.tensors.adapters import digest_of_base

    trainer = KINDS[settings.run.kind].trainer
    assert trainer is not None, "a run that trains nothing has no learner of its own"
    if trainer == "rl":
        check_objective(settings.policy.algorithm)
    seed_random(settings.run.seed)
    device = settings.model.device if mesh is None else mesh.device(settings.model.device)
    load, lora = partial(load_version_0, path, settings, fetch_to, device), settings.model.lora
    defer = None if mesh is None else partial(defer_version_0, path, settings, fetch_to, device, mesh)
    learner = Learner(load, settings.policy, mesh=mesh, base_of=partial(digest_of_base, spec=lora), defer=defer)
    if mesh is not None and lora is not None and lora.merged:
        from starling.policy.train.parallel.weights.adapters import check_mergeable

        check_mergeable(learner.model)
    names = None if learner.parallel is None else learner.parallel.whole.names
    check_fit(learner.model, settings.policy, trainer, names)
    return learner


def _diffusion_learner(path: Path, settings: PolicyProcess, diffusion: SamplerSettings) -> Learner:
    """Return a learner with version 0 of the transformer of a pipeline. Raises ConfigError."""
    from starling.algo.diffusion.folder import read_pipeline
    from starling.policy.train.diffusion.learner import DiffusionLearner
    from starling.policy.train.diffusion.load import load_version_0 as load_transformer
    from starling.policy.train.optim.optimizer import check_optimizers
    from starling.weightsync.tensors.adapters import digest_of_base

    folder = read_pipeline(path, diffusion.text_length)
    learner = DiffusionLearner(
        partial(load_transformer, folder, settings.model, settings.policy, settings.run.seed),
        settings.policy,
        folder,
        diffusion,
        base_of=partial(digest_of_base, spec=settings.model.lora),
    )
    check_optimizers(learner.model, settings.policy, "rl")
    return learner


def load_fixed(path: Path, settings: PolicyProcess, fetch_to: Path) -> tuple[Learner, str]:
    """Load the model of a run that trains nothing into host memory; return it in a learner, and its folder's digest.

    Arguments and errors are those of `create_learner`.
    """
    from starling.policy.train.checkpoint.source import whole_model
    from starling.policy.train.learner import Learner
    from starling.policy.train.model.load import load_model
    from starling.weightsync.tensors.adapters import digest_of_base

    model, policy = settings.model, settings.policy
    with whole_model(path, policy.weights_from, policy.saving.storage_options, fetch_to) as folder:
        thread = ThreadPoolExecutor(1, "digest")  # reads the files while they are loaded
        digest = thread.submit(model_digest, folder)
        thread.shutdown(wait=False)
        load = partial(load_model, folder, dtype=model.dtype, trust_remote_code=model.trust_remote_code)
        alone = policy.model_copy(update={"parallel": ParallelSettings()})  # nothing is computed
        return Learner(load, alone, base_of=partial(digest_of_base, spec=model.lora)), digest.result()


def load_version_0(path: Path, settings: PolicyProcess, fetch_to: Path, device: str) -> Any:
    """Load version 0 of the model in the folder `path` to `device`; `fetch_to`: see `create_learner`.

    Raises ConfigError.
    """
    from starling.policy.train.checkpoint.source import whole_model
    from starling.policy.train.memory.setup import apply_memory_settings
    from starling.policy.train.model.load import freeze, load_model, place, use_liger
    from starling.policy.train.model.lora import load_adapters
    from starling.policy.train.precision.layers import use_precision
    from starling.weightsync.tensors.adapters import add_adapters

    policy = settings.policy
    with whole_model(path, policy.weights_from, policy.saving.storage_options, fetch_to) as folder:
        model = load_model(folder, init=policy.init, **_form(settings))
    lora = settings.model.lora
    if lora is not None:
        add_adapters(model, lora, seed=settings.run.seed)
        if lora.adapter:
            load_adapters(model, Path(lora.adapter))
    freeze(model, settings.policy.frozen)
    model = place(model, device)
    if settings.policy.liger:
        use_liger(model)
    apply_memory_settings(model, settings.policy.memory, settings.policy.attention)
    use_precision(model, settings.policy)
    return model


@contextmanager
def defer_version_0(
    path: Path, settings: PolicyProcess, fetch_to: Path, device: str, mesh: Mesh
) -> Iterator[DeferredModel | None]:
    """Lend what `load_version_0` returns, without memory for its weights, which the ranks of `mesh` read in parts.

    Lends None where they cannot: random weights, such as those of DoRA, and files that are no safetensors. Weights that
    are fetched from elsewhere are on the disk of this host for one rank after another, and for all of them where these
    wait for each other meanwhile: with `tp`, and for the digest of adapters' base weights.

    Raises ConfigError.
    """
    from starling.policy.train.checkpoint.source import whole_model
    from starling.policy.train.memory.setup import apply_memory_settings
    from starling.policy.train.model.deferred import defer_model
    from starling.policy.train.model.load import find_device, freeze, use_liger
    from starling.policy.train.parallel.weights.sample import observe
    from starling.policy.train.precision.layers import use_precision

    policy, lora, place = settings.policy, settings.model.lora, find_device(device)
    if policy.init == "random" or (lora is not None and lora.dora):
        yield None
        return
    with (
        mesh.turn() if policy.weights_from else nullcontext(),
        whole_model(path, policy.weights_from, policy.saving.storage_options, fetch_to) as folder,
        defer_model(folder, place, **_form(settings)) as deferred,
    ):
        if deferred is not None:
            model = deferred.model
            if lora is not None:
                deferred.add_adapters(lora, settings.run.seed)
            freeze(model, policy.frozen)
            if policy.liger:
                use_liger(model, place)
            observe(model, place, policy.attention)
            apply_memory_settings(model, policy.memory, policy.attention, place)
            use_precision(model, policy, place)
        yield deferred


def _form(settings: PolicyProcess) -> dict[str, Any]:
    """Return the arguments that a whole model and an outline of it are loaded with."""
    return {
        "seed": settings.run.seed,
        "dtype": settings.model.dtype,
        "trust_remote_code": settings.model.trust_remote_code,
        "scores": KINDS[settings.run.kind].trainer == "reward_model",
    }
