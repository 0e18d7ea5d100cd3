"""Small training programs whose rehearsals must not depend on the build of torch.

`python dev/programs.py NAME` runs one. Without a name it prints the names. `dev/compare_builds.py`
rehearses each with several builds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, VOCAB, ROWS = 64, 1_000, 128
Program = Callable[[], tuple[nn.Module, Callable[[], Tensor]]]
PROGRAMS: dict[str, Program] = {}


def program(build: Program) -> Program:
    PROGRAMS[build.__name__] = build
    return build


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*(shape or (ROWS, WIDTH)), device="cuda", dtype=dtype)


def tokens(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape or (ROWS,), device="cuda")


def activation(function: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Callable[[], Tensor]]:
    model = nn.Linear(WIDTH, WIDTH).cuda()
    return model, lambda: function(model(inputs()))


@program
def silu():
    return activation(F.silu)


@program
def mish():
    return activation(F.mish)


@program
def gelu_tanh():
    return activation(lambda x: F.gelu(x, approximate="tanh"))


@program
def glu():
    return activation(F.glu)


@program
def softplus_and_elu():
    return activation(lambda x: F.softplus(x) + F.elu(x) + F.leaky_relu(x) + F.hardswish(x))


@program
def rms_norm():
    model = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)).cuda()
    return model, lambda: model(inputs())


@program
def rms_norm_autocast():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)).cuda()

    def loss() -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(inputs())

    return model, loss


@program
def layer_norm_bf16():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)).cuda().bfloat16()
    return model, lambda: model(inputs(dtype=torch.bfloat16))


@program
def group_norm():
    model = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3), nn.GroupNorm(4, WIDTH)).cuda()
    return model, lambda: model(inputs(4, WIDTH, 32))


@program
def swiglu_compiled():
    gate, up = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
    model = nn.ModuleList([gate, up]).cuda()
    run = torch.compile(lambda x: F.silu(gate(x)) * up(x))
    return model, lambda: run(inputs())


@program
def rms_norm_compiled():
    model = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)).cuda()
    run = torch.compile(model)
    return model, lambda: run(inputs())


def attention(
    dtype: torch.dtype, masked: bool = False, **options: bool
) -> tuple[nn.Module, Callable[[], Tensor]]:
    model = nn.Linear(WIDTH, 3 * WIDTH).cuda().to(dtype)

    def loss() -> Tensor:
        q, k, v = model(inputs(2, 32, WIDTH, dtype=dtype)).view(2, 32, 3, 4, 16).permute(2, 0, 3, 1, 4)
        mask = torch.ones(32, 32, dtype=torch.bool, device="cuda").tril() if masked else None
        return F.scaled_dot_product_attention(q, k, v, mask, **options)

    return model, loss


@program
def attention_flash():
    return attention(torch.bfloat16, is_causal=True)


@program
def attention_efficient():
    return attention(torch.float32)


@program
def attention_masked():
    return attention(torch.float16, masked=True)


@program
def cross_entropy_ignored():
    model = nn.Linear(WIDTH, VOCAB).cuda()

    def loss() -> Tensor:
        targets = tokens()
        targets[::2] = -100
        return F.cross_entropy(model(inputs()), targets, ignore_index=-100, label_smoothing=0.1)

    return model, loss


@program
def tied_embedding():
    model = nn.Embedding(VOCAB, WIDTH, padding_idx=0).cuda()
    return model, lambda: F.cross_entropy(model(tokens()) @ model.weight.T, tokens())


@program
def log_probs_gathered():
    model = nn.Linear(WIDTH, VOCAB).cuda()
    return model, lambda: model(inputs()).log_softmax(-1).gather(-1, tokens()[:, None])


@program
def dropout_and_checkpoint():
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.GELU()).cuda()
    return model, lambda: checkpoint(model, inputs().requires_grad_(), use_reentrant=False)


@program
def scaler():
    model, grad_scaler = nn.Linear(WIDTH, WIDTH).cuda(), torch.amp.GradScaler("cuda")

    def loss() -> Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            return grad_scaler.scale(model(inputs()).float().mean())

    return model, loss


@program
def rotary():
    model = nn.Linear(WIDTH, WIDTH).cuda()
    angles = torch.outer(torch.arange(ROWS), 1e4 ** -torch.linspace(0, 1, WIDTH // 2)).cuda()

    def loss() -> Tensor:
        a, b = model(inputs()).chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    return model, loss


@program
def experts():
    model = nn.Linear(WIDTH, 4).cuda()

    def loss() -> Tensor:
        weights, chosen = model(inputs()).softmax(-1).topk(2)
        return torch.zeros(ROWS, 4, device="cuda").scatter_add(1, chosen, weights)

    return model, loss


@program
def masked_fill_and_where():
    model = nn.Linear(WIDTH, WIDTH).cuda()

    def loss() -> Tensor:
        y = model(inputs())
        return y.masked_fill(y > 0, 0.5) + torch.where(y < 0, y, 1.0)

    return model, loss


@program
def known_mask():
    model = nn.Linear(WIDTH, WIDTH).cuda()
    return model, lambda: model(inputs())[(torch.arange(ROWS) % 3 == 0).cuda()]


@program
def reads():
    model = nn.Linear(WIDTH, WIDTH).cuda()

    def loss() -> Tensor:
        y = model(inputs())
        print(y.sum().item(), y.detach().mean().cpu(), torch.isnan(y).any().item())
        return y

    return model, loss


@program
def newton_schulz():
    model = nn.Linear(WIDTH, WIDTH, bias=False).cuda()

    def loss() -> Tensor:
        x = model.weight / model.weight.norm()
        for _ in range(3):
            gram = x @ x.T
            x = 3.4 * x + torch.addmm(gram, gram, gram, beta=-4.7, alpha=2.0) @ x
        return x

    return model, loss


@program
def scan():
    model = nn.Linear(WIDTH, WIDTH).cuda()
    return model, lambda: model(inputs()).cumsum(0).sort(-1).values.flip(0)


@program
def einsum():
    model = nn.Linear(WIDTH, WIDTH).cuda()
    return model, lambda: torch.einsum("bnd,bmd->bnm", *(2 * [model(inputs(2, 64, WIDTH))]))


@program
def convolution():
    features = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    model = nn.Sequential(*features, nn.LazyLinear(10)).cuda()
    model(inputs(4, 3, 16, 16))
    return model, lambda: model(inputs(4, 3, 16, 16))


@program
def side_stream():
    model, side = nn.Linear(WIDTH, WIDTH).cuda(), torch.cuda.Stream()

    def loss() -> Tensor:
        with torch.cuda.stream(side):
            x = torch.randn(ROWS, WIDTH).pin_memory().to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        return model(x)

    return model, loss


@program
def accumulated_double():
    model = nn.Linear(WIDTH, WIDTH).cuda().double()

    def loss() -> Tensor:
        model(inputs(dtype=torch.float64)).mean().backward()
        return model(inputs(dtype=torch.float64)).std(-1)

    return model, loss


def train(build: Program) -> None:
    model, loss = build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    for _ in range(4):
        loss().float().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(PROGRAMS[sys.argv[1]])
    else:
        print(*PROGRAMS)
