"""Why a rehearsal stops: one sentence that names the feature in the user's terms.

torch's own messages about fake tensors name internals; this module translates them.
"""

from __future__ import annotations

NESTED = "nested tensors are not supported: pad the batch or pack it (flash_attn_varlen_func, flex_attention)"
SPARSE = "sparse device tensors are not supported (torch.sparse, Embedding(sparse=True)); use dense ones"
EXPORT = "torch.export is not supported: run the module itself, or torch.compile it"
RECURRENT = "recurrent layers are not supported (nn.RNN, nn.LSTM, nn.GRU, nn.GRUCell, pack_padded_sequence)"
CTC = "the CTC loss is not supported (nn.CTCLoss, F.ctc_loss)"
LAZY = "lazy modules are not supported (nn.LazyLinear and others): give the module its input size"
TENSOR_TYPE = "torch.cuda.FloatTensor and similar types are not supported: use dtype and device"
PIPELINE = "pipeline schedules are not supported (torch.distributed.pipelining)"
REAL_DEVICE = "a call bypassed the rehearsal and asked CUDA for a real device, but none is visible"
SIMULATED = "torch does not run this on simulated tensors"
# Part of a message or of an operator's name -> sentence.
_FEATURES = {"nested": NESTED, "sparse": SPARSE}
# Parts of torch's messages about its fake tensors.
_INTERNAL = ("fake mode", "FakeTensor", "Could not run 'aten::", "no rule registered for HigherOrderOperator")
# Messages of CUDA and torch without a real or visible device.
_CUDA_ERRORS = (
    "driver version is insufficient",
    "no CUDA-capable device is detected",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
)


class Refused(Exception):
    """The program uses a feature that a rehearsal does not support; the message is one sentence."""


def reason(failure: BaseException) -> str:
    """Return one sentence about what ended the program."""
    from torch._subclasses import fake_tensor

    said = next((s for s in str(failure).splitlines() if s.strip()), "")
    shapes = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
    if isinstance(failure, Refused):
        return said
    if isinstance(failure, SystemExit):
        is_code = isinstance(failure.code, int)
        return f"the program ended with exit code {failure.code}" if is_code else f"the program ended: {said}"
    if isinstance(failure, KeyboardInterrupt):
        return "interrupted"
    if isinstance(failure, fake_tensor.UnsupportedOperatorException) or "no fake impl" in str(failure):
        kind = "an op of torch" if said.startswith("aten.") else "a custom op"
        return _feature(said) or f"{kind} without a fake implementation: {said}"
    if isinstance(failure, shapes):
        return _feature(said) or f"a shape or value that depends on device data: {said}"
    if isinstance(failure, ImportError):
        return f"an import failed: {said}"
    if any(text in said for text in _CUDA_ERRORS):
        return REAL_DEVICE
    raised = f"{type(failure).__name__}: {said}"
    if any(text in said for text in _INTERNAL):
        return _feature(said) or f"{SIMULATED} ({raised})"
    return f"the program raised {raised}"


def _feature(said: str) -> str | None:
    return next((sentence for part, sentence in _FEATURES.items() if part in said.lower()), None)
