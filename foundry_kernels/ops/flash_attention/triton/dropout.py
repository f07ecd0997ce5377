"""Which weights dropout keeps, from the seed and the place of each; see `ops.flash_attention.dropout`."""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels.ops.flash_attention.triton.bundles import Dropout


@triton.jit
def wide(x, A: tl.constexpr):
    return tl.inline_asm_elementwise("{.reg .b64 p; mul.wide.u32 p, $2, "+str(A)+"; mov.b64 {$0, $1}, p;}", "=r,=r,r", [x], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1, zero):
    for _ in tl.static_range(10):
        p0l, p0h = tl.inline_asm_elementwise("{.reg .b64 p; mul.wide.u32 p, $2, 0xD2511F53; mov.b64 {$0, $1}, p;}", "=r,=r,r", [c0], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1)
        p1l, p1h = tl.inline_asm_elementwise("{.reg .b64 p; mul.wide.u32 p, $2, 0xCD9E8D57; mov.b64 {$0, $1}, p;}", "=r,=r,r", [c2], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1)
        c0, c2 = p1h ^ c1 ^ k0, p0h ^ c3 ^ k1
        c1, c3 = p1l, p0l
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def load_dropout(seed_ptr, heads_ptr, n, head, n_heads, threshold, keep_scale, COMPUTE: tl.constexpr):
    """The `Dropout` of one head of sequence n, or of each row's, with heads_ptr (or None) the places of the heads at
    hand in the whole tensor."""
    if heads_ptr is not None:
        place = tl.load(heads_ptr + n * n_heads + head)
        n, head = place >> 32, place & 0xFFFFFFFF
    least = tl.cast(threshold, tl.uint32) << 16
    scale = tl.full([], 0.0, COMPUTE) + keep_scale
    zero = scale - scale
    seed = tl.load(seed_ptr).to(tl.uint64, bitcast=True)
    return Dropout(seed.to(tl.uint32), (seed >> 32).to(tl.uint32), tl.cast(n, tl.uint32), tl.cast(head, tl.uint32), least, scale, zero, zero.to(tl.uint32, bitcast=True).to(tl.uint64))


@triton.jit
def kept(i0, rows, j0, cols, dropout, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Whether the weights of the queries i0 + rows and the keys j0 + cols are kept; one of `rows` and `cols` is a row,
    the other a column. i0 is a multiple of 16, and j0 of BLOCK_N.

    One call of the generator decides about the queries i and i + 8 and the keys j, j + 8, j + 16 and j + 24. It is
    written for each pair, but in the layout of matrix products a thread holds all of these or half of them, and the
    compiler leaves one call for what it holds: so the places within the tile are apart from those of the tile.
    """
    if BLOCK_N % 32 == 0:
        key = j0 // 32 * 8 + (cols // 32 * 8 + cols % 8)
    else:
        cols = j0 + cols
        key = cols // 32 * 8 + cols % 8
    query = i0 // 16 * 8 + (rows // 16 * 8 + rows % 8)
    w0, w1, w2, w3 = philox(key.to(tl.uint32), query.to(tl.uint32), dropout.head, dropout.n, dropout.low, dropout.high, dropout.nothing)
    word = tl.where(cols & 16 != 0, tl.where(cols & 8 != 0, w3, w2), tl.where(cols & 8 != 0, w1, w0))
    return tl.where(rows & 8 != 0, word, word << 16) >= dropout.least
