"""Imports of the fork server from which policies, rollouts and teachers are forked.

It only imports: a fork keeps one thread and no GPU context, so neither may be in use before it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
import threading

import setproctitle

from starling.cli.run.lean_imports import lean_transformers
from starling.common.importing import without_modules
from starling.common.observe.parent import GROUP_SIGNALS, die_with_parent

with without_modules("rich"):  # which structlog imports for tracebacks that no service prints
    import structlog  # noqa: F401

_MODULES = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "numpy.ma",
    "numpy.random",
    "fsspec",
    "starling.cli.run.forkserver",
    "starling.common.net.link",
    "starling.common.nodes.agent",
    "starling.common.offers",
    "starling.common.service",
    "starling.policy.core.admission",
    "starling.policy.settings.policy",
    "starling.policy.shell.facts",
    "starling.policy.shell.peers",
    "starling.policy.shell.replica",
    "starling.policy.shell.saving",
    "starling.policy.train.fit",
    "starling.policy.train.learner",
    "starling.policy.train.model.load",
    "starling.policy.train.rl",
    "starling.policy.train.sft",
    "starling.rollout.core.machine",
    "starling.rollout.settings",
    "starling.rollout.shell.adoption",
    "starling.rollout.shell.engines",
    "starling.rollout.shell.groups",
    "starling.rollout.shell.nodes",
    "starling.rollout.engine.embedded.engine",
    "starling.rollout.engine.multimodal.prompts",
    "starling.rollout.engine.teacher",
    "starling.weightsync.publisher.publisher",
    "starling.weightsync.puller.puller",
)

_UNUSED = ("sklearn", "scipy", "torchao", "accelerate")
"""transformers imports them where they are installed: for assisted generation, detection losses, its quantisers, and
models on several devices."""


def _load_library() -> None:
    """Load UCX's library beside the imports: it takes 0.4 s, which each process would take again."""
    with contextlib.suppress(Exception):
        from starling.weightsync.transports.ucx.worker import load_library

        load_library()


# It looks for the place of the title beside the environment, and finds it only while the first variable is unchanged.
setproctitle.getproctitle()

# Ctrl-C reaches every process of the terminal, and SIGTERM of systemd or Slurm every process of the run: the supervisor
# stops the run, for which the server has to live. It starts with these signals blocked; those that wait are discarded
# here.
for _number in GROUP_SIGNALS:
    signal.signal(_number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)

# The server checks for its parent only after the imports, and would outlive a supervisor that exits during them.
die_with_parent()
if os.environ.pop("STARLING_SUPERVISOR", None) not in (None, str(os.getppid())):  # it has exited already
    os._exit(0)

# Output of libraries during their import is discarded; errors after it are not.
_nowhere, _errors = os.open(os.devnull, os.O_WRONLY), os.dup(2)
os.dup2(_nowhere, 2)

gc.disable()
with without_modules(*_UNUSED), lean_transformers():
    _library = threading.Thread(target=_load_library)
    _library.start()
    for _module in _MODULES:
        # A service that is not installed, or fails to import, reports that itself when it starts.
        with contextlib.suppress(Exception):
            importlib.import_module(_module)
    _library.join()
os.dup2(_errors, 2)
os.close(_errors)
os.close(_nowhere)
# These objects live as long as any child: without a traversal by the collector their pages stay shared.
gc.freeze()
gc.enable()
# The teardown of torch takes a second, in which the process would outlive the supervisor. Children never run this.
atexit.register(os._exit, 0)
