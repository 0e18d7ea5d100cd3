"""Version checks: adapters patch other packages and refuse versions that they were not tested with."""

from __future__ import annotations

from importlib import metadata


class UnknownVersion(RuntimeError):
    """The adapter was not tested with the installed version."""


def require_version(package: str, tested: tuple[str, ...], *, allow_untested: bool = False) -> str:
    """Return the installed version of `package`, which must begin with one of `tested`.

    Raises:
        UnknownVersion: names the installed version, the tested ones and the option to continue anyway.
        ModuleNotFoundError: if it is not installed; names the command that installs it.
    """
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        hint = "pip install leanstep[integrations]"
        raise ModuleNotFoundError(f"{package} is not installed: {hint}", name=package) from None
    if not allow_untested and not any(version == t or version.startswith(t + ".") for t in tested):
        raise UnknownVersion(
            f"{package}: this adapter was not tested with version {version} (tested: {', '.join(tested)}); "
            "pass allow_untested=True to try it, and compare the losses with the stock trainer"
        )
    return version
