"""Log-probs, entropy and gradients of one long batch: 205,280 tokens, vocabulary 76,032, width 2,560, fp32.

leanstep rehearse --device h200 --sweep response-fraction=1,0.25,0.1 examples/rl/long_batch.py
"""

import argparse

import torch

from leanstep.heads import linear_logprobs

TOKENS, VOCAB, WIDTH = 205_280, 76_032, 2_560


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, rows: torch.Tensor):
    """Logits of every row, then log-probs and entropy of the response rows."""
    logp_all = torch.log_softmax((hidden @ weight.T)[rows], dim=-1)
    logp = logp_all.gather(-1, targets[rows, None]).squeeze(-1)
    return logp, -(logp_all.exp() * logp_all).sum(-1)


def leanstep(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, rows: torch.Tensor):
    scored = linear_logprobs(hidden, weight, targets, rows=rows, entropy="grad")
    return scored.logp, scored.entropy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--response-fraction", type=float, default=0.25)
    parser.add_argument("--head", choices=("plain", "leanstep"), default="leanstep")
    options = parser.parse_args()
    hidden = torch.randn(TOKENS, WIDTH, device="cuda", requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(VOCAB, WIDTH, device="cuda"))
    targets = torch.randint(VOCAB, (TOKENS,), device="cuda")
    rows = torch.arange(int(options.response_fraction * TOKENS), device="cuda")
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    for _ in range(3):
        logp, entropy = {"plain": plain, "leanstep": leanstep}[options.head](hidden, weight, targets, rows)
        (logp.mean() - 0.01 * entropy.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        hidden.grad = None


if __name__ == "__main__":
    main()
