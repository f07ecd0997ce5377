"""What the launches have in common for calls with the same shapes, dtypes and options."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from foundry_kernels._triton.devices import capability
from foundry_kernels._triton.launch import Plan
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import compute_dtype
from foundry_kernels._triton.tuning import choose
from foundry_kernels.ops.gated_delta_rule.operators import chunks_of
from foundry_kernels.ops.gated_delta_rule.options import DeltaRuleOptions
from foundry_kernels.ops.gated_delta_rule.triton.config import chunk_length, configs, kind

Strides = tuple[int, ...] | None


class Problem(NamedTuple):
    """Sizes of a call. `n_documents` is None for a dense batch."""

    n_batch: int
    n_kv_heads: int
    n_heads: int
    tokens: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    n_documents: int | None
    scale: float
    l2norm: bool
    delta: bool
    chunk_size: int | None
    channels: bool
    beta_limit: float | None

    @classmethod
    def of(cls, k: Tensor, v: Tensor, g: Tensor | None, options: DeltaRuleOptions) -> Problem:
        cu_seqlens = options.cu_seqlens
        return cls(
            v.shape[0], k.shape[1], v.shape[1], v.shape[2], k.shape[3], v.shape[3], v.dtype, v.device,
            None if cu_seqlens is None else cu_seqlens.shape[0] - 1,
            options.scale, options.qk_l2norm, options.delta, options.chunk_size, g is not None and g.dim() == 4,
            options.beta_limit,
        )  # fmt: skip

    @property
    def width(self) -> int:
        return max(self.head_dim, self.head_dim_v)

    @property
    def chunk(self) -> int:
        return chunk_length(self.chunk_size, self.width, self.dtype, capability(self.device), self.channels)

    @property
    def n_chunks(self) -> int:
        return chunks_of(self.tokens, self.chunk, self.n_documents)

    @property
    def n_states(self) -> int:
        return self.n_batch if self.n_documents is None else self.n_documents

    @property
    def compute(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def block(self, kernel: str) -> dict[str, Any]:
        """The launch config of a kernel by its name without "gated_delta_rule_"; blocks are not wider than heads."""
        tags = f"{str(self.dtype)[6:]}{' channels' * self.channels} D<={max(64, triton.next_power_of_2(self.width))}"
        name = f"gated_delta_rule_{kernel}_kernel"
        found = configs(kernel, capability(self.device), self.width, torch.float32 if self.channels else self.dtype)
        config = choose(name, tags, found, self.device)
        whole_d, whole_v = (max(16, triton.next_power_of_2(n)) for n in (self.head_dim, self.head_dim_v))
        config["BLOCK_D"] = min(config["BLOCK_D"] or whole_d, whole_d)
        config["BLOCK_V"] = min(config["BLOCK_V"], whole_v)
        return config

    @property
    def kind(self) -> str:
        """How `products` multiply. With channels, all operands but a few were computed in float32."""
        return kind(torch.float32 if self.channels else self.dtype, capability(self.device))

    def parts(self, *results: Tensor | None) -> int:
        """Returns the number of bfloat16 parts of float32 operands of matmuls (see `products`). Two are exact enough
        for results of 16 bits, not for the states and the gradients of g and beta in float32, whose errors would be
        up to four times the permitted ones."""
        return 2 if all(x is None or x.dtype == self.dtype for x in results) else 3

    def blocks(self, kernel: str) -> int:
        """The number of blocks of q's columns."""
        return triton.cdiv(self.head_dim, self.block(kernel)["BLOCK_D"])

    def by_chunk(self) -> tuple[tuple[Any, ...], int]:
        """The first numbers and the constant DOCUMENTS of a kernel whose programs find their chunk by `place_of`."""
        documents = self.n_documents or 0
        sizes = (self.tokens, self.n_chunks, self.n_heads, self.n_heads // self.n_kv_heads, self.size)
        return (documents, *sizes), triton.next_power_of_2(documents) if documents else 0

    @property
    def size(self) -> int:
        """Numbers of one for each token and head."""
        return self.n_batch * self.n_heads * self.tokens


def _strides(*tensors: Strides) -> tuple[int, ...]:
    """The strides of each tensor without that of its last dimension, 0 for None; a tensor of numbers has three."""
    return tuple(s for strides in tensors for s in (strides or (0, 0, 0, 1))[:3])


@planned
def plan(kernel: str, p: Problem, strides: tuple[Strides, ...], **flags: Any) -> Plan:
    """The launch of a kernel by its name without "gated_delta_rule_". `strides`: of the tensors that are not
    contiguous, in the order of the kernel's parameters."""
    block = p.block(kernel)
    constants: dict[str, Any] = {"D": p.head_dim, "CHUNK": p.chunk, "COMPUTE": compute_dtype(p.dtype)}
    constants |= {"KIND": p.kind} | flags
    sizes, constants["DOCUMENTS"] = p.by_chunk()
    programs = p.n_batch * p.n_chunks
    scale = p.scale
    if kernel in ("states", "dstates"):
        sizes, programs = sizes[1:], p.n_states
        if p.channels:  # rows of each head of v, which have been decayed, normalized and scaled
            sizes, scale = (*sizes[:3], 1, sizes[4]), 1.0
        del constants["DOCUMENTS"]
        constants["VARLEN"] = p.n_documents is not None
        constants["WIDTH"] = max(16, triton.next_power_of_2(p.head_dim))
        if flags["PARTS"] == 3:  # for want of registers
            block["BLOCK_V"] = min(block["BLOCK_V"], max(16, 2048 // constants["WIDTH"]))
    programs *= p.n_kv_heads if kernel == "dqk" else p.n_heads
    constants["DV"] = p.head_dim_v
    if kernel == "prepare":
        constants["MERGES"] = (p.chunk // 16).bit_length() - 1
        constants["BETA_LIMIT"] = p.beta_limit
    elif kernel == "dqk":
        programs *= p.blocks(kernel)
    elif kernel != "pairs":
        programs *= triton.cdiv(p.head_dim_v, block["BLOCK_V"])
    if kernel != "states":
        sizes = (*sizes, scale)
    return Plan((programs,), (*sizes, *_strides(*strides)), constants | block)


@planned
def plan_channels(kernel: str, p: Problem, strides: tuple[Strides, ...], **flags: Any) -> Plan:
    """The launch of a kernel of `channels` or `channel_gradients`; see `plan`."""
    block = p.block(f"channel_{kernel}")
    sizes, documents = p.by_chunk()
    constants: dict[str, Any] = {"D": p.head_dim, "DV": p.head_dim_v, "CHUNK": p.chunk, "DOCUMENTS": documents}
    constants |= {"COMPUTE": compute_dtype(p.dtype), "KIND": p.kind}
    constants |= {"MERGES": (p.chunk // 16).bit_length() - 1, "BETA_LIMIT": p.beta_limit} | flags | block
    columns = triton.cdiv(p.head_dim, block["BLOCK_D"])
    programs = p.n_batch * p.n_chunks * p.n_heads
    if kernel == "scores":
        programs *= p.chunk // 16
    elif kernel == "dqk":
        programs = programs // (p.n_heads // p.n_kv_heads) * columns * (p.chunk // 16)
    elif kernel == "finish":
        programs *= columns
    elif kernel == "outputs":
        programs *= triton.cdiv(p.head_dim_v, block["BLOCK_V"])
    unused = {
        "rows": ("DV", "BLOCK_V", "KIND", "MERGES"),
        "scores": ("DV", "BLOCK_V", "MERGES", "BETA_LIMIT"),
        "solve": ("D", "BLOCK_D", "BETA_LIMIT"),
        "outputs": ("MERGES", "BETA_LIMIT"),
        "pairs": ("MERGES", "BETA_LIMIT"),
        "dqk": ("MERGES", "BETA_LIMIT"),
        "finish": ("MERGES", "BETA_LIMIT"),
    }[kernel]
    constants = {name: x for name, x in constants.items() if name not in unused}
    return Plan((programs,), (*sizes, p.scale, *_strides(*strides)), constants)


@planned
def plan_gates(p: Problem, strides: tuple[Strides, ...]) -> Plan:
    sizes, documents = p.by_chunk()
    constants = {"COMPUTE": compute_dtype(p.dtype), "DOCUMENTS": documents, "D": p.head_dim, "CHUNK": p.chunk}
    constants |= {"BLOCK_D": min(32, max(16, triton.next_power_of_2(p.head_dim))), "CHANNELS": p.channels}
    programs = p.n_batch * p.n_chunks * p.n_heads
    numbers = (*sizes, p.scale, *_strides(*strides))
    return Plan((programs,), numbers, constants | {"BETA_LIMIT": p.beta_limit, "num_warps": 4})


@planned
def plan_finish(p: Problem, strides: tuple[Strides, ...]) -> Plan:
    sizes, documents = p.by_chunk()
    whole = max(16, triton.next_power_of_2(p.head_dim))
    constants = {"COMPUTE": compute_dtype(p.dtype), "DELTA": p.delta, "DOCUMENTS": documents, "D": p.head_dim}
    programs = p.n_batch * p.n_chunks * p.n_kv_heads
    numbers = (*sizes, p.blocks("dqk"), *_strides(*strides))
    return Plan((programs,), numbers, constants | {"BLOCK_D": whole, "CHUNK": p.chunk, "num_warps": 4})
