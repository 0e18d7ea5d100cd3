"""A package the adapter does not know is refused with a line that says what to do."""

from __future__ import annotations

from importlib import metadata

import pytest

from leanstep.integrations.versions import UnknownVersion, require_version


def stub(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda package: version)


def test_a_tested_version_passes(monkeypatch):
    stub(monkeypatch, "1.16.4")
    assert require_version("trl", ("1.16",)) == "1.16.4"


@pytest.mark.parametrize("version", ["1.17.0", "2.0.0", "1.160.0", "0.9"])
def test_an_unknown_version_is_refused(monkeypatch, version):
    stub(monkeypatch, version)
    with pytest.raises(
        UnknownVersion, match=rf"trl: version {version} is not one .* \(1.16\); pass allow_untested"
    ):
        require_version("trl", ("1.16",))
    assert require_version("trl", ("1.16",), allow_untested=True) == version


def test_a_missing_package_names_the_command_that_installs_it():
    with pytest.raises(ModuleNotFoundError, match=r"no-such-package is not installed: pip install leanstep"):
        require_version("no-such-package", ("1",))
