"""The first and last versions of torch and triton that the tests have run with, and a warning about others."""

import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from autoptd.runtime.user_warnings import warn_caller

# The first and the last version, major.minor.
TESTED = {"torch": ("2.11", "2.14"), "triton": ("3.6", "3.9")}


def read_versions() -> dict[str, str]:
    """Return the installed versions of the packages in `TESTED`, without those that are not installed."""
    found = {}
    for name in TESTED:
        with suppress(PackageNotFoundError):  # triton is there on GPUs only
            found[name] = version(name)
    return found


def warn_untested(versions: Mapping[str, str]) -> None:
    """Warn of each package whose version is outside the tested range: what is found, the range, how to proceed."""
    for name, found in versions.items():
        first, last = TESTED[name]
        ascending = [[int(number) for number in re.findall(r"\d+", own)[:2]] for own in (first, found, last)]
        if ascending == sorted(ascending):
            continue
        tested = f"{first} to {last}" if first != last else first
        warn_caller(
            f'{name} {found} is not among the versions autoptd is tested with ({tested}): install "{name}=={last}.*", '
            "or run autoptd's tests and program.verify() here before you trust a long run to it"
        )
