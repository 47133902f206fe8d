"""Whether a model's directory holds what a model needs, without reading it, and who may read it.

In: `[model]`. Out: nothing, or a `ModelError` that names the setting and the way out. Imports no
torch, so that it can be asked before anything is started.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.config import ModelSettings
from pipeline.errors import ConfigError, ModelError

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def check_model_files(model: ModelSettings) -> None:
    """All that a model needs is there. Raises ModelError."""
    require_configuration(model)
    require_weights(model)
    require_tokenizer(model)


def require_configuration(model: ModelSettings) -> None:
    """Raises ModelError where there is no config.json."""
    _check_files(model, ("config.json",), "configuration (config.json)")


def require_weights(model: ModelSettings) -> None:
    """Raises ModelError where there are no weights."""
    _check_files(model, _WEIGHT_FILES, "weights (*.safetensors)")


def require_tokenizer(model: ModelSettings) -> None:
    """Raises ModelError where there is no tokenizer."""
    _check_files(model, _TOKENIZER_FILES, "tokenizer (tokenizer.json)")


def _check_files(model: ModelSettings, patterns: tuple[str, ...], what: str) -> None:
    """A directory is looked into here; anything else that has a Hub id's form is left to the Hub."""
    if not model.path:
        raise ModelError("model.path is empty; set it to the directory of a Hugging Face causal language model")
    directory = Path(model.path).expanduser()
    if directory.is_dir():
        if not any(match for pattern in patterns for match in directory.glob(pattern)):
            raise ModelError(f"model.path = {model.path!r} has no {what}; point it to a complete checkpoint")
        return
    if directory.exists():
        raise ModelError(f"model.path = {model.path!r} is a file; point it to the directory of a checkpoint")
    if directory.is_absolute() or model.path.startswith((".", "~")) or model.path.count("/") > 1:
        raise ModelError(f"model.path = {model.path!r} does not exist; point it to the directory of a checkpoint")


def as_the_umask_says(directory: Path) -> None:
    """Give weights that were just written the mode of the configuration beside them.

    safetensors makes its files for their owner alone, whatever the umask is; a container or a server that
    runs as somebody else then cannot load the model.
    """
    mode = next(directory.glob("*config.json")).stat().st_mode & 0o777
    for file in directory.glob("*.safetensors"):
        if file.stat().st_mode & 0o777 != mode:  # not every mount knows modes
            file.chmod(mode)


@contextmanager
def naming(setting: str) -> Iterator[None]:
    """Errors of the model inside name `setting`, where the policy's would name model.path."""
    try:
        yield
    except (ModelError, ConfigError) as error:
        raise type(error)(str(error).replace("model.path", setting).replace("model.max_context", setting)) from error
