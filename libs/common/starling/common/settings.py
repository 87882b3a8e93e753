"""Configuration of every process.

TOML files stack (a later one wins), then the environment (``STARLING_ROLLOUT__MAX_ROWS=8``), then flags
(``--rollout.max-rows 8``). What results is validated once and is frozen. An unknown key is an error that names the
nearest valid one. This is the only module that reads the environment.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from starling.common.errors import ConfigError
from starling.common.ranges import (
    MAX_COEFFICIENT,
    MAX_ROWS,
    MAX_SECONDS,
    MAX_TEMPERATURE,
    MAX_WHOLE,
    MIN_TEMPERATURE,
)
from starling.common.secret_settings import HIDDEN, is_secret, may_have_secrets, without_passwords, without_secrets
from starling.common.setting_docs import setting_texts
from starling.common.setting_fields import field_at, item_of, section_of

ENV_PREFIX = "STARLING_"
MAX_SHOWN = 200
MAX_FILE_BYTES = 16 << 20
MAX_DEPTH = 64
"""Most tables and lists in each other."""
"""Characters of a wrong value that an error shows."""
_FIRST_LINE = "# This file is complete if its last line is: # end\n"
_LAST_LINE = "# end\n"
Tree = dict[str, Any]
B = TypeVar("B", bound=BaseModel)


def _check_temperature(temperature: float) -> float:
    if 0.0 < temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"{temperature:g} is so low that logits overflow; give 0, which takes the most likely token, or at least "
            f"{MIN_TEMPERATURE:g}"
        )
    return temperature


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"{name!r} names a folder; use letters, digits, '.', '_' and '-', first a letter or a digit")
    return name


def _check_endpoint(endpoint: str) -> str:
    if not endpoint:
        return endpoint
    from urllib.parse import urlsplit  # here: a process without traces does not load it

    try:
        parts = urlsplit(endpoint)
        is_address = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.username is None
            and (parts.port is None or parts.port > 0)
        )
    except ValueError:  # no number as the port
        is_address = False
    if not is_address:
        raise ValueError(
            f"{endpoint!r} is no address of a collector; write http://HOST:4318, and a password into "
            "OTEL_EXPORTER_OTLP_HEADERS"
        )
    return endpoint


Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
"""A duration or time limit."""
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
TokenId = Annotated[int, Field(ge=0, le=MAX_WHOLE)]
Temperature = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE), AfterValidator(_check_temperature)]
"""A sampling temperature; 0 takes the most likely token."""


class SettingsSection(BaseModel):
    """A frozen group of settings; each field's docstring is its help. No number may be infinite or NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RunSettings(SettingsSection):
    """Settings of the whole run."""

    name: Annotated[str, AfterValidator(_check_name)] = "run"
    """Name of the run; its files go to <folder>/<name>/attempt-<n>/."""
    kind: Literal["rl", "sft", "dpo", "reward_model", "replay", "generate", "evaluate", "infer", "serve"] = "rl"
    """`rl`: reinforcement learning, after [sft] steps if there are any. `sft`: supervised fine-tuning only. `dpo`:
    learning from pairs of a chosen and a rejected response. `reward_model`: training a model to score, from pairs.
    `replay`: as rl, from the trajectories in the files of another run. Without a policy: `generate` writes such files,
    `evaluate` answers prompts and scores them, `infer` answers them; `serve` answers requests at the rollouts'
    endpoints until it is stopped."""
    seed: Seed = 0
    """Seed of the initial weights, the order of the data and every sampled token."""
    folder: Path = Path("runs")
    """Folder of all runs."""
    log_format: Literal["text", "json"] = "text"
    """Format of the log of every process: lines of text, or one JSON object per line; see
    `docs/reference/log-events.md`."""
    id: str = ""
    """Identity of this attempt on the wire; set by `starling run`. Replicas of another run are refused."""


