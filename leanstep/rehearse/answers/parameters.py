"""Parameters are created as fake tensors: a model of any size takes no memory to build or initialise."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from leanstep.rehearse.answers.stand_ins import after_import
from leanstep.rehearse.tape import Tape

# A host parameter of at most this many elements keeps its initial value: temperatures, scales, gates.
KNOWN_PARAMETER_ELEMENTS = 64


def install(tape: Tape) -> None:
    """Make new parameters fake. `.to("cuda")` and copies of modules leave them parameters."""
    make = torch.nn.Parameter.__new__

    def fake_copy(data: Any) -> Any:
        if type(data) not in (torch.Tensor, torch.nn.Parameter) or data.is_meta:
            return data
        with tape.lock, tape.fake_mode:
            fake = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device="cpu")
        if data.numel() <= KNOWN_PARAMETER_ELEMENTS and data.device.type == "cpu":
            tape.shadows.put(fake, data.detach().clone())
        return fake

    def parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        tracked = make(cls, fake_copy(data), requires_grad)
        tape.track_parameter(tracked)
        return tracked

    def apply(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
        if recurse:
            for child in self.children():
                child._apply(fn)
        for name, p in self._parameters.items():
            if p is None:
                continue
            with torch.no_grad():
                new = fn(p)
            if new is not p:
                if isinstance(p, FakeTensor) and (isinstance(new, FakeTensor) or type(new) is Tensor):
                    # A small tensor moved to the host is real: `set_data` stores a fake copy of it.
                    p.data = new.detach()
                else:
                    self._parameters[name] = torch.nn.Parameter(new, p.requires_grad)
            if p.grad is not None:
                with torch.no_grad():
                    p.grad = fake_copy(fn(p.grad))
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    whole = torch.Tensor.data

    def set_data(self: FakeTensor, value: Tensor) -> None:
        value = fake_copy(value)
        whole.__set__(self, value)  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(value, FakeTensor):
            self.fake_device = value.fake_device
            tape.shadows.put(self, tape.shadows.get(value))

    FakeTensor.data = property(whole.__get__, set_data)  # pyright: ignore

    def deepcopy(self: FakeTensor, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            )
        with torch.no_grad():
            duplicate = self.clone()
        if getattr(self, "_is_param", False):
            duplicate = torch.nn.Parameter(duplicate, self.requires_grad)
        else:
            duplicate.requires_grad_(self.requires_grad)
        memo[id(self)] = duplicate
        if self.grad is not None:
            duplicate.grad = copy.deepcopy(self.grad, memo)
        return duplicate

    after_import("transformers.modeling_utils", lambda module: _without_weights(tape, module))
    FakeTensor.__deepcopy__ = deepcopy  # pyright: ignore[reportAttributeAccessIssue]
    torch.nn.Parameter.__new__ = staticmethod(parameter)
    torch.nn.Module._apply = apply


_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json", "*.h5", "*.msgpack")


def _without_weights(tape: Tape, module: Any) -> None:
    """Let transformers' `from_pretrained` take a folder with a config and no weights: they have no values."""
    model = module.PreTrainedModel
    load = model.from_pretrained.__func__

    def from_pretrained(cls: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        folder = Path(path) if path is not None else Path()
        folder /= kwargs.get("subfolder") or ""
        has_weights = any(next(folder.glob(name), None) for name in _WEIGHTS)
        if has_weights or not (folder / "config.json").is_file() or kwargs.get("quantization_config"):
            return load(cls, path, *args, **kwargs)
        tape.notes[f"from_pretrained: no weights in {folder.name}; the model was built from its config"] += 1
        config = kwargs.get("config") or cls.config_class.from_pretrained(folder)
        config.name_or_path = str(path)  # libraries load the tokenizer from there
        dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
        dtype = getattr(config, "dtype", None) if dtype in (None, "auto") else dtype
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        named = {name: kwargs[name] for name in ("attn_implementation",) if kwargs.get(name)}
        built = cls._from_config(config, dtype=dtype, **named).eval()
        return built.to("cuda") if kwargs.get("device_map") else built

    model.from_pretrained = classmethod(from_pretrained)
