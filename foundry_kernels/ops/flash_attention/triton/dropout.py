"""Which weights dropout keeps. This depends on the seed and a weight's place; see `ops.flash_attention.dropout`."""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels.ops.flash_attention.triton.bundles import Dropout


@triton.jit
def load_dropout(
    seed_ptr, heads_ptr, n, head, n_heads, threshold, keep_scale, HAS_HEADS: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    """The `Dropout` of one head of sequence n, or of each row's head. HAS_HEADS: heads_ptr has the places of these
    heads in a larger tensor."""
    if HAS_HEADS:
        place = tl.load(heads_ptr + n * n_heads + head)
        n, head = place >> 32, place & 0xFFFFFFFF
    seed = tl.load(seed_ptr).to(tl.uint64, bitcast=True)
    scale = dropout_scale(keep_scale, COMPUTE)
    # Not a constant: the compiler would then select after the rounding, which takes more 16-bit operations.
    zero = scale - scale
    least = tl.cast(threshold, tl.uint32) << 16
    return Dropout(
        seed.to(tl.uint32), (seed >> 32).to(tl.uint32), tl.cast(n, tl.uint32), tl.cast(head, tl.uint32),
        least, scale, zero,
    )  # fmt: skip


@triton.jit
def dropout_scale(keep_scale, COMPUTE: tl.constexpr):
    """The factor for the weights that are kept."""
    return tl.full([], 0.0, COMPUTE) + keep_scale


@triton.jit
def _wide_products(c0, c2, PTX: tl.constexpr):
    """The low and high words of a round's products. Without PTX, the compiler multiplies twice for each product."""
    if PTX:
        low0, high0 = tl.inline_asm_elementwise(
            "{.reg .b64 p; mul.wide.u32 p, $2, 0xD2511F53; mov.b64 {$0, $1}, p;}", "=r,=r,r", [c0],
            dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
        low2, high2 = tl.inline_asm_elementwise(
            "{.reg .b64 p; mul.wide.u32 p, $2, 0xCD9E8D57; mov.b64 {$0, $1}, p;}", "=r,=r,r", [c2],
            dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
        return low0, high0, low2, high2
    else:
        p0, p2 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        return p0.to(tl.uint32), (p0 >> 32).to(tl.uint32), p2.to(tl.uint32), (p2 >> 32).to(tl.uint32)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1, PTX: tl.constexpr):
    """The four words of Philox4x32-10. All are uint32. Counters may differ in shape; they are broadcast in the third
    round."""
    for _ in tl.static_range(10):
        low0, high0, low2, high2 = _wide_products(c0, c2, PTX)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def kept(dropout, i0, rows, j0, cols, sizes):
    """Whether the weights of the queries i0 + rows and the keys j0 + cols are kept. One of these are the tile's rows,
    the other its columns. i0 is a multiple of 16, j0 of BLOCK_N.

    One call of the generator decides about the queries i and i + 8 and the keys j, j + 8, j + 16 and j + 24. The code
    has a call for each pair. But in the layout of matmuls, a thread holds all of these pairs or half of them, and the
    compiler merges their calls. To see that they are equal, it needs the place within the tile (some of its bits are
    known) as a separate term.
    """
    if sizes.BLOCK_N % 32 == 0:
        key = j0 // 32 * 8 + (cols // 32 * 8 + cols % 8)
    else:
        cols = j0 + cols
        key = cols // 32 * 8 + cols % 8
    query = i0 // 16 * 8 + (rows // 16 * 8 + rows % 8)
    w0, w1, w2, w3 = philox(
        key.to(tl.uint32), query.to(tl.uint32), dropout.head, dropout.n, dropout.low, dropout.high, sizes.PTX
    )
    word = tl.where(cols & 16 != 0, tl.where(cols & 8 != 0, w3, w2), tl.where(cols & 8 != 0, w1, w0))
    return tl.where(rows & 8 != 0, word, word << 16) >= dropout.least
