"""leanstep beside MegaContext's own code, from a checkout: equality over random settings, and time.

    git clone https://github.com/brandf/MegaContext && git -C MegaContext checkout dd21c98
    python dev/megacontext.py equal MegaContext --settings 200
    python dev/megacontext.py time MegaContext

The checkout is only run: it comes first on the import path, and nothing of it is copied.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import random
import statistics
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leanstep.integrations import megacontext

VOCAB = 61
COMPARED = ("loss", "grad", "ema", "agreement", "span_corr", "stats")


class BaseModel(nn.Module):
    """What a controller asks of the base model: an embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(VOCAB, width)


class Float64Lens(nn.Module):
    """A controller in float64 with LensNet's keywords; LensNet itself computes its features in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, 1, dtype=torch.float64)
        self.level = nn.Embedding(8, 1, dtype=torch.float64)

    def forward(
        self, working_context: Any = None, *, embeddings: Tensor, lods: Tensor, **rest: Any
    ) -> Tensor:
        return torch.tanh(self.project(embeddings.double()) + self.level(lods)).squeeze(-1)


def load_upstream(checkout: Path) -> Any:
    """`mc.runtime` of the checkout, with a report that writes nothing."""
    if not (checkout / "mc" / "runtime.py").is_file():
        raise SystemExit(f"checkout: expected a MegaContext checkout, {checkout} has no mc/runtime.py")
    sys.path.insert(0, str(checkout.resolve()))
    runtime: Any = importlib.import_module("mc.runtime")
    runtime.get_report = lambda: types.SimpleNamespace(log=lambda *args, **kwargs: None)
    return runtime


def make_controller(runtime: Any, **settings: Any) -> Any:
    config = importlib.import_module("mc.config").MCConfig(
        device="cpu",
        compile_gistnet=False,
        compile_lensnet=False,
        gistnet_type="mean",
        collect_debug_metrics=False,
        auxiliary_dtype="fp32",
        **settings,
    )
    return runtime.MCController(BaseModel(config.embed_dim), config)


def random_settings(draw: random.Random) -> dict[str, Any]:
    block = draw.choice([4, 8, 16, 32])
    length = draw.choice([3, 5, 8, 12]) * block + draw.choice([0, 1, block // 2])
    return {
        "embed_dim": 16,
        "num_heads": 2,
        "lensnet_layers": 1,
        "block_size": block,
        "max_lod": draw.choice([1, 2, 2, 3]),
        "max_seq_len": length,
        "train_wc_length": draw.randint(length // 3, length),
        "allocator_recent_tokens": draw.choice([0, block, 2 * block]),
        "num_random_variants": draw.randint(1, 4),
        "max_lens_pairs": draw.choice([1, 3, 8, 12]),
        "random_seed": draw.randint(0, 2**31),
        "training_lod2_probability": draw.choice([0.1, 0.6]),
        "lens_rank_weight": draw.choice([0.0, 0.5, 1.3]),
        "lens_margin": draw.choice([0.1, 0.5]),
        "lens_budget_weight": draw.choice([0.1, 1.0]),
        "lens_budget_smooth_weight": draw.choice([0.0, 0.0, 0.2]),
        "lens_budget_smooth_beta": draw.choice([0.5, 0.9]),
        "lens_temperature": draw.choice([0.3, 1.0, 2.0]),
        "lens_collapse_weight": draw.choice([1.0, 1.7]),
        "lens_hard_negative_ratio": draw.choice([1.0, 0.5]),
    }


def sample_states(controller: Any, num_samples: int, draw: random.Random) -> list[Any]:
    """Upstream's own variants of random tokens, with losses that tie now and then or are missing."""
    controller._train_progress = draw.random()
    states = []
    for i in range(num_samples):
        length = controller.config.max_seq_len - (draw.randint(0, 3) if num_samples > 1 else 0)
        tokens = torch.tensor([[draw.randrange(VOCAB) for _ in range(length)]])
        _, state, _, _ = controller._build_tree_sample(tokens, f"sample_{i}")
        for variant in state.variants:
            if draw.random() < 0.9:
                variant.token_loss_value = torch.tensor(round(2 + 3 * draw.random(), draw.choice([1, 7])))
        states.append(state)
    return states