class NetworkSettings(SettingsSection):
    """How the services reach each other."""

    host: str = "127.0.0.1"
    """Address that the controller listens on, and that replicas serve weights on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the controller; 0 takes a free one."""
    curve: bool = True
    """Encrypt and authenticate every connection to the controller."""
    encrypt_weights: bool | None = None
    """Encrypt weights that travel between hosts (AES-256-GCM), which only the transport `tcp` can. Unset: `tcp`
    encrypts, and other transports are allowed. `true`: others between hosts are refused. `false`: weights are not
    encrypted, for a private network, where the transport `auto` uses RDMA if it can."""
    heartbeat_s: Seconds = 1.0
    """Interval at which each replica reports its state."""
    lease_s: Seconds = 10.0
    """A replica without a heartbeat for this long has left; its groups are given to other replicas."""
    connect_s: Seconds = 120.0
    """How long a starting replica waits for the controller, and `starling run` until it listens; the latter waits a
    second more for each MB of the journal and metrics that the controller reads before."""
    silence_s: Seconds = 300.0
    """How long a replica waits for a controller that does not answer, which may be restarting."""


class TraceSettings(SettingsSection):
    """OpenTelemetry traces of groups, from the prompt to the weights (`docs/how-to/traces.md`)."""

    endpoint: Annotated[str, AfterValidator(_check_endpoint)] = ""
    """Address of a collector that takes OTLP over HTTP, such as `http://localhost:4318`; empty for no traces. Every
    service sends its own spans there."""
    share: float = Field(default=1.0, ge=0, le=1)
    """Share of the groups that are traced; all services have to have the same."""


class ObserveSettings(SettingsSection):
    """What each service shows of itself: over HTTP, and in traces."""

    http: str = ""
    """Address, `host:port`, at which a service answers `/healthz`, `/readyz` and `/metrics`; empty for none. Port 0
    takes a free one, which is logged. `starling run` gives this port to the controller, and each replica another one
    (see `docs/how-to/deploy/monitoring.md`)."""
    token_file: str = ""
    """File with the token that `/metrics` asks for, as `Authorization: Bearer TOKEN`. Without it the address must be a
    loopback one."""
    stalled_s: Seconds = 600.0
    """`/healthz` fails when the working loop has not turned for so long, and what it waits for has no longer limit of
    its own."""
    traces: TraceSettings = TraceSettings()


class LoraSettings(SettingsSection):
    """Low-rank adapters (arXiv:2106.09685), trained and published instead of the weights themselves."""

    rank: int = Field(default=16, ge=1, le=MAX_ROWS)
    """Rank of each adapter."""
    alpha: float = Field(default=32.0, gt=0.0, le=MAX_COEFFICIENT)
    """The output of an adapter is scaled by alpha / rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """Which layers get one: a regular expression that matches the whole name, a list of endings of names, or
    `all-linear`, all but the output layer."""
    exclude: str | tuple[str, ...] = ()
    """Layers without one, in the same form: `".*visual.*"` leaves out a vision tower."""
    parameters: tuple[str, ...] = ()
    """Endings of names of weights that are not a layer of their own, as `mlp.experts.down_proj`: the experts of a layer
    are one tensor. Their update is computed in full in each pass, which takes memory and time."""
    rank_pattern: dict[str, int] = {}
    """Ranks of some layers, by regular expressions for the end of the name; the first match counts."""
    alpha_pattern: dict[str, float] = {}
    """Alphas of some layers, in the same form."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (arXiv:2312.03732): large ranks then learn as fast as small ones."""
    dora: bool = False
    """Learn the length of each row of a weight apart from its direction (arXiv:2402.09353)."""
    dropout: float = 0.0
    """Must be 0."""
    modules_to_save: tuple[str, ...] = ()
    """Endings of names of modules that are trained in full, besides the adapters."""
    init: Literal["kaiming", "gaussian", "orthogonal"] = "kaiming"
    """Initialisation of the first factor; an adapter adds nothing at first. Methods that also change the base weights
    (PiSSA, OLoRA, LoftQ) are not supported: each rollout would have to change its own weights to the same bits."""
    adapter: str = ""
    """A folder with initial adapters in peft's format, instead of new ones."""
    merged: bool = False
    """Checkpoints hold the whole model with its adapters merged into it, instead of the adapters alone."""

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def _positive(cls, pattern: dict[str, float]) -> dict[str, float]:
        for name, value in pattern.items():
            if not 0 < value <= MAX_COEFFICIENT:
                raise ValueError(f"{name!r} has {shown(value)}; give a number above 0 and at most {MAX_COEFFICIENT:g}")
        return pattern

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, dropout: float) -> float:
        if dropout:
            raise ValueError(
                f"{dropout:g} would make the trainer's log-probabilities differ from those of the rollout, "
                "and importance ratios differ from 1 for no reason; remove it"
            )
        return dropout


