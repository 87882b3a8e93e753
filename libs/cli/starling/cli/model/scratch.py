"""A model folder from nothing: a configuration and a character tokenizer in Hugging Face format, without weights; or a
tiny pipeline of diffusers, without the weights of its transformer.

The policy that opens such a folder starts from random weights. The same settings give the same bytes.

Importing this module is cheap; `make_model_folder` imports transformers, and with it torch where torch is installed
(2 to 3 s), and diffusers for a pipeline. A process that wants none of them calls it in a child.
"""

from __future__ import annotations

import json
import os
import shutil
import string
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from starling.common.errors import ConfigError
from starling.common.files import sync_folder, sync_tree
from starling.common.ranges import MAX_TOKENS
from starling.common.settings import SettingsSection

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

PAD: Final = "<pad>"
EOS: Final = "<eos>"
UNK: Final = "<unk>"
SPECIAL_TOKENS: Final = (PAD, EOS, UNK)
"""The first tokens of every vocabulary, so their ids are 0, 1, 2."""

RECORD: Final = "scratch.json"
"""The file in the folder that records the settings it was made with."""

_ANY_CHARACTER: Final = r"[\s\S]"
_OF_LANGUAGE_MODELS: Final = ("model_type", "alphabet", "chat_template", "max_length")
"""Settings that a pipeline does not have."""
_OWNED: Final = ("vocab_size", "pad_token_id", "eos_token_id", "bos_token_id", "max_position_embeddings")


class ScratchSettings(SettingsSection):
    """A small causal language model to train from nothing, and its tokenizer with one token for each character; or a
    tiny diffusion model, with all that its pipeline has."""

    pipeline: Literal["", "wan", "cosmos"] = ""
    """Make a pipeline of diffusers for a run with `[diffusion]`, of the family Wan or Cosmos-Predict 2.5: a transformer
    of random weights, and VAE and text encoder of fixed ones, which no training changes. `config` has fields of the
    transformer, for example `num_layers`; its defaults are tiny. Empty: a language model."""
    model_type: str = "qwen3"
    """Architecture: any Hugging Face `model_type` of a causal language model."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Fields of that architecture's configuration, for example `hidden_size`; its defaults are of full size."""
    alphabet: str = Field(default=string.ascii_letters + string.digits + string.punctuation + " \n", min_length=1)
    """The characters that the tokenizer knows, in the order of their ids; any other becomes `<unk>`."""
    chat_template: str | None = None
    """Jinja chat template of the tokenizer; none for a model that is prompted with plain text."""
    max_length: int = Field(default=512, ge=1, le=MAX_TOKENS)
    """Maximum number of tokens of a sequence."""

    @field_validator("alphabet")
    @classmethod
    def _check_alphabet(cls, alphabet: str) -> str:
        repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
        if repeated:
            raise ValueError(f"alphabet repeats {''.join(repeated)!r}: write each character once")
        return alphabet

    @model_validator(mode="after")
    def _check_pipeline(self) -> Self:
        fields = type(self).model_fields
        for name in _OF_LANGUAGE_MODELS if self.pipeline else ():
            if getattr(self, name) != fields[name].default:
                raise ValueError(
                    f"{name} is of a language model, and pipeline = {self.pipeline!r} makes a diffusion model; remove "
                    "one of the two"
                )
        return self


@contextmanager
def model_folder(path: str, scratch: ScratchSettings | None) -> Iterator[Path]:
    """Yield the model folder at `path`, or a temporary one made of `scratch`. Raises ConfigError."""
    if scratch is None:
        yield Path(path)
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "model"
        make_model_folder(scratch, folder)
        yield folder


def make_model_folder(settings: ScratchSettings, folder: Path) -> None:
    """Write config.json, generation_config.json and the tokenizer of `settings` to `folder`, all or nothing; or the
    parts of a pipeline.

    A folder made before with the same settings is left as it is.
    Errors: `ConfigError` for an unknown architecture, a configuration that it does not take, a pipeline where diffusers
    is not installed, and a folder that holds something else.
    """
    try:
        _make_folder(settings, folder)
    except OSError as error:
        raise ConfigError(f"the model folder {folder} cannot be made: {error.strerror}; give another folder") from None


def _make_folder(settings: ScratchSettings, folder: Path) -> None:
    if folder.exists():
        if _is_made_with(settings, folder):
            return
        if not folder.is_dir() or any(folder.iterdir()):
            raise ConfigError(
                f"{folder} exists and was not made with these settings: remove it, or name another folder"
            )
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write_folder(settings, unfinished)
        unfinished.chmod(0o755)
        sync_tree(unfinished)
        os.replace(unfinished, folder)
        sync_folder(folder.parent)
    except BaseException:  # raised again; an interrupted command leaves no partial folder
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _is_made_with(settings: ScratchSettings, folder: Path) -> bool:
    try:
        return (folder / RECORD).read_text(encoding="utf-8") == _record(settings)
    except (OSError, UnicodeDecodeError):
        return False


def _record(settings: ScratchSettings) -> str:
    """Return the settings that the folder follows from, as JSON."""
    others = set(_OF_LANGUAGE_MODELS) if settings.pipeline else {"pipeline"}
    return json.dumps(settings.model_dump(mode="json", exclude=others), indent=2, sort_keys=True) + "\n"


def _write_folder(settings: ScratchSettings, folder: Path) -> None:
    if settings.pipeline:
        _write_pipeline(settings, folder)
    else:
        _write_language_model(settings, folder)
    (folder / RECORD).write_text(_record(settings), encoding="utf-8")


def _write_pipeline(settings: ScratchSettings, folder: Path) -> None:
    try:
        from starling.algo.diffusion.scratch import write_pipeline
    except ImportError as error:
        raise ConfigError(
            f"model.scratch.pipeline = {settings.pipeline!r} cannot be made ({error}): install the extra `diffusion`, "
            "as in starling-policy[diffusion]"
        ) from error
    write_pipeline(settings.pipeline, settings.config, folder)


def _write_language_model(settings: ScratchSettings, folder: Path) -> None:
    from transformers import GenerationConfig

    tokenizer = _make_tokenizer(settings)
    config = _make_config(settings, tokenizer)
    config.save_pretrained(folder)
    GenerationConfig(
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_tokenizer(settings: ScratchSettings) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose tokens are single characters, so that decoding undoes encoding exactly."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *settings.alphabet))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_ANY_CHARACTER), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        chat_template=settings.chat_template,
        model_max_length=settings.max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _make_config(settings: ScratchSettings, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if settings.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"model_type = {settings.model_type!r} is not a causal language model of transformers; "
            f"{_nearest(settings.model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}"
        )
    kind = CONFIG_MAPPING[settings.model_type]
    known = {*kind.__dataclass_fields__, *kind.attribute_map}
    for name in settings.config:
        if name in _OWNED:
            raise ConfigError(
                f"config.{name} follows from the alphabet and max_length: remove it, and set those instead"
            )
        if name not in known:
            raise ConfigError(f"a {settings.model_type} has no config.{name}; {_nearest(name, known)}")
    length = {"max_position_embeddings": settings.max_length} if "max_position_embeddings" in known else {}
    try:
        config: PreTrainedConfig = AutoConfig.for_model(
            settings.model_type,
            **settings.config,
            **length,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[settings.model_type]],
        )
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"config of the {settings.model_type} is refused ({reason}): correct it") from None
    return config


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f"nearest: {', '.join(matches)}" if matches else "see the documentation of transformers"