def run_loss(controller: Any, states: list[Any], method: Any) -> dict[str, Any]:
    """One call from the same start: loss, gradient of LensNet, state and telemetry afterwards."""
    keep = copy.deepcopy((controller._rng.getstate(), controller._budget_mass_ema))
    for variant in (v for state in states for v in state.variants):
        variant.policy_scores = None
    controller.lensnet.zero_grad()
    loss = method(states)
    if loss is not None and loss.requires_grad:
        loss.backward(retain_graph=True)
    outcome = {
        "loss": loss,
        "grad": [p.grad.clone() for p in controller.lensnet.parameters() if p.grad is not None],
        "rng": controller._rng.getstate(),
        "ema": controller._budget_mass_ema,
        "agreement": controller._last_preference_agreement,
        "span_corr": getattr(controller, "_last_span_score_corr", None),
        "stats": dict(controller._last_policy_stats),
    }
    controller._rng.setstate(keep[0])
    controller._budget_mass_ema = keep[1]
    return outcome


def relative(mine: Any, theirs: Any) -> float:
    """Largest difference as a share of the largest value; 0 when both are absent."""
    if mine is None or theirs is None:
        return 0.0 if mine is theirs else float("inf")
    x = torch.as_tensor(mine, dtype=torch.float64).detach().reshape(-1)
    y = torch.as_tensor(theirs, dtype=torch.float64).detach().reshape(-1)
    if x.numel() == 0 or y.numel() == 0:
        return 0.0 if (x if y.numel() == 0 else y).abs().sum() == 0 else float("inf")
    return float((x - y).abs().max() / y.abs().max().clamp(min=1e-12))


def flat(grads: list[Tensor]) -> Tensor:
    return torch.cat([g.reshape(-1) for g in grads]) if grads else torch.zeros(0)


def compare(checkout: Path, num_settings: int, seed: int, dtype: torch.dtype) -> dict[str, float]:
    """Largest relative differences over random settings."""
    runtime = load_upstream(checkout)
    worst: dict[str, float] = dict.fromkeys(COMPARED, 0.0)
    active = done = number = 0
    while done < num_settings:
        number += 1
        draw = random.Random(seed * 1_000_003 + number)
        torch.manual_seed(number)
        controller = make_controller(runtime, **random_settings(draw))
        if dtype == torch.float64:
            controller.lensnet = Float64Lens(controller.config.embed_dim)
            controller._target_dtype = dtype
        try:
            states = sample_states(controller, draw.randint(1, 4), draw)
        except RuntimeError:
            continue  # a length that upstream's own sampler cannot reach
        done += 1
        controller._budget_mass_ema = draw.uniform(-0.5, 0.5)
        theirs = run_loss(controller, states, controller._compute_lens_losses)
        mine = run_loss(controller, states, lambda s, c=controller: megacontext.compute_lens_losses(c, s))
        if mine["rng"] != theirs["rng"]:
            raise SystemExit(f"setting {number}: the generators differ")
        if set(mine["stats"]) != set(theirs["stats"]):
            raise SystemExit(f"setting {number}: statistics {mine['stats']} and {theirs['stats']}")
        if mine["span_corr"] is None and abs(theirs["span_corr"] or 0) < 1e-5:
            theirs["span_corr"] = None  # all targets are equal: upstream correlates what rounding leaves
        active += bool(theirs["loss"] is not None and theirs["loss"].requires_grad)
        row = {name: relative(mine[name], theirs[name]) for name in ("loss", "ema", "agreement", "span_corr")}
        row["grad"] = relative(flat(mine["grad"]), flat(theirs["grad"]))
        row["stats"] = max((relative(mine["stats"][k], v) for k, v in theirs["stats"].items()), default=0.0)
        for name, value in row.items():
            if value > worst[name]:
                worst[name] = value
                print(f"setting {number}: {name} differs by {value:.2e}", flush=True)
    print(f"{num_settings} settings, {active} with pairs, {dtype}:", flush=True)
    print("  " + ", ".join(f"{name} {value:.1e}" for name, value in worst.items()), flush=True)
    return worst


