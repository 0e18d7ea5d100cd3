"""Stand-ins for binary kernels: the right shapes and a price, no computation.

A stand-in is used only if the package itself is not installed. The recording notes each stand-in used.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import re
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leanstep.rehearse.answers import attention
from leanstep.rehearse.answers.attention import attention_by_values, fused_attention
from leanstep.rehearse.refusals import Refused
from leanstep.rehearse.tape import Tape


def install(tape: Tape) -> None:
    """Offer the modules below to `import`, after all installed packages."""
    attention.install()
    sys.meta_path.append(_Finder(tape))
    sys.meta_path.insert(0, _Answers())


def after_import(name: str, answer: Callable[[types.ModuleType], None]) -> None:
    """Call `answer` with an installed module as soon as the program imports it, or now if it has."""
    if name in sys.modules:
        answer(sys.modules[name])
    AFTER_IMPORT[name] = answer


class _Answers(importlib.abc.MetaPathFinder):
    """Patches installed modules (`AFTER_IMPORT`) as soon as they are imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in AFTER_IMPORT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader = spec.loader if spec is not None else None
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                run(module)
                AFTER_IMPORT[name](module)

            loader.exec_module = exec_module
        return spec


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, tape: Tape):
        self.tape = tape

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in MODULES:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = []
        return spec

    def find_distributions(self, context: Any = None) -> Any:
        """Report the stand-ins as installed: libraries look up flash-attn before they import it."""
        name = getattr(context, "name", None)
        return [
            _Distribution(package, module)
            for package, module in DISTRIBUTIONS.items()
            if name in (None, package, package.replace("-", "_"))
            and importlib.machinery.PathFinder.find_spec(module) is None
        ]

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__version__ = MODULES[spec.name].version  # pyright: ignore[reportAttributeAccessIssue]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        self.tape.notes[f"{module.__name__}: not installed; a stand-in with the same shapes was used"] += 1
        for name, make in MODULES[module.__name__].functions.items():
            setattr(module, name, make(self.tape))


class _Distribution(importlib.metadata.Distribution):
    """The `importlib.metadata` distribution of a stand-in's package."""

    def __init__(self, package: str, module: str):
        self.texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {MODULES[module].version}\n",
            "top_level.txt": module,
        }

    def read_text(self, filename: str) -> str | None:
        return self.texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(path)


class _Module:
    def __init__(self, version: str, functions: dict[str, Callable[[Tape], Any]]):
        self.version, self.functions = version, functions


def _share(causal: bool, window: Sequence[int], length: int) -> float:
    """Return the share of the T x T scores that is computed."""
    left = window[0] if window and window[0] is not None and window[0] >= 0 else None
    if left is not None and left < length:
        computed = (left + 1) * length - left * (left + 1) / 2
        return computed / length**2 if causal else min(1.0, 2 * computed / length**2)
    return 0.5 if causal else 1.0


def _check(tape: Tape, kernel: str, q: Tensor, k: Tensor, v: Tensor, *bounds: Tensor) -> None:
    """Raise what FlashAttention raises for tensors or a device that it has no kernel for."""
    is_3 = kernel.startswith(attention.HOPPER)
    clock: Any = tape.clock
    device = clock.target
    if device.vendor == "nvidia" and device.capability < (8, 0):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if is_3 and device.vendor == "nvidia" and device.capability >= (10, 0):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")
    allowed = (torch.float16, torch.bfloat16, *((torch.float8_e4m3fn,) if is_3 else ()))
    if q.dtype not in allowed:
        only = "supports fp16, bf16, and fp8_e4m3" if is_3 else "support fp16 and bf16"
        raise RuntimeError(f"FlashAttention only {only} data type, got {str(q.dtype)[6:]}")
    for name, tensor in (("key", k), ("value", v)):
        if tensor.dtype != q.dtype:
            raise RuntimeError(f"query and {name} must have the same dtype")
    if q.shape[-1] > 256:
        raise RuntimeError(
            f"FlashAttention forward only supports head dimension at most 256, got {q.shape[-1]}"
        )
    if q.shape[-2] % k.shape[-2]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    for tensor in bounds:
        if tensor.dtype != torch.int32:
            raise RuntimeError(f"cu_seqlens must have dtype torch.int32, got {tensor.dtype}")


def _flash(tape: Tape, kernel: str) -> Any:
    """flash_attn_func(q, k, v): [B, T, H, D]."""

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, *_: Any, causal: bool = False, **options: Any
    ) -> Any:
        _check(tape, kernel, q, k, v)
        share = _share(causal and q.shape[1] == k.shape[1], options.get("window_size", ()), q.shape[1])
        out, lse = fused_attention(f"{kernel}_func", q, k, v, share, "bthd")
        return (out, lse) if options.get("return_attn_probs") or options.get("return_softmax_lse") else out

    return flash_attn_func


def _flash_varlen(tape: Tape, kernel: str) -> Any:
    """flash_attn_varlen_func(q, k, v, cu_seqlens...): [tokens, H, D], packed documents."""

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, *args: Any, causal: bool = False, **options: Any
    ) -> Tensor:
        bounds = options["cu_seqlens_q"] if "cu_seqlens_q" in options else args[0]
        longest = int(options.get("max_seqlen_q", args[2] if len(args) > 2 else q.shape[0]))
        _check(tape, kernel, q, k, v, bounds)
        left, *_ = (*(options.get("window_size") or ()), None)
        window = -1 if left is None else int(left)
        out, _lse = attention_by_values(
            tape, f"{kernel}_varlen_func", q, k, v, bounds, [q.shape[0], longest, int(causal), window], "thd"
        )
        return out

    return flash_attn_varlen_func


