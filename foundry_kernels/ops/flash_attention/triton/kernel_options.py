"""Turns the options of attention into numbers and constants of a launch. No other host code does this."""

from __future__ import annotations

import math
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foundry_kernels._triton.rows import contiguous
from foundry_kernels.ops.flash_attention.dropout import keep_scale, threshold
from foundry_kernels.ops.flash_attention.options import AttentionOptions
from foundry_kernels.ops.flash_attention.triton.bundles import Mask, PairStrides

_TENSORS_AT = {*AttentionOptions._tensors_at, *AttentionOptions._lists_at}

#: The options that are not tensors. They are keys of launch plans.
numbers_of = itemgetter(*(at for at in range(AttentionOptions._n_in_schema) if at not in _TENSORS_AT))

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


class TensorOptions(NamedTuple):
    """The properties of tensor options that launches depend on."""

    alibi_dims: int  # 0 if there are no slopes
    attn_mask: Layout | None
    biased: bool  # the mask is a floating-point tensor
    mask_tiles: Layout | None
    dropout_heads: bool
    table: Layout | None  # of the pages
    captured: tuple[Layout, ...]  # by a score function


NO_TENSORS = TensorOptions(0, None, False, None, False, None, ())


def tensor_options(options: AttentionOptions) -> TensorOptions:
    slopes, mask, tiles = options.alibi_slopes, options.attn_mask, options.mask_tiles
    if slopes is mask is tiles is options.dropout_heads is options.block_table is None and not options.score_tensors:
        return NO_TENSORS
    return TensorOptions(
        0 if slopes is None else slopes.dim(),
        None if mask is None else (mask.shape, mask.stride()),
        mask is not None and mask.dtype != torch.bool,
        None if tiles is None else (tiles.shape, tiles.stride()),
        options.dropout_heads is not None,
        None if options.block_table is None else _table_layout(options.block_table),
        tuple([(x.shape, x.stride()) for x in options.score_tensors or ()]),
    )


def pair_tensors(options: AttentionOptions) -> tuple[Tensor | None, ...]:
    """The tensors of the options that decide about single pairs of a query and a key, in the order of the kernels'
    parameters."""
    bits, heads = options.mask_bits, options.dropout_heads
    return (
        options.attn_mask, options.mask_tiles, None if bits is None else bits.contiguous(), options.dropout_seed,
        None if heads is None else heads.contiguous(),
    )  # fmt: skip


def _table_layout(table: Tensor) -> Layout:
    return table.shape, table.stride() if table.stride(1) == 1 else (table.shape[1], 1)


def page_tensors(options: AttentionOptions) -> tuple[Tensor | None, Tensor | None]:
    """The tensors that say where pages are, in the order of the kernels' parameters."""
    table = options.block_table
    if table is None:
        return None, None
    return table if table.stride(1) == 1 else table.contiguous(), contiguous(options.leftpad_k)


class Score(NamedTuple):
    """The numbers of which kernels make a score, see `scores`."""

    stride_alibi: int  # of the slopes, from sequence to sequence
    scale: float
    softcap: float


def captured_tensors(options: AttentionOptions, q: Tensor) -> tuple[Tensor, ...] | None:
    """The tensors that a score function reads; Triton takes no empty tuple."""
    return (options.score_tensors or (q,)) if options.score_mod else None


class Has(NamedTuple):
    """Constants: which options are on, and along which dimensions a mask or a bias is not broadcast. `bent`: a score
    is no linear function of its dot product. `natural`: scores are in natural units, because of a bias or a score
    function (`modified`). `global_heads`: `dropout_heads` has the numbers of heads that a score function gets."""

    left: bool
    right: bool
    bent: bool
    softcap: bool
    alibi: bool
    natural: bool
    modified: bool
    global_heads: bool
    bias: bool
    mask: bool
    queries_differ: bool
    keys_differ: bool
    tiles: bool
    dropout: bool
    dropout_heads: bool


class KernelOptions(NamedTuple):
    """The options as numbers and constants of a launch."""

    numbers: dict[str, Any]
    constants: dict[str, bool]
    needs_registers: bool  # see `config`

    def arguments(self) -> dict[str, Any]:
        """The same by the names of the kernels' parameters, some of which are bundles. What is in none stays."""
        rest = self.numbers | self.constants

        def take(bundle: Any, prefix: str = "") -> Any:
            return bundle(*[rest.pop(prefix + name) for name in bundle._fields])

        return {
            "score": take(Score),
            "window": take(Mask),
            "mask_strides": take(PairStrides, "stride_mask"),
            "tile_strides": take(PairStrides, "stride_tile"),
            "HAS": Has(*[rest.pop(f"HAS_{name.upper()}") for name in Has._fields]),
            **rest,
        }


def kernel_options(
    options: AttentionOptions, tensors: TensorOptions, n_heads: int, reach: int, ptx: bool
) -> KernelOptions:
    """Returns the kernels' parameters for the options; it reads no tensors. A window of `reach` or more has no effect.
    The numbers of an option that is off are None, so that the compiled kernel has no argument for them. `ptx`: use PTX
    where it is better."""
    sides = (options.window_left, options.window_right)
    left, right = (None if side is None or side >= reach else side for side in sides)
    softcap, has_alibi = options.softcap, tensors.alibi_dims > 0
    modified = options.score_mod is not None
    natural = tensors.biased or modified
    unit = 1.0 if natural else math.log2(math.e)  # of the scores, see `scores`
    numbers = {
        "stride_alibi": n_heads if tensors.alibi_dims == 2 else 0,
        "scale": options.scale * unit if softcap is None else options.scale / softcap,
        "softcap": 1.0 if softcap is None else softcap * unit,
        "left": left or 0,
        "right": right or 0,
        **_strides("stride_mask", tensors.attn_mask),
        **_strides("stride_tile", tensors.mask_tiles),
        "threshold": None if options.dropout_p is None else threshold(options.dropout_p),
        "keep_scale": None if options.dropout_p is None else keep_scale(options.dropout_p),
        "score_layout": tuple([n for layout in tensors.captured for pair in zip(*layout, strict=True) for n in pair])
        or ((0,) if modified else None),
    }
    shape = (1, 1, 1, 1) if tensors.attn_mask is None else tensors.attn_mask[0]
    constants = {
        "BOTTOM_RIGHT": options.bottom_right,
        "HAS_LEFT": left is not None,
        "HAS_RIGHT": right is not None,
        "HAS_BENT": softcap is not None or modified,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_ALIBI": has_alibi,
        "HAS_NATURAL": natural,
        "HAS_MODIFIED": modified,
        "HAS_GLOBAL_HEADS": modified and tensors.dropout_heads,
        "HAS_BIAS": tensors.biased,
        "HAS_MASK": tensors.attn_mask is not None and not tensors.biased,
        "HAS_QUERIES_DIFFER": shape[2] != 1,
        "HAS_KEYS_DIFFER": shape[3] != 1,
        "HAS_TILES": tensors.mask_tiles is not None,
        "HAS_DROPOUT": options.dropout_p is not None,
        "HAS_DROPOUT_HEADS": tensors.dropout_heads,
        "PTX": ptx and options.dropout_p is not None,
    }
    return KernelOptions(numbers, constants, softcap is not None or has_alibi or modified)


def _strides(name: str, layout: Layout | None) -> dict[str, int | None]:
    """The strides by the names of their parameters, 0 for a broadcast dimension."""
    if layout is None:
        return dict.fromkeys((name + dim for dim in "bhts"), None)
    return {name + dim: stride if n > 1 else 0 for dim, n, stride in zip("bhts", *layout, strict=True)}
