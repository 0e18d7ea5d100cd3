"""A GAN; a third optimizer exists and never steps."""

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
generator, critic = torch.nn.Linear(8, 16).to(device), torch.nn.Linear(16, 1).to(device)
idle = torch.optim.SGD([torch.nn.Parameter(torch.ones(2, device=device))], lr=0.1)
generates = torch.optim.Adam(generator.parameters(), lr=0.01)
judges = torch.optim.Adam(critic.parameters(), lr=0.01)
real = torch.randn(8, 16, device=device)
for _ in range(6):
    judges.zero_grad()
    loss = critic(generator(torch.randn(8, 8, device=device)).detach()).mean() - critic(real).mean()
    loss.backward()
    judges.step()
    generates.zero_grad()
    (-critic(generator(torch.randn(8, 8, device=device))).mean()).backward()
    generates.step()
    loss.item()  # SYNC
