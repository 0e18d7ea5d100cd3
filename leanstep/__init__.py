"""Check PyTorch training scripts of language models without a GPU, and make them cheaper.

Fast paths are in `leanstep.heads`, `leanstep.muon` and `leanstep.lens`.
`leanstep.diagnose` names the lines that waste time or memory, `leanstep.prove` compares the
updates that scripts make, and `leanstep.update()` captures an update. `leanstep.model_logprobs` and
`leanstep.masked_token_logprobs` score a padded batch. All of them are imported on first use, so that
`import leanstep` is cheap.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.4.0.dev0"
_FUNCTIONS = {
    "masked_token_logprobs": "leanstep.heads",
    "model_logprobs": "leanstep.integrations.causal_lm",
    "update": "leanstep.prove",
}
__all__ = ["diagnose", "heads", "lens", "muon", "prove", *_FUNCTIONS]


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    if name in __all__:
        return importlib.import_module(f"leanstep.{name}")
    raise AttributeError(f"module 'leanstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
