r"""Ring attention for a sequence that is sharded over processes: keys and values circulate, queries stay.

In n steps each process sees the keys and values of all processes. While it attends to one part, it sends it to the next
process and receives another from the previous one. The result of a step, an output :math:`y_s` and the log-sum-exp
:math:`\ell_s` of its scores, is combined with earlier results in float32,

.. math:: \ell = \log \Bigl(e^{\sigma} + \sum_s e^{\ell_s}\Bigr), \qquad y = \sum_s e^{\ell_s - \ell} \, y_s ,

the sink :math:`\sigma` once at the end. The backward pass repeats the ring. Each step computes its part of the
gradients from the y and :math:`\ell` of the whole, so that they equal those of attention in one process. The gradients
of keys and values travel with them as float32 sums, and return to their process.

Sent by a process, of B sequences of T tokens over n processes with Hk key-value heads: forward ``(n - 1) B Hk T / n (D
+ Dv)`` numbers of q's dtype, backward these and ``n B Hk T / n (D + Dv)`` numbers of float32. Memory beyond the
arguments is at most two parts of keys and values in transit; forward the output in float32; backward the gradient of q
and three parts in float32; and the results of the kernels for one piece. Scores are never stored.

Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023, arXiv:2310.01889. The order of the chunks,
by which each process has as much to do under a causal mask, two of 2n from both ends: Grattafiori et al., "The Llama 3
Herd of Models", 2024, arXiv:2407.21783; why it matters: Brandon et al., "Striped Attention", 2023, arXiv:2311.09431.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from foundry_kernels.core.autocast import no_autocast
from foundry_kernels.core.autograd import apply
from foundry_kernels.core.checks import check_integer, check_tensor
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.core.layout import inverse, storage_order
from foundry_kernels.core.registry import is_dtensor, wide_dtype
from foundry_kernels.distributed.pieces import Piece, plan
from foundry_kernels.distributed.zigzag import Place
from foundry_kernels.ops.flash_attention import passes
from foundry_kernels.ops.flash_attention.checks import cast, check_dense, check_lengths, dense_options
from foundry_kernels.ops.flash_attention.options import AttentionOptions


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh,
    *,
    cu_seqlens: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`foundry_kernels.flash_attention` of a sequence that `shard_sequence` has sharded over the processes.

    All processes of `mesh` must call it together with the same options, and also run the backward pass together.

    Args:
        q: ``[B, H, T / n, D]``, this process's queries, with positions already encoded.
        k: ``[B, Hk, T / n, D]``, its keys. v: ``[B, Hk, T / n, Dv]``. Hk heads are sent, not H.
        mesh: of one dimension, the n processes.
        cu_seqlens: ``[N + 1]`` int32 or int64: the whole sequence holds N packed documents, which do not see each
            other; B is 1. It may be on any device; on the CPU, reading it does not wait.
        causal, scale, window, softcap, alibi_slopes, sinks, deterministic, backend: as of `flash_attention`, for the
            whole sequence. The gradient of `sinks` is this process's part of the whole's.
        dropout_p, dropout_seed: as there, but the mask depends on the two processes and the position within their
            parts, so it differs from that of one process.
        return_lse: also return the log-sum-exp of each row, differentiable.

    Returns:
        ``out [B, H, T / n, Dv]`` of q's dtype, in q's storage order, or ``(out, lse)``, lse ``[B, H, T / n]`` float32
        (float64 for float64 inputs).

    Raises:
        TypeError, ValueError: as `flash_attention`, and if mesh has several dimensions, the parts an odd number of
            tokens, or `cu_seqlens` does not go from 0 to the T tokens of all.
        BackendUnavailable: as there.
    """
    place = Place.of(mesh)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if is_dtensor(x):
            raise TypeError(f"{name} must be a plain tensor, the part of this process; got a DTensor")
    q, k, v = cast(q, k, v)
    check_dense(q, k, v)
    if q.shape[2] != k.shape[2] or q.shape[2] % 2:
        raise ValueError(
            f"q and k must have as many tokens, two chunks of them; got shapes {tuple(q.shape)} and {tuple(k.shape)}"
        )
    length = q.shape[2] * place.size
    documents = None if cu_seqlens is None else _documents(cu_seqlens, q, length)
    options = dense_options(
        q, k, causal=causal, scale=scale, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        dropout_p=dropout_p, dropout_seed=dropout_seed, align="top_left", deterministic=deterministic,
    )._replace(sinks=None)  # fmt: skip
    pieces = plan(
        place, q.shape[2] // 2, options.window_left, options.window_right, documents, alibi_slopes is not None
    )
    ring = _Ring(mesh.get_group(), place, pieces, passes.serving(backend, q, k, v, options))
    out, lse = apply(_RingAttention, q, k, v, sinks, options, ring)
    return (out, lse) if return_lse else out


