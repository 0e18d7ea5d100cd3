"""Thin adapters for existing trainers. Nothing else in leanstep imports them.

`trl`, `transformers`, `verl`, `megatron`, `slime`: each needs its package; the first two come with
`pip install leanstep[integrations]`.
"""
