r"""The gated delta rule, Mamba-2's scan, and the short convolution before them, of a sequence that is sharded over
processes.

A chunk of a sequence maps the state before it to the state behind it: :math:`S \mapsto M S + B`, where B is the chunk's
final state from zeros, and M, of :math:`D_k \times D_k`, is the product of its tokens' decays and corrections. One call
of the kernel with values of 0 and the unit matrix as the state computes M beside B. Every process sends M and B of its
two chunks (`shard_sequence`) to all, combines those of the chunks before its own in their order, and computes its
tokens from the states that it finds. Where a document begins in a chunk, nothing of earlier chunks passes on.

Of B sequences with H_v heads each process sends ``2 B H_v D_k (D_k + D_v)`` float32 numbers to each other one forward,
whatever the number of tokens, and as many gradients backward (an all-gather and a reduce-scatter). It computes each of
its tokens twice, once for the states (with :math:`D_k + D_v` columns for :math:`D_v`) and once for the outputs. The
scan's M is one number for each head: it sends ``2 B H P (N + 1)`` numbers and computes M without a kernel. The
convolution sends the last W - 1 tokens of each chunk in the same way, ``2 B C (W - 1)`` numbers of x's dtype. If the
chunks were brought into the order of the sequence, as one piece for each process, the tokens themselves would be sent.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from foundry_kernels.core.autocast import no_autocast
from foundry_kernels.core.autograd import apply
from foundry_kernels.core.checks import check_integer, check_rank, check_tensor
from foundry_kernels.core.registry import is_dtensor, wide_dtype
from foundry_kernels.distributed.zigzag import Place
from foundry_kernels.ops.flash_attention.checks import check_lengths
from foundry_kernels.ops.gated_delta_rule import gated_delta_rule
from foundry_kernels.ops.gated_delta_rule.checks import MAX_HEAD_DIM, check_sequence
from foundry_kernels.ops.short_conv1d import short_conv1d
from foundry_kernels.ops.ssd import ssd
from foundry_kernels.ops.ssd.checks import check_sequence as check_ssd
from foundry_kernels.ops.ssd.reference import step_sizes


def sharded_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    mesh: DeviceMesh,
    *,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    beta_limit: float | None = None,
    qk_l2norm: bool = False,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """:func:`foundry_kernels.gated_delta_rule` of a sequence that `shard_sequence` has sharded over the processes.

    All processes of `mesh` must call it together with the same options, and also run the backward pass together.

    Args:
        q, k, v, g, beta: as of `gated_delta_rule`, with the T / n tokens of this process.
        mesh: of one dimension, the n processes.
        cu_seqlens: ``[N + 1]`` int32 or int64: the whole sequence holds N packed documents; B is 1. It may be on any
            device; on the CPU, reading it does not wait.
        scale, A_log, dt_bias, beta_limit, qk_l2norm, chunk_size, backend: as of `gated_delta_rule`. The gradients of
            A_log and dt_bias are this process's part of the whole's.

    Returns:
        ``[B, H_v, T / n, D_v]`` of v's dtype.

    Raises:
        TypeError, ValueError: as `gated_delta_rule`, and if mesh has several dimensions, the parts an odd number of
            tokens, or `cu_seqlens` does not go from 0 to the T tokens of all.
        BackendUnavailable: as there.
    """
    numbers = {name: x for name, x in (("g", g), ("beta", beta)) if x is not None}
    parts = _Parts.of(mesh, {"q": q, "k": k, "v": v, **numbers}, 2, cu_seqlens)
    gates: dict[str, Any] = {"A_log": A_log, "dt_bias": dt_bias, "beta_limit": beta_limit}
    q, k, v, _ = check_sequence(q, k, v, g, beta, None, scale, False, None, qk_l2norm, chunk_size, delta=True, **gates)
    options: dict[str, Any] = {"qk_l2norm": qk_l2norm, "chunk_size": chunk_size, "backend": backend, **gates}
    chunks = [_Tokens(*(None if x is None else _half(x, i, 2) for x in (k, v, g, beta))) for i in (0, 1)]  # type: ignore[arg-type]
    maps = [_map(parts, number, chunk, **options) for number, chunk in zip(parts.place.chunks, chunks, strict=True)]

    def run(i: int, state: Tensor | None, documents: Tensor | None) -> Tensor:
        given: dict[str, Any] = {"initial_state": state, "cu_seqlens": documents, "scale": scale, **options}
        # In the storage order of the parts, in which the heads of a token lie together if they do in v.
        return gated_delta_rule(_half(q, i, 2), *chunks[i], **given).transpose(1, 2)

    states = partial(_states, parts, width=k.shape[-1])
    return _from_states(parts, maps, (q, k, v, g, beta), states, run).transpose(1, 2)


def sharded_ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    mesh: DeviceMesh,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """:func:`foundry_kernels.ssd` of a sequence that `shard_sequence` has sharded over the processes.

    All processes of `mesh` must call it together with the same options, and also run the backward pass together.

    Args:
        x, dt, B, C, z: as of `ssd`, with the T / n tokens of this process.
        A, D, dt_bias, dt_softplus, dt_limit, chunk_size, backend: as of `ssd`. The gradients of A, D and dt_bias are
            this process's part of the whole's.
        mesh, cu_seqlens: as of :func:`sharded_gated_delta_rule`.

    Returns:
        ``[B, T / n, H, P]`` of x's dtype.

    Raises:
        TypeError, ValueError, BackendUnavailable: as `ssd` and :func:`sharded_gated_delta_rule`.
    """
    parts = _Parts.of(mesh, {"x": x, "dt": dt, "B": B, "C": C} | ({} if z is None else {"z": z}), 1, cu_seqlens)
    limits: dict[str, Any] = {"dt_softplus": dt_softplus, "dt_limit": dt_limit}
    x, B, C, z, checked = check_ssd(
        x, dt, A, B, C, D, z, dt_bias, **limits, initial_states=None, return_final_states=False, cu_seqlens=None,
        chunk_size=chunk_size,
    )  # fmt: skip
    options: dict[str, Any] = {"chunk_size": chunk_size, "backend": backend, **limits}
    sizes = step_sizes(dt, dt_bias, wide_dtype(x.dtype), dt_softplus, checked.dt_min, checked.dt_max)
    maps = []
    for i, number in enumerate(parts.place.chunks):
        own = x.new_zeros(x.shape[0], *x.shape[2:], 1 + B.shape[-1], dtype=sizes.dtype)
        if parts.passes_on(number):
            first = max(parts.start(number) - number * parts.chunk, 0)
            x_, dt_, B_, sizes_ = (_half(each, i, 1)[:, first:] for each in (x, dt, B, sizes))
            _, final = ssd(x_, dt_, A, B_, B_.detach(), None, None, dt_bias, return_final_states=True, **options)
            decay = (sizes_.sum(1) * A.to(sizes.dtype)).exp()[..., None, None].expand_as(own[..., :1])
            own = torch.cat([decay, final], -1)
        maps.append(own)

    def run(i: int, state: Tensor | None, documents: Tensor | None) -> Tensor:
        x_, dt_, B_, C_ = (_half(each, i, 1) for each in (x, dt, B, C))
        given: dict[str, Any] = {"initial_states": state, "cu_seqlens": documents, **options}
        return ssd(x_, dt_, A, B_, C_, D, None if z is None else _half(z, i, 1), dt_bias, **given)

    inputs = (x, dt, A, B, C, D, z, dt_bias)
    return _from_states(parts, maps, inputs, partial(_states, parts, width=1), run)


def sharded_short_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    mesh: DeviceMesh,
    *,
    residual: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """:func:`foundry_kernels.short_conv1d` of a sequence that `shard_sequence` has sharded over the processes.

    All processes of `mesh` must call it together with the same options, and also run the backward pass together.

    Args:
        x, residual: ``[B, T / n, C]``, the tokens of this process. A chunk must have at least W - 1 tokens.
        weight, bias, activation, backend: as of `short_conv1d`. Gradients are this process's part of the whole's.
        mesh, cu_seqlens: as of :func:`sharded_gated_delta_rule`.

    Returns:
        ``[B, T / n, C]`` of x's dtype.

    Raises:
        TypeError, ValueError: as `short_conv1d` and :func:`sharded_gated_delta_rule`, and if a chunk has fewer than
            W - 1 tokens.
        BackendUnavailable: as there.
    """
    parts = _Parts.of(mesh, {"x": x} | ({} if residual is None else {"residual": residual}), 1, cu_seqlens)
    check_tensor("weight", weight)
    check_rank("weight", weight, 2, "[C, W]")
    past = weight.shape[1] - 1
    if parts.chunk < past:
        raise ValueError(f"x must have at least W - 1 = {past} tokens in each of its two chunks; got {parts.chunk}")
    halves = [_half(x, i, 1) for i in (0, 1)]
    ends = [half[:, parts.chunk - past :].transpose(1, 2) for half in halves]

    def run(i: int, state: Tensor | None, documents: Tensor | None) -> Tensor:
        added = None if residual is None else _half(residual, i, 1)
        given: dict[str, Any] = {"residual": added, "cu_seqlens": documents, "initial_state": state, "backend": backend}
        return short_conv1d(halves[i], weight, bias, activation, **given)

    return _from_states(parts, ends, (x,), partial(_past, parts, past), run)


def _from_states(
    parts: _Parts,
    own: Sequence[Tensor],
    inputs: Sequence[Tensor | None],
    states: Callable[[Tensor], list[Tensor | None]],
    run: Callable[[int, Tensor | None, Tensor | None], Tensor],
) -> Tensor:
    """The results of this process's chunks, one after the other along dimension 1.

    own: of each of its two chunks, what later ones need, a function of `inputs`. states: from that of all chunks, the
    states before them, None for zeros. run: of chunk i of the two, the state before each of its documents, and their
    ends, the results.
    """
    gathered = _gather(torch.stack(list(own)), parts, *inputs)
    before, found = states(gathered), []
    for i, number in enumerate(parts.place.chunks):
        documents = parts.inside(number, gathered.device)
        found.append(run(i, _of_documents(before[number], documents), documents))
    return _tied(torch.cat(found, 1), gathered)


class _Tokens(NamedTuple):
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None


def _of_documents(state: Tensor | None, documents: Tensor | None) -> Tensor | None:
    """The states before the documents of a chunk, from that before its first one. The others begin in the chunk."""
    if state is None or documents is None:
        return state
    return torch.cat([state, state.new_zeros(len(documents) - 2, *state.shape[1:])])


def _half(x: Tensor, index: int, dim: int) -> Tensor:
    return x.narrow(dim, index * (x.shape[dim] // 2), x.shape[dim] // 2)


class _Parts(NamedTuple):
    """The chunks of a sequence. documents: where each begins, and the length of the whole; None for one."""

    place: Place
    group: dist.ProcessGroup
    chunk: int
    documents: Sequence[int] | None

    @classmethod
    def of(cls, mesh: DeviceMesh, given: dict[str, Tensor], dim: int, cu_seqlens: Tensor | None) -> _Parts:
        place, (first, x) = Place.of(mesh), next(iter(given.items()))
        for name, each in given.items():
            check_tensor(name, each)
            if is_dtensor(each):
                raise TypeError(f"{name} must be a plain tensor, the part of this process; got a DTensor")
            if each.dim() <= dim or each.shape[dim] % 2:
                raise ValueError(f"{name} must have two chunks of tokens in dimension {dim}; got {tuple(each.shape)}")
        documents = None
        if cu_seqlens is not None:
            check_integer("cu_seqlens", cu_seqlens, 1, "[N + 1]")
            if x.shape[0] != 1:
                raise ValueError(f"{first} must hold one row with cu_seqlens; got shape {tuple(x.shape)}")
            on_cpu, length = cu_seqlens.cpu(), x.shape[dim] * place.size
            check_lengths("cu_seqlens", on_cpu, "length", length, length)
            documents = sorted(set(on_cpu.tolist()))  # without those of no token
        return cls(place, mesh.get_group(), x.shape[dim] // 2, documents)

    def start(self, number: int) -> int:
        """The token at which the document of a chunk's last token begins."""
        if self.documents is None:
            return 0
        return self.documents[bisect_left(self.documents, (number + 1) * self.chunk) - 1]

    def passes_on(self, number: int) -> bool:
        """Whether later chunks need the state behind this one."""
        return number < 2 * self.place.size - 1 and self.reach(number + 1) > 0

    def reach(self, number: int) -> int:
        """How many tokens before a chunk belong to the document of its first token."""
        at = number * self.chunk
        return at if self.documents is None else at - self.documents[bisect_right(self.documents, at) - 1]

    def inside(self, number: int, device: torch.device) -> Tensor | None:
        """`cu_seqlens` of a chunk; None where no document begins within it."""
        at = number * self.chunk
        begin = [d - at for d in self.documents or () if at < d < at + self.chunk]
        return torch.tensor([0, *begin, self.chunk], dtype=torch.int32, device=device) if begin else None


