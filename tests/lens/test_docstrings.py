"""The docstring of every public name has shapes and equivalent code that runs."""

from __future__ import annotations

import doctest
import inspect
import re
from dataclasses import replace

import pytest
import torch
from docstring_code import code_blocks

import leanstep.lens as package
from leanstep.lens import loss, proxy, reference
from recipes.lens.contexts import LensNet, sample_variants

PUBLIC = {name: getattr(package, name) for name in package.__all__}
PUBLIC |= {name: getattr(loss, name) for name in ("Pairs", "build_pairs", "build_targets")}
PUBLIC |= {"aggregate_targets": proxy.aggregate_targets}

# What the code of a docstring must have computed; the names are those of the docstring and of `world`.
MEANS = {
    "GateConfig": "runs == [True, False, False][counter % 3]",
    "LensBatch": "batch.loss[0].equal(nll[batch.row[0]])",
    "LensConfig": "colder.objective.tau == 0.5 and colder.gate.every == 4",
    "LensMetrics": "0 <= agreement <= 1",
    "LensObjective": "result.loss.isfinite() and objective.micro_steps == 1",
    "LensResult": "torch.allclose(loss, result.loss)",
    "ObjectiveConfig": "torch.allclose(per_pair[kept].mean(), lens_loss(scores, batch, config).loss)",
    "SamplingConfig": "pref.shape == pairs.delta.shape",
    "Variant": "len(raw.positions) == 4 and gist.lods == [1]",
    "Pairs": "delta == pairs.delta[k]",
    "aggregate_targets": "masked.any() and not target[~masked].any()",
    "build_pairs": "[d for *_, d in listed] == pairs.delta[: len(listed)].tolist()",
    "build_targets": "row.equal(same[: len(row)])",
    "coverage": "torch.allclose(value, coverage(scores, batch, config)[v])",
    "lens_loss": "torch.allclose(value.loss, lens_loss(scores, batch, config).loss)",
    "lens_loss_reference": "torch.allclose(value.loss, lens_loss_reference(scores, batch, config).loss)",
    "proxy_loss": "torch.allclose(loss, proxy_loss(scores, batch, config))",
}


def world() -> dict[str, object]:
    """Names that the docstrings use."""
    torch.manual_seed(0)
    config = package.LensConfig(block_size=4)
    samples = []
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        drawn = sample_variants(64, 4, 2, 2, 52, g, recent_tokens=8)
        losses = torch.rand(len(drawn), generator=g).tolist()
        samples.append([replace(v, loss=x) for v, x in zip(drawn, losses, strict=True)])
    batch = package.LensBatch.from_variants(samples, config, num_tokens=64, loss_dtype=torch.float32)
    pairs = loss.build_pairs(batch.loss, batch.row, config)
    scores = torch.randn(batch.pos.shape).tanh()
    truth = package.lens_loss_reference(scores, batch, config)
    k = int(truth.kept.nonzero()[0])
    loss_of = torch.zeros(batch.num_contexts)
    loss_of[batch.row.reshape(-1)] = batch.loss.reshape(-1)
    worse, better = (
        list(zip(batch.pos[c].tolist(), batch.lod[c].tolist(), strict=True))
        for c in (pairs.worse[k], pairs.better[k])
    )
    lensnet = LensNet(16, 8, max_lod=2, block_size=4)
    embeddings = torch.randn(*batch.pos.shape, 16)
    inputs = (embeddings, batch.pos, batch.lod, batch.valid, batch.num_tokens)
    cache = package.ContextCache()
    for variants in samples:
        cache.append(variants, 64)
    names = dict(PUBLIC)
    names |= {
        "torch": torch,
        "replace": replace,
        "softplus": torch.nn.functional.softplus,
        "relu": torch.relu,
    }
    names |= {name: getattr(reference, name) for name in ("reference_pairs", "reference_targets")}
    names |= {"reference_coverage": reference.reference_coverage}
    up, down = loss.build_targets(loss.level_grid(batch, config), pairs, config, torch.float32)
    names |= {"up": up, "down": down}
    names |= {"config": config, "samples": samples, "batch": batch, "pairs": pairs, "scores": scores}
    names |= {"terms": truth.terms, "kept": truth.kept, "k": k, "loss_of": loss_of, "v": int(pairs.worse[k])}
    names |= {"better": better, "worse": worse, "s": 0, "cache": cache}
    names |= {
        "lensnet": lensnet,
        "embeddings": embeddings,
        "inputs": inputs,
        "nll": torch.rand(batch.num_contexts),
    }
    names |= {"counter": 1, "gate": package.GateConfig(every=3), "pos": batch.pos, "lod": batch.lod}
    names |= {"num_tokens": 64, "token_ids": torch.randint(50, (3, 64)), "counted": torch.ones(3, 64) > 0}
    names |= {"sequence": torch.arange(3).repeat_interleave(torch.tensor(batch.counts))}
    names |= {"base_loss": torch.zeros((), requires_grad=True)}
    names |= {"background": package.AsyncLens(lensnet, lambda x, b: x.square().mean())}
    names |= {"optimizer": torch.optim.SGD(lensnet.parameters(), lr=0.1)}
    names |= {"lens_optimizer": names["optimizer"], "loader": [batch, batch]}
    return names


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_has_shapes_and_code(name):
    doc = inspect.getdoc(PUBLIC[name])
    assert doc and not doc.startswith(f"{name}("), f"{name} has no docstring of its own"
    assert code_blocks(doc) or ">>>" in doc, f"{name}: no equivalent or example"
    shapes = doc + "".join(
        inspect.getdoc(m) or "" for _, m in inspect.getmembers(PUBLIC[name], inspect.isfunction)
    )
    host_only = {"GateConfig", "LensConfig", "SamplingConfig", "check_variant_counts", "ObjectiveConfig"}
    assert name in host_only or re.search(r"\[[A-Z0-9n]|0-d|scalar", shapes), f"{name}: no shape"


@pytest.mark.parametrize("name", PUBLIC)
def test_code_of_docstrings_means_the_same(name):
    doc = inspect.getdoc(PUBLIC[name])
    blocks = code_blocks(doc)
    names = world()
    try:
        for block in blocks:
            lines = block.strip().splitlines()
            # A bare last expression is the value.
            if not re.match(r"\s|[\w, ]+ = |for |if ", lines[-1]):
                lines[-1] = f"value = {lines[-1]}"
            exec("\n".join(lines), names)
        assert name not in MEANS or bool(eval(MEANS[name], names)), (
            f"{name}: the code computes something else"
        )
        assert name in MEANS or not blocks or name in ("AsyncLens", "ContextCache")
    finally:
        names["background"].close()
    runner = doctest.DocTestRunner()
    examples = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name, globs=world())
    for example in examples:
        torch.manual_seed(0)
        assert runner.run(example).failed == 0