def _documents(cu_seqlens: Tensor, q: Tensor, length: int) -> tuple[int, ...]:
    check_integer("cu_seqlens", cu_seqlens, 1, "[N + 1]")
    if q.shape[0] != 1:
        raise ValueError(f"q must hold one row with cu_seqlens; got shape {tuple(q.shape)}")
    on_cpu = cu_seqlens.cpu()
    check_lengths("cu_seqlens", on_cpu, "length", length, length)
    return tuple(on_cpu.tolist())


class _Ring(NamedTuple):
    """The processes of one call, and the pieces that this one computes with each part."""

    group: dist.ProcessGroup
    place: Place
    pieces: tuple[tuple[Piece, ...], ...]
    backend: str

    def source(self, step: int) -> int:
        """The process whose part is here in a step."""
        return (self.place.rank - step) % self.place.size

    def exchange(self, x: Tensor, tag: int) -> _Arriving:
        """Sends x to the next process and receives from the previous one, overlapping with computation."""
        rank, size = self.place
        received = torch.empty_like(x)
        after, before = (dist.get_global_rank(self.group, peer % size) for peer in (rank + 1, rank - 1))
        send = dist.P2POp(dist.isend, x, after, self.group, tag)
        receive = dist.P2POp(dist.irecv, received, before, self.group, tag)
        return _Arriving(received, dist.batch_isend_irecv([send, receive]))

    def options(self, base: AttentionOptions, piece: Piece, number: int, q: Tensor, k: Tensor) -> AttentionOptions:
        """A piece's options. number: of the piece among all pairs of processes."""
        changes: dict[str, Any] = {"max_seqlen_q": q.shape[-2], "max_seqlen_k": k.shape[-2]}
        batch, slopes = q.shape[0], base.alibi_slopes
        if piece.cu_seqlens is not None:
            cu_seqlens = torch.tensor(piece.cu_seqlens, dtype=torch.int32, device=q.device)
            longest = max(b - a for a, b in zip(piece.cu_seqlens, piece.cu_seqlens[1:], strict=False))
            changes = {"max_seqlen_q": longest, "max_seqlen_k": longest, "cu_seqlens_q": cu_seqlens}
            changes |= {"cu_seqlens_k": cu_seqlens}
            batch, slopes = len(piece.cu_seqlens) - 1, None if slopes is None else slopes.view(-1, q.shape[1])[-1]
        if slopes is not None and piece.distance:
            changes |= {"attn_mask": _bias_of_keys(slopes.to(wide_dtype(q.dtype)), piece, k.shape[2])}
            slopes = None
        if base.dropout_p is not None:
            heads = number * q.shape[1] + torch.arange(q.shape[1], device=q.device)
            changes |= {"dropout_heads": (torch.arange(batch, device=q.device)[:, None] << 32) + heads}
        return base._replace(window_left=piece.left, window_right=piece.right, alibi_slopes=slopes, **changes)

    def number(self, source: int, index: int) -> int:
        """The number of a piece among those of all pairs of processes. A pair has at most four pieces."""
        return (self.place.rank * self.place.size + source) * 4 + index


class _Arriving(NamedTuple):
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def _bias_of_keys(slopes: Tensor, piece: Piece, n_keys: int) -> Tensor:
    """ALiBi's bias ``[B or 1, H, 1, S]`` without the part that is equal for all keys of a query, `_bias_of_queries`. If
    all keys are on one side of the queries, the bias is the sum of both."""
    key = torch.arange(n_keys, device=slopes.device, dtype=slopes.dtype)
    steps = n_keys - 1 - key if piece.distance > 0 else key
    bias = slopes[..., None, None] * -steps
    return bias if bias.dim() == 4 else bias[None]


