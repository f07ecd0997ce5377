"""How a sequence is sharded over n processes: in 2n chunks, of which process r holds chunk r and chunk 2n - 1 - r.

Under a causal mask chunk c sees c + 1 chunks, so that each process has as much to compute: 2n + 1 pairs of chunks.
Packed documents and windows are sharded in the same way; the load is balanced if the hidden part is spread evenly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from foundry_kernels.core.checks import check_int, check_tensor


def check_mesh(mesh: DeviceMesh, parallelism: str = "context") -> None:
    """Raises TypeError or ValueError unless `mesh` is a DeviceMesh of one dimension."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh; got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, that of {parallelism} parallelism; got {mesh.ndim}: {mesh}")


class Place(NamedTuple):
    """A process among those that share a sequence."""

    rank: int
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Place:
        check_mesh(mesh)
        return cls(mesh.get_local_rank(), mesh.size())

    @property
    def chunks(self) -> tuple[int, int]:
        """The numbers of the chunks that this process holds, in order."""
        return self.rank, 2 * self.size - 1 - self.rank

    def chunk_length(self, length: int) -> int:
        """Tokens of a chunk of a sequence of `length` tokens."""
        if length % (2 * self.size):
            raise ValueError(
                f"a sequence over {self.size} processes must have a multiple of {2 * self.size} tokens; got {length}"
            )
        return length // (2 * self.size)


def shard_sequence(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """Returns this process's part of a tensor that every process has: two chunks, with T / n of the T tokens.

    Args:
        x: tokens, targets, positions or any other tensor with one entry a token.
        mesh: of one dimension, the processes that share the sequence.
        dim: the dimension of x that counts tokens.

    Raises:
        TypeError: `x` is no tensor, `mesh` no DeviceMesh.
        ValueError: the mesh has several dimensions, x no multiple of ``2 * mesh.size()`` tokens.
    """
    check_tensor("x", x)
    place = Place.of(mesh)
    chunk = place.chunk_length(x.shape[dim])
    return torch.cat([x.narrow(dim, number * chunk, chunk) for number in place.chunks], dim)


@torch.no_grad()
def gather_sequence(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """Gathers the tensor whose parts by `shard_sequence` the processes have, on every process; it has no gradient.

    Raises:
        TypeError: `x` is no tensor, `mesh` no DeviceMesh.
        ValueError: the mesh has several dimensions, x an odd number of tokens.
    """
    check_tensor("x", x)
    _, size = Place.of(mesh)
    if x.shape[dim] % 2:
        raise ValueError(f"x must have two chunks of tokens in dimension {dim}; got shape {tuple(x.shape)}")
    mine = x.movedim(dim, 0).contiguous()
    gathered = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(gathered, mine, group=mesh.get_group())
    first, second = zip(*(part.chunk(2) for part in gathered), strict=True)
    return torch.cat([*first, *reversed(second)]).movedim(0, dim)


def sequence_positions(length: int, mesh: DeviceMesh, device: torch.device | str | None = None) -> Tensor:
    """Returns where the tokens of this process lie in the sequence of `length` tokens, ``[length / n]`` int64.

    Raises:
        TypeError, ValueError: as :func:`shard_sequence`.
    """
    check_int("length", length, 0)
    return shard_sequence(torch.arange(length, device=device), mesh, 0)
