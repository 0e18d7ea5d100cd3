"""Version checks: adapters patch other packages and refuse versions that they were not tested with.

An adapter that compares its results with the package's own on made-up numbers only warns.
"""

from __future__ import annotations

import warnings
from importlib import metadata


class UnknownVersion(RuntimeError):
    """The adapter was not tested with the installed version."""


def require_version(package: str, tested: tuple[str, ...], *, allow_untested: bool = False) -> str:
    """Return the installed version of `package`, which must begin with one of `tested`.

    Raises:
        UnknownVersion: names the installed version, the tested ones and the option to continue anyway.
        ModuleNotFoundError: if it is not installed; names the command that installs it.
    """
    version = _installed(package)
    if not allow_untested and not _is_tested(version, tested):
        raise UnknownVersion(
            f"{package}: this adapter was not tested with version {version} (tested: {', '.join(tested)}); "
            "pass allow_untested=True to try it, and compare the losses with the stock trainer"
        )
    return version


def is_tested_version(package: str, tested: tuple[str, ...]) -> bool:
    """Return whether the installed version begins with one of `tested`, and warn if it does not."""
    version = _installed(package)
    if _is_tested(version, tested):
        return True
    warnings.warn(
        f"{package}: this adapter was not tested with version {version} (tested: {', '.join(tested)}); it "
        "compares its results with the package's own on made-up numbers first",
        stacklevel=3,
    )
    return False


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        hint = "pip install leanstep[integrations]"
        raise ModuleNotFoundError(f"{package} is not installed: {hint}", name=package) from None


def _is_tested(version: str, tested: tuple[str, ...]) -> bool:
    return any(version == t or version.startswith(t + ".") for t in tested)
