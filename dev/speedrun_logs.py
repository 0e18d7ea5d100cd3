"""Logs of the NanoGPT speedrun (KellerJordan/modded-nanogpt): the script in a log, and tokens for it to read.

    python dev/speedrun_logs.py CHECKOUT LOG    # logged ms per step between steps, to write a row from

A log begins with the script that wrote it (and its kernels), then one line per step. The script is only run,
from a temporary folder; nothing of it is stored here.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from leanstep.files import BadInput

RECORDS = "records/track_1_short/"
RULE = "=" * 100
COMPANION = re.compile(r"\n\n-{40}\n# (\w+\.py)\n-{40}\n\n")
STEP = re.compile(r"^step:(\d+)/\d+ .*?train_time:(\d+)ms", re.MULTILINE)
HEADER_INTS, MAGIC, END_OF_TEXT = 256, 20240520, 50256
TRAIN_TOKENS, VAL_TOKENS = 20_000_000, 11_000_000


def read_log(checkout: Path, log: str) -> str:
    """A log among the records of a clone (with or without a work tree), or a file at its top."""
    path = log if "/" not in log else RECORDS + log
    if (checkout / path).is_file():
        return (checkout / path).read_text(encoding="utf-8", errors="replace")
    shown = subprocess.run(["git", "-C", str(checkout), "show", f"HEAD:{path}"], capture_output=True)
    if shown.returncode:
        raise BadInput(f"--speedrun: expected a clone of modded-nanogpt; {checkout} has no {path}")
    return shown.stdout.decode("utf-8", "replace")


def files_in(text: str) -> dict[str, str]:
    """The files that a log holds: train_gpt.py and what it was logged with."""
    text = text.lstrip()
    if text.startswith(RULE):
        text = text.partition("\n")[2]
    script, *others = COMPANION.split(text.split("\n" + RULE)[0] + "\n")
    if "import torch" not in script:
        raise BadInput("log: expected a log that begins with its script")
    return {"train_gpt.py": script, **dict(zip(others[::2], others[1::2], strict=True))}


def companions(checkout: Path, script: str) -> dict[str, str]:
    """Kernel modules of the repository that the script imports."""
    names = re.findall(r"^\s*(?:from|import) (\w*triton_kernels)\b", script, re.MULTILINE)
    return {f"{name}.py": read_log(checkout, f"{name}.py") for name in names}


def logged_ms(text: str, first: int, last: int) -> float:
    """Mean milliseconds per step from the end of step `first` to the end of step `last`."""
    times = {int(step): int(ms) for step, ms in STEP.findall(text)}
    if first not in times or last not in times:
        raise BadInput(f"steps: expected logged steps, got {first} and {last} of {len(times)}")
    return (times[last] - times[first]) / (last - first)


def write_tokens(folder: Path) -> None:
    """Token files of random documents, lengths as in web text: lognormal, median 365 tokens."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    sizes = {f"train_{i:06d}": TRAIN_TOKENS for i in (1, 2, 3)} | {"val_000000": VAL_TOKENS}
    for name, size in sizes.items():
        tokens = random.integers(0, END_OF_TEXT, size, dtype=np.uint16)
        lengths = np.clip(random.lognormal(5.9, 1.0, size // 300), 20, 20_000).astype(int)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        tokens[starts[starts < size]] = END_OF_TEXT
        header = np.zeros(HEADER_INTS, np.int32)
        header[:3] = MAGIC, 1, size
        (folder / f"fineweb_{name}.bin").write_bytes(header.tobytes() + tokens.tobytes())


@contextlib.contextmanager
def prepared(log: str | None, checkout: Path | None) -> Iterator[Path | None]:
    """A folder to run the script of a log in, as working directory: its path. None without a log."""
    if log is None:
        yield None
        return
    if checkout is None:
        raise BadInput(f"--speedrun: expected a clone of modded-nanogpt for {log}")
    files = files_in(read_log(checkout, log))
    files = companions(checkout, files["train_gpt.py"]) | files
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="leanstep-speedrun-") as name:
        folder = Path(name)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
        (folder / "logs").mkdir()  # some records expect it
        write_tokens(folder / "data" / "fineweb10B")
        os.chdir(folder)
        try:
            yield folder / "train_gpt.py"
        finally:
            os.chdir(before)


def main() -> None:
    text = read_log(Path(sys.argv[1]), sys.argv[2])
    steps = sorted({int(step) for step, _ in STEP.findall(text)})
    print("\n".join(sorted(files_in(text))))
    for first, last in ((10, 20), (20, 60), (60, 120), (steps[-1] // 2, steps[-1])):
        print(f"steps {first} to {last}: {logged_ms(text, first, last):.2f} ms")


if __name__ == "__main__":
    main()
