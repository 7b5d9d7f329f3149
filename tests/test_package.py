"""The package from outside: what `import xmlc` offers, and what it costs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

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
