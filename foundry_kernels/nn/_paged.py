"""Keys and values in the pages of a cache, as :class:`foundry_kernels.nn.Attention` appends to them and attends."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from foundry_kernels.core.inference import cut, without_backward
from foundry_kernels.ops.flash_attention import flash_attention_varlen

NO_GRADIENT = "cache is for inference: gradients do not flow through it; use torch.no_grad()"


class PagedStep(NamedTuple):
    """The positions of the packed tokens of one forward pass, which are the same in every layer."""

    positions: Tensor  # of the tokens: [B, T] or [1, total]
    page: Tensor  # [total] int64, that each token is stored in
    offset: Tensor  # [total] int64, its place in the page
    cu_seqlens_q: Tensor
    seqused_k: Tensor  # positions of each sequence, the new ones among them
    block_table: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class PagedKeyValues:
    """One layer's pages ``[n_pages, page_size, Hk, D]`` in a forward pass."""

    def __init__(self, k: Tensor, v: Tensor, step: PagedStep) -> None:
        self.k, self.v, self.step = k, v, step

    @property
    def positions(self) -> Tensor:
        return self.step.positions

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
        """Stores ``[B, Hk, T, D]`` keys and values and attends with ``[B, H, T, D]`` queries, by one launch. `options`:
        of :func:`flash_attention_varlen`.

        Returns:
            The heads' results ``[B, H, T, D]``, and what is returned for each row ``[B, H, T]``.

        Raises:
            ValueError: they do not fit the pages.
            RuntimeError: a backward pass goes through the results.
        """
        step, (batch, _, tokens, _) = self.step, q.shape
        wanted, (q, k, v) = cut(q, k, v)
        for name, new, pages in (("k", k, self.k), ("v", v, self.v)):
            if new.shape != (batch, pages.shape[2], tokens, pages.shape[3]) or batch * tokens != len(step.page):
                expected = (batch, pages.shape[2], tokens, pages.shape[3])
                raise ValueError(f"{name} must be {expected}, as the cache is; got {tuple(new.shape)}")
            if new.dtype != pages.dtype or new.device != pages.device:
                got = f"{new.dtype} on {new.device}"
                raise ValueError(f"{name} must be {pages.dtype} on {pages.device}, as the cache is; got {got}")
        packed, new_k, new_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        self.k[step.page, step.offset] = new_k
        self.v[step.page, step.offset] = new_v
        result = flash_attention_varlen(
            packed, self.k, self.v, step.cu_seqlens_q, None, step.max_seqlen_q, step.max_seqlen_k,
            block_table=step.block_table, seqused_k=step.seqused_k, **options,
        )  # fmt: skip
        found = result if isinstance(result, tuple) else (result,)
        with_gradient = 1 + options.get("return_lse", False)  # statistics never have one
        out, *rows = without_backward(found[:with_gradient], wanted, NO_GRADIENT) + found[with_gradient:]
        heads = out.unflatten(0, (batch, tokens)).transpose(1, 2)
        return heads, *(x.unflatten(1, (batch, tokens)).transpose(0, 1) for x in rows)
