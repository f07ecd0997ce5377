r"""Softmax attention that never materializes the matrix of scores; dense and packed ("varlen") sequences.

For a query :math:`q_i`, the keys :math:`k_j` and values :math:`v_j` of its head, a scale :math:`\alpha` and an offset
:math:`o` that aligns queries with keys (``S - T`` for "bottom_right", 0 for "top_left")

.. math:: s_{ij} = f \bigl(c \tanh(\alpha \, q_i \cdot k_j / c) - m \, |i + o - j| + b_{ij}\bigr), \qquad
          \ell_i = \log \Bigl(e^{\sigma} + \sum_{j \in W_i} e^{s_{ij}}\Bigr), \qquad
          p_{ij} = e^{s_{ij} - \ell_i}, \qquad y_i = \sum_{j \in W_i} z_{ij} p_{ij} v_j

where :math:`W_i` are the keys ``i + o - left <= j <= i + o + right`` that a mask lets be seen. The soft cap :math:`c`,
the ALiBi slope :math:`m`, the bias :math:`b`, the sink :math:`\sigma` and dropout are optional; the cap comes before
ALiBi, then the bias, then a function :math:`f` of score and place (`score_mod`), the mask last. :math:`z_{ij}` is 1
without dropout, else 0 or :math:`1 / (1 - p)` (`foundry_kernels.ops.flash_attention.dropout`). With the gradients
:math:`g_i` of :math:`y_i` (``dout``) and :math:`\lambda_i` of :math:`\ell_i` (``dlse``)

.. math:: \delta_i = g_i \cdot y_i - \lambda_i, \quad
          \partial L / \partial s_{ij} = p_{ij} (z_{ij} \, g_i \cdot v_j - \delta_i), \quad
          \partial L / \partial v_j = \sum_i z_{ij} p_{ij} g_i, \quad
          \partial L / \partial \sigma = -\sum_i e^{\sigma - \ell_i} \delta_i ,

so the backward pass needs the inputs, the output and one number per row, :math:`\ell_i`. The derivative of the cap is
:math:`1 - (s_{ij} / c)^2` of the capped score. Two statistics show the health of a training run: the entropy of a row's
distribution, :math:`\ell_i - \sum_j p_{ij} s_{ij}` (in nats; a sink counts as one more outcome), which falls to 0 when
attention collapses, and the largest logit, :math:`\max_{j \in W_i} s_{ij}`, which grows when training diverges. Both
are computed in the same pass: one more multiply-add per score, and two numbers written per row.

Dao et al., "FlashAttention", 2022, arXiv:2205.14135; Dao, "FlashAttention-2", 2023, arXiv:2307.08691. Grouped heads:
Ainslie et al., 2023, arXiv:2305.13245. ALiBi: Press et al., 2021, arXiv:2108.12409. Soft cap: Gemma 2, 2024,
arXiv:2408.00118. Sinks: Xiao et al., 2023, arXiv:2309.17453; as a learned logit: gpt-oss, 2025, arXiv:2508.10925.
Dropout of the weights: Vaswani et al., 2017, arXiv:1706.03762. Entropy collapse: Zhai et al., 2023, arXiv:2303.06296;
clipping by the largest logit: Kimi K2, 2025, arXiv:2507.20534.
"""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core import invariance
from foundry_kernels.core.inference import cut, without_backward
from foundry_kernels.core.registry import resolve
from foundry_kernels.ops._register import register_op
from foundry_kernels.ops.flash_attention import hopper, reference
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask
from foundry_kernels.ops.flash_attention.checks import cast, check_dense, check_paged, check_varlen, make_options
from foundry_kernels.ops.flash_attention.options import LACKS, AttentionArguments
from foundry_kernels.ops.flash_attention.pages import NO_PAGES
from foundry_kernels.ops.flash_attention.score_program.trace import ScoreFunction


# Both functions list all arguments for editors and documentation; a test compares these lists with AttentionArguments.
class Options(TypedDict, total=False):
    """The keyword arguments of both functions, except those that select the results."""

    causal: bool
    scale: float | None
    window: tuple[int | None, int | None] | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    attn_mask: Tensor | AttentionMask | None
    dropout_p: float
    dropout_seed: Tensor | int | None
    score_mod: ScoreFunction | None
    align: str
    deterministic: bool
    batch_invariant: bool
    backend: str


