"""Checkpoints that survive `kill -9`: one safetensors file per step, written aside and renamed.

A checkpoint is a nested state (dicts, lists, tuples, tensors, numbers, strings, None). Tensors go into
the safetensors body; the rest goes as JSON into its header, with a checksum over the body. Nothing is
pickled, so loading a third-party file runs no code.

    save(directory, step, state, settings=..., keep=3)
    found = load_latest(directory, settings=...)      # the newest that is whole and belongs to this run
    check_like(template, found.state)                 # has what a fresh state has: names, types, shapes

Writing: temporary file in the same directory, fsync, rename, fsync of the directory. A process that is killed
at any moment leaves either the old set of files or the new one, plus at most a temporary file that the
next run removes. A file that is torn anyway (a dying disk, a copy cut short) fails its checksum, is
reported in one line and passed over for the one before it.
"""

from __future__ import annotations

import json
import random
import re
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as serialise_tensors
from torch import Tensor

from leanstep.files import write_atomically
from leanstep.recipes.distributed import World

FORMAT = "leanstep-checkpoint-1"
# Bytes of a header: a name and a shape per tensor, and the run's settings and counters.
MAX_HEADER = 100 << 20
_NAME = re.compile(r"^step-(\d{8})\.safetensors$")
_TEMPORARY = re.compile(r"^\.(step-\d{8}\.safetensors|metrics\.jsonl|settings\.json)\.[\w-]+\.partial$")


class CheckpointError(ValueError):
    """A file that is no usable checkpoint; the message says why."""


@dataclass(frozen=True)
class Loaded:
    """What `load_latest` found."""

    path: Path
    step: int
    state: Any


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}.safetensors"


def list_checkpoints(directory: Path) -> list[Path]:
    """Files named like checkpoints, oldest first. Their content is not looked at."""
    if not directory.is_dir():
        return []
    return sorted(p for p in directory.iterdir() if _NAME.match(p.name))


def save(directory: Path, step: int, state: Any, *, settings: Mapping[str, Any], keep: int = 3) -> Path:
    """Write `state` as the checkpoint of `step`, then delete all but the newest `keep` up to it.

    Args:
        directory: created when missing.
        step: steps completed so far, >= 0.
        state: nested dicts, lists and tuples of tensors, numbers, strings, None and torch dtypes.
        settings: what identifies the run (JSON); a run with other settings will not load this file.
        keep: how many checkpoints stay, >= 1.

    Returns:
        The path of the new file.
    """
    if step < 0 or step > 99_999_999:
        raise ValueError(f"step: expected 0 .. 99999999, got {step}")
    if keep < 1:
        raise ValueError(f"keep: expected at least 1, got {keep}")
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    tree = _flatten(state, "", tensors)
    header = {
        "format": FORMAT,
        "step": str(step),
        "settings": json.dumps(settings),
        "state": json.dumps(tree),
        "checksum": _checksum(tensors),
    }
    path = checkpoint_path(directory, step)
    write_atomically(path, serialise_tensors(tensors, metadata=header))
    # A damaged file with a later step must not count, or the one just written might be deleted for it.
    for old in [p for p in list_checkpoints(directory) if p.name <= path.name][:-keep]:
        old.unlink(missing_ok=True)
    return path


def load(path: Path, *, settings: Mapping[str, Any] | None = None) -> Loaded:
    """Read one checkpoint; `CheckpointError` says what is wrong with a bad one.

    With `settings`, a checkpoint of a run with other settings is refused and the differences are named.
    """
    data = _read_whole(path)
    try:
        header_length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + header_length]).get("__metadata__", {})
        if header.get("format") != FORMAT:
            raise CheckpointError(f"not a {FORMAT} file")
        tensors = parse_tensors(data)
        step, tree = int(header["step"]), json.loads(header["state"])
        saved_settings = json.loads(header["settings"])
    except (
        SafetensorError,
        UnicodeDecodeError,
        AttributeError,
        KeyError,
        TypeError,
        RecursionError,
        json.JSONDecodeError,
    ) as error:
        raise CheckpointError(f"torn or foreign file ({type(error).__name__})") from error
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if _checksum(tensors) != header.get("checksum"):
        raise CheckpointError("checksum does not match its content")
    if step < 0:
        raise CheckpointError(f"step: expected 0 or more, got {step}")
    if not isinstance(saved_settings, dict):
        raise CheckpointError(f"settings: expected named entries, got {_short(saved_settings)}")
    if settings is not None:
        difference = _settings_difference(saved_settings, json.loads(json.dumps(settings)))
        if difference:
            raise ForeignCheckpoint(f"made with other settings: {difference}")
    try:
        return Loaded(path, step, _unflatten(tree, tensors))
    except KeyError as error:
        raise CheckpointError(f"tensor {error.args[0]} is missing") from error
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"torn or foreign content ({type(error).__name__})") from error


