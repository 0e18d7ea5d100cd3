"""Who orthogonalises which matrix: the same answer on every rank, without communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Assignment:
    """Matrices by name -> owning rank, with the load of each rank in FLOPs."""

    owner: dict[str, int]
    cost: dict[str, float]
    loads: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """The busiest rank's load over the mean; 1 is perfect."""
        mean = sum(self.loads) / len(self.loads)
        return max(self.loads) / mean if mean else 1.0

    def __str__(self) -> str:
        lines = [f"imbalance {self.imbalance:.3f}"]
        for rank, load in enumerate(self.loads):
            names = [name for name, owner in self.owner.items() if owner == rank]
            lines.append(f"rank {rank}: {load / 1e9:.3g} GFLOP, {len(names)} matrices: {', '.join(names)}")
        return "\n".join(lines)


def assign(costs: Mapping[str, tuple[int, float]], world_size: int) -> Assignment:
    """Longest processing time first: biggest matrix to the least loaded rank, ties to the lowest.

    Args:
        costs: name -> (number of elements, FLOPs). Sorted by (-elements, name) before assigning.
        world_size: number of ranks.
    """
    if world_size < 1:
        raise ValueError(f"world_size: expected at least 1, got {world_size}")
    loads = [0.0] * world_size
    owner: dict[str, int] = {}
    for name in sorted(costs, key=lambda name: (-costs[name][0], name)):
        rank = min(range(world_size), key=lambda r: (loads[r], r))
        owner[name] = rank
        loads[rank] += costs[name][1]
    ordered = {name: owner[name] for name in costs}
    return Assignment(ordered, {name: cost for name, (_, cost) in costs.items()}, tuple(loads))