def _map(parts: _Parts, number: int, tokens: _Tokens, **options: Any) -> Tensor:
    """``[B, H_v, D_k, D_k + D_v]``: M and B of a chunk, as far as later chunks need them."""
    k, v = tokens.k, tokens.v
    width, wide = k.shape[-1], wide_dtype(v.dtype)
    shape = (*v.shape[:2], width, v.shape[-1])
    if not parts.passes_on(number):
        return v.new_zeros((*shape[:-1], width + shape[-1]), dtype=wide)
    first = max(parts.start(number) - number * parts.chunk, 0)
    k, v = k[:, :, first:], v[:, :, first:]
    g, beta = (None if x is None else x[:, :, first:] for x in (tokens.g, tokens.beta))
    nothing = v.new_zeros(*v.shape[:3], width)
    unit = torch.eye(width, dtype=wide, device=v.device).expand(*v.shape[:2], width, width)
    zeros = unit.new_zeros(shape)
    begins = parts.start(number) >= number * parts.chunk
    if begins:
        calls = [(v, zeros)]  # what was before has ended
    elif width + v.shape[-1] > MAX_HEAD_DIM:
        calls = [(nothing, unit), (v, zeros)]
    else:
        calls = [(torch.cat([nothing, v], -1), torch.cat([unit, zeros], -1))]
    found = [
        gated_delta_rule(k, k, values, g, beta, initial_state=state, return_final_state=True, **options)[1]
        for values, state in calls
    ]
    return torch.cat([torch.zeros_like(unit), *found] if begins else found, -1)


