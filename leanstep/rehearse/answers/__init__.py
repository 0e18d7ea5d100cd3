"""What a program finds instead of a device: torch.cuda, compiled regions, Triton, binaries, other ranks."""
