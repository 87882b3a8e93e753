"""Settings that a process which joins a run gets from the controller: which they are, and how they are asked for.

`starling join` needs a key and an address. The controller answers the holder of a key with the sections of its role
(`SECTIONS_OF`), without secrets and without what only the controller's machine has; both sides use the rules here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, Final

import xxhash
import zmq

from starling.common.errors import RefusedError, UnreachableError, WireError
from starling.common.net.curve import KeyFile
from starling.common.net.dealer import Dealer
from starling.common.net.frames import receive
from starling.common.net.settings import make_incarnation
from starling.common.secret_settings import names_secret
from starling.common.settings import Tree, unusable_text
from starling.common.wire import codec
from starling.common.wire.messages import PROTOCOL_VERSION, Envelope, Refused, RequestSettings, RoleSettings

SECTIONS_OF: Final = {
    "policy": ("run", "network", "model", "diffusion", "weights", "policy"),
    "rollout": ("run", "network", "model", "diffusion", "weights", "rollout"),
    "reward": ("run", "network", "diffusion", "reward"),
    "teacher": ("run", "network", "model", "teacher"),
}
"""Sections that a replica of each role reads. It is sent no others: those of a reward have the answers' secrets."""
LOCAL: Final = (("run", "folder"), ("network", "host"), ("network", "port"))
"""Settings of the controller's machine, which mean nothing on another one."""
MAX_FILES: Final = 64
MAX_FILE_BYTES: Final = 64 << 20
MAX_MODEL_BYTES: Final = 128 << 20
"""Of all files together. The tokenizer of a large vocabulary has some 30 MiB."""
REPEAT_S: Final = 1.0
PATIENCE_MS: Final = 100
"""How long to wait for a message before the connection is checked."""
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}\.(?:json|txt|jinja|model|vocab)")
_NO_SECRETS: Final = re.compile(r"reward\.scorers\.\d+\.key")
"""Settings with the names of secrets that hold none."""
_ANY_KEY: Final = re.compile(r"api_?keys?$|_keys?$", re.IGNORECASE)
"""Names that mean a secret often enough, in tables of any keys, for it not to be sent."""
_SECRET_URL: Final = re.compile(r"://[^/\s@]*@")


def is_model_file(name: str) -> bool:
    """Return whether a file of a model folder may be sent: configuration, tokenizer or template, no code, no weights.

    The index of weights says nothing without them.
    """
    return _FILE_NAME.fullmatch(name) is not None and not name.endswith(".index.json")


def withhold_secrets(tree: Mapping[str, Any], prefix: str = "") -> tuple[Tree, list[str]]:
    """Return a tree of settings without texts that look like secrets, and the keys that are left out.

    A secret is a text with the name of one (`names_secret`, and any ``..._key``), or an URL with a user's name.
    """
    kept: Tree = {}
    withheld: list[str] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            kept[name], more = withhold_secrets(value, f"{key}.")
            withheld += more
        elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
            items = [withhold_secrets(item, f"{key}.{number}.") for number, item in enumerate(value)]
            kept[name] = [item for item, _ in items]
            withheld += [one for _, more in items for one in more]
        elif _is_secret(key, value):
            withheld.append(key)
        else:
            kept[name] = value
    return kept, withheld


def _is_secret(key: str, value: Any) -> bool:
    texts = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str) and one]
    name = key.rpartition(".")[2]
    is_named = (names_secret(name) or _ANY_KEY.search(name) is not None) and not _NO_SECRETS.fullmatch(key)
    return any(is_named or _SECRET_URL.search(text) for text in texts)


