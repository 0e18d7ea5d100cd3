"""NorMuon against traces of upstream's optimizer, step by step."""

from __future__ import annotations

import torch
from muon.golden import array, load
from torch import nn

from leanstep.muon import NorMuon, to_master


def master(optimizer, param):
    """Return the float32 weight of a parameter of the preset."""
    low = optimizer.state[param].get("residual")
    return param.detach().float().clone() if low is None else to_master(param.detach(), low, "truncate")


def replay(trace, compute_dtype):
    """Run the recorded gradients through the optimizer as the speedrun does."""
    hyper = trace["hyper"]
    params = {label: nn.Parameter(array(entry)) for label, entry in trace["init"].items()}
    groups = [
        {
            "params": [("mlp_bank", params["mlp_bank"])],
            "algorithm": "normuon",
            "lr_mul": [1.0, 2.0, 1.0, 2.0],
        },
        {"params": [("attn_bank", params["attn_bank"])], "algorithm": "normuon"},
    ]
    for label, row in hyper["table"].items():
        groups.append(
            {
                "params": [(label, params[label])],
                "algorithm": "adam",
                "betas": tuple(row["betas"]),
                "lr_mul": row["lr_mul"],
                "wd_mul": row["wd_mul"],
            }
        )
    optimizer = NorMuon.preset("modded-nanogpt", groups, compute_dtype=compute_dtype)
    for group in optimizer.param_groups:
        expected = hyper["adam" if group["algorithm"] == "adam" else "normuon"]
        assert {name: group[name] for name in expected} == expected
    banks = {params["mlp_bank"], params["attn_bank"]}
    base = [group["lr"] for group in optimizer.param_groups]
    tied, snapshots = True, []
    for row in trace["steps"]:
        for label, entry in row["new_grads"].items():
            grad = array(entry)
            params[label].grad = grad if params[label].grad is None else params[label].grad + grad
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * row["lr_mul"]
            if "momentum" in group:
                group["momentum"] = row["muon_momentum"]
        if tied and row["do_adam"]:
            params["lm_head"].grad += params["embed"].grad.mT
            params["embed"].grad = None
        # Adam steps on odd steps only; between them its gradients accumulate.
        waiting = {p: p.grad for p in params.values() if not row["do_adam"] and p not in banks}
        for p in waiting:
            p.grad = None
        optimizer.step()
        for p in params.values():
            p.grad = waiting.get(p)
        if tied and row["do_adam"]:
            params["embed"].data.copy_(params["lm_head"].data.mT)
        if row["split_after"]:
            tied = False
            head = optimizer.state[params["lm_head"]]
            optimizer.state[params["embed"]] = {
                k: v.mT.contiguous() if v.ndim > 1 else v.clone() for k, v in head.items()
            }
        snapshots.append({label: master(optimizer, p) for label, p in params.items()})
    return optimizer, params, snapshots


def test_six_step_trace_of_the_whole_optimizer():
    trace = load("optimizer_trace")
    optimizer, params, snapshots = replay(trace, torch.float32)
    for row, snapshot in zip(trace["steps"], snapshots, strict=True):
        for label, expected in row["after"].items():
            key = "weight_fp32" if "weight_fp32" in expected else "weight"
            want = array(expected[key]).float()
            atol = 2e-5 if key == "weight_fp32" or want.dtype == torch.float32 else 0
            rtol = 2**-7 if array(expected[key]).dtype == torch.bfloat16 else 0
            torch.testing.assert_close(
                snapshot[label], want, atol=atol, rtol=rtol, msg=lambda m, label=label: f"{label}: {m}"
            )
    last = trace["steps"][-1]["after"]
    for label, param in params.items():
        state = optimizer.state[param]
        if "step" in state:
            assert int(state["step"]) == last[label]["step"]
            torch.testing.assert_close(state["exp_avg"], array(last[label]["exp_avg"]), atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(
                state["exp_avg_sq"], array(last[label]["exp_avg_sq"]), atol=1e-6, rtol=1e-5
            )
        else:
            torch.testing.assert_close(
                state["second_momentum"].flatten(), array(last[label]["second_momentum"]).flatten(),
                atol=1e-6, rtol=1e-4,
            )  # fmt: skip


def test_bfloat16_orthogonalisation_is_closer_to_float32_than_upstreams():
    _, _, snapshots = replay(load("optimizer_trace"), torch.bfloat16)
    exact = load("optimizer_trace")["steps"][-1]["after"]
    for label, expected in load("optimizer_trace_bf16_final")["final"].items():
        truth = array(exact[label]["weight_fp32"])
        upstream = (array(expected["weight_fp32"]) - truth).norm()
        assert (snapshots[-1][label] - truth).norm() <= upstream
