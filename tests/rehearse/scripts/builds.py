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

floats = torch.cuda.FloatTensor(4, 8).fill_(1.0)
longs = torch.cuda.LongTensor([3, 1])
seen["old types"] = [floats.type(), longs.type(), longs.tolist(), list(floats.shape)]
seen["instances"] = [isinstance(floats, torch.cuda.FloatTensor), isinstance(longs, torch.cuda.FloatTensor)]
moved = torch.ones(2).type("torch.cuda.HalfTensor")
seen["converted"] = [str(moved.device), str(moved.dtype), torch.ones(2).type()]
torch.set_default_tensor_type(torch.cuda.DoubleTensor)
seen["default type"] = torch.zeros(1).type()
torch.set_default_tensor_type(torch.FloatTensor)
seen["default restored"] = torch.zeros(1).type()

x = torch.ones(64, 128, device="cuda", requires_grad=True)
F.silu(x).sum().backward()  # MARK silu
F.mish(x).sum().backward()  # MARK mish
w = torch.ones(128, device="cuda", requires_grad=True)
F.rms_norm(x, (128,), w).sum().backward()  # MARK rms norm
lstm = torch.nn.LSTM(16, 32).cuda()
lstm(torch.randn(10, 4, 16, device="cuda"))[0].sum().backward()
print(json.dumps(seen))
