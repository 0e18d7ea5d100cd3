"""FLOPs from recorded products: torch's own counter, published counts of two mixtures, and the refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from leanstep import diagnose
from leanstep.diagnose.mfu import step_flops
from leanstep.flops import StepFlops, num_pairs, utilisation
from leanstep.integrations.callbacks import StepReport
from leanstep.rehearse.devices import DEVICES, device_named


def recorded(step) -> StepFlops:
    with diagnose.watch(steps=1, warmup=0) as watch:
        step()
        watch.step()
    assert watch.recorder.errors == []
    return step_flops(watch.steps)


# Against torch's own counter


class Block(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(32, 96), nn.Linear(32, 32), causal

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 24, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
        )


def test_counts_are_torchs_own():
    model = nn.Sequential(Block(), nn.Linear(32, 41))
    x = torch.randn(2, 24, 32, requires_grad=True)

    def step():
        model(x).square().mean().backward()

    counter = FlopCounterMode(display=False)
    # torch's counter does not know the CPU's fused attention: it gets the plain products.
    with counter, sdpa_kernel(SDPBackend.MATH):
        step()
    flops = recorded(step)
    assert flops.model == counter.get_total_flops()
    # The scores that the fused backward makes again stand apart.
    assert flops.recomputed == {"float32": 2 * 2 * 4 * 24 * 24 * 8}
    assert sum(flops.backward.values()) == 2 * sum(flops.forward.values())


@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_count(transposed):
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    model = kind(6, 9, 3, stride=2, padding=1)
    x = torch.randn(2, 6, 11, 7, requires_grad=True)

    def step():
        model(x).square().mean().backward()

    counter = FlopCounterMode(display=False)
    with counter:
        step()
    assert recorded(step).model == counter.get_total_flops()


def test_a_causal_kernel_counts_half_of_the_square():
    x = torch.randn(2, 24, 32)
    full, half = Block(), Block(causal=True)
    linears = 2 * 2 * 24 * 32 * (96 + 32)
    whole = recorded(lambda: full(x)).model - linears
    assert recorded(lambda: half(x)).model - linears == whole * 25 // 48
    assert num_pairs(24, 24, True) == 24 * 25 // 2
    for queries, keys, window in ((5, 5, 2), (3, 7, None), (7, 3, None), (9, 9, 0), (4, 4, 9)):
        seen = [[j <= i and (window is None or i - j <= window) for j in range(keys)]
                for i in range(queries)]  # fmt: skip
        assert num_pairs(queries, keys, True, window) == sum(map(sum, seen))


def test_a_head_in_tiles_counts_three_products():
    """Its backward makes the logits again: that is no work of the model's."""
    from leanstep.heads import linear_logprobs

    hidden, weight = torch.randn(64, 24, requires_grad=True), torch.randn(901, 24, requires_grad=True)
    targets = torch.randint(0, 901, (64,))
    flops = recorded(lambda: linear_logprobs(hidden, weight, targets).logp.sum().backward())
    assert flops.model == 3 * 2 * 64 * 901 * 24


# Published counts per token (pytorch/torchtitan, pull request 4300): 4,096 tokens in one sequence