class ModelSettings(SettingsSection):
    """The model that is trained."""

    path: str = ""
    """A Hugging Face model folder."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of the weights, in training and in transfers."""
    device: str = "auto"
    """Device: `cpu`, `cuda`, `cuda:1`; `auto` takes a GPU if there is one."""
    lora: LoraSettings | None = None
    """Train adapters on top of the weights in `path`; these never change, and every replica reads them itself."""
    trust_remote_code: bool = False
    """Run Python code from the model's folder."""


class WeightsSettings(SettingsSection):
    """Transfer and verification of weight versions."""

    quantise: Literal["", "fp8_row", "fp8_block", "mxfp8", "mxfp4", "nvfp4"] = ""
    """Format of the linear layers in rollouts; empty for that of the policy. The policy quantises, and only
    codes and scales are sent. Embeddings, heads, norms and routers stay as they are; see
    `docs/how-to/low-precision.md`."""
    digests: Literal["full", "sampled", "off"] = "full"
    """Verify an adopted version by digests of all bytes, of a sixteenth (another one each version), or of none.

    Keep `full` while it takes less than a twentieth of a pull (see `starling sync-report`); only `full` allows the
    transfer of changed weights alone.
    """


class ServiceSettings(BaseSettings):
    """Settings of every service; each service adds its own sections."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        # A section that is given in part keeps its own defaults for the rest, not those of its class.
        nested_model_default_partial_update=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
    )

    run: RunSettings = RunSettings()
    network: NetworkSettings = NetworkSettings()
    observe: ObserveSettings = ObserveSettings()

    _given: tuple[Tree, ...] = PrivateAttr(default=())
    """What files, the environment and flags give, for `is_given`."""

    def is_given(self, key: str) -> bool:
        """Return whether a file, the environment or a flag gives the setting `key`, be it with its default value.

        `model_fields_set` does not tell: pydantic-settings leaves out a section that equals its defaults, and fills in
        one that is given in part. Only of settings made by `load`.
        """
        return any(_has_key(tree, key.split(".")) for tree in self._given)


S = TypeVar("S", bound=ServiceSettings)


def load(
    schema: type[S],
    files: Sequence[Path],
    flags: Sequence[str] = (),
    *,
    others: Sequence[str] = (),
    translate: Callable[[Tree, str], Tree] | None = None,
) -> S:
    """Read `files`, the environment and `flags` into a `schema`.

    Args:
        schema: of the settings.
        files: TOML; a later one wins.
        flags: of the command line.
        others: top-level sections that belong to other services: they are allowed and not looked at.
        translate: makes settings of the contents of a file, given its name, that may have another form.

    Raises:
        ConfigError: one sentence for the first problem.
    """
    foreign = set(others) - set(schema.model_fields)
    contents = [(str(file), read_toml(file)) for file in files]
    if translate is not None:
        contents = [(name, translate(tree, name)) for name, tree in contents]
    trees = [_own(schema, tree, foreign, name) for name, tree in contents]
    given = _own(schema, flags_tree(schema, flags), foreign, "the command line")
    variables = _own(schema, _environment_tree(schema), foreign, "the environment")

    class Sourced(schema):  # type: ignore[valid-type,misc]
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            stacked = [InitSettingsSource(settings_cls, tree) for tree in reversed(trees)]
            return (init_settings, env_settings, *stacked)

    try:
        settings: S = Sourced(**given)
    except ValidationError as error:
        raise ConfigError(_sentence(error, schema)) from None
    except SettingsError as error:
        raise ConfigError(f"a variable {ENV_PREFIX}... of the environment cannot be read: {error}; unset it") from None
    settings._given = (*trees, variables, given)
    return settings


def _has_key(tree: Any, keys: Sequence[str]) -> bool:
    for key in keys:
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True


def validate(schema: type[B], tree: Mapping[str, Any]) -> B:
    """Make a `schema` of `tree`. Raises ConfigError that names the key, the value, and what is wrong with it."""
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_sentence(error, schema)) from None


def _sentence(error: ValidationError, schema: type[BaseModel]) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, Exception):
        return f"{where}: {cause}" if where else str(cause)
    if first["type"] == "missing":
        if len(first["loc"]) == 1:
            return f"the section [{where}] is missing; give a recipe that has it: --config FILE"
        return f"{where} is missing; set it in a recipe or with --{where.replace('_', '-')}"
    given = shown_setting(schema, first["loc"], first["input"])
    return f"{where} = {given}: {first['msg']}{_remedy(first['type'], first['input'], where)}"


def _remedy(kind: str, given: object, key: str) -> str:
    """Return what to write instead of a value of another type than that of the setting `key`; empty for most types."""
    match kind:
        case "string_type":
            return "; write it in quotes"
        case "tuple_type":
            return f"; write [[{key}]] above each table" if isinstance(given, dict) else "; write a list in brackets"
        case "model_type" | "dict_type":
            return f"; it is a section, so set one of its keys: `starling settings {key}` lists them"
        case _:
            return ""


def shown(value: object) -> str:
    """Return a value that was given for a setting as an error names it: as Python writes it, and not too long.

    Of a URL without what is before its host, which may have a password.
    """
    try:
        text = without_passwords(repr(value))
    except ValueError:  # Python writes no number of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def shown_setting(schema: type[BaseModel], path: Sequence[str | int], value: object) -> str:
    """Return the value that was given at `path` below `schema` as an error names it: without a secret."""
    if is_secret(schema, path):
        return HIDDEN
    field = field_at(schema, [str(part) for part in path])
    if isinstance(value, str) and field is not None and may_have_secrets(field):  # a whole section, as one text
        return HIDDEN
    return shown(without_secrets(schema, value, tuple(path)))


def _own(schema: type[BaseModel], tree: Tree, foreign: set[str], origin: str) -> Tree:
    """Return `tree` without the sections of other services. Raises ConfigError for an unknown key."""
    own = {key: value for key, value in tree.items() if key not in foreign}
    problem = unknown_key(schema, own, ()) or unusable_text(own, schema=schema)
    if problem is not None:
        raise ConfigError(f"{problem} (in {origin})")
    return own


def unusable_text(value: Any, path: tuple[str, ...] = (), *, schema: type[BaseModel] | None = None) -> str | None:
    """Return what is wrong with the first string that neither a recipe nor a path can contain.

    `schema` says which settings are secret.
    """
    if len(path) > MAX_DEPTH:
        return f"{'.'.join(path[:3])} has more than {MAX_DEPTH} tables or lists in each other; write it flatter"
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        found = (unusable_text(item, (*path, str(key)), schema=schema) for key, item in items)
        return next((problem for problem in found if problem is not None), None)
    if isinstance(value, str) and ("\0" in value or not value.isprintable()):
        given = shown(value) if schema is None else shown_setting(schema, path, value)
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"{'.'.join(path)} = {given} is not UTF-8, as a recipe has to be; give another value"
        if "\0" in value:
            return f"{'.'.join(path)} = {given} has a null character; remove it"
    return None


def environment_variables(names: Collection[str], prefixes: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the variables of this process's environment with one of `names`, or that begin with one of `prefixes`."""
    return {name: value for name, value in os.environ.items() if name in names or name.startswith(prefixes)}