class PagedOptions(Options, total=False):
    """The keyword arguments of packed sequences."""

    block_table: Tensor | None
    seqused_k: Tensor | None
    leftpad_k: Tensor | None


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_stats: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    return_stats: Literal[False] = False,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, return_stats: bool, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, ...]: ...
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | AttentionMask | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    score_mod: ScoreFunction | None = None,
    align: str = "bottom_right",
    deterministic: bool = True,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_stats: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Attention of T queries over S keys and values.

    ``out = softmax(scale * q k^T + mask) v``, query head h reading key-value head ``h // (H // Hk)``.

    Args:
        q: ``[B, H, T, D]`` float32, bfloat16, float16 or float64, any strides, 1 <= D <= 512. B, T and S may be 0.
        k: ``[B, Hk, S, D]``, of q's dtype and device; H must be a multiple of Hk.
        v: ``[B, Hk, S, Dv]``, likewise; Dv need not be D, 1 <= Dv <= 512.
        attn_mask: a bool tensor, True where a query sees a key, or a floating one, a bias that is added to the scores:
            of any shape that broadcasts to ``[B, H, T, S]``, with any strides. It is not copied. A bias may have
            another dtype than q (float64 only where q has) and, if it requires one, gets a gradient: the sum over what
            was broadcast, in float32 or wider, rounded once. For a bool mask that many calls share, use an
            :class:`AttentionMask`: all backends skip its empty tiles.
        causal: a query sees no key after its own position, also if `window` would allow it.
        scale: factor on the scores, finite and > 0; ``1 / sqrt(D)`` if None.
        window: ``(left, right)``: query i sees keys ``i - left <= j <= i + right`` after alignment; each is >= 0,
            or None or -1 for no bound. None for both.
        softcap: c > 0 bounds the scores smoothly: ``c * tanh(s / c)``.
        alibi_slopes: ``[H]`` or ``[B, H]`` float32; subtracts ``slope * |i - j|`` (after alignment). Takes no gradient.
        sinks: ``[H]``, floating-point: one logit per head that counts in the softmax's denominator and in `lse`, but
            has no value.
        dropout_p: in [0, 1). Each weight is set to 0 with this probability, rounded to a multiple of 2^-16, and is
            otherwise divided by the probability of being kept, so that the mean is exact. Pass 0 in evaluation.
        dropout_seed: an int in [0, 2^63), or an int64 tensor of one number on q's device. It determines which weights
            are dropped. Equal seeds drop the weights of equal places (sequence, head, query and key) on every backend
            and device, dense or packed. None draws a seed from the default generator of q's device: `torch.manual_seed`
            and activation checkpointing reproduce it, and each replay of a CUDA graph draws a new one.
        score_mod: a function of ``(score, b, h, q_idx, kv_idx)``, as FlexAttention takes it, to the score that enters
            the softmax; see below.
        align: which query sees which key where T != S. "bottom_right" aligns the last query with the last key (as with
            a key-value cache), "top_left" the first with the first (as ``is_causal`` of torch's
            scaled_dot_product_attention does).
        deterministic: whether results have the same bits in every run. False allows a faster, non-deterministic order
            of the sums in q's gradient. Only the extension's kernels for compute capability 9.0 use it, up to a
            head_dim of 128 (prototypes were 3 to 13 % faster on an H100). Everything else is always deterministic.
        batch_invariant: whether the results of a sequence, and the gradients of its q, k and v, have the same bits
            whatever else is in the batch. The output of a query then also has the same bits in decoding, in a chunk of
            a prompt and in the whole prompt. Keys are not split over programs, nor are a group's heads in the backward
            pass, and few queries have no kernel of their own, so decoding is slower. It implies `deterministic`. The
            reference computes each sequence separately with PyTorch's matmuls, whose bits may differ between decoding
            and a prompt. Always on within :func:`foundry_kernels.batch_invariant`.
        return_lse: also return the log-sum-exp of each row.
        return_stats: also return the entropy and the largest logit of each row, as the last results. This costs one
            multiply-add per score, compared with ``2 (D + Dv)`` floating-point operations, and 8 bytes per row.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        ``out [B, H, T, Dv]`` of q's dtype, dense in q's storage order: if `q` is a view of ``[B, T, H, D]`` memory,
        `out` is a view of ``[B, T, H, Dv]`` memory. With `return_lse`, ``(out, lse)``; ``lse [B, H, T]`` is contiguous,
        float32 (float64 for float64 inputs), a natural logarithm, and differentiable. A query that sees no key has
        output 0 and lse -inf (with sinks too), and contributes to no gradient.

        With `return_stats`, ``(out, entropy, max_logit)`` or ``(out, lse, entropy, max_logit)``: each ``[B, H, T]``, of
        lse's dtype, and not differentiable. `entropy` is that of the softmax in nats, between 0 and the logarithm of
        the number of keys seen (plus one with sinks: a sink counts as an outcome). `max_logit` is the largest score
        that enters the softmax, after scale, cap, ALiBi and bias, sinks not included. A query that sees no key has
        entropy 0 and max_logit -inf. Statistics and lse are those of the weights before dropout.

    Raises:
        TypeError: an argument does not have one of the types listed above; `score_mod` has control flow that depends on
            its arguments, uses another operation, or returns something else than one number.
        ValueError: an index of `score_mod` is out of range wherever the tensor is read, or its tensor is on another
            device; shapes, dtypes or devices do not match, an option is out of range, `alibi_slopes` requires a
            gradient, q is a DTensor and `dropout_seed` is not given, or the backend's name is unknown.
        BackendUnavailable: the named backend does not support this device or dtype, or an option: native CUDA kernels
            have no `score_mod`, for which "auto" takes Triton.

    `score_mod` is called once per call of this function, with stand-ins for single numbers, and what it does with them
    becomes a short program (:mod:`foundry_kernels.ops.flash_attention.score_program`) that kernels run on every score
    in float32 (float64 for float64 q). `score` is the product after scale, soft cap, ALiBi and bias; masks come after
    it, and -inf hides a pair. `b` is the batch entry (the sequence, if they are packed), `h` the query head, and
    `q_idx` and `kv_idx` count from 0 whatever `align` is: in decoding q_idx is 0, and the function adds the offset. The
    function may use arithmetic and comparisons, ``//``, ``%``, ``&``, ``|``, ``~``, ``torch.where``, abs, exp, exp2,
    log, log2, sqrt, rsqrt, tanh, sigmoid, sin, cos, floor, ceil, minimum, maximum, clamp, pow, dtype casts (between
    floats without rounding; integers have 32 bits), and tensors, indexed down to one number by integers. Floating
    tensors that it reads get gradients, summed in a fixed order in float32 or wider and rounded once. An index below 0
    counts from the end; one that may be out of range is moved to the nearest in range.

    Under ``torch.autocast``, q, k and v (unless float64) are cast to its dtype first, as torch does for its own
    attention. The softmax is always computed in float32 or wider.
    """
    if batch_invariant is False and invariance.on:
        batch_invariant = True
    given = (
        causal, scale, window, softcap, alibi_slopes, sinks, attn_mask, dropout_p, dropout_seed, score_mod, align,
        deterministic, batch_invariant, return_lse, return_stats,
    )  # fmt: skip
    if not is_dynamo_compiling():
        out = FLASH_ATTENTION.direct(backend, q, k, v, *given)
        if out is not None:
            return out
    q, k, v = cast(q, k, v)
    check_dense(q, k, v)
    options = make_options(q, (None, None, q.shape[2], k.shape[2]), AttentionArguments(*given))
    first = hopper.first_backend(q, k, v, options)
    return resolve(FLASH_ATTENTION, backend, q, first, options.needs())(q, k, v, options)


@overload
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = False,
    return_stats: Literal[False] = False,
    **options: Unpack[PagedOptions],
) -> Tensor: ...
@overload
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    return_stats: Literal[False] = False,
    **options: Unpack[PagedOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool = False,
    return_stats: bool,
    **options: Unpack[PagedOptions],
) -> Tensor | tuple[Tensor, ...]: ...
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    attn_mask: Tensor | AttentionMask | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    score_mod: ScoreFunction | None = None,
    align: str = "bottom_right",
    deterministic: bool = True,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_stats: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Attention within each of B sequences, packed one after the other without padding.

    Sequence n has the queries ``cu_seqlens_q[n] .. cu_seqlens_q[n + 1] - 1`` and the keys and values ``cu_seqlens_k[n]
    .. cu_seqlens_k[n + 1] - 1``; for it, this is :func:`flash_attention`. With `block_table`, keys and values are pages
    of a cache, which is read in place by one launch for sequences of all lengths.

    Args:
        q: ``[total_q, H, D]`` float32, bfloat16, float16 or float64, any strides.
        k: ``[total_k, Hk, D]``, of q's dtype and device; H must be a multiple of Hk.
        v: ``[total_k, Hk, Dv]``, likewise.
        cu_seqlens_q: ``[B + 1]`` int32 or int64 on q's device: the cumulative lengths of the sequences, from 0 to
            total_q. A length may be 0.
        cu_seqlens_k: ``[B + 1]``, the same for keys, from 0 to total_k.
        max_seqlen_q: the longest length in `cu_seqlens_q`, or any number above it.
        max_seqlen_k: the same for keys.
        block_table: ``[B, max_blocks]`` int32 or int64: k is ``[num_blocks, page_block_size, Hk, D]`` and v
            ``[num_blocks, page_block_size, Hk, Dv]``, with unit last strides, and position p of sequence n is row ``p %
            page_block_size`` of page ``block_table[n, p // page_block_size]``. Pages have any size, lie in any order,
            and may belong to several sequences. `cu_seqlens_k` then only gives the lengths. Pages do not support
            dropout or a backward pass, which raises RuntimeError.
        seqused_k: ``[B]`` int32 or int64, with `block_table` and in place of `cu_seqlens_k`, which is None: how many
            positions each sequence has. The last query is aligned with the last of these.
        leftpad_k: ``[B]`` int32 or int64, with `block_table`: positions before this one are not attended to; None is 0.
        alibi_slopes: ``[H]`` or ``[B, H]`` float32.
        attn_mask: must be None: packed sequences do not support a mask.
        score_mod: `b` is the sequence's number, and q_idx and kv_idx count within it, from the end of `leftpad_k`.
        causal, scale, window, softcap, sinks, dropout_p, dropout_seed: as for :func:`flash_attention`; dropout drops
            the same weights of sequence n as of row n of a padded batch.
        align, deterministic, batch_invariant, return_lse, return_stats, backend: likewise; `align` applies within each
            sequence.

    Returns:
        ``out [total_q, H, Dv]`` of q's dtype, contiguous. `return_lse` and `return_stats` add the same results as in
        :func:`flash_attention`, each ``[H, total_q]``.

    Raises:
        ValueError: and all others as :func:`flash_attention`. The values of cumulative lengths, of `block_table` and of
            the lengths beside it are checked on the CPU, outside of ``torch.compile``. Elsewhere a check would wait for
            the GPU, so correct values are the caller's responsibility; nothing outside of the tensors is read or
            written.

    The reference reads the lengths to loop over sequences. It cannot do so under ``torch.compile``, where it
    materializes the whole ``total_q x total_k`` matrix of scores. It copies pages. The native CUDA kernels do not
    support pages, so "auto" runs on Triton there.
    """
    pages, keys = NO_PAGES, cu_seqlens_k
    wanted: list[Tensor] = []
    q, k, v = cast(q, k, v)
    if block_table is not None:
        pages = check_paged(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, seqused_k, leftpad_k
        )
        keys = None
        wanted, (q, k, v, sinks, alibi_slopes) = cut(q, k, v, sinks, alibi_slopes)
    else:
        for name, x in (("seqused_k", seqused_k), ("leftpad_k", leftpad_k)):
            if x is not None:
                raise ValueError(f"{name} must be None without block_table; put the lengths into cu_seqlens_k")
        check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    given = AttentionArguments(
        causal, scale, window, softcap, alibi_slopes, sinks, attn_mask, dropout_p, dropout_seed, score_mod, align,
        deterministic, batch_invariant, return_lse, return_stats,
    )  # fmt: skip
    options = make_options(q, (cu_seqlens_q, keys, max_seqlen_q, max_seqlen_k), given, pages)
    if block_table is not None and options.score_tensors is not None:
        more, captured = cut(*options.score_tensors)
        wanted, options = wanted + more, options._replace(score_tensors=captured)
    first = hopper.first_backend(q, k, v, options)
    results = resolve(FLASH_ATTENTION_VARLEN, backend, q, first, options.needs())(q, k, v, options)
    if not wanted:
        return results
    found = results if isinstance(results, tuple) else (results,)
    with_gradient = 1 + return_lse  # statistics never have one
    found = (*without_backward(found[:with_gradient], wanted, _PAGES), *found[with_gradient:])
    return found if len(found) > 1 else found[0]


_PAGES = "pages are for inference: no gradient flows with block_table; use torch.no_grad() or detach"


FLASH_ATTENTION = register_op(flash_attention, reference.flash_attention, lacks=LACKS)
FLASH_ATTENTION_VARLEN = register_op(flash_attention_varlen, reference.flash_attention_varlen, lacks=LACKS)
