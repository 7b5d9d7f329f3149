"""Where an encoder lies, what of its folder counts, and what the messages say where there is none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import encoders
import pytest

from xmlc.config import EncoderConfig
from xmlc.data import pretrained
from xmlc.data.pretrained import copy_encoder, encoder_files, encoder_fingerprint, locate_encoder
from xmlc.errors import CheckpointError, ConfigError


def config(path: object, **settings: Any) -> EncoderConfig:
    return EncoderConfig(kind="transformer", path=str(path), **settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of an encoder, of any content."""
    made = tmp_path / "encoder"
    made.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "vocab.txt"):
        (made / name).write_text(name)
    return made


def test_a_folder_is_found_by_its_path(folder: Path) -> None:
    assert locate_encoder(config(folder)) == folder


def test_a_folder_inside_an_installed_package_is_found_without_importing_it(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "carries_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    folder.rename(package / "model")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert locate_encoder(config("package:carries_a_model/model")) == package / "model"
    assert "carries_a_model" not in sys.modules


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("package:there_is_none_such/model", "no such package"),
        ("package:xmlc/there is none", "no folder 'there is none' in it"),
        ("package:os.path/x", "no such package"),
        ("package:/x", "no such package"),
        ("./nowhere", "nothing at ./nowhere"),
        ("/a/b/c", "nothing at /a/b/c"),
        (__file__, "a file at"),
    ],
)
def test_a_path_that_leads_nowhere_is_named(path: str, found: str) -> None:
    with pytest.raises(ConfigError, match=r"^encoder\.path: .*found") as raised:
        locate_encoder(config(path))
    assert found in str(raised.value)


def test_a_name_is_looked_for_on_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: Any, **__: Any) -> Any:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", no_network)
    monkeypatch.setattr("socket.getaddrinfo", no_network)
    with pytest.raises(ConfigError, match=r"in the Hub's cache on this machine.*encoder\.download = true"):
        locate_encoder(config("somebody/some-encoder-that-is-not-here"))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_lacks_a_part_is_refused(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=r"must hold config\.json and weights in safetensors, found no"):
        locate_encoder(config(folder))


def test_pickled_weights_are_named_and_not_loaded(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pickled weights are never loaded"):
        locate_encoder(config(folder))


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretrained.transformers.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"needs the packages of the extra .*pip install 'xmlc\[text\]'"):
        pretrained.transformers()


def test_only_settings_tokenizer_and_safetensors_count(folder: Path) -> None:
    before = encoder_fingerprint(folder)
    for name in ("README.md", "modeling.py", "pytorch_model.bin"):
        (folder / name).write_text("x")
    (folder / "1_Pooling.json").mkdir()
    assert [path.name for path in encoder_files(folder)] == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "vocab.txt",
    ]
    assert encoder_fingerprint(folder) == before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.txt"])
def test_any_changed_byte_changes_the_fingerprint(folder: Path, name: str) -> None:
    before = encoder_fingerprint(folder)
    (folder / name).write_text(f"{name}.")
    assert encoder_fingerprint(folder) != before


def test_a_copy_has_the_fingerprint_and_none_of_the_code(folder: Path, tmp_path: Path) -> None:
    (folder / "modeling.py").write_text("x")
    (folder / "vocab.txt").rename(tmp_path / "blob")
    (folder / "vocab.txt").symlink_to(tmp_path / "blob")  # as in the Hub's cache
    target = tmp_path / "run" / "encoder"
    target.parent.mkdir()
    copy_encoder(folder, target)
    assert encoder_fingerprint(target) == encoder_fingerprint(folder)
    assert not (target / "modeling.py").exists()
    assert not (target / "vocab.txt").is_symlink()
    assert list(target.parent.iterdir()) == [target]


def test_a_copy_that_fails_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").chmod(0o644)
    target = tmp_path / "run" / "encoder"
    target.parent.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.copyfile", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(CheckpointError, match="No space left"):
            copy_encoder(folder, target)
    assert list(target.parent.iterdir()) == []


def test_the_tiny_encoder_of_the_tests_is_a_folder_of_an_encoder(tmp_path: Path) -> None:
    folder = encoders.write(tmp_path / "tiny")
    assert locate_encoder(config(folder)) == folder