def request_settings(
    address: str, key: KeyFile | None, name: str, *, with_model: bool = False, timeout_s: float
) -> tuple[RoleSettings, dict[str, bytes]]:
    """Ask the controller at `address` for the settings of the replica `name`. Returns them, and the model's files.

    If it cannot send these, the answer's `problem` says why.

    Args:
        address: ``tcp://host:port``.
        key: of `name`; None without CURVE.
        name: for example ``rollout-3``.
        with_model: also ask for the small files of the model folder.
        timeout_s: deadline for the answer, in seconds.

    Raises:
        RefusedError: the controller does not accept the key, or refuses this process.
        UnreachableError: there is no answer within `timeout_s`, or it is not valid.
    """
    dealer = Dealer(address, name, key)
    dealer.socket.rcvtimeo = PATIENCE_MS
    try:
        settings, buffers = _ask(dealer, name, RequestSettings(with_model=with_model), timeout_s)
    finally:
        dealer.close()
    problem = ("" if with_model else settings.problem) or _problem(settings, buffers, name)
    if problem:
        raise UnreachableError(f"the controller at {address} has no settings for {name}: {problem:.300}")
    return settings, {file.name: buffer for file, buffer in zip(settings.files, buffers, strict=True)}


def _ask(dealer: Dealer, name: str, message: RequestSettings, timeout_s: float) -> tuple[RoleSettings, list[bytes]]:
    now = time.monotonic()
    deadline, ask_at = now + timeout_s, now
    while now < deadline:
        # Also at once over a new connection: messages over the last one may be lost.
        if dealer.reconnected() or now >= ask_at:
            ask_at = now + REPEAT_S
            _send(dealer, name, message)
        answer = _receive(dealer, name)
        if answer is not None:
            return answer
        now = time.monotonic()
    raise UnreachableError(
        dealer.unreachable(f"no answer for {round(timeout_s, 1):g} s") + ", and that the controller is of this version"
    )


def _send(dealer: Dealer, name: str, message: RequestSettings) -> None:
    envelope = Envelope(protocol=PROTOCOL_VERSION, run="", sender=name, incarnation=make_incarnation(), seq=1)
    try:
        dealer.send(codec.pack(envelope, message))
    except zmq.Again:
        return  # it is sent again


def _receive(dealer: Dealer, name: str) -> tuple[RoleSettings, list[bytes]] | None:
    """Return the answer, or None after a moment without one. Raises RefusedError."""
    received = receive(dealer.socket, 0)
    if received is None:
        return None
    frames = received[0]
    try:
        envelope = codec.unpack_envelope(frames)
        message = codec.unpack_down(frames)
    except WireError:
        return None
    if isinstance(message, Refused):  # also from a controller that speaks another protocol, which says so
        raise RefusedError(f"the controller refuses {name}: {message.reason:.300}")
    if isinstance(message, RoleSettings) and envelope.protocol == PROTOCOL_VERSION:
        return message, frames[2:]
    return None


def _problem(settings: RoleSettings, buffers: list[bytes], name: str) -> str:
    """Return what is wrong with an answer; empty if nothing is. Values are checked by the service that reads them."""
    role = name.rpartition("-")[0]
    others = sorted(set(settings.sections) - set(SECTIONS_OF[role]))
    if others or not all(isinstance(section, dict) for section in settings.sections.values()):
        return f"it sent other sections than those of a {role} ({', '.join(others) or 'which are no sections'})"
    run = settings.sections.get("run", {}).get("id")
    if not (isinstance(run, str) and run):
        return "it sent no run.id"
    return unusable_text(settings.sections) or _problem_of_files(settings, buffers)


def _problem_of_files(settings: RoleSettings, buffers: list[bytes]) -> str:
    names = [file.name for file in settings.files]
    if len(names) > MAX_FILES or len(set(names)) < len(names) or sum(map(len, buffers)) > MAX_MODEL_BYTES:
        return "it sent too many files of the model"
    for file, buffer in zip(settings.files, buffers, strict=True):
        if not is_model_file(file.name):
            return f"it sent {file.name!r:.150}, which is no file of a tokenizer or a configuration"
        if len(buffer) != file.nbytes or xxhash.xxh3_128(buffer).hexdigest() != file.digest:
            return f"{file.name} was damaged on the way; try again"
    return ""
