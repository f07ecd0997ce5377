"""A model converter of torchtitan (0.3, whose converters change the model's config before it is built)::

    from foundry_kernels.integrations.torchtitan import FoundryConverter
    spec = model_registry("8B", attn_backend="varlen", converters=[FoundryConverter.Config()])

Names of parameters, initialization, sharding and checkpoints stay torchtitan's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchtitan.config.override import derive
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, FeedForward, RMSNorm
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module

from foundry_kernels.core.registry import is_dtensor
from foundry_kernels.ops.flash_attention import flash_attention_varlen
from foundry_kernels.ops.rms_norm import rms_norm
from foundry_kernels.ops.rope import rope
from foundry_kernels.ops.swiglu import swiglu


class _OnKernels:
    backend: str

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # of torchtitan's class
        self.backend = config.backend


class FoundryRMSNorm(_OnKernels, RMSNorm):
    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        backend: str = "auto"

    def forward(self, x: Tensor) -> Tensor:
        shape = self.normalized_shape
        return rms_norm(x, self.weight, self.eps, normalized_shape=shape, backend=self.backend)


class FoundryFeedForward(_OnKernels, FeedForward):
    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        backend: str = "auto"

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(swiglu(self.w1(x), self.w3(x), backend=self.backend))
        return out


class FoundryAttention(VarlenAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        backend: str = "auto"

    def __init__(self, config: Config) -> None:
        Module.__init__(self)  # without a look for the flash attention of torch, which is not used
        self.window_size, self.backend = config.window_size, config.backend

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Takes ``[B, T, H, D]``, in any dtype."""
        left, right = self.window_size
        options: dict[str, Any] = {"scale": scale, "causal": right == 0, "window": (left, right)}
        lengths = (attention_masks.cu_seq_q, attention_masks.cu_seq_k, attention_masks.max_q, attention_masks.max_k)
        q_packed, k_packed, v_packed = (x.flatten(0, 1) for x in (q, k, v))
        out, lse = flash_attention_varlen(
            q_packed, k_packed, v_packed, *lengths, **options, return_lse=True, backend=self.backend
        )
        out = out.unflatten(0, q.shape[:2])
        return out if out_transform is None else out_transform(out, lse.T.unflatten(0, q.shape[:2]))


class _Rotation(_OnKernels):
    """What the two rotations of torchtitan share: they differ in the pairs, and in how they keep their table."""

    interleaved: bool
    cache: Tensor

    def _table(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if is_dtensor(query):  # whose table is not one
            theirs: Any = super()
            rotated: tuple[Tensor, Tensor] = theirs.forward(query, key, positions)
            return rotated
        cos, sin = self._table()
        q, k = query.transpose(1, 2), key.transpose(1, 2)
        options: Any = {"interleaved": self.interleaved, "positions": positions, "backend": self.backend}
        q, k = rope(q, k, cos, sin, **options)
        return q.transpose(1, 2), k.transpose(1, 2)


class FoundryComplexRoPE(_Rotation, ComplexRoPE):
    interleaved = True

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        backend: str = "auto"

    def _table(self) -> tuple[Tensor, Tensor]:
        return self.cache.real, self.cache.imag


class FoundryCosSinRoPE(_Rotation, CosSinRoPE):
    interleaved = False

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        backend: str = "auto"

    def _table(self) -> tuple[Tensor, Tensor]:
        width = self.cache.shape[-1] // 4  # cos twice, then sin twice
        return self.cache[..., :width], self.cache[..., 2 * width : 3 * width]


#: What is replaced: classes of torchtitan, by the operation. A class that derives from one of these stays.
REPLACED: tuple[tuple[str, Any, Any], ...] = (
    ("rms_norm", RMSNorm, FoundryRMSNorm),
    ("swiglu", FeedForward, FoundryFeedForward),
    ("flash_attention", VarlenAttention, FoundryAttention),
    ("rope", ComplexRoPE, FoundryComplexRoPE),
    ("rope", CosSinRoPE, FoundryCosSinRoPE),
)


class FoundryConverter(ModelConfigConverter):
    """Puts norms, SwiGLU, rotations and the attention of the backend "varlen" of a torchtitan model on these kernels.

    Config:
        backend: as for the operations. ops: the operations to use, of rms_norm, swiglu, flash_attention and rope; None
            for all.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        backend: str = "auto"
        ops: list[str] | None = None

    def __init__(self, config: Config) -> None:
        known = {op for op, _, _ in REPLACED}
        if unknown := sorted(set(config.ops or ()) - known):
            raise ValueError(f"ops must name some of {', '.join(sorted(known))}; got {', '.join(unknown)}")
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Returns the config, in which the replaced parts have other classes."""
        for op, theirs, ours in REPLACED:
            if self.config.ops is not None and op not in self.config.ops:
                continue
            for _, found, parent, name in list(model_config.traverse(theirs.Config, recurse=True)):
                if type(found) is not theirs.Config or parent is None:
                    continue
                replacement = derive(found, ours.Config, backend=self.config.backend)
                if isinstance(parent, list):
                    parent[name] = replacement
                else:
                    setattr(parent, name, replacement)
        return model_config
