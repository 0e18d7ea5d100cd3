"""Maintainers' scripts: kernel checks, calibration, the published table, fuzzers, the site."""
