"""Training steps that others wrote. Every expected finding was read in their source and counted by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent / "third_party"


def found(watch) -> dict[tuple[str, str], int]:
    """(rule, code) -> count: line numbers of other people's files move."""
    return {(f.rule, f.line.code): f.count for f in watch.findings()}


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_torch_muon_walks_over_its_matrices(watched) -> None:
    watch = watched(HERE / "muon.py")
    findings = found(watch)
    # 8 matrices x 23 (2 lerps, a cast, norm, clamp, divide, 15 matmuls, decay, update),
    # 11 parameters x AdamW's 9.
    assert findings["unbatched-optimizer", "optimizer.step()"] == 283
    assert findings["host-sync", "print(step, loss.item())"] == 1
    assert {rule for rule, _ in findings} <= {"unbatched-optimizer", "host-sync", "slow-dtype"}
    (finding,) = [f for f in watch.findings() if f.rule == "unbatched-optimizer"]
    assert finding.evidence["repeats"]["matmul"] == 8 * 5 * 3


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")


@needs_transformers
def test_transformers_trainer_scores_the_prompt(watched) -> None:
    watch = watched(HERE / "trainer.py")
    findings = found(watch)
    # 8 sequences, 32 ignored labels each; the loss shifts by one, so the last prompt row predicts an answer
    # and the last row of all predicts nothing: 32 dead rows either way.
    assert findings["dead-rows", "logits = self.lm_head(hidden_states)"] == 8 * 32
    assert watch.findings()[0].rule == "dead-rows"
    assert "apply_leanstep(model)" in watch.findings()[0].fix
    assert {rule for rule, _ in findings} == {"dead-rows", "host-sync"}
    assert sum(count for (rule, _), count in findings.items() if rule == "host-sync") == 5
    assert all(f.callers for f in watch.findings())


@needs_trl
def test_trl_grpo_reads_the_device_all_over(watched) -> None:
    watch = watched(HERE / "grpo.py")
    findings = found(watch)
    assert {rule for rule, _ in findings} == {"host-sync", "dead-rows"}
    # Off Triton devices every position is scored, the prompts' as well.
    (first,) = [finding for finding in watch.findings() if finding.rule == "dead-rows"]
    assert first.line.file.endswith("chunked_logprob.py")
    assert first.evidence["width"] == 512 and first.count >= 8 * 11
    # What is advised must take every trainer that scores with this kernel: SFT, DPO and KTO as well.
    assert first.short_fix == "integrations.trl.apply_leanstep(trainer)"
    assert all(f"Lean{kind}Trainer" in first.fix for kind in ("SFT", "DPO", "GRPO", "KTO"))
    # One look per generated token, to see whether all sequences have ended.
    assert findings["host-sync", "return bool(unfinished_sequences.max() == 0)"] == 16
    # Ids and mask are copied to the host; the lists are made from the copies.
    (lists,) = [c for (_, code), c in findings.items() if code.startswith("c[m].tolist()")]
    assert lists == 2
    assert len(watch.steps) == 3