def _past(parts: _Parts, past: int, ends: Tensor) -> list[Tensor | None]:
    """The `past` inputs of its document before each chunk, from the ends of all chunks; None for zeros."""
    found: list[Tensor | None] = [None]
    for number in range(1, 2 * parts.place.size):
        state, reach = ends[number - 1], parts.reach(number)
        if 0 < reach < past:  # what lies before the document
            state = torch.cat([torch.zeros_like(state[..., : past - reach]), state[..., past - reach :]], -1)
        found.append(state if reach else None)
    return found


def _states(parts: _Parts, maps: Tensor, width: int) -> list[Tensor | None]:
    """The state before each chunk up to this process's last one, from all chunks' maps in the order of the sequence.
    width: the columns of M, or 1 if it is a number."""
    found: list[Tensor | None] = [None]
    for number in range(max(parts.place.chunks)):
        carry, own = maps[number].split([width, maps.shape[-1] - width], -1)
        state = found[-1]
        if parts.reach(number + 1) == 0:
            found.append(None)
        elif state is None or parts.start(number) >= number * parts.chunk:
            found.append(own)
        else:
            with no_autocast(own):
                found.append((carry * state if width == 1 else carry @ state) + own)
    return found


def _gather(x: Tensor, parts: _Parts, *inputs: Tensor | None) -> Tensor:
    """Gathers the values of all chunks, ``[2 n, ..]`` in the order of the sequence, from this process's ``[2, ..]``."""
    both: Tensor = apply(_Gather, _tied(x, *inputs), parts.group, parts.place)
    return both


# In newer versions of torch the old names give a warning.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, place: Place) -> Tensor:
        ctx.group = group
        gathered = x.new_empty(place.size * 2, *x.shape[1:])
        _ALL_GATHER(gathered, x.contiguous(), group=group)
        first, second = gathered.unflatten(0, (-1, 2)).unbind(1)
        return torch.cat([first, second.flip(0)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        first, second = grad.chunk(2)
        by_process = torch.stack([first, second.flip(0)], 1).flatten(0, 1)
        mine = grad.new_empty(2, *grad.shape[1:])
        _REDUCE_SCATTER(mine, by_process, group=ctx.group)
        return mine, None, None


def _tied(x: Tensor, *inputs: Tensor | None) -> Tensor:
    """x, whose backward pass reaches all `inputs`. Processes whose documents need nothing of others would otherwise
    leave out the collective of the backward pass, for which the others wait."""
    tied: Tensor = apply(_Tied, x, *inputs)
    return tied


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *inputs: Tensor | None) -> Tensor:
        ctx.inputs = len(inputs)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *[None] * ctx.inputs
