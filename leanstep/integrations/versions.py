"""Adapters reach into packages they do not own: a version they were not tested with is refused."""

from __future__ import annotations

from importlib import metadata


class UnknownVersion(RuntimeError):
    """The installed package is not one the adapter was tested with."""


def require_version(package: str, tested: tuple[str, ...], *, allow_untested: bool = False) -> str:
    """The installed version of `package`, which must begin with one of `tested`.

    Raises:
        UnknownVersion: naming what is installed, what was tested and the way to go on regardless.
        ModuleNotFoundError: when it is not installed, with the command that installs it.
    """
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        hint = "pip install leanstep[integrations]"
        raise ModuleNotFoundError(f"{package} is not installed: {hint}", name=package) from None
    if not allow_untested and not any(version == t or version.startswith(t + ".") for t in tested):
        raise UnknownVersion(
            f"{package}: version {version} is not one this adapter was tested with ({', '.join(tested)}); "
            "pass allow_untested=True to try it, and compare the losses with the stock trainer"
        )
    return version
