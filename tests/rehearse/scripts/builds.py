"""What CPU builds and CUDA builds of torch would answer differently."""

import ctypes
import json
import os

import torch
import torch.nn.functional as F

seen = {}
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
seen["own variable"] = os.environ["CUDA_VISIBLE_DEVICES"]
seen["variable of CUDA"] = libc.getenv(b"CUDA_VISIBLE_DEVICES").decode()
del os.environ["CUDA_VISIBLE_DEVICES"]
seen["after deletion"] = libc.getenv(b"CUDA_VISIBLE_DEVICES").decode()
seen["config"] = "PyTorch built with" in torch.__config__.show()
seen["versions"] = [type(torch.version.cuda).__name__, type(torch.backends.cudnn.version()).__name__]

seen["instances"] = [isinstance(torch.ones(1, device=d), torch.cuda.FloatTensor) for d in ("cuda", "cpu")]

x = torch.ones(64, 128, device="cuda", requires_grad=True)
F.silu(x).sum().backward()  # MARK silu
F.mish(x).sum().backward()  # MARK mish
w = torch.ones(128, device="cuda", requires_grad=True)
F.rms_norm(x, (128,), w).sum().backward()  # MARK rms norm
print(json.dumps(seen))
