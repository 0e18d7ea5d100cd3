"""Replacements for what needs a real device: torch.cuda, compiled regions, Triton, binaries, other ranks."""
