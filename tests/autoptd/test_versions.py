"""A warning, once, where torch or triton are of versions that nobody has tried."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

from autoptd.versions import read_versions, warn_untested


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.1+cu130", "2.14.0a0+git1234"])
def test_a_tested_version_is_no_news(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_untested({"torch": version})


@pytest.mark.parametrize("version", ["2.9.1", "2.10.0", "2.15.0", "3.0", "nightly"])
def test_another_version_is_warned_of(version: str) -> None:
    message = (
        rf"torch {version} is not among the versions autoptd is tested with \(2\.11 to 2\.14\): "
        r'install "torch==2\.14\.\*", or run autoptd\'s tests and program\.verify'
    )
    with pytest.warns(UserWarning, match=message):
        warn_untested({"torch": version})


def test_the_torch_version_read_is_torchs_own() -> None:
    assert read_versions()["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_the_compiler_warns_once_when_it_is_imported() -> None:
    code = (
        "import warnings, autoptd.versions as v\n"
        "v.TESTED['torch'] = ('1.0', '1.5')\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    import autoptd; autoptd.compile; autoptd.load\n"
        "print([str(w.message) for w in seen if 'tested with (1.0 to 1.5)' in str(w.message)])"
    )
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert run.stdout.count("is not among the versions") == 1
