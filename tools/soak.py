"""Call every public function thousands of times: memory, threads, open files and processes must not grow.

    python tools/soak.py --calls 3000 --seconds 60            all of them; a slow one stops after 60 s
    python tools/soak.py linear_logprobs NorMuon.step

The first tenth of the calls warms up. Prints a row per function; the exit code is 1 if one grows.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import inspect
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from leanstep import diagnose, gpt, lens, logprob, muon, objectives, prove
from leanstep.script import guard

# Allocators keep some freed memory for themselves; a leak of one small tensor per call exceeds this.
MOST_GROWTH_BYTES = 4 << 20
Call = Callable[[], Any]


class Level(NamedTuple):
    """What the process holds: resident bytes, threads, open files, child processes."""

    rss_bytes: int
    threads: int
    files: int
    children: int


def level() -> Level:
    gc.collect()
    # glibc hands free pages back.
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    children = [pid for pid, (parent, *_) in guard.processes().items() if parent == os.getpid()]
    threads, files = (sum(1 for _ in Path("/proc/self", name).iterdir()) for name in ("task", "fd"))
    return Level(pages * os.sysconf("SC_PAGE_SIZE"), threads, files, len(children))


def logprob_calls() -> dict[str, Call]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=g).requires_grad_() for n in (12, 40))
    targets, temperature = torch.randint(40, (12,), generator=g), 1.0
    values = [torch.randn(12, generator=g) for _ in range(3)]
    batch = logprob.PolicyBatch(values[0], values[1], sequence_lengths=[5, 7])
    plan = logprob.plan_rows([9, 8], [5, 3], layout="zigzag", cp_size=2, cp_rank=1)
    one = logprob.plan_rows([9], [5])
    masks = [torch.tensor([1, 0, 1, 1, 1])]
    masked = logprob.plan_rows([9], [5], loss_masks=masks)
    responses = [torch.randn(5, generator=g), torch.randn(3, generator=g)]
    ids, offsets = [[3, 1, 4, 1, 5, 9]], [[0, 1, 3, 3, 5, 6]]

    def head(**options: Any) -> None:
        out = logprob.linear_logprobs(hidden, weight, targets, entropy="grad", **options)
        (out.logp.sum() + out.entropy.sum()).backward()  # type: ignore[union-attr]

    def tokens() -> None:
        out = logprob.token_logprobs(hidden @ weight.T, targets, entropy="grad", temperature=temperature)
        out.logp.sum().backward()

    def frozen() -> None:
        logprob.linear_logprobs(hidden, weight.detach(), targets).logp.sum().backward()

    return {
        "linear_logprobs": head,
        "linear_logprobs, invariant": lambda: head(tuning=logprob.Tuning(invariant=True)),
        "linear_logprobs, budget 1": lambda: head(tuning=logprob.Tuning(budget=1)),
        "linear_logprobs, frozen head": frozen,
        "token_logprobs": tokens,
        "linear_policy_loss": lambda: logprob.linear_policy_loss(
            hidden, weight, targets, batch
        ).loss.backward(),
        "masked_token_logprobs": lambda: (
            logprob.masked_token_logprobs(hidden.view(3, 4, 16), weight, targets.view(3, 4)).sum().backward()
        ),
        "policy_loss": lambda: logprob.policy_loss(*values),
        "plan_rows": lambda: logprob.plan_rows([9, 8], [5, 3], layout="zigzag", cp_size=2, cp_rank=1),
        "full_loss_mask": lambda: logprob.full_loss_mask(masks, [9], [5]),
        "gather_response": lambda: logprob.gather_response([responses[0]], one, None),
        "gather_vocab_starts": lambda: logprob.gather_vocab_starts(40, None),
        "next_token_targets": lambda: logprob.next_token_targets(targets.view(3, 4)),
        "return_parts": lambda: logprob.return_parts(plan, None, torch.randn(plan.num_rows)),
        "sample_mean": lambda: logprob.sample_mean([responses[0]], masked),
        "select_allowed": lambda: logprob.select_allowed(ids, offsets, one),
        "select_rows": lambda: logprob.select_rows(True, False),
        "slice_response": lambda: logprob.slice_response(responses, plan),
        "choose_tiles": lambda: logprob.choose_tiles(100, 1000, 64),
    }


def objective_calls() -> dict[str, Call]:
    g = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 16, generator=g).requires_grad_() for n in (12, 40))
    rows = hidden.detach().view(4, 3, 16).requires_grad_()
    labels, targets = torch.randint(40, (4, 3), generator=g), torch.randint(40, (12,), generator=g)
    far, wide = torch.randn(12, 8, generator=g), torch.randn(40, 8, generator=g)
    log_q = torch.log_softmax(far @ wide.T, -1)
    top, ids = log_q.topk(4, -1)
    teachers = {
        "head": objectives.TeacherHead(far, wide),
        "log-probs": objectives.TeacherLogProbs(log_q),
        "top k": objectives.TeacherTopK(ids, top),
    }
    sets = logprob.Allowed(torch.arange(24) % 40, torch.arange(13) * 2)
    scores, ranks = torch.randn(9, generator=g).requires_grad_(), torch.randperm(9, generator=g)
    groups, pairs = [0, 4, 9], (torch.tensor([0, 3, 4]), torch.tensor([1, 2, 8]))
    sums = [torch.randn(2, generator=g) for _ in range(4)]
    batch = logprob.PolicyBatch(torch.randn(12, generator=g), torch.randn(12, generator=g))
    correction = objectives.RolloutCorrection()

    def preferences() -> Any:
        return objectives.linear_preference_loss(rows, weight, labels, objective="simpo").loss.backward()

    def sequences() -> Any:
        return objectives.linear_sequence_logprobs(rows, weight, labels).sums.sum().backward()

    def masked() -> Any:
        out = objectives.linear_masked_logprobs(hidden, weight, targets, sets, entropy="grad")
        return out.logp.sum().backward()

    def ahead() -> Any:
        loss = objectives.linear_ahead_cross_entropy([rows, rows], [weight, weight], labels)
        return (loss if isinstance(loss, torch.Tensor) else loss[0]).sum().backward()

    calls: dict[str, Call] = {
        f"linear_distill_loss, {name}": lambda t=teacher: objectives.linear_distill_loss(
            hidden, weight, t
        ).loss.backward()
        for name, teacher in teachers.items()
    }
    return calls | {
        "linear_cross_entropy": lambda: objectives.linear_cross_entropy(hidden, weight, targets).backward(),
        "linear_ahead_cross_entropy": ahead,
        "linear_preference_loss": preferences,
        "linear_sequence_logprobs": sequences,
        "linear_masked_logprobs": masked,
        "divergence": lambda: objectives.divergence(log_q, log_q.flip(0), ("jsd", 0.5)),
        "pair_losses": lambda: objectives.pair_losses(
            "dpo", sums[0], sums[1], ref_chosen=sums[2], ref_rejected=sums[3]
        ),
        "kto_losses": lambda: objectives.kto_losses("kto", sums[0], sums[1], torch.tensor([True, False])),
        "correct_rollout": lambda: objectives.correct_rollout(batch, batch.old_logp, correction),
        "make_groups": lambda: objectives.make_groups(scores, groups),
        "bradley_terry": lambda: objectives.bradley_terry(scores, pairs=pairs).backward(),
        "hinge": lambda: objectives.hinge(scores, ranks, groups).backward(),
        "plackett_luce": lambda: objectives.plackett_luce(scores, ranks, groups).backward(),
        "draw_pairs": lambda: objectives.draw_pairs(ranks, groups, 5),
        "top_pairs": lambda: objectives.top_pairs(scores.detach(), ranks, groups, 3),
    }


def muon_calls() -> dict[str, Call]:
    g = torch.Generator().manual_seed(2)
    update, wide = torch.randn(24, 16, generator=g), torch.randn(16, 24, generator=g)
    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.LayerNorm(24), torch.nn.Linear(24, 8))
    optimizer = muon.NorMuon(muon.split_params(model))
    half, residual = muon.from_master(update)
    workspace, buffer = muon.Workspace(), torch.zeros(24, 16)

    def step() -> None:
        model(update[:, :16]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def saved() -> None:
        optimizer.load_state_dict(optimizer.state_dict())

    return {
        "NorMuon.step": step,
        "NorMuon.state_dict and load_state_dict": saved,
        "NorMuon()": lambda: muon.NorMuon(muon.split_params(model)),
        "split_params": lambda: muon.split_params(model),
        "polar": lambda: muon.polar(update),
        "polar, workspace": lambda: muon.polar(update, workspace=workspace),
        "plan_polar": lambda: muon.plan_polar(300, 400),
        "explain": lambda: muon.explain(300, 400),
        "momentum_polar": lambda: muon.momentum_polar(update, buffer),
        "from_master": lambda: muon.from_master(update),
        "to_master": lambda: muon.to_master(half, residual),
        "transpose_copy": lambda: muon.transpose_copy(update),
        "transpose_add": lambda: muon.transpose_add(update, wide),
    }


def lens_calls() -> dict[str, Call]:
    config, samples = lens.LensConfig(block_size=4), []
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        drawn = lens.sample_variants(64, 4, 2, 2, 52, g, recent_tokens=8)
        losses = torch.rand(len(drawn), generator=g).tolist()
        samples.append([replace(v, loss=x) for v, x in zip(drawn, losses, strict=True)])

    def batched() -> lens.LensBatch:
        return lens.LensBatch.from_variants(samples, config, num_tokens=64, loss_dtype=torch.float32)

    batch = batched()
    pairs = lens.build_pairs(batch.loss, batch.row, config)
    scores = torch.randn(batch.pos.shape).tanh().requires_grad_()
    objective, net = lens.LensObjective(config), lens.LensNet(16, 8, max_lod=2, block_size=4)
    embeddings = torch.randn(*batch.pos.shape, 16)
    inputs = (embeddings, batch.pos, batch.lod, batch.valid, batch.num_tokens)
    proxy, keys = lens.ProxyLoss(config), (batch.pos[0], batch.lod[0])
    counts = [len(variants) for variants in samples]
    focus: dict[str, Any] = {"block_size": 4, "max_lod": 2, "budget": 40, "num_tokens": 64}

    def in_background() -> None:
        background = lens.AsyncLens(net, config)
        background.close()

    return {
        "sample_variants": lambda: lens.sample_variants(64, 4, 2, 2, 52, recent_tokens=8),
        "baseline_variant": lambda: lens.baseline_variant(64, 32),
        "planned_length": lambda: lens.planned_length(64, 0.5),
        "reachable_length": lambda: lens.reachable_length(64, 40, 4),
        "LensBatch.from_variants": batched,
        "build_pairs": lambda: lens.build_pairs(batch.loss, batch.row, config),
        "build_targets": lambda: lens.build_targets(batch, pairs, config),
        "build_lod_table": lambda: lens.build_lod_table(batch),
        "aggregate_targets": lambda: lens.aggregate_targets(batch, config),
        "coverage": lambda: lens.coverage(scores, batch, config),
        "lens_loss": lambda: lens.lens_loss(scores, batch, config).loss.backward(),
        "lens_loss_reference": lambda: lens.lens_loss_reference(scores, batch, config).loss,
        "LensObjective": lambda: objective(scores, batch).loss,
        "LensNet": lambda: net(*inputs).sum().backward(),
        "ProxyLoss": lambda: proxy(scores, batch).backward(),
        "AsyncLens": in_background,
        "content_key": lambda: lens.content_key(3, *keys),
        "check_variant_counts": lambda: lens.check_variant_counts(counts, len(counts), 2),
        "allocate_focus": lambda: lens.allocate_focus(
            batch.pos[0][batch.valid[0]], batch.lod[0][batch.valid[0]],
            scores[0][batch.valid[0]].detach(), **focus,
        ),
    }  # fmt: skip


def gpt_calls(folder: Path) -> dict[str, Call]:
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(300, (512,), generator=g)
    tokens[::64] = 0
    shard, source = folder / "tokens.bin", folder / "source"
    gpt.write_shard(shard, tokens)
    source.mkdir()
    for number in range(4):
        (source / f"m{number}.py").write_text(f"def f{number}():\n    return {number}\n" * 40)

    config = gpt.GPTConfig.preset("plain", vocab_size=300)
    model = gpt.build_model(config)

    return {
        "build_model": lambda: gpt.build_model(config),
        "GPT, forward and backward": lambda: model(tokens[:64], tokens[1:65]).backward(),
        "write_shard": lambda: gpt.write_shard(shard, tokens),
        "read_shard": lambda: gpt.read_shard(shard),
        "validation_batches": lambda: list(gpt.validation_batches([shard], 128, bos=0)),
        "bigram_hash": lambda: gpt.bigram_hash(tokens, 100),
        "unbind_bank": lambda: gpt.unbind_bank(torch.randn(3, 4, 5)),
        "standard_library_corpus": lambda: gpt.standard_library_corpus(300, root=source, folder=folder / "c"),
    }


def observer_calls() -> dict[str, Call]:
    weight = torch.nn.Parameter(torch.randn(8, 8))
    optimizer, rows = torch.optim.SGD([weight], lr=1e-3), torch.randn(6, 8)

    def step(batch: torch.Tensor = rows) -> torch.Tensor:
        loss = (batch @ weight).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def fresh_step(num_parts: int) -> None:
        model = torch.nn.Linear(8, 8)
        own = torch.optim.SGD(model.parameters(), lr=1e-3)
        for part in torch.randn(6, 8).chunk(num_parts):
            (model(part).square().mean() / num_parts).backward()
        own.step()

    def captured() -> None:
        with prove.update():
            step()

    def watched() -> None:
        with diagnose.watch(steps=1, warmup=0):
            step()
            diagnose.step()

    return {
        "prove.update": captured,
        "prove.same_update": lambda: prove.same_update(fresh_step, [1, 2]),
        "prove.row_invariance": lambda: prove.row_invariance(lambda x: x.relu(), rows),
        "diagnose.watch, diagnose.step": watched,
    }


def soak(call: Call, calls: int, seconds: float) -> tuple[int, Level, Level]:
    """How many calls were made, and the levels after a tenth of them and at the end."""
    warm, deadline, num_calls = max(calls // 10, 1), time.monotonic() + seconds, 0
    while num_calls < warm and time.monotonic() < deadline - 0.9 * seconds:
        call()
        num_calls += 1
    before = level()
    while num_calls < calls and time.monotonic() < deadline:
        call()
        num_calls += 1
    return num_calls, before, level()


def missing(calls: dict[str, Call]) -> list[str]:
    """Public functions of the packages that no call above names."""
    text = " ".join(calls)
    packages = (logprob, objectives, muon, lens, gpt)
    names = [n for p in packages for n in p.__all__ if inspect.isfunction(getattr(p, n)) and n not in text]
    return sorted(set(names))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("functions", nargs="*", help="all by default")
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=60.0, help="at most, per function")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        calls = {**logprob_calls(), **objective_calls(), **muon_calls(), **lens_calls()}
        calls |= {**gpt_calls(Path(folder)), **observer_calls()}
        print("not called:", ", ".join(missing(calls)) or "none")
        print("| function | calls | memory | threads | files | processes |\n|---|---|---|---|---|---|")
        for name, call in calls.items():
            if options.functions and name not in options.functions:
                continue
            num_calls, before, after = soak(call, options.calls, options.seconds)
            change = [b - a for a, b in zip(before, after, strict=True)]
            grows = change[0] > MOST_GROWTH_BYTES or any(count > 0 for count in change[1:])
            failures += grows
            memory = f"{change[0] / 2**20:+.1f} MiB"
            counts = " | ".join(f"{count:+d}" for count in change[1:])
            print(f"| {name} | {num_calls} | {memory} | {counts} |{' GROWS' if grows else ''}", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
