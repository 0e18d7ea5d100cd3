"""Recurrent layers, packed sequences, cells and CTC: what they print is checked against shapes and sums."""

import json

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

LENGTHS = [7, 4, 2]
seen = {}
lstm = nn.LSTM(16, 32, num_layers=2, bidirectional=True, batch_first=True).cuda()
gru = nn.GRU(16, 32).cuda()
cell = nn.GRUCell(16, 32).cuda()
head = nn.Linear(32, 10).cuda()
parameters = [p for module in (lstm, gru, cell, head) for p in module.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.1)

for _ in range(3):
    y, (h, c) = lstm(torch.randn(3, 7, 16, device="cuda"))  # MARK lstm
    seen["lstm"] = [list(t.shape) for t in (y, h, c)]
    y.sum().backward()

    x = torch.randn(7, 3, 16, device="cuda", requires_grad=True)
    packed = pack_padded_sequence(x, torch.tensor(LENGTHS))
    seen["packed"] = [list(packed.data.shape), packed.batch_sizes.tolist()]
    out, h = gru(packed)  # MARK gru
    out, lengths = pad_packed_sequence(out)
    seen["gru"] = [list(out.shape), list(h.shape), lengths.tolist()]
    out.sum().backward()
    seen["gradient of packed"] = list(x.grad.shape)

    state = cell(torch.randn(5, 16, device="cuda"), torch.zeros(5, 32, device="cuda"))  # MARK cell
    state.sum().backward()

    scores = head(torch.randn(20, 4, 32, device="cuda")).log_softmax(-1)
    targets = torch.randint(1, 10, (4, 6)).cuda()
    steps, sizes = torch.full((4,), 20).cuda(), torch.full((4,), 6).cuda()
    loss = nn.functional.ctc_loss(scores, targets, steps, sizes)  # MARK ctc
    loss.backward()
    seen["gradients"] = all(p.grad is not None and p.grad.shape == p.shape for p in parameters)
    optimizer.step()
    optimizer.zero_grad()
    print(json.dumps(seen), flush=True)
