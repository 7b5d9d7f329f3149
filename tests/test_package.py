"""The package from outside: what `import xmlc` offers, and what it costs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import xmlc
from xmlc import errors


def python(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter and return its stdout."""
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**clean, **environment},
    )
    return done.stdout


def test_importing_it_does_not_wait_for_torch() -> None:
    loaded = python(
        "import sys, xmlc, xmlc.config, xmlc.metrics, xmlc.reports; print('torch' in sys.modules)"
    )
    assert loaded == "False\n"


def test_its_public_names_are_there() -> None:
    for name in xmlc.__all__:
        assert getattr(xmlc, name) is not None


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'xmlc' has no attribute 'frobnicate'"):
        xmlc.frobnicate  # noqa: B018


def test_its_version_is_the_installed_one() -> None:
    assert xmlc.__version__ == metadata.version("xmlc")


def test_idle_threads_of_torch_do_not_spin_unless_asked_to() -> None:
    code = "import os, xmlc; print(os.environ.get('OMP_WAIT_POLICY'))"
    assert python(code) == "PASSIVE\n"
    assert python(code, OMP_WAIT_POLICY="ACTIVE") == "ACTIVE\n"


def test_every_error_on_purpose_is_an_xmlc_error() -> None:
    for error in (errors.ConfigError, errors.DataError, errors.CheckpointError, errors.NativeError):
        assert issubclass(error, errors.XmlcError)


def test_a_source_folder_that_hides_the_package_is_named(tmp_path: Path) -> None:
    source = Path(__file__).resolve().parent.parent / "xmlc"
    shutil.copytree(source, tmp_path / "xmlc", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "pyproject.toml").touch()
    code = (  # without the finder of an editable install, which would find the built module after all
        f"import sys; sys.meta_path = [f for f in sys.meta_path if isinstance(f, type)]; "
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from xmlc.errors import NativeError\n"
        "try:\n    import xmlc.native\nexcept NativeError as error:\n    print(error)"
    )
    found = python(code)
    assert found.startswith("native: the CPU kernels must be built and importable, found: ")
    assert "is the source, which hides an installed package" in found
