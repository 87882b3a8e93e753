"""Loading of a model's tokenizer, refused at the start of a process if the model cannot work with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from starling.algo.architecture import remedy
from starling.common.errors import ConfigError

FILES: Final = ("tokenizer*", "vocab*", "*.model")


def load_tokenizer(folder: Path, config: Any = None, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer in `folder`.

    Args:
        folder: of the model.
        config: of the model in transformers; None to leave the vocabulary unchecked.
        trust_remote_code: run Python code from the folder.

    Raises:
        ConfigError: there is none, it cannot be read, or it has tokens for which the model has no embedding.
    """
    # Imported here, because importing transformers takes seconds.
    from transformers import AutoTokenizer

    # For a folder without a tokenizer, transformers would return a nearly empty one.
    if not any(True for pattern in FILES for _ in folder.glob(pattern)):
        raise ConfigError(f"the model folder {folder} has no tokenizer; add its tokenizer.json")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the user's folder: transformers and the folder's own code may raise anything
        reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0].rstrip(".")
        reason += remedy(folder, trust_remote_code)
        raise ConfigError(f"the model folder {folder} has no tokenizer that can be read: {reason}") from error
    if config is not None:
        _check_vocabulary(tokenizer, folder, int(config.get_text_config().vocab_size))
    return tokenizer


def check_end_token(tokenizer: Any, folder: Path) -> None:
    """Refuse a tokenizer without an end-of-sequence token, which a model that learns from examples learns to write.

    Raises:
        ConfigError: with the remedy.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer in {folder} has no end-of-sequence token, so the model could not learn when to stop; set "
            "eos_token in its tokenizer_config.json"
        )


def _check_vocabulary(tokenizer: Any, folder: Path, num_embeddings: int) -> None:
    """Refuse ordinary tokens beyond the embedding, with which a prompt could not be read.

    Special ones may lie there: Gemma 3 without vision has the tokenizer of its models with vision.
    """
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    beyond = {
        token: id_
        for token, id_ in tokenizer.get_vocab().items()
        if id_ >= num_embeddings and (token not in special or token == tokenizer.eos_token)
    }
    if beyond:
        token, id_ = min(beyond.items(), key=lambda item: item[1])
        raise ConfigError(
            f"the tokenizer in {folder} gives {token!r} the id {id_}, and the model has embeddings for "
            f"{num_embeddings} tokens (vocab_size in config.json); give the model its own tokenizer"
        )
