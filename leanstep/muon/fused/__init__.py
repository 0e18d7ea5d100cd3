"""A Muon step on a GPU: Triton kernels for the passes around the polar factor, many tensors per launch."""
