"""A package the adapter does not know is refused with a line that says what to do."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata

import pytest

from leanstep.integrations.versions import UnknownVersion, is_tested_version, require_version


def stub(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda package: version)


def test_a_tested_version_passes(monkeypatch):
    stub(monkeypatch, "1.16.4")
    assert require_version("trl", ("1.16",)) == "1.16.4"


@pytest.mark.parametrize("version", ["1.17.0", "2.0.0", "1.160.0", "0.9"])
def test_an_unknown_version_is_refused(monkeypatch, version):
    stub(monkeypatch, version)
    with pytest.raises(
        UnknownVersion,
        match=rf"trl: this adapter was not tested with version {version} \(tested: 1.16\); "
        "pass allow_untested",
    ):
        require_version("trl", ("1.16",))
    assert require_version("trl", ("1.16",), allow_untested=True) == version


def test_where_results_are_compared_an_unknown_version_only_warns(monkeypatch):
    stub(monkeypatch, "0.18.0")
    assert is_tested_version("megatron-core", ("0.16", "0.18"))
    with pytest.warns(
        UserWarning, match=r"megatron-core: .* not tested with version 0.18.0 \(tested: 0.16\)"
    ):
        assert not is_tested_version("megatron-core", ("0.16",))


def test_a_missing_package_names_the_command_that_installs_it():
    with pytest.raises(ModuleNotFoundError, match=r"no-such-package is not installed: pip install leanstep"):
        require_version("no-such-package", ("1",))


@pytest.mark.parametrize(
    ("package", "module", "modules"),
    [
        ("trl", "trl", ("trl",)),
        ("transformers", "transformers", ("transformers",)),
    ],
)
def test_an_adapter_refuses_an_unknown_package_before_importing_it(
    tmp_path, monkeypatch, package, module, modules
):
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").write_text("raise AssertionError('the stub was imported')\n")
    information = tmp_path / f"{package.replace('-', '_')}-9.0.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [n for n in sys.modules if n == module or n.startswith(module + ".")]:
        monkeypatch.delitem(sys.modules, name)
    for name in modules:
        monkeypatch.delitem(sys.modules, f"leanstep.integrations.{name}", raising=False)
    with pytest.raises(UnknownVersion, match=rf"{package}: this adapter was not tested with version 9.0.0"):
        importlib.import_module(f"leanstep.integrations.{module}")