def set_variable(name: str, value: str) -> None:
    """Set a variable of the environment of this process, and of those that it starts."""
    os.environ[name] = value


def take_variables(names: Collection[str]) -> dict[str, str]:
    """Return those of `names` that are set, and unset them: no process that this one starts has them."""
    return {name: os.environ.pop(name) for name in names if name in os.environ}


def user_cache(name: str) -> Path:
    """Return a folder for files that later processes of this user can do without; it need not exist."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "starling" / name


def _environment_tree(schema: type[BaseModel]) -> Tree:
    """Return the keys that ``STARLING_SECTION__KEY=value`` variables name, to find misspelt ones.

    The value of a section, a list or a table is JSON. Raises ConfigError for one that is not.
    """
    tree: Tree = {}
    for name, text in sorted(os.environ.items()):
        if name.startswith(ENV_PREFIX):
            keys = name.removeprefix(ENV_PREFIX).lower().split("__")
            field = field_at(schema, keys)
            is_json = field is not None and _is_json(field)
            _put(tree, keys, _json_value(schema, keys, name, text) if is_json else text, name)
    return tree


def _is_json(field: FieldInfo) -> bool:
    """Return whether a variable of the environment gives this field as JSON: a section, a list or a table."""
    kind = typing.get_origin(field.annotation) or field.annotation
    return isinstance(kind, type) and issubclass(kind, BaseModel | tuple | list | dict)


def _json_value(schema: type[BaseModel], keys: Sequence[str], name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name} = {shown_setting(schema, keys, text)} is not valid JSON ({error}); correct it, or unset it and "
            f"give one variable for each key: {name}__KEY"
        ) from None


def flags_tree(schema: type[BaseModel], flags: Sequence[str]) -> Tree:
    """Return what ``--section.key value`` (or ``=value``; a lone flag of a boolean means true) sets, as a tree."""
    tree: Tree = {}
    rest, keys = list(flags), [""]
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or len(flag) < 3:
            given = HIDDEN if is_secret(schema, keys) else repr(flag)  # the rest of a secret with a space
            raise ConfigError(f"{given} is not a flag; settings are given as --section.key value")
        name, equals, value = flag[2:].partition("=")
        keys = name.replace("-", "_").split(".")
        if not equals:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif is_boolean(schema, keys):
                value = "true"
            else:
                raise ConfigError(f"--{name} needs a value")
        field = field_at(schema, keys)
        _put(tree, keys, value if field is not None and _is_string(field, value) else parse_value(value), f"--{name}")
    return tree


def _is_string(field: FieldInfo, text: str) -> bool:
    """Return whether `text` on the command line is a string for this field although TOML reads it as something else.

    A name may be 1, a folder 2026-01-01.
    """
    kinds = (*typing.get_args(field.annotation), field.annotation)
    if not {str, Path} & set(kinds) or {int, float, bool} & set(kinds):
        return False
    return not isinstance(parse_value(text), str | list | dict)


def child_environment(**extra: str) -> dict[str, str]:
    """Return the environment for a child process, with `extra`."""
    return {**os.environ, **extra}


def environment_variable(name: str) -> str | None:
    """Read one variable of the environment, for every other module."""
    return os.environ.get(name)


class Setting(NamedTuple):
    """One setting, as help and documentation show it."""

    key: str
    """``section.setting``; that of a member of a list is ``section.list[].setting``."""
    type: str
    default: str
    """As Python writes it, or `required`."""
    text: str


def iter_settings(schema: type[BaseModel], prefix: str = "", defaults: BaseModel | None = None) -> Iterator[Setting]:
    """Yield every setting below `schema`.

    `defaults` holds the section's own defaults, where they differ from those of its class.
    """
    for name, field in schema.model_fields.items():
        key, nested, item = f"{prefix}{name}", section_of(field), item_of(field)
        required = field.is_required() and defaults is None
        default = None if required else getattr(defaults, name, field.get_default(call_default_factory=True))
        if nested is not None:
            yield from iter_settings(nested, f"{key}.", default if isinstance(default, BaseModel) else None)
            continue
        shown = str(default) if isinstance(default, Path) else default
        text = "required" if required else repr(shown)
        yield Setting(key, type_name(field.annotation), text, setting_texts(schema)[name])
        if item is not None:
            yield from iter_settings(item, f"{key}[].")


def nearest(word: str, words: Sequence[str], cutoff: float = 0.5) -> str | None:
    """Return the most similar of `words`, if the similarity of any is at least `cutoff` (0 to 1)."""
    return next(iter(difflib.get_close_matches(word, words, n=1, cutoff=cutoff)), None)


def unknown_key(schema: type[BaseModel], tree: Tree, path: tuple[str, ...]) -> str | None:
    """Return the first key of `tree`, which is at `path`, that is no setting of `schema`, with the nearest one."""
    for key, value in tree.items():
        field = schema.model_fields.get(key)
        if field is None:
            where = ".".join((*path, key))
            like = nearest(key, list(schema.model_fields)) or nearest_anywhere(key, schema)
            hint = f"did you mean {'.'.join((*path, like))}?" if like else f"known: {', '.join(schema.model_fields)}"
            is_hidden = is_secret(schema, (key,)) or (like is not None and is_secret(schema, like))
            given = HIDDEN if is_hidden else shown(without_secrets(schema, value, (key,)))
            what = f"section {where}" if isinstance(value, dict) else f"setting {where} = {given}"
            return f"unknown {what}; {hint}"
        for nested, inner, at in _sections(field, value, (*path, key)):
            problem = unknown_key(nested, inner, at)
            if problem is not None:
                return problem
    return None


def _sections(
    field: FieldInfo, value: Any, path: tuple[str, ...]
) -> Iterator[tuple[type[BaseModel], Tree, tuple[str, ...]]]:
    """Yield the sections in a value: itself, or the members of a list."""
    one, many = section_of(field), item_of(field)
    if one is not None and isinstance(value, dict):
        yield one, value, path
    for number, item in enumerate(value if many is not None and isinstance(value, list) else ()):
        if many is not None and isinstance(item, dict):
            yield many, item, (*path, str(number))


def nearest_anywhere(key: str, schema: type[BaseModel]) -> str | None:
    """Return the full key of a setting below `schema` whose last part is like `key`: the wrong section was named."""
    known = {full.rpartition(".")[2]: full for full, *_ in reversed([*iter_settings(schema)])}
    like = nearest(key, list(known))
    return known[like] if like else None


def is_boolean(schema: type[BaseModel], keys: Sequence[str]) -> bool:
    """Return whether the setting below `schema` that `keys` name is true or false."""
    field = field_at(schema, keys)
    return field is not None and field.annotation is bool


def complete_toml(text: str) -> str:
    """Return TOML with a first and a last line by which `read_toml` sees that nothing of it was cut off.

    TOML that ends early is mostly still TOML, and means other settings.
    """
    return f"{_FIRST_LINE}{text}{_LAST_LINE}"


def read_toml(file: Path) -> Tree:
    """Read a TOML file. Raises ConfigError when it cannot be read, is no TOML, or lacks what `complete_toml` added."""
    try:
        if file.exists() and not file.is_file():
            raise ConfigError(f"the configuration file {file} is not a regular file; give the path of a TOML file")
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"the configuration file {file} has more than {MAX_FILE_BYTES >> 20} MiB; shorten it")
        text = file.read_text()
        is_begun = text.startswith(_FIRST_LINE) or _FIRST_LINE.startswith(text)
        if is_begun and not text.endswith(f"\n{_LAST_LINE}"):
            problem = "is cut off: its last line is missing" if text else "is empty"
            raise ConfigError(f"{file} {problem}; restore it, or begin a new run")
        return tomllib.loads(text)
    except FileNotFoundError:
        # Without the suffix, which makes all names alike.
        siblings = {path.stem: path for path in file.parent.glob("*.toml")} if file.parent.is_dir() else {}
        like = nearest(file.name.removesuffix(".toml"), list(siblings), cutoff=0.6)
        hint = f"did you mean {siblings[like]}?" if like else "give the path of a TOML file"
        raise ConfigError(f"the configuration file {file} does not exist; {hint}") from None
    except ConfigError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {file} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:  # also of a number of thousands of digits, or of deep nesting
        raise ConfigError(f"{file} is not valid TOML: {error}") from None


def parse_value(text: str) -> Any:
    """Read `text` as a TOML value where it is one (numbers, booleans, lists, tables), else as a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _put(tree: Tree, keys: Sequence[str], value: Any, origin: str) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{origin} sets a key below {key}, which is a value")
    tree[keys[-1]] = value


def type_name(annotation: Any) -> str:
    """Return a type as help shows it: ``int``, ``float | None``, ``'cpu' | 'cuda'``."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return "str" if annotation is Path else annotation.__name__
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " | ".join(map(repr, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join("None" if one is type(None) else type_name(one) for one in arguments)
    if origin in (tuple, list) and (len(arguments) == 1 or arguments[-1] is ...):
        return f"list of {type_name(arguments[0])}"
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", str(annotation))
