"""Only on a GPU: sides of tiles that fill it, kernels for whole rows."""
