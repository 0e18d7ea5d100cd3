"""GPU only: tile sizes that fill the device, and kernels for whole rows."""
