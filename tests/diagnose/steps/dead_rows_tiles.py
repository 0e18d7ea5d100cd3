"""The head in tiles of the vocabulary, forward and backward by hand; every row is scored, a quarter counts."""
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
VOCAB, TILE = 640, 128


class TiledLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets):
        top, total = torch.full(targets.shape, -1e30), torch.zeros(targets.shape)
        logit = torch.zeros(targets.shape)
        for start in range(0, VOCAB, TILE):
            tile = hidden @ weight[start : start + TILE].t()  # expect: dead-rows count=192
            new_top = torch.maximum(top, tile.amax(-1))
            total = total * (top - new_top).exp() + (tile - new_top[:, None]).exp().sum(-1)
            top = new_top
            local = targets - start
            inside = (local >= 0) & (local < TILE)
            found = tile.gather(1, local.clamp(0, TILE - 1)[:, None])[:, 0]
            logit = torch.where(inside, found, logit)
        log_z = top + total.log()
        ctx.save_for_backward(hidden, weight, targets, log_z)
        return logit - log_z

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, targets, log_z = ctx.saved_tensors
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, VOCAB, TILE):
            rows = weight[start : start + TILE]
            p = (hidden @ rows.t() - log_z[:, None]).exp()
            is_target = torch.arange(start, start + TILE) == targets[:, None]
            tile = grad[:, None] * (is_target.float() - p)
            grad_hidden.addmm_(tile, rows)
            grad_weight[start : start + TILE].addmm_(tile.t(), hidden)
        return grad_hidden, grad_weight, None


embed, head = torch.nn.Embedding(VOCAB, 32), torch.nn.Linear(32, VOCAB, bias=False)
optimizer = torch.optim.SGD([*embed.parameters(), *head.parameters()], lr=0.1)
ids, targets = torch.randint(0, VOCAB, (256,)), torch.randint(0, VOCAB, (256,))
counts = torch.arange(256) % 4 == 0

for _ in range(4):
    optimizer.zero_grad()
    logp = TiledLogProb.apply(embed(ids), head.weight, targets)
    loss = -(logp * counts).sum() / 64
    loss.backward()
    optimizer.step()
