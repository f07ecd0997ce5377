"""What attention's launches have in common for calls with the same shapes, strides and options."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from foundry_kernels._triton.devices import capability, device_of
from foundry_kernels._triton.launch import Plan
from foundry_kernels._triton.plans import keep, kept_plans, planned
from foundry_kernels._triton.rows import compute_dtype
from foundry_kernels._triton.tuning import choose, is_forced
from foundry_kernels.ops.flash_attention.options import AttentionOptions
from foundry_kernels.ops.flash_attention.triton.bundles import HeadStrides
from foundry_kernels.ops.flash_attention.triton.config import apart, configs, wide_pairs_tile
from foundry_kernels.ops.flash_attention.triton.kernel_options import (
    Layout,
    TensorOptions,
    kernel_options,
    numbers_of,
    tensor_options,
)
from foundry_kernels.ops.flash_attention.triton.pairs_config import PairOptions, with_pairs

#: Larger than any window that has an effect.
_FAR = 1 << 30

#: Bytes that the heads of a section may read together: less than half of the L2 cache of data-center GPUs.
_SECTION_BYTES = 16 << 20

#: Within a tile, offsets have 32 bits. So inputs with a row stride of at least this many elements are copied.
_FAR_APART = 1 << 23


@planned
def _has_aligned_rows(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    step = 16 // dtype.itemsize
    whole = strides[3] == 1 and shape[3] % step == 0
    return whole and strides[2] < _FAR_APART and all(s % step == 0 for s in strides[:3])


def lse_dtype(dtype: torch.dtype, natural: bool) -> torch.dtype:
    """The dtype of lse between the passes, for inputs of `dtype`. Rounded to float32, it would cause by far the largest
    error of the gradients of float32 inputs. Beside a large bias it would lose the logarithm of the sum."""
    return torch.float64 if natural or dtype.itemsize >= 4 else torch.float32


class _Problem:
    """What the launches have in common for calls with the same shapes, strides and options; q, k and v are batched.
    `_problem` returns the same object for the same combination, so that caches can use it as a key."""

    def __init__(
        self,
        q: Layout,
        k: Layout,
        v: Layout,
        dtype: torch.dtype,
        device: torch.device,
        n_sequences: int | None,
        tensors: TensorOptions,
        options: AttentionOptions,
    ) -> None:
        """`n_sequences`: None for dense tensors. `options`: without tensors, of which `tensors` says what counts."""
        self.packed = n_sequences is not None
        self.n_heads, self.tokens_q, self.head_dim = q[0][1:]
        self.n_kv_heads, self.tokens_k, self.head_dim_v = v[0][1:]
        if tensors.table is not None:
            self.tokens_k *= tensors.table[0][1]
        self.n_batch = q[0][0] if n_sequences is None else n_sequences
        self.group = self.n_heads // max(self.n_kv_heads, 1)
        self.max_seqlen_q = min(options.max_seqlen_q, self.tokens_q)
        self.max_seqlen_k = min(options.max_seqlen_k, self.tokens_k)
        self.dtype, self.device, self.capability = dtype, device, capability(device)
        self.batch_invariant = options.batch_invariant
        # A window of at least this size has no effect. For batch invariance, it must be the same for all batches.
        self.reach = _FAR if self.batch_invariant else self.tokens_q + self.tokens_k
        ptx = self.capability != 0 and device_of(self.capability).name != "cdna"
        found = kernel_options(options, tensors, self.n_heads, self.reach, ptx)
        self.numbers, constants, self.needs_registers = found
        self.mask_tiles = tensors.mask_tiles
        self.score_code, self.captured = options.score_mod, tensors.captured
        self.page_size = 0 if tensors.table is None else k[0][2]
        #: The forward kernels' parameters for pages, by name.
        self.pages: dict[str, Any] = {"stride_table": None, "n_pages": None, "PAGE_SIZE": False}
        if tensors.table is not None:
            self.pages = {"stride_table": tensors.table[1][0], "n_pages": k[0][0], "PAGE_SIZE": self.page_size}
        masks = tensors.attn_mask is not None, tensors.mask_tiles is not None
        self.pairs = PairOptions(*masks, options.dropout_p is not None)
        self.window = (self.numbers["left"], self.numbers["right"])
        self.natural_scale = options.scale
        self.stride_lseb = 0 if self.packed else self.n_heads * self.tokens_q
        self.layouts = (q, k, v)
        #: Whether kernels can read rows without a copy, see `_aligned`.
        self.rows_aligned = all(_has_aligned_rows(*layout, dtype) for layout in self.layouts)
        self.strides_qkv = self.strides(q[1], k[1], v[1])
        if tensors.table is not None:  # a page has an address, like a sequence of a batch
            self.strides_qkv = (*self.strides(q[1]), HeadStrides(*k[1][:3]), HeadStrides(*v[1][:3]))
        of_shape = {
            "VARLEN": self.packed,
            "COMPUTE": compute_dtype(dtype),
            "D": self.head_dim,
            "DV": self.head_dim_v,
            "BLOCK_D": max(16, triton.next_power_of_2(self.head_dim)),
            "BLOCK_DV": max(16, triton.next_power_of_2(self.head_dim_v)),
        }
        self.constants = constants | of_shape
        #: Whether lse has two parts between the passes, see `lse_dtype`.
        self.wide_lse = dtype != torch.float64 and lse_dtype(dtype, self.constants["HAS_NATURAL"]) == torch.float64
        #: What kernels that compute scores get by name.
        self.arguments = found.arguments() | of_shape
        #: Whether heads are wider than 256 and there is a mask, a bias or dropout.
        self.wide_pairs = max(self.head_dim, self.head_dim_v) > 256 and any(self.pairs)
        self.apart = apart(self.width_and_needs()[0], dtype)
        few = self.group * self.max_seqlen_q <= self._configs("decode")[1][0]["BLOCK_M"]
        self.few_queries = few and not self.batch_invariant

    def score_functions(self, by_keys: bool = False, slope: int | None = None) -> dict[str, Any]:
        """The functions of `score_mod` that a kernel calls, by the names of its parameters; see `score_print`."""
        if not self.score_code:
            return {"PREPARE": None, "MODIFY": None}
        from foundry_kernels.ops.flash_attention.triton.score_print import Request, functions  # few calls need it

        empty = tuple([0 in shape for shape, _ in self.captured])
        found = functions(Request(self.score_code, by_keys, slope, empty))
        return {"PREPARE": found.prepare, "MODIFY": found.modify}

    def config(self, kernel: str, *preferred: dict[str, Any], **fixed: int) -> dict[str, Any]:
        """Returns the launch config for `kernel`, in which `fixed` replaces values of the table. `preferred`: configs
        of another kernel, which dense calls use instead unless this kernel was measured to be faster. They are a
        separate choice, because a config of this kernel that was measured on dense calls also applies to all other
        calls."""
        name = f"flash_attention_{'dkdv' if kernel in ('dk', 'dv') else kernel}_kernel"
        tags, found = self._configs(kernel)
        if self.wide_pairs:
            fixed |= wide_pairs_tile(kernel, self.capability, self.dtype)
        candidates = [config | fixed for config in found]
        default = choose(name, tags, candidates, self.device)
        if not preferred or is_forced(name, tags, candidates):
            return default
        chosen = choose(name, f"{tags} dense", [*preferred, candidates[0]], self.device)
        return default if chosen == candidates[0] else chosen

    def _configs(self, kernel: str) -> tuple[str, list[dict[str, Any]]]:
        """Returns the tags, which distinguish this launch from others with the same config, and the configs."""
        width, needs_registers = self.width_and_needs()
        if kernel in ("dk", "dv") and (self.tokens_q % 16 != 0 or self.batch_invariant):
            needs_registers = True  # rows of lse and delta are not aligned, or would not be in another batch
        found = configs(kernel, self.capability, width, self.dtype, needs_registers, any(self.pairs))
        tags = f"{8 * self.dtype.itemsize}-bit D<={width}{' with options' if needs_registers else ''}"
        if any(self.pairs):  # separate from configs that were measured on other calls
            names = "".join(f" {name}" for name, on in zip(self.pairs._fields, self.pairs, strict=True) if on)
            found = [self._with_pairs(kernel, row) for row in (found if self.capability == 0 else found[:1])]
            tags += f" with{names}"
        return tags + (f" {kernel} alone" if kernel in ("dk", "dv") else ""), found

    def _with_pairs(self, kernel: str, row: dict[str, Any]) -> dict[str, Any]:
        width, needs_registers = self.width_and_needs()
        return with_pairs(row, kernel, self.capability, width, self.dtype, self.pairs, needs_registers)

    def width_and_needs(self) -> tuple[int, bool]:
        """The `head_dim` and `needs_registers` for `config`."""
        blocks = (self.constants["BLOCK_D"], self.constants["BLOCK_DV"])
        return max(blocks), self.needs_registers or self.wide_pairs or blocks != (self.head_dim, self.head_dim_v)

    def section(self, tokens: int, num_splits: int = 1) -> int:
        """The number of key-value heads (of all sequences), or parts of them, whose data fit L2 together. For each,
        programs read two tensors of `tokens` rows. See `program_order`."""
        row_bytes = (self.head_dim + self.head_dim_v) * self.dtype.itemsize
        fit = _SECTION_BYTES // (max(tokens, 1) * row_bytes)
        return max(1, min(fit, self.n_batch * self.n_kv_heads * num_splits))

    def plan(self, programs: int, numbers: tuple[Any, ...], *others: dict[str, Any]) -> Plan:
        """The launch of a kernel that computes scores. After the tensors it gets `numbers`, in the kernel's own order.
        By name it gets what follows from the options and the shapes, and `others`: its flags and its
        launch config."""
        named = dict(self.arguments)
        for more in others:
            named.update(more)
        return Plan((programs,), numbers, named)

    def strides(self, *tensors: tuple[int, ...] | None) -> tuple[HeadStrides, ...]:
        """Returns the strides of each tensor. Packed sequences are found by cu_seqlens."""
        found: list[HeadStrides] = []
        for strides in tensors:
            sequence, head, token, _ = strides or (0, 0, 0, 0)
            found.append(HeadStrides(0 if self.packed else sequence, head, token))
        return tuple(found)


_PROBLEMS = kept_plans()


def _problem(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> _Problem:
    cu_seqlens = options.cu_seqlens_q
    key = (
        (q.shape, q.stride()), (k.shape, k.stride()), (v.shape, v.stride()), q.dtype, q.device,
        None if cu_seqlens is None else cu_seqlens.shape[0] - 1, tensor_options(options), numbers_of(options),
    )  # fmt: skip
    found = _PROBLEMS.get(key)
    return keep(_PROBLEMS, key, _Problem(*key[:-1], options.without_tensors())) if found is None else found
