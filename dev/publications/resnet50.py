"""ResNet-50 v1.5 training on ImageNet shapes: NVIDIA's scripts, and a trace of kineto's samples."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# args: images per step, fp32 or tf32 or amp, nchw or nhwc
PUBLISHED = {
    "source": "https://github.com/NVIDIA/DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets/resnet50v1.5",
    "date": "2020-2022",
    "role": "development",
    "sets": "RATES.conv of NVIDIA",
    "class": "convolutions",
    "rows": {
        "resnet50-a100-tf32": {"args": "256 tf32 nchw", "device": "a100", "per_step": 256, "per_s": 938},
        "resnet50-a100-amp": {"args": "256 amp nhwc", "device": "a100", "per_step": 256, "per_s": 2470},
        "resnet50-v100-fp32": {
            "args": "128 fp32 nchw",
            "device": "v100",
            "per_step": 128,
            "per_s": 367,
            "note": "published with 112 images",
        },
        "resnet50-v100-amp": {"args": "256 amp nhwc", "device": "v100", "per_step": 256, "per_s": 1200},
        "resnet50-v100-b32": {
            "args": "32 fp32 nchw",
            "device": "v100",
            "device_ms": 99.24,
            "url": "https://github.com/pytorch/kineto/tree/main/tb_plugin/samples/resnet50_num_workers_4",
            "date": "2021",
            "note": "kernels of a trace",
        },
    },
}
BATCH, PRECISION, LAYOUT = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.backends.cudnn.benchmark = True
torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = PRECISION == "tf32"


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return [layer, nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            *convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, 4 * width, 1),
        )
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolution(inputs, 4 * width, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += self.shortcut(x)
        return self.relu(y)


blocks: list[nn.Module] = []
inputs = 64
for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
    for index in range(count):
        blocks.append(Bottleneck(inputs, width, stride if index == 0 else 1))
        inputs = 4 * width
stem = [*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
layout = torch.channels_last if LAYOUT == "nhwc" else torch.contiguous_format
model = nn.Sequential(*stem, *blocks, *head).cuda().to(memory_format=layout)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5)
scaler = torch.amp.GradScaler("cuda", enabled=PRECISION == "amp")
images = torch.randn(BATCH, 3, 224, 224, device="cuda").to(memory_format=layout)
labels = torch.randint(0, 1000, (BATCH,)).cuda()
for _ in range(10):
    with torch.autocast("cuda", torch.float16, enabled=PRECISION == "amp"):
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