def _packed_share(tape: Tape, bounds: Tensor, numbers: Sequence[int]) -> float:
    """Return the share of the tokens x tokens scores within documents; unknown lengths count as the longest.

    numbers: tokens, longest document, whether causal, left window (-1: none).
    """
    tokens, longest, causal, window = numbers
    known = tape.shadows.get(bounds)
    documents = known.diff().tolist() if known is not None else [longest] * max(1, tokens // max(1, longest))
    scores = sum(n * n * _share(bool(causal), (window,), max(1, int(n))) for n in documents)
    return min(1.0, scores / max(1, tokens) ** 2)


def _packed_qkv(tape: Tape, kernel: str) -> Any:
    plain = _flash(tape, kernel)
    return lambda qkv, *args, **options: plain(*qkv.unbind(2), *args, **options)


def _flash_with_cache(tape: Tape, kernel: str) -> Any:
    """flash_attn_with_kvcache(q, k_cache, v_cache): decoding, a few queries against all keys."""

    def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any, **__: Any) -> Tensor:
        _check(tape, kernel, q, k_cache, v_cache)
        out, _lse = fused_attention(f"{kernel}_with_kvcache", q, k_cache, v_cache, 1.0, "bthd")
        return out

    return flash_attn_with_kvcache


# Padding of flash_attn.bert_padding, in plain torch.


def _index_first_axis(rows: Tensor, indices: Tensor) -> Tensor:
    return rows[indices]


def _unpad_input(hidden: Tensor, mask: Tensor, unused: Tensor | None = None) -> Any:
    """Return the unmasked rows, their indices, the sequence offsets, the longest length, and the lengths."""
    lengths = mask.sum(-1, dtype=torch.int32)
    used = mask if unused is None else mask + unused
    indices = used.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(used.sum(-1, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
    return hidden.flatten(0, 1)[indices], indices, offsets, int(lengths.max().item()), lengths


def _pad_input(rows: Tensor, indices: Tensor, batch: int, length: int) -> Tensor:
    padded = rows.new_zeros(batch * length, *rows.shape[1:])
    padded = padded.index_put((indices,), rows)
    return padded.unflatten(0, (batch, length))


def _xformers(tape: Tape) -> Any:
    def memory_efficient_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, *_: Any, **__: Any
    ) -> Tensor:
        causal = "LowerTriangular" in type(attn_bias).__name__ or attn_bias is LowerTriangularMask
        out, _lse = fused_attention(
            "memory_efficient_attention", query, key, value, 0.5 if causal else 1.0, "bthd"
        )
        return out

    return memory_efficient_attention


class LowerTriangularMask:
    """xformers' causal mask."""


def _hub_kernels(tape: Tape) -> Any:
    """kernels.get_kernel(name): kernels of the Hugging Face hub; flash attention 2 and 3 are known."""

    def get_kernel(name: str, *_: Any, **__: Any) -> Any:
        if "flash" not in name:
            raise Refused(f"kernel {name}: this binary kernel has no stand-in")
        known = FLASH_3 if re.search("flash.*3", name) else FLASH
        functions = {n: make(tape) for n, make in known.items()}
        tape.notes[f"kernel {name}: a stand-in with the same shapes was used"] += 1
        return types.SimpleNamespace(**functions, flash_attn_interface=types.SimpleNamespace(**functions))

    return get_kernel


# Fake tensors represent real ones: libraries must not behave as they do while tracing.
# (While tracing, transformers builds masks that it otherwise omits, which rules out the flash kernel.)
def _tensors_are_real(module: Any) -> None:
    module.is_fake_tensor = lambda x: False


AFTER_IMPORT: dict[str, Callable[[types.ModuleType], None]] = {
    "transformers.utils.import_utils": _tensors_are_real
}


def _flash_functions(kernel: str) -> dict[str, Callable[[Tape], Any]]:
    """Return the public functions of FlashAttention; `kernel` starts their names in a recording."""
    functions = {
        "flash_attn_func": _flash,
        "flash_attn_varlen_func": _flash_varlen,
        "flash_attn_qkvpacked_func": _packed_qkv,
        "flash_attn_with_kvcache": _flash_with_cache,
    }
    attention.RULES[f"{kernel}_varlen_func"] = _packed_share
    return {name: functools.partial(make, kernel=kernel) for name, make in functions.items()}


FLASH, FLASH_3 = _flash_functions("flash_attn"), _flash_functions(attention.HOPPER)
PADDING: dict[str, Callable[[Tape], Any]] = {
    "index_first_axis": lambda tape: _index_first_axis,
    "unpad_input": lambda tape: _unpad_input,
    "pad_input": lambda tape: _pad_input,
}
MODULES = {
    "flash_attn": _Module("2.8.3", FLASH),
    "flash_attn.flash_attn_interface": _Module("2.8.3", FLASH),
    "flash_attn.bert_padding": _Module("2.8.3", PADDING),
    "flash_attn_interface": _Module("3.0.0", FLASH_3),
    "flash_attn_3": _Module("3.0.0", FLASH_3),
    "xformers": _Module("0.0.32", {}),
    "xformers.ops": _Module(
        "0.0.32",
        {"memory_efficient_attention": _xformers, "LowerTriangularMask": lambda tape: LowerTriangularMask},
    ),
    "kernels": _Module("0.10.0", {"get_kernel": _hub_kernels}),
}
# Package -> its module, for packages that libraries look up before they import the module.
DISTRIBUTIONS = {"flash-attn": "flash_attn"}