def attend(q, k, v, window: int | None):
    """Every query meets `window` keys, or all: torchtitan counts no causal half."""
    tokens = q.shape[0]
    near = tokens if window is None else window
    q, k, v = (x.reshape(tokens // near, near, 64, 64).transpose(1, 2) for x in (q, k, v))
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(tokens, -1)


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * self.weight


class Experts(nn.Module):
    """Top-k routing in which every expert gets the same number of tokens."""

    def __init__(self, dim: int, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.router = nn.Linear(dim, experts)
        self.up = nn.Parameter(torch.empty(experts, dim, 2 * hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, dim))
        self.up_bias = nn.Parameter(torch.empty(experts, 1, 2 * hidden))
        self.down_bias = nn.Parameter(torch.empty(experts, 1, dim))

    def forward(self, x):
        tokens, dim = x.shape
        rows = torch.arange(tokens * self.top_k, device=x.device) % tokens
        # One row per chosen expert; how the tokens fall is of no interest to the count.
        scores = self.router(x).softmax(-1)[:, : self.top_k].reshape(-1, 1)
        chosen = x[rows].view(self.experts, -1, dim)
        gate, value = (chosen @ self.up + self.up_bias).chunk(2, -1)
        out = (F.silu(gate) * value) @ self.down + self.down_bias
        return torch.zeros_like(x).index_add(0, rows, out.reshape(-1, dim) * scores)


class GptOssLayer(nn.Module):
    def __init__(self, dim: int, experts: int, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.qkv, self.out = nn.Linear(dim, 80 * 64), nn.Linear(64 * 64, dim)
        self.sinks = nn.Parameter(torch.empty(64))
        self.norms = nn.ModuleList(Norm(dim) for _ in range(2))
        self.moe = Experts(dim, dim, experts, 4)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).split([64 * 64, 8 * 64, 8 * 64], -1)
        k, v = (y.view(-1, 8, 64).repeat_interleave(8, 1).flatten(1) for y in (k, v))
        mixed = attend(q, k, v, self.window).view(-1, 64, 64) * self.sinks[:, None]
        x = x + self.out(mixed.flatten(1))
        return x + self.moe(self.norms[1](x))


class Decoder(nn.Module):
    def __init__(self, vocab: int, dim: int, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embedding, self.layers, self.norm = nn.Embedding(vocab, dim), nn.ModuleList(layers), Norm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).sum()


def gpt_oss(layers: int, experts: int) -> Decoder:
    windows = [128 if i % 2 == 0 else None for i in range(layers)]
    return Decoder(201_088, 2880, [GptOssLayer(2880, experts, window) for window in windows])


@pytest.mark.parametrize(
    ("name", "build", "published"),
    [
        ("gpt-oss-20b", lambda: gpt_oss(24, 32), 24_141_260_160),
        ("gpt-oss-120b", lambda: gpt_oss(36, 128), 34_534_221_696),
    ],
)
def test_published_counts_of_mixtures(name, build, published):
    """On meta tensors: the products of a whole step, and torchtitan's convention for what multiplies nothing.

    Its formula takes 6 FLOPs for every active parameter but the embedding, so for norms, biases and sinks as
    well, which multiply no matrix and are no product here.
    """
    tokens = 4096
    with torch.device("meta"):
        model = build()
        flops = recorded(lambda: model(torch.empty(tokens, dtype=torch.long)).backward())
    assert flops.recomputed == {} and flops.optimizer == {}
    vectors = sum(
        p.numel() * (module.top_k / module.experts if isinstance(module, Experts) else 1)
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False)
        if p.ndim == 1 or name.endswith("bias")
    )
    per_token, rest = divmod(flops.model, tokens)
    assert rest == 0 and per_token + 6 * vectors == published


# Shares


def test_every_product_is_held_against_the_peak_of_its_type():
    flops = StepFlops(forward={"bfloat16": 10, "float32": 2}, backward={"bfloat16": 20})
    peaks = {"bfloat16": 100.0, "float32": 10.0}
    assert utilisation(flops, 1.0, lambda name: peaks[name]) == pytest.approx(0.3 + 0.2)
    assert utilisation(flops, 1.0, 64.0) == pytest.approx(0.5)
    # Recomputed products and the optimizer's are no use of the model's.
    more = StepFlops(flops.forward, flops.backward, {"bfloat16": 50}, {"float32": 50})
    assert utilisation(more, 1.0, 64.0) == utilisation(flops, 1.0, 64.0)


def test_more_than_the_device_can_do_is_refused():
    flops = StepFlops(forward={"bfloat16": 10**15})
    peak = device_named("h100").flops
    assert utilisation(flops, 2.0, peak) == pytest.approx(10**15 / 2 / 989e12)
    with pytest.raises(ValueError, match=r"mfu: 1e\+15 FLOPs in 1 s are 101% of the peak of an H100"):
        utilisation(flops, 1.0, peak, "an H100")
    with pytest.raises(ValueError, match="seconds: expected the time of one step, got 0"):
        utilisation(flops, 0.0, peak)
    with pytest.raises(ValueError, match="steps: expected at least one recorded step"):
        step_flops([])


@pytest.mark.parametrize(
    ("options", "has_share"),
    [({}, False), ({"device": "h100"}, True), ({"peak_flops": 1e15}, True), ({"peak_flops": 1.0}, False)],
)
def test_a_report_logs_the_share_where_a_peak_is_known(options, has_share):
    texts: list[str] = []
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = StepReport(steps=1, warmup=0, show=texts.append, **options)
    report.begin()
    for _ in range(2):
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
        report.step()
    assert ("leanstep/mfu" in report.scalars) is has_share
    if has_share:
        expected = 2 * 2 * 4 * 16 * 16 / report.step_seconds
        expected /= options.get("peak_flops") or DEVICES["h100"].flops("float32")
        assert report.scalars["leanstep/mfu"] == pytest.approx(expected)
    assert ("% of the peak of a device of 1 FLOP/s" in texts[0]) is (options.get("peak_flops") == 1.0)


def test_a_device_must_be_in_the_table():
    with pytest.raises(ValueError, match="device: expected one of v100"):
        StepReport(device="h1000")
    with pytest.raises(ValueError, match="peak_flops: expected FLOP/s above 0"):
        StepReport(peak_flops=0.0)
