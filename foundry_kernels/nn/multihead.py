"""PyTorch's multi-head attention on the kernels here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from foundry_kernels.core import dropout
from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.core.checks import check_bool, check_device, check_dtype, check_rank, check_shape, check_tensor
from foundry_kernels.core.registry import FLOATS
from foundry_kernels.nn._backend import Backend, describe, plan, serving
from foundry_kernels.nn._linear_layers import products_for
from foundry_kernels.nn._nested import Packed, nest_like, pack, pad_packed
from foundry_kernels.nn._scripting import refuse_scripting
from foundry_kernels.ops._linear import Linear
from foundry_kernels.ops.flash_attention import flash_attention, flash_attention_varlen
from foundry_kernels.ops.flash_attention.checks import MAX_HEAD_DIM
from foundry_kernels.ops.flash_attention.weights import attention_weights


class OutProjection(torch.nn.modules.linear.NonDynamicallyQuantizableLinear):
    """A linear layer whose bias begins as 0."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)


class MultiheadAttention(torch.nn.MultiheadAttention):
    """:class:`torch.nn.MultiheadAttention` over this package's kernels: same arguments, attributes, state dict, masks
    and results.

    ``out_proj(softmax(q k^T / sqrt(head_dim) + mask) v)`` with H heads of q, k and v, the projections of queries, keys
    and values; self-attention where the three are one tensor, cross-attention where they are not.

    Args:
        embed_dim: width E of the queries and the output.
        num_heads: H, a divisor of `embed_dim`.
        dropout: of the weights, in training, in [0, 1): inside of the kernel, with a seed from torch's generator.
        bias: whether the projections have one.
        add_bias_kv: whether one more key and value, which are learned, follow those of each sequence.
        add_zero_attn: whether one more key and value of zeros follow them.
        kdim, vdim: widths of keys and values; None is `embed_dim`.
        batch_first: whether tensors are ``[B, T, E]``; else ``[T, B, E]``.
        backend: a backend's name, or a mapping of operations to names.

    Raises:
        ValueError: `embed_dim` is no multiple of `num_heads`, a width is below 1, a head is wider than kernels take,
            `dropout` is outside of [0, 1), the backend is unknown.

    In inference torch.nn.TransformerEncoderLayer calls a kernel of its own instead of the attention module that it
    holds; apply :func:`foundry_kernels.patch` to the layer to avoid this.
    """

    __prepare_scriptable__ = refuse_scripting

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        backend: Backend = "auto",
    ) -> None:
        backends = plan(backend, ("flash_attention",))  # packed or not
        for name, value in (("embed_dim", embed_dim), ("num_heads", num_heads), ("kdim", kdim), ("vdim", vdim)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads={num_heads}; got {embed_dim}")
        if (reason := why_not(embed_dim // num_heads, dropout)) is not None:
            raise ValueError(reason)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.out_proj.__class__ = OutProjection  # of the same parameters, which are drawn already
        self.backends = backends

    def reset_parameters(self) -> None:
        """Draws the parameters of this module itself, for a module that was made on the meta device."""
        self._reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of T queries over S keys and values.

        Args:
            query: ``[T, B, E]``, ``[B, T, E]`` with `batch_first`, or ``[T, E]``, of the weights' dtype. Or a nested
                tensor ``[B, *, E]`` with `batch_first`, without masks and the two options that add keys.
            key: ``[S, B, kdim]``, ``[B, S, kdim]`` or ``[S, kdim]``; nested if query is.
            value: ``[S, B, vdim]``, likewise.
            key_padding_mask: ``[B, S]`` or ``[S]``, bool, True where a key is hidden from all queries; or floating,
                added to the scores of the key.
            need_weights: whether to return the weights too. Plain PyTorch computes them from the log-sum-exp of each
                row, with two float32 matrices ``[B, H, T, S]`` at a time (more with dropout). One of these is kept for
                the backward pass.
            attn_mask: ``[T, S]`` or ``[B * H, T, S]``, bool, True where a query does not see a key; or floating, added
                to the scores. It gets a gradient if it requires one.
            average_attn_weights: whether the weights returned are the mean over the heads.
            is_causal: a hint that `attn_mask`, which must be given, is the causal mask, so that the kernel skips what
                it hides. With is_causal=True the mask is ignored, as in PyTorch, unless it requires a gradient or keys
                are added.

        Returns:
            ``(output, weights)``. output has query's shape. weights is None without `need_weights`, else ``[B, T, S]``
            (``[B, H, T, S]`` without `average_attn_weights`, no B for ``[T, E]``; S counts added keys) in the dtype of
            the projected queries: what the values were multiplied by, after dropout. A query that sees no key has
            weights 0 and an output of `out_proj`'s bias, where some of PyTorch's implementations return NaN.

        Raises:
            TypeError: an argument is not a tensor, or a mask is neither bool nor floating.
            ValueError: shapes, dtypes or devices do not fit, `is_causal` is given without `attn_mask`, or an option
                does not support nested tensors.
            BackendUnavailable: the named backend does not support this device or dtype.
        """
        for name, x in (("query", query), ("key", key), ("value", value)):
            check_tensor(name, x)
        check_bool("is_causal", is_causal)
        if is_causal and attn_mask is None:
            raise ValueError("attn_mask must be given with is_causal=True, which is a hint about it; got None")
        if query.is_nested or key.is_nested or value.is_nested:
            self._check_nested(query, key, value, key_padding_mask, attn_mask)
            return self._nested(query, key, value, need_weights, average_attn_weights)
        sizes = self._check(query, key, value)
        batch, n_queries, n_keys = sizes
        if attn_mask is not None:
            of_heads = (batch * self.num_heads, n_queries, n_keys)
            _check_mask("attn_mask", attn_mask, query)
            shape = of_heads if attn_mask.dim() == 3 else of_heads[1:]
            check_shape("attn_mask", attn_mask, shape, "[T, S] or [B * num_heads, T, S]")
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask, query)
            keys, layout = ((n_keys,), "[S]") if query.dim() == 2 else ((batch, n_keys), "[B, S]")
            check_shape("key_padding_mask", key_padding_mask, keys, layout)
        q, k, v = (self._heads(x) for x in self._with_added_keys(*self._projected(query, key, value)))
        added = k.shape[2] - n_keys
        causal = is_causal and not added and attn_mask is not None and not attn_mask.requires_grad
        options: dict[str, Any] = {
            "attn_mask": self._mask(None if causal else attn_mask, key_padding_mask, batch, added),
            "causal": causal, "align": "top_left", **self._dropout(q),
        }  # fmt: skip
        backend = self.backends["flash_attention"]
        if not need_weights:
            return self._output(flash_attention(q, k, v, **options, backend=backend), query.dim()), None
        out, lse = flash_attention(q, k, v, **options, return_lse=True, backend=backend)
        ran = serving({"flash_attention": backend}, q.device.type, autocast_dtype(q) or q.dtype)
        weights = attention_weights(q, k, lse, rounded="reference" in ran.values(), **options)
        weights = (weights.mean(1) if average_attn_weights else weights).to(q.dtype)
        return self._output(out, query.dim()), weights.squeeze(0) if query.dim() == 2 else weights

    def forward_packed(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Self-attention within each of N sequences that are packed without padding.

        Args:
            x: ``[total, E]``.
            cu_seqlens: ``[N + 1]`` int32 or int64, the cumulative lengths, from 0 to total.
            max_seqlen: the longest length, or any number above it.

        Returns:
            ``[total, E]``.

        Raises:
            ValueError: x is not of that shape, the module adds keys, or as :func:`flash_attention_varlen`.
        """
        check_tensor("x", x)
        check_rank("x", x, 2, f"[total, {self.embed_dim}]")
        self._check(x, x, x)
        self._refuse_added_keys("x")
        packed = Packed(x, cu_seqlens, max_seqlen)
        return self._attend_packed(packed, packed, packed)

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int, int]:
        """Checks all three and returns (B, T, S); B is 1 for one sequence ``[T, E]``."""
        rank = query.dim()
        if rank not in (2, 3):
            raise ValueError(f"query must be [T, E] or have a batch beside T; got shape {tuple(query.shape)}")
        weight = self.out_proj.weight
        mixed = autocast_dtype(query) is not None
        for name, x, width in (
            ("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim),
        ):  # fmt: skip
            if x.dim() != rank or x.shape[-1] != width:
                raise ValueError(
                    f"{name} must have query's {rank} dimensions, the last of {width}; got shape {tuple(x.shape)}"
                )
            check_device(name, x, "the weights", weight)
            if not mixed:
                check_dtype(name, x, "the weights", weight)
        if value.shape[:-1] != key.shape[:-1]:
            raise ValueError(f"value must have key's sizes {tuple(key.shape[:-1])}; got shape {tuple(value.shape)}")
        if rank == 2:
            return 1, query.shape[0], key.shape[0]
        along = 1 if self.batch_first else 0
        batch = query.shape[1 - along]
        if key.shape[1 - along] != batch:
            raise ValueError(f"key must have query's batch size {batch}; got shape {tuple(key.shape)}")
        return batch, query.shape[along], key.shape[along]

    def _linear(self, x: Tensor) -> Linear:
        return products_for(x, self.backends["flash_attention"]).function

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values ``[..., E]``, with one matmul for each distinct input."""
        e, weight, bias = self.embed_dim, self.in_proj_weight, self.in_proj_bias
        linear = self._linear(query)
        if weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key is value:
            return linear(query, weight, bias).chunk(3, -1)
        elif key is value:
            of_q, of_kv = (None, None) if bias is None else bias.split((e, 2 * e))
            return linear(query, weight[:e], of_q), *linear(key, weight[e:], of_kv).chunk(2, -1)
        else:
            weights = weight.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return tuple(linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))

    def _with_added_keys(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Appends the learned key and value, and those of zeros."""
        along = 1 if self.batch_first and k.dim() == 3 else 0
        one = [1 if dim == along else n for dim, n in enumerate(k.shape)]
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.flatten().expand(one)], along)
            v = torch.cat([v, self.bias_v.flatten().expand(one)], along)
        if self.add_zero_attn:
            k, v = torch.cat([k, k.new_zeros(one)], along), torch.cat([v, v.new_zeros(one)], along)
        return q, k, v

    def _heads(self, x: Tensor) -> Tensor:
        """``[B, H, T, D]``, a view."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        if x.dim() == 3:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _output(self, out: Tensor, rank: int) -> Tensor:
        """The projection of ``[B, H, T, D]``, whose memory lies as the queries' does, in the layout of the query."""
        if rank == 2:
            out = out.squeeze(0).transpose(0, 1)
        else:
            out = out.transpose(1, 2) if self.batch_first else out.permute(2, 0, 1, 3)
        return self._linear(out)(out.flatten(-2), self.out_proj.weight, self.out_proj.bias)

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, batch: int, added: int) -> Tensor | None:
        """Both masks as one of scores ``[B, H, T, S + added]``: bool, True where a query sees a key, or a bias."""
        masks = []
        if attn_mask is not None:
            masks.append(attn_mask.unflatten(0, (batch, self.num_heads)) if attn_mask.dim() == 3 else attn_mask)
        if key_padding_mask is not None:
            masks.append(key_padding_mask[..., None, None, :])
        if not masks:
            return None
        if added:
            masks = [pad(mask, (0, added)) for mask in masks]
        hidden = [mask for mask in masks if mask.dtype == torch.bool]
        biases = [mask for mask in masks if mask.dtype != torch.bool]
        anywhere = hidden[0] if len(hidden) == 1 else hidden[0] | hidden[1] if hidden else None
        if not biases:
            assert anywhere is not None
            return ~anywhere
        bias = biases[0] if len(biases) == 1 else biases[0] + biases[1]
        return bias if anywhere is None else bias.masked_fill(anywhere, -torch.inf)

    def _dropout(self, q: Tensor) -> dict[str, Any]:
        """The options of dropout, with the seed."""
        drop = dropout.arguments(q, self.dropout, None, "query") if self.training else ()
        return {"dropout_p": drop[0], "dropout_seed": drop[1]} if drop else {}

    # Nested tensors ----------------------------------------------------------------------------------------------

    def _check_nested(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> None:
        if not (query.is_nested and key.is_nested and value.is_nested):
            raise ValueError("query, key and value must all be nested tensors or none of them")
        if not self.batch_first:
            raise ValueError("query may be a nested tensor with batch_first=True; got batch_first=False")
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None:
                raise ValueError(f"{name} must be None for nested tensors, which have no padding")
        self._refuse_added_keys("query")

    def _refuse_added_keys(self, name: str) -> None:
        if self.bias_k is not None or self.add_zero_attn:
            raise ValueError(f"{name} must be padded with add_bias_kv or add_zero_attn, which add a key to each row")

    def _nested(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, average_attn_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        packed_q = pack("query", query)
        packed_k = packed_q if key is query else pack("key", key)
        packed_v = packed_q if value is query else packed_k if value is key else pack("value", value)
        self._check(packed_q.tokens, packed_k.tokens, packed_v.tokens)
        if not torch.equal(packed_k.cu_seqlens, packed_v.cu_seqlens):
            raise ValueError("value must have the lengths of key's sequences")
        if len(packed_q.cu_seqlens) != len(packed_k.cu_seqlens):
            raise ValueError(f"key must have as many sequences as query, {len(packed_q.cu_seqlens) - 1}")
        if not need_weights:
            return nest_like(self._attend_packed(packed_q, packed_k, packed_v), packed_q, query), None
        (padded_q, seen_q), (padded_k, seen_k) = pad_packed(packed_q), pad_packed(packed_k)
        padded_v = padded_k if packed_v is packed_k else pad_packed(packed_v)[0]
        out, weights = self.forward(
            padded_q, padded_q if packed_k is packed_q else padded_k, padded_v, ~seen_k,
            average_attn_weights=average_attn_weights,
        )  # fmt: skip
        assert weights is not None
        rows = seen_q[..., None] if average_attn_weights else seen_q[:, None, :, None]
        return nest_like(out[seen_q], packed_q, query), weights.masked_fill(~rows, 0.0)

    def _attend_packed(self, query: Packed, key: Packed, value: Packed) -> Tensor:
        """``[total, E]``: attention within sequences, projected."""
        q, k, v = self._projected(query.tokens, key.tokens, value.tokens)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)) for x in (q, k, v))
        out = flash_attention_varlen(
            q, k, v, query.cu_seqlens, key.cu_seqlens, query.max_seqlen, key.max_seqlen,
            **self._dropout(q), backend=self.backends["flash_attention"],
        )  # fmt: skip
        return self._linear(out)(out.flatten(-2), self.out_proj.weight, self.out_proj.bias)

    def extra_repr(self) -> str:
        extra = f"{self.embed_dim}, num_heads={self.num_heads}, "
        extra += f"dropout={self.dropout}, " if self.dropout else ""
        return extra + f"batch_first={self.batch_first}, backend={describe(self.backends)}"


def why_not(head_dim: int, dropout_p: float) -> str | None:
    """The reason why kernels do not support heads of this width, or this dropout; None where they do."""
    if head_dim > MAX_HEAD_DIM:
        return f"embed_dim must be at most {MAX_HEAD_DIM} for each of the heads; got {head_dim}"
    if not 0.0 <= dropout_p < 1.0:
        return f"dropout must be in [0, 1); got {dropout_p}"
    return None


def _check_mask(name: str, mask: Tensor, query: Tensor) -> None:
    check_tensor(name, mask)
    if mask.dtype != torch.bool and mask.dtype not in FLOATS:
        raise TypeError(f"{name} must be bool or floating, as in PyTorch; got {mask.dtype}")
    if mask.dtype == torch.float64 != query.dtype:
        raise TypeError(f"{name} may be float64 only where query is; got query of {query.dtype}")
    check_device(name, mask, "query", query)
