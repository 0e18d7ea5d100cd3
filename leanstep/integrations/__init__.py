"""Thin adapters: leanstep inside the trainers people already use. Nothing else in leanstep imports them.

`trl`, `transformers`, `megatron`, `slime`: each needs its package (`pip install leanstep[integrations]`).
"""
