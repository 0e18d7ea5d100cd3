"""Under autocast one activation feeds three layers: the weights' casts are cached, the activation's are not."""
import torch

torch.manual_seed(0)
torch.set_num_threads(1)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(256, 256, bias=False) for _ in range(3))

    def forward(self, x):
        q = self.q(x)  # expect: slow-dtype count=1 when=no-native-bf16
        k = self.k(x)  # expect: duplicate-cast count=1; slow-dtype count=1 when=no-native-bf16
        v = self.v(x)  # expect: duplicate-cast count=1; slow-dtype count=1 when=no-native-bf16
        return q * k + v


model = Attention()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
x = torch.randn(256, 256)
for _ in range(4):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
