"""Where a Hugging Face encoder lies: its folder, the files of it that count, and their fingerprint."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from xmlc.config import EncoderConfig
from xmlc.data.card import sha256
from xmlc.errors import ConfigError, DataError
from xmlc.files import sync, temporary_of, writing

_PACKAGE = "package:"
# No code (.py) and nothing pickled (.bin, .pt): what is not here can neither be run nor copied.
_SUFFIXES = (".json", ".txt", ".model", ".safetensors")


@cache
def transformers() -> Any:
    """Import the package `transformers`.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"encoder.kind = transformer: needs the packages of the extra `text`, found none ({error}); "
            "install them with `pip install 'xmlc[text]'`"
        ) from None
    return transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' own messages and bars off stderr; what matters of them is an error of ours."""
    log = transformers().utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(logging.CRITICAL)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def locate_encoder(config: EncoderConfig) -> Path:
    """Return the folder of ``encoder.path``; the network is used only with ``encoder.download``.

    Raises:
        ConfigError: There is no such folder, package or name, or it holds no encoder.
    """
    path = config.path
    if path.startswith(_PACKAGE):
        folder = _in_package(path)
    elif Path(path).is_dir():
        folder = Path(path).resolve()
    elif Path(path).exists() or path.count("/") > 1 or path.startswith((".", "/", "~")):
        raise ConfigError(
            f"encoder.path: must be a folder with an encoder, found {_found(Path(path))} at {path}; "
            "correct the path"
        )
    else:
        folder = _from_hub(path, config.download)
    for name in ("config.json", "*.safetensors"):
        if not any(folder.glob(name)):
            pickled = " (pickled weights are never loaded: save them as safetensors)" * any(
                folder.glob("*.bin")
            )
            raise ConfigError(
                f"encoder.path: {folder} must hold config.json and weights in safetensors, found no "
                f"{name}{pickled}; name the folder that `save_pretrained` has written"
            )
    return folder


def _found(path: Path) -> str:
    return "a file" if path.exists() else "nothing"


def _in_package(path: str) -> Path:
    name, _, inside = path.removeprefix(_PACKAGE).partition("/")
    try:
        spec = find_spec(name)  # of a top-level package: nothing of it is run
    except (ImportError, ValueError):
        spec = None
    places = [] if spec is None or "." in name else list(spec.submodule_search_locations or [])
    for place in places:
        if Path(place, inside).is_dir():
            return Path(place, inside).resolve()
    found = f"no folder {inside!r} in it" if places else "no such package"
    raise ConfigError(
        f"encoder.path: {path} must name an installed package and a folder in it, found {found}; install the "
        "package, or correct the folder"
    )


def _from_hub(name: str, download: bool) -> Path:
    transformers()  # brings huggingface_hub along, or a clear error
    from huggingface_hub import snapshot_download

    try:
        patterns = [f"*{suffix}" for suffix in _SUFFIXES]
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=not download))
    except Exception as error:  # of the network, the Hub, or the name
        asked = "on the Hugging Face Hub" if download else "in the Hub's cache on this machine"
        advice = "check name and network" if download else "or set encoder.download = true to fetch it"
        raise ConfigError(
            f"encoder.path: must be a folder, or a model's name {asked}, found neither at {name!r} "
            f"({type(error).__name__}: {first_line(error)}); correct it, {advice}"
        ) from None


def encoder_files(folder: Path) -> list[Path]:
    """Return the files of an encoder's folder that count, by name: settings, tokenizer, safetensors."""
    return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())


def encoder_fingerprint(folder: Path) -> str:
    """Return 32 hexadecimal digits of SHA-256 over names and bytes of `encoder_files`."""
    digest = hashlib.sha256()
    for path in encoder_files(folder):
        digest.update(f"{path.name} {sha256(path)}\n".encode())
    return digest.hexdigest()[:32]


def copy_encoder(folder: Path, target: Path) -> None:
    """Copy the files that count into ``target``, which appears whole or not at all, or is there already.

    Raises:
        CheckpointError: The disk refuses.
    """
    fresh = temporary_of(target)
    with writing(target):
        shutil.rmtree(target, ignore_errors=True)
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            fresh.mkdir()
            for path in encoder_files(folder):
                shutil.copyfile(path, fresh / path.name)
                sync(fresh / path.name)
            sync(fresh)
            fresh.rename(target)
            sync(target.parent)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def first_line(error: Exception) -> str:
    """Return the start of an error of the library, which may run to pages."""
    return str(error).strip().partition("\n")[0][:200]


def no_texts(name: str, kind: str) -> DataError:
    """Return the error that a data set has nothing for a transformer to read."""
    return DataError(
        f"{name}: encoder.kind = transformer needs texts, found {kind} features; use a data set of texts, or "
        "encoder.kind = features"
    )
