"""Which calls "auto" runs on the kernels of `csrc/cuda/hopper`, on compute capability 9.0 if the extension has them:
the calls whose forward pass they support, and compute faster than others. `takes` of `csrc/cuda/hopper/attention.h` is
the authoritative list. This is the same list in a form that torch.compile can trace, and
`tests/ops/flash_attention/test_hopper_kernels.py` compares the two."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels._triton.devices import capability, too_old
from foundry_kernels.core import extension
from foundry_kernels.ops.flash_attention.options import AttentionOptions

#: The GPU's multiprocessors: of an H100 or H200.
MULTIPROCESSORS = 132
MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16)
#: Elements of 16 bits in what TMA copies: widths and strides are multiples.
STEP = 8


def first_backend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str | None:
    """The backend that "auto" tries first, or None to keep its usual order."""
    if not (extension.HAS_HOPPER and q.is_cuda and _is_hopper(q.device)):
        return None
    return "native" if takes(q, k, v, options) else None


def supports(device: str, dtype: torch.dtype) -> bool:
    """Whether these kernels support most calls with tensors of this kind."""
    return extension.HAS_HOPPER and device == "cuda" and dtype in DTYPES and _is_hopper(torch.device("cuda"))


def takes(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> bool:
    """Whether the kernels for compute capability 9.0 support the forward pass of a call whose arguments are checked."""
    tokens = 0 if options.packed else 2
    if q.dtype not in DTYPES or q.numel() == 0 or k.shape[tokens] == 0:
        return False
    if options.attn_mask is not None or options.mask_tiles is not None or options.dropout_p is not None:
        return False
    if options.block_table is not None or options.score_mod or options.return_stats:
        return False
    if q.shape[-1] > MAX_HEAD_DIM or v.shape[-1] > MAX_HEAD_DIM or q.shape[-1] % STEP or v.shape[-1] % STEP:
        return False
    if not options.batch_invariant and not _shape_is_faster(q, k, v, options):
        return False
    return _has_map(q) and _has_map(k) and _has_map(v)


def _shape_is_faster(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> bool:
    width = max(q.shape[-1], v.shape[-1])
    if not options.packed:
        return is_faster(q.shape[0] * q.shape[1], q.shape[2], q.shape[2], k.shape[2], width)
    longest, keys = min(options.max_seqlen_q, q.shape[0]), min(options.max_seqlen_k, k.shape[0])
    return is_faster(q.shape[1], q.shape[0], longest, keys, width)


def is_faster(heads: int, queries: int, longest: int, keys: int, width: int) -> bool:
    """`forward_is_faster` of `csrc/cuda/hopper/choice.h`, which says why.

    heads: query heads, of all sequences unless they are packed. queries: of a sequence, or of all packed ones. longest,
    keys: of the longest sequence. width: the larger head dimension."""
    rows = 192 if width <= 64 else 128
    if 2 * longest < rows:
        return False
    return keys <= 1024 or 5 * heads * ((queries + rows - 1) // rows) >= 2 * MULTIPROCESSORS


def _has_map(x: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes and do not overlap; x is copied if rows are not dense."""
    if x.stride(-1) != 1:
        return True
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size > 1 and (stride <= 0 or stride % STEP):
            return False
    return torch.compiler.is_compiling() or x.storage_offset() % STEP == 0


def _is_hopper(device: torch.device) -> bool:
    return capability(device) == 90


# Tracing calls it and keeps its result (see `core.registry`).
_is_hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _tell_direct_calls() -> None:
    """What the direct call of attention on a GPU asks of the GPUs: csrc/direct_attention.cpp."""
    devices = range(torch.cuda.device_count())
    supported = all(too_old(i) is None for i in devices)
    extension._C.attention_gpus(
        supported, extension.HAS_HOPPER and all(_is_hopper(torch.device("cuda", i)) for i in devices)
    )


if hasattr(extension._C, "attention_gpus"):  # in an older extension it is not
    torch.cuda._lazy_call(_tell_direct_calls)  # when CUDA is initialised, which is before any tensor is on a GPU
