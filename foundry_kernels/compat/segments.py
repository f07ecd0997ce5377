"""Represents partly used or chunked packed sequences as more and shorter packed sequences.

A sequence of which queries 0 .. m - 1 and keys 0 .. n - 1 are in use is one with these, then one of the other queries
and no keys, then one of the other keys and no queries: nothing is copied, no length is read, and the kernels give 0 to
the queries that are not in use. A chunk is a sequence of its own with the queries whose positions fall into it: its
last query is where its last key is, so that "bottom_right" aligns it as before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_device, check_integer, check_rank, check_shape


def segments(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_k: int,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    attention_chunk: int,
) -> tuple[Tensor, Tensor]:
    """`cu_seqlens_q` and `cu_seqlens_k` of the segments of all sequences, as many for each.

    Raises:
        TypeError, ValueError: `seqused_q` or `seqused_k` is not ``[B]`` int32 or int64 on the device of its cumulative
            lengths or, on the CPU, is not within its sequence.
    """
    if seqused_q is None and seqused_k is None and not attention_chunk:
        return cu_seqlens_q, cu_seqlens_k
    check_rank("cu_seqlens_q", cu_seqlens_q, 1, "[B + 1]")
    check_shape("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape, "that of cu_seqlens_q")
    begin_q, begin_k = cu_seqlens_q[:-1], cu_seqlens_k[:-1]
    n_q = _lengths("seqused_q", seqused_q, "cu_seqlens_q", cu_seqlens_q)
    n_k = _lengths("seqused_k", seqused_k, "cu_seqlens_k", cu_seqlens_k)
    # where segments begin, in the tokens of each sequence: [B, segments] of queries, and of keys
    zero = torch.zeros_like(n_q)[:, None]
    of_q, of_k = [zero], [torch.zeros_like(n_k)[:, None]]
    if attention_chunk:  # before the first chunk are the queries that lie before the first key
        ends = torch.arange(-(-max_seqlen_k // attention_chunk) + 1, device=n_q.device) * attention_chunk
        place = ends - (n_k - n_q)[:, None]
        of_q.append(torch.minimum(place.clamp(min=0), n_q[:, None]))
        of_k.append(torch.minimum(ends[None], n_k[:, None]))
    else:
        of_q.append(n_q[:, None])
        of_k.append(n_k[:, None])
    if seqused_q is not None or seqused_k is not None:
        of_q.append(cu_seqlens_q.diff()[:, None])
        of_k.append(n_k[:, None])
    return _join(of_q, begin_q, cu_seqlens_q), _join(of_k, begin_k, cu_seqlens_k)


def _join(of: list[Tensor], begin: Tensor, cu_seqlens: Tensor) -> Tensor:
    begins = torch.cat(of, 1) + begin[:, None]
    return torch.cat((begins.flatten().to(cu_seqlens.dtype), cu_seqlens[-1:]))


def _lengths(name: str, seqused: Tensor | None, cu_name: str, cu_seqlens: Tensor) -> Tensor:
    check_integer(cu_name, cu_seqlens)
    lengths = cu_seqlens.diff()
    if seqused is None:
        return lengths
    check_integer(name, seqused)
    check_shape(name, seqused, lengths.shape, "one for each sequence")
    check_device(name, seqused, cu_name, cu_seqlens)
    if seqused.device.type == "cpu" and not torch.compiler.is_compiling() and type(seqused) is Tensor:
        pairs = zip(seqused.tolist(), lengths.tolist(), strict=True)
        for n, (used, length) in enumerate(pairs):
            if not 0 <= used <= length:
                raise ValueError(f"{name} must be in 0 .. {length}, the length of sequence {n}; got {used}")
    return seqused
