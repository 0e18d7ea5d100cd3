"""Other versions of packages on top of the present environment: `--with trl==1.15`.

An overlay is a virtual environment that sees this one's packages and holds only what differs. torch stays the
installed one.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

from leanstep.files import BadInput


def overlay(requirements: str, folder: Path) -> tuple[str, ...]:
    """Install `requirements` into `folder`, or take them from it; return what goes in front of sys.path.

    requirements: separated by spaces, as pip accepts them; an existing folder is used as it is, like an entry
        of PYTHONPATH.
    """
    words = shlex.split(requirements)
    folders = [word for word in words if Path(word).is_dir()]
    packages = [word for word in words if word not in folders]
    if not words:
        raise BadInput("--with: expected a requirement such as trl==1.15, got nothing")
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    finished = folder / "installed.txt"
    if packages and not (finished.exists() and finished.read_text(encoding="utf-8") == requirements):
        _install(packages, folder, site)
        finished.write_text(requirements, encoding="utf-8")
    front = [str(Path(f).resolve()) for f in folders]
    return (*front, str(site)) if packages else tuple(front)


def _install(packages: list[str], folder: Path, site: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    # The packages of this environment, behind those of the overlay.
    seen = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    seen += [sysconfig.get_paths()["purelib"]]
    (site / "below.pth").write_text("\n".join(dict.fromkeys(seen)) + "\n", encoding="utf-8")
    constraint = folder / "constraints.txt"
    constraint.write_text(f"torch=={version('torch')}\n", encoding="utf-8")
    python = folder / "bin" / "python" if os.name != "nt" else folder / "Scripts" / "python.exe"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *packages]
    command += ["--constraint", str(constraint), "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line.strip(" ×") for line in done.stderr.splitlines() if "did not run succ" in line]
        lines += [line for line in done.stderr.splitlines() if line.startswith(("ERROR", "error"))]
        raise BadInput(f"--with: {' '.join(packages)}: {lines[0] if lines else 'pip failed'}")
