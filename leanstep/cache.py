"""Where leanstep keeps what is worth making once per machine: the default corpus, the built C++ library."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """`LEANSTEP_CACHE`, or leanstep's folder in the user's cache."""
    override = os.environ.get("LEANSTEP_CACHE")
    if override:
        return Path(override)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "leanstep"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leanstep"
