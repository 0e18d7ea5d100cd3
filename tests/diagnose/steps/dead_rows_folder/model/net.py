import torch
import torch.nn.functional as F


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mix = torch.nn.LayerNorm(width), torch.nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.mix(self.norm(x)))


class LanguageModel(torch.nn.Module):
    def __init__(self, vocab, width, layers):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, width)
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.embed.weight)  # expect: dead-rows count=120
