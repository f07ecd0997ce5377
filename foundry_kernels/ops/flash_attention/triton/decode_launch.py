"""The launches for few queries: how keys are split, and the memory for the splits' sums."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from foundry_kernels._triton import INTERPRET
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.tuning import choose
from foundry_kernels.ops.flash_attention.triton.config import combine_configs
from foundry_kernels.ops.flash_attention.triton.decode import (
    MAX_SPLITS,
    flash_attention_combine_kernel,
    flash_attention_decode_kernel,
)
from foundry_kernels.ops.flash_attention.triton.problem import _Problem

#: Keys of a split for each row of the tile, so that sums are small next to keys; and the fewest keys of a split, which
#: are as many 16-bit keys as a program loads at once. The interpreter's cases are short.
_KEYS_A_ROW, _FEWEST_KEYS = (4, 64) if INTERPRET else (16, 128)
#: The last program of a head adds the splits if a split has at most this many sums; more would take one program too
#: long. The second number, of elements loaded at once, determines how many splits it adds at a time.
_ADDED_AT_ONCE, _LOADED_AT_ONCE = 1024, 8192


def split(rows: int, keys: int) -> tuple[int, int]:
    """(keys of a split, number of splits) for this number of rows in a tile, and of keys that a row may see.

    The result does not depend on the device or the batch, so that a sequence's output does not depend on other
    sequences. 4096 keys make 32 splits, 256 programs of a model with 8 key-value heads, two for each multiprocessor of
    an H100; 16384 keys 64 splits, 512 programs.
    """
    least = max(_FEWEST_KEYS, _KEYS_A_ROW * triton.next_power_of_2(rows))
    split_keys = max(least, triton.next_power_of_2(triton.cdiv(keys, MAX_SPLITS.value)))
    return split_keys, max(1, triton.cdiv(keys, split_keys))


#: By device and stream: counters of the programs that have finished a head. The last program of each head resets its
#: counter to zero, so they are zero between launches.
_arrived: dict[tuple[int | None, int], Tensor] = {}


def arrivals(n: int, device: torch.device) -> Tensor:
    """At least `n` zeros for a launch on the current stream. A captured graph gets its own, which each replay sets to
    zero, because it may run at the same time as launches on any stream."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(n, dtype=torch.int32, device=device)
    key = device.index, torch.cuda.current_stream(device).cuda_stream
    found = _arrived.get(key)
    if found is None or found.shape[0] < n:
        found = _arrived[key] = torch.zeros(max(n, 1024), dtype=torch.int32, device=device)
    return found


@planned
def _plan_decode(
    p: _Problem, out: tuple[int, ...], has_sinks: bool, save_lse: bool, save_stats: bool
) -> tuple[Plan, Plan | None, int, int]:
    """The launch of `decode`, the launch of `combine` (None if not needed), and the workspace's number of rows and
    their width (0 if keys are not split)."""
    rows = p.group * p.max_seqlen_q
    config = p.config("decode", BLOCK_M=max(16, triton.next_power_of_2(rows)))
    left, right = p.window
    keys = p.max_seqlen_k
    if p.constants["HAS_LEFT"] and (p.constants["HAS_RIGHT"] or p.constants["BOTTOM_RIGHT"]):
        keys = min(keys, left + p.max_seqlen_q + right)
    if p.constants["HAS_RIGHT"] and not p.constants["BOTTOM_RIGHT"]:
        keys = min(keys, p.max_seqlen_q + right)
    split_keys, num_splits = split(rows, keys)
    assert split_keys % config["BLOCK_N"] == 0, "a tile would read the keys of the next split"
    places = p.tokens_k // split_keys + p.n_batch if p.packed and not p.page_size else p.n_batch * num_splits
    n_states = places * p.n_kv_heads * rows
    counts = (
        p.n_batch, p.n_kv_heads, p.group, rows, p.tokens_q, p.tokens_k, split_keys, num_splits, n_states,
    )  # fmt: skip
    strides = p.strides(out)
    numbers = (*counts, *p.strides_qkv, *strides, p.stride_lseb)
    flags = {"HAS_SINKS": has_sinks, "SAVE_LSE": save_lse, "SAVE_STATS": save_stats}
    numbers_of_sums = triton.next_power_of_2(rows) * p.constants["BLOCK_DV"]
    added = num_splits > 1 and numbers_of_sums <= _ADDED_AT_ONCE
    splitting = {
        "SPLIT": num_splits > 1,
        "ROWS": triton.next_power_of_2(rows) if added else 1,
        "BLOCK_SPLITS": min(MAX_SPLITS.value, _LOADED_AT_ONCE // numbers_of_sums) if added else 0,
        "Q_AHEAD": added and p.dtype.itemsize == 2 and not p.needs_registers and max(p.head_dim, p.head_dim_v) <= 256,
    }
    decode = p.plan(
        num_splits * p.n_batch * p.n_kv_heads, numbers, p.pages, flags, splitting, p.score_functions(), config
    )
    if num_splits == 1:
        return decode, None, 0, 0
    if added:
        return decode, None, n_states, p.head_dim_v
    shared = {name: p.constants[name] for name in ("VARLEN", "COMPUTE", "DV", "BLOCK_DV")}
    shared |= {"HAS_BIAS": p.constants["HAS_NATURAL"], "PAGE_SIZE": p.pages["PAGE_SIZE"]}
    tags = f"{8 * p.dtype.itemsize}-bit D<={shared['BLOCK_DV']}"
    found = combine_configs(shared["BLOCK_DV"], MAX_SPLITS.value)
    chunk = choose("flash_attention_combine_kernel", tags, found, p.device)
    combine = Plan(
        (p.n_batch * p.n_kv_heads * rows,), (*counts, *strides, p.stride_lseb), shared | flags | chunk
    )  # fmt: skip
    return decode, combine, n_states, p.head_dim_v


def launch_decode(
    p: _Problem,
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor | None, ...],
    lengths: tuple[Tensor | None, Tensor | None],
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    pairs: tuple[Tensor | None, ...],
    pages: tuple[Tensor | None, Tensor | None],
    captured: tuple[Tensor, ...] | None,
    save_lse: bool,
    save_stats: bool,
) -> None:
    """`results` are out, lse, entropy and max_logit; `lengths` the two cu_seqlens; `pairs` the result of
    `pair_tensors`; `pages` that of `page_tensors`, `captured` that of `captured_tensors`."""
    out = results[0]
    assert out is not None
    decode, combine, n_states, width = _plan_decode(p, out.stride(), sinks is not None, save_lse, save_stats)
    sums = states = arrived = None
    if n_states:
        dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
        sums = out.new_empty((n_states, width), dtype=dtype)
        states = sums.new_empty((3 if save_stats else 2, n_states))
    if n_states and combine is None:
        arrived = arrivals(p.n_batch * p.n_kv_heads, p.device)
    tensors = (*inputs, *results, sums, states, *lengths, alibi_slopes, sinks, *pairs, *pages, arrived, captured)
    launch(flash_attention_decode_kernel, decode, *tensors)
    if combine is not None:
        launch(flash_attention_combine_kernel, combine, sums, states, *results, *lengths, sinks, pages[1])
