"""Thin adapters: leanstep inside the trainers people already use. Nothing else in leanstep imports them.

`trl`, `transformers`, `verl`, `megatron`, `slime`: each needs its package; the first two come with
`pip install leanstep[integrations]`.
"""
