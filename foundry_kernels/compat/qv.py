"""Attention with two options of FlashAttention 3: `qv`, dot products of a second set of queries with the values, and
chunks.

.. math:: s_{ij} = \\alpha (q_i \\cdot k_j + q^v_i \\cdot v_j)

of keys j in the chunk of `attention_chunk` positions in which query i is (aligned at the last key).
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.autocast import no_autocast
from foundry_kernels.core.checks import check_device, check_dtype, check_shape, check_tensor
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.flash_attention import Options, flash_attention, flash_attention_varlen
from foundry_kernels.ops.flash_attention.checks import MAX_HEAD_DIM

#: Up to this number of queries a matrix of scores is smaller than keys and values that are copied side by side.
_FEW_QUERIES = 16


def check_qv(qv: Tensor | None, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Options:
    """Checks `qv` of tensors in flash-attn's layout, and returns the options with the scale that it makes the default.

    Raises:
        TypeError, ValueError: it does not fit, or a soft cap would bound scores of too wide heads.
    """
    if qv is None:
        return options
    check_tensor("qv", qv)
    check_dtype("qv", qv, "q", q)
    check_device("qv", qv, "q", q)
    check_shape("qv", qv, (*q.shape[:-1], v.shape[-1]), "q's, with v's head dimension")
    width = q.shape[-1] + v.shape[-1]
    if options["softcap"] is not None and width > MAX_HEAD_DIM:
        raise ValueError(
            f"softcap must be 0 with qv where q and v have more than {MAX_HEAD_DIM} dimensions together; got {width}"
        )
    return options if options["scale"] is not None else options | {"scale": width**-0.5}


def attend(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, attention_chunk: int, options: Options
) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``[B, H, T, D]`` queries, ``[B, Hk, S, D]`` keys, ``[B, Hk, S, Dv]`` values and ``[B, H, T, Dv]``
    `qv`: one call for each chunk in which there are queries."""
    n_q, n_k = q.shape[2], k.shape[2]
    before = n_k - n_q  # the position of the first query
    if not attention_chunk or n_q == 0 or (before >= 0 and n_k <= attention_chunk):
        return _attend(q, k, v, qv, options)
    begins = range(max(before, 0) // attention_chunk * attention_chunk, n_k, attention_chunk)
    places = [(begin - before, begin, begin + attention_chunk) for begin in begins]
    found = []
    if before < 0:  # queries before the first key are in chunks of their own
        found.append(_attend(q[:, :, :-before], k[:, :, :0], v[:, :, :0], _part(qv, 0, -before), options))
    for first, begin, end in places:
        i, j = max(first, 0), min(first + attention_chunk, n_q)
        found.append(_attend(q[:, :, i:j], k[:, :, begin:end], v[:, :, begin:end], _part(qv, i, j), options))
    out, lse = (torch.cat(x, 2) if len(x) > 1 else x[0] for x in zip(*found, strict=True))
    return out, lse


def attend_packed(
    packed: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], qv: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """(out ``[total_q, H, Dv]``, lse ``[H, total_q]``) of the arguments of `flash_attention_varlen` and `qv`
    ``[total_q, H, Dv]``. Where D and Dv are wider than a kernel takes, the lengths are read: one call a sequence."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, *max_seqlens = packed
    if qv is None:
        return flash_attention_varlen(*packed, return_lse=True, **options)
    if q.shape[-1] + v.shape[-1] <= MAX_HEAD_DIM:
        q, k = torch.cat((q, qv), -1), torch.cat((k, v), -1)
        packed = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlens[0], max_seqlens[1])
        return flash_attention_varlen(*packed, return_lse=True, **options)
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    found = []
    for n in range(len(ends_q) - 1):
        of_q, of_k = slice(*ends_q[n : n + 2]), slice(*ends_k[n : n + 2])
        if of_q.start < of_q.stop:
            qn, kn, vn, of_qv = (x.transpose(0, 1)[None] for x in (q[of_q], k[of_k], v[of_k], qv[of_q]))
            out, lse = _attend(qn, kn, vn, of_qv, options)
            found.append((out[0].transpose(0, 1), lse[0]))
    if not found:
        return flash_attention_varlen(
            qv, v, v, cu_seqlens_q, cu_seqlens_k, 0, max_seqlens[1], return_lse=True, **options
        )
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs), torch.cat(lses, 1)


def _part(qv: Tensor | None, first: int, last: int) -> Tensor | None:
    return None if qv is None else qv[:, :, first:last]


def _attend(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    if qv is None:
        return flash_attention(q, k, v, return_lse=True, **options)
    fits = q.shape[-1] + v.shape[-1] <= MAX_HEAD_DIM
    if fits and (q.shape[2] > _FEW_QUERIES or options["softcap"] is not None):
        return flash_attention(torch.cat((q, qv), -1), torch.cat((k, v), -1), v, return_lse=True, **options)
    scale = options["scale"]
    assert scale is not None
    if q.shape[-1] <= v.shape[-1]:
        return flash_attention(qv, v, v, return_lse=True, **options | {"attn_mask": _products(q, k) * scale})
    return flash_attention(q, k, v, return_lse=True, **options | {"attn_mask": _products(qv, v) * scale})


def _products(q: Tensor, k: Tensor) -> Tensor:
    """``[B, H, T, S]`` in float32 or wider: the kernels do not round scores to 16 bits either."""
    wide = wide_dtype(q.dtype)
    b, h, t, d = q.shape
    with no_autocast(q):
        folded = q.to(wide).reshape(b, k.shape[1], h // k.shape[1] * t, d)
        return torch.matmul(folded, k.to(wide).transpose(-1, -2)).view(b, h, t, k.shape[2])