def _bias_of_queries(slopes: Tensor, piece: Piece, n_keys: int) -> Tensor:
    """``[B or 1, H, T]``: minus slope times the distance to the nearest key."""
    n_queries = piece.queries[1] - piece.queries[0]
    from_first = piece.distance + torch.arange(n_queries, device=slopes.device, dtype=torch.float64)
    steps = from_first - (n_keys - 1) if piece.distance > 0 else -from_first
    bias = slopes[..., None].double() * -steps
    return bias if bias.dim() == 3 else bias[None]


class _Cut(NamedTuple):
    """A piece as the two passes take it."""

    options: AttentionOptions
    rows: slice
    cols: slice
    shift: Tensor | None  # what the lse of its own scores lacks

    @classmethod
    def of(cls, ring: _Ring, base: AttentionOptions, source: int, index: int, q: Tensor, k: Tensor) -> _Cut:
        piece = ring.pieces[source][index]
        rows, cols = slice(*piece.queries), slice(*piece.keys)
        options = ring.options(base, piece, ring.number(source, index), q[:, :, rows], k[:, :, cols])
        shift = None
        if base.alibi_slopes is not None and piece.distance:
            shift = _bias_of_queries(base.alibi_slopes, piece, cols.stop - cols.start)
        return cls(options, rows, cols, shift)

    def take(self, x: Tensor, part: slice) -> Tensor:
        """Returns the `part` of x ``[B, H, T, D]``, in the layout of the operators."""
        x = x[:, :, part]
        return x.squeeze(0).transpose(0, 1) if self.options.packed else x

    def take_rows(self, x: Tensor) -> Tensor:
        """Returns the piece's rows of x ``[B, H, T]``, contiguous, in the layout of the operators."""
        x = x[:, :, self.rows].contiguous()
        return x.squeeze(0) if self.options.packed else x

    def give(self, x: Tensor) -> Tensor:
        """Returns a result of the operators as ``[B, H, T, D]``."""
        return x.transpose(0, 1).unsqueeze(0) if self.options.packed else x

    def add_output(self, backend: str, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor) -> None:
        """Combines the piece's result with what is in `out` and `lse`."""
        q, k, v = qkv
        part, of_part = passes.forward_wide(
            backend, self.take(q, self.rows), self.take(k, self.cols), self.take(v, self.cols), self.options
        )
        of_part = of_part.view(q.shape[0], q.shape[1], -1).to(lse.dtype)
        if self.shift is not None:
            of_part = of_part + self.shift
        before = lse[:, :, self.rows]
        total = torch.logaddexp(before, of_part)
        safe = total.masked_fill(total == -torch.inf, 0.0)  # a row that has seen no key yet
        kept, added = (torch.exp(x - safe)[..., None].to(out.dtype) for x in (before, of_part))
        out[:, :, self.rows].mul_(kept).add_(self.give(part) * added)
        before.copy_(total)

    def gradients(
        self, backend: str, qkv: tuple[Tensor, Tensor, Tensor], results: tuple[Tensor, Tensor, Tensor, Tensor | None]
    ) -> tuple[Tensor, ...]:
        """dq, dk and dv of the piece, of results (dout, out, lse, dlse) of all keys."""
        q, k, v = qkv
        dout, out, lse, dlse = results
        if self.shift is not None:
            lse = lse.clone()
            lse[:, :, self.rows] -= self.shift
        found = passes.backward(
            backend, self.take(dout, self.rows), self.take(q, self.rows), self.take(k, self.cols),
            self.take(v, self.cols), self.take(out, self.rows), self.take_rows(lse), self.options,
            None if dlse is None else self.take_rows(dlse),
        )  # fmt: skip
        return tuple(self.give(x) for x in found)


