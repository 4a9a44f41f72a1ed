"""The place of a rank in a line of ranks that holds the model once, and its replica among such lines.

The replicas of one place have consecutive ranks (``rank = place * replicas + replica``). If ranks share a machine,
gradients are averaged inside it, and only activations and their gradients leave it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from hydra_ext.errors import InvalidArgument


@dataclass(frozen=True)
class Topology:
    """The ranks of a pipeline, and this rank among them.

    Attributes:
        rank: This rank in the default process group; 0 without one.
        world: Number of ranks.
        replicas: Number of lines. Each trains a copy of the model on data of its own.
    """

    rank: int
    world: int
    replicas: int

    @classmethod
    def here(cls, replicas: int) -> Topology:
        """The topology of torch.distributed's default group.

        Raises:
            InvalidArgument: The ranks do not divide into so many lines.
        """
        initialised = dist.is_available() and dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if initialised else (0, 1)
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1 or world % replicas:
            raise InvalidArgument(
                f"replicas={replicas!r} with {world} rank{'s' * (world > 1)}: give a number that divides the ranks"
                + ("" if initialised else "; torch.distributed is not initialised, so this is the only one")
            )
        return cls(rank, world, replicas)

    @property
    def places(self) -> int:
        """Number of ranks in one line."""
        return self.world // self.replicas

    @property
    def place(self) -> int:
        return self.place_of(self.rank)

    @property
    def replica(self) -> int:
        return self.rank % self.replicas

    def rank_of(self, place: int, replica: int | None = None) -> int:
        """The rank at a place; by default in this rank's own line."""
        return place * self.replicas + (self.replica if replica is None else replica)

    def place_of(self, rank: int) -> int:
        return rank // self.replicas

    def line(self, replica: int) -> list[int]:
        return [self.rank_of(place, replica) for place in range(self.places)]

    def copies(self, place: int) -> list[int]:
        return [self.rank_of(place, replica) for replica in range(self.replicas)]
