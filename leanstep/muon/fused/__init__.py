"""A Muon step on a GPU: what stands around the polar factor as Triton kernels, many tensors a launch."""