def seed_setting(runtime: Any, *, num_samples: int = 13, tokens: int = 2048) -> tuple[Any, list[Any]]:
    """13 samples with 1 + 2 variants of 1,831 entries, losses given."""
    torch.manual_seed(0)
    controller = make_controller(
        runtime,
        embed_dim=16,
        num_heads=2,
        lensnet_layers=1,
        max_seq_len=tokens,
        num_random_variants=2,
        random_seed=3,
        total_train_steps=1000,
    )
    controller._train_progress = 0.0
    states = []
    for i in range(num_samples):
        _, state, _, _ = controller._build_tree_sample(torch.randint(VOCAB, (1, tokens)), f"sample_{i}")
        for variant in state.variants:
            variant.token_loss_value = 2 + torch.rand(())
            variant.working_context.get_positional_encodings()
        states.append(state)
    return controller, states


def give_scores(controller: Any, states: list[Any], mode: str) -> Tensor:
    """A leaf [V, W] in place of LensNet: handed out per variant (`given`) or by its batched call."""
    variants = [v for state in states for v in state.variants]
    width = max(v.working_context.length for v in variants)
    leaf = torch.randn(len(variants), width).tanh().requires_grad_()
    if mode == "given":
        for variant, row in zip(variants, leaf.split(1), strict=True):
            variant.policy_scores = row
    else:
        for variant in variants:
            variant.policy_scores = None
        controller._run_lensnet_batched = lambda stacked: leaf
    return leaf


def measure(controller: Any, states: list[Any], method: Any, mode: str, repeats: int) -> dict[str, float]:
    """Median milliseconds of CPU time of this thread: the call, and the call with backward."""
    calls, steps = [], []
    for _ in range(repeats):
        leaf = give_scores(controller, states, mode)
        controller._variant_meta_cache = {}
        start = time.thread_time()
        loss = method(states)
        middle = time.thread_time()
        loss.backward()
        end = time.thread_time()
        calls.append(middle - start)
        steps.append(end - start)
        assert leaf.grad is not None
    return {"call": 1000 * statistics.median(calls), "with backward": 1000 * statistics.median(steps)}


def time_both(checkout: Path, repeats: int) -> None:
    runtime = load_upstream(checkout)
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)
    controller, states = seed_setting(runtime)
    lengths = {v.working_context.length for state in states for v in state.variants}
    print(
        f"{len(states)} samples, {sum(len(s.variants) for s in states)} contexts of {sorted(lengths)} entries"
    )
    stock = controller._compute_lens_losses
    for mode, words in (("given", "scores given"), ("packed", "inputs packed, LensNet replaced by a leaf")):
        mine: dict[str, list[float]] = {"call": [], "with backward": []}
        theirs: dict[str, list[float]] = {"call": [], "with backward": []}
        for _ in range(repeats):
            for record, method, count in (
                (theirs, stock, 1),
                (mine, lambda s: megacontext.compute_lens_losses(controller, s), 9),
            ):
                for name, value in measure(controller, states, method, mode, count).items():
                    record[name].append(value)
        for name in mine:
            before, after = statistics.median(theirs[name]), statistics.median(mine[name])
            print(
                f"{words}, {name}: {before:.1f} ms upstream, {after:.2f} ms leanstep, {before / after:.1f}x"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="leanstep beside MegaContext's own code")
    parser.add_argument("command", choices=["equal", "time"])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--settings", type=int, default=200, help="random settings to compare")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--float64", action="store_true", help="LensNet and loss in float64")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    if options.command == "equal":
        dtype = torch.float64 if options.float64 else torch.float32
        compare(options.checkout, options.settings, options.seed, dtype)
    else:
        time_both(options.checkout, options.repeats)


if __name__ == "__main__":
    main()