def _read_whole(path: Path) -> bytes:
    """The file, if it is one and as long as its header says; a huge or endless one is not read."""
    if not path.is_file():
        raise CheckpointError("no regular file")
    size = path.stat().st_size
    with path.open("rb") as file:
        header_length = int.from_bytes(file.read(8), "little")
        if not 0 < header_length <= min(size, MAX_HEADER):
            raise CheckpointError("torn or foreign file (no header)")
        try:
            entries = json.loads(file.read(header_length))
            ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
            expected = 8 + header_length + max(ends, default=0)
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"torn or foreign file ({type(error).__name__})") from None
        if size != expected:
            raise CheckpointError(f"torn file: expected {expected:,} bytes, got {size:,}")
        try:
            file.seek(0)
            return file.read()
        except MemoryError:
            raise CheckpointError(f"too large for this machine's memory: {size:,} bytes") from None


class ForeignCheckpoint(CheckpointError):
    """A whole checkpoint, but of a run with other settings."""


def load_latest(
    directory: Path,
    *,
    settings: Mapping[str, Any],
    say: Callable[[str], None] = lambda line: None,
    use: Callable[[Loaded], None] = lambda loaded: None,
) -> Loaded | None:
    """The newest usable checkpoint of this run, or None when the directory has no checkpoint at all.

    Every file passed over is reported through `say` in one line; `use` may refuse a file by raising
    `CheckpointError`. When files exist but none can be used, `CheckpointError` is raised: silently starting
    again at step 0 would be worse.
    """
    reasons = []
    for path in reversed(list_checkpoints(directory)):
        try:
            usable = load(path, settings=settings)
            if path != checkpoint_path(directory, usable.step):
                raise CheckpointError(f"holds step {usable.step}, not the step of its name")
            use(usable)
            return usable
        except (CheckpointError, OSError) as error:
            reasons.append(f"{path.name}: {error}")
            say(f"checkpoint {path.name} skipped: {error}")
    if reasons:
        raise CheckpointError(f"no usable checkpoint in {directory}: {reasons[0]}")
    return None


def check_like(template: Any, state: Any, path: str = "state") -> None:
    """`CheckpointError` unless `state` has everything that `template` has, of the same type and shape.

    Lists may be longer or shorter (one entry per rank), and dicts may have more keys (an optimizer's state
    before the first step is empty); where the template has None, anything goes.
    """
    if template is None:
        return
    if isinstance(template, Tensor):
        if not isinstance(state, Tensor):
            raise CheckpointError(f"{path}: expected a tensor, got {type(state).__name__}")
        if state.shape != template.shape or state.dtype != template.dtype:
            raise CheckpointError(
                f"{path}: expected {template.dtype} {tuple(template.shape)}, "
                f"got {state.dtype} {tuple(state.shape)}"
            )
    elif isinstance(template, Mapping):
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{path}: expected named entries, got {type(state).__name__}")
        for key, inner in template.items():
            if key not in state:
                raise CheckpointError(f"{path}.{key} is missing")
            check_like(inner, state[key], f"{path}.{key}")
    elif isinstance(template, list | tuple):
        if not isinstance(state, list | tuple) or bool(template) > bool(state):
            raise CheckpointError(f"{path}: expected a list of entries, got {_short(state)}")
        for i, (inner, entry) in enumerate(zip(template, state, strict=False)):
            check_like(inner, entry, f"{path}[{i}]")
    elif isinstance(template, int | float):
        if not isinstance(state, int | float):
            raise CheckpointError(f"{path}: expected a number, got {_short(state)}")
    elif type(state) is not type(template):
        raise CheckpointError(f"{path}: expected {type(template).__name__}, got {_short(state)}")