class _Pair(NamedTuple):
    """Keys and values, or their gradients, in one piece of memory, which one message sends."""

    memory: Tensor
    first: Tensor  # [B, Hk, T / n, D]
    second: Tensor  # [B, Hk, T / n, Dv]

    @classmethod
    def like(cls, memory: Tensor, k: Tensor, v: Tensor) -> _Pair:
        return cls(memory, memory[: k.numel()].view(k.shape), memory[k.numel() :].view(v.shape))

    @classmethod
    def copy_of(cls, k: Tensor, v: Tensor) -> _Pair:
        return cls.like(torch.cat([k.reshape(-1), v.reshape(-1)]), k, v)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: AttentionOptions, ring: _Ring
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        wide, size = wide_dtype(q.dtype), ring.place.size
        order = storage_order(q)
        shape = (*q.shape[:-1], v.shape[-1])
        out = torch.zeros([shape[d] for d in order], dtype=wide, device=q.device).permute(inverse(order))
        lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float64, device=q.device)
        with no_autocast(q):
            part = _Pair(k, k, v) if size == 1 else _Pair.copy_of(k, v)
            for step in range(size):
                arriving = ring.exchange(part.memory, 0) if step < size - 1 else None
                source = ring.source(step)
                for index in range(len(ring.pieces[source])):
                    cut = _Cut.of(ring, options, source, index, q, k)
                    cut.add_output(ring.backend, (q, part.first, part.second), out, lse)
                part = part if arriving is None else _Pair.like(arriving.wait(), k, v)
            if sinks is not None:
                lse = _add_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *options.tensors())
        ctx.options, ctx.ring = options.without_tensors(), ring
        return out, lse.to(wide)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        refuse_second_derivative("ring_attention")
        if dout is None and dlse is None:
            return None, None, None, None, None, None
        q, k, v, sinks, out, lse, *tensors = ctx.saved_tensors
        options, ring = ctx.options.with_tensors(tensors), ctx.ring
        need_dq, need_dk, need_dv, need_dsinks, *_ = ctx.needs_input_grad
        size, wide = ring.place.size, wide_dtype(q.dtype)
        dout = torch.zeros_like(out) if dout is None else dout
        results = (dout, out, lse, dlse)
        dq = torch.zeros_like(q, dtype=wide)
        sums = arriving_sums = None
        with no_autocast(q):
            part = _Pair(k, k, v) if size == 1 else _Pair.copy_of(k, v)
            for step in range(size):
                arriving = ring.exchange(part.memory, 0) if step < size - 1 else None
                source = ring.source(step)
                own = _Pair.like(torch.zeros(k.numel() + v.numel(), dtype=wide, device=k.device), k, v)
                for index in range(len(ring.pieces[source])):
                    cut = _Cut.of(ring, options, source, index, q, k)
                    dq_part, dk_part, dv_part = cut.gradients(ring.backend, (q, part.first, part.second), results)
                    dq[:, :, cut.rows] += dq_part
                    own.first[:, :, cut.cols] += dk_part
                    own.second[:, :, cut.cols] += dv_part
                sums = own.memory if arriving_sums is None else own.memory.add_(arriving_sums.wait())
                if size > 1:
                    arriving_sums = ring.exchange(sums, 1)
                part = part if arriving is None else _Pair.like(arriving.wait(), k, v)
            home = sums if arriving_sums is None else arriving_sums.wait()
            dsinks = _gradient_of_sinks(sinks, *results) if need_dsinks else None
        assert home is not None
        of_part = _Pair.like(home, k, v)
        return (
            dq.to(q.dtype) if need_dq else None,
            of_part.first.to(k.dtype) if need_dk else None,
            of_part.second.to(v.dtype) if need_dv else None,
            dsinks,
            None,
            None,
        )


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns lse with the sinks, which scales `out`; a row that sees no key keeps -inf."""
    empty = lse == -torch.inf
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None]).masked_fill(empty, 0.0)
    out.mul_(torch.exp(lse - total)[..., None].to(out.dtype))
    return total.masked_fill(empty, -torch.inf)


def _gradient_of_sinks(sinks: Tensor, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    wide = wide_dtype(dout.dtype)
    delta = (dout.to(wide) * out.to(wide)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    share = torch.exp(sinks.to(lse.dtype)[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)
    return -(share * delta).sum((0, 2)).to(sinks.dtype)