def find_nonfinite(state: Any, path: str = "state") -> str | None:
    """The first tensor of `state` that holds NaN or infinity, or None."""
    tensors: dict[str, Tensor] = {}
    _flatten(state, path, tensors, copy=False)
    wide = {name: x for name, x in tensors.items() if x.is_floating_point() and x.numel()}
    if not wide:
        return None
    # x * 0 is NaN exactly where x is not finite; a sum keeps it.
    flags = torch.stack([(x.detach() * 0).sum(dtype=torch.float32).cpu() for x in wide.values()])
    bad = flags.isnan().tolist()
    return next((name for name, is_bad in zip(wide, bad, strict=True) if is_bad), None)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict`, which does not look at shapes, and `CheckpointError` when one is wrong."""
    optimizer.load_state_dict(state)
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                raise CheckpointError(
                    f"optimizer: expected {name} of shape {tuple(parameter.shape)}, got {tuple(value.shape)}"
                )


def remove_leftovers(directory: Path) -> None:
    """Delete temporary files that a killed process left behind."""
    if directory.is_dir():
        for path in directory.iterdir():
            if _TEMPORARY.match(path.name):
                path.unlink(missing_ok=True)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    value = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        value = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), value)
        if tensor.numel():
            value = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, value)
    return f"{value:08x}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else type(value).__name__


def _flatten(node: Any, path: str, tensors: dict[str, Tensor], copy: bool = True) -> Any:
    """The JSON half of a state; tensors are put into `tensors` under their path."""
    if isinstance(node, Tensor):
        key = path or "value"
        while key in tensors:  # {"a.b": x, "a": {"b": y}}
            key += "'"
        # A private contiguous copy: safetensors refuses aliases, and the caller may go on training.
        tensors[key] = node.detach().to("cpu", copy=True).contiguous() if copy else node
        return {"~tensor": key}
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, torch.dtype):
        return {"~dtype": str(node).removeprefix("torch.")}
    if isinstance(node, tuple):
        return {"~tuple": [_flatten(v, f"{path}.{i}", tensors, copy) for i, v in enumerate(node)]}
    if isinstance(node, list):
        return [_flatten(v, f"{path}.{i}", tensors, copy) for i, v in enumerate(node)]
    if isinstance(node, Mapping):
        if all(isinstance(k, str) and not k.startswith("~") for k in node):
            return {k: _flatten(v, f"{path}.{k}" if path else k, tensors, copy) for k, v in node.items()}
        # JSON keys are strings; an optimizer's state is keyed by integers.
        items = [[k, _flatten(v, f"{path}.[{k!r}]", tensors, copy)] for k, v in node.items()]
        if not all(isinstance(k, str | int | float | bool | None) for k, _ in items):
            raise TypeError(f"state: {path or 'the top level'} has keys that are neither numbers nor strings")
        return {"~items": items}
    raise TypeError(f"state: cannot save a {type(node).__name__} at {path or 'the top level'}")


def _unflatten(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_unflatten(v, tensors) for v in node]
    if not isinstance(node, dict):
        return node
    if "~tensor" in node:
        return tensors[node["~tensor"]]
    if "~dtype" in node:
        return getattr(torch, node["~dtype"])
    if "~tuple" in node:
        return tuple(_unflatten(v, tensors) for v in node["~tuple"])
    if "~items" in node:
        return {k: _unflatten(v, tensors) for k, v in node["~items"]}
    return {k: _unflatten(v, tensors) for k, v in node.items()}


def _settings_difference(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    parts = []
    for key in sorted(set(saved) | set(wanted)):
        if saved.get(key) != wanted.get(key):
            parts.append(f"{key} was {saved.get(key)!r}, now {wanted.get(key)!r}")
    return "; ".join(parts)


def seed_python_generators(seed: int) -> None:
    """Seed `random` and NumPy's global generator: unseeded, every process saves another state of them."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def random_state() -> dict[str, Any]:
    """The global random states of this process, in a form that a checkpoint can hold."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put `random_state()` back."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy

        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))


def restore_random_state(states: list[Mapping[str, Any]], world: World, say: Callable[[str], None]) -> None:
    """Each rank takes its own state back; with another number of ranks all take that of rank 0."""
    if len(states) != world.size:
        say(f"checkpoint of {len(states)} ranks, run of {world.size}: all take the random state of rank 0")
    set_random_state(states[world.rank] if len(states) == world.size else states[0])
