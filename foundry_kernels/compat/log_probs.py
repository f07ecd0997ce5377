"""TRL's functions of logits: log-probabilities of tokens, and entropies."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_float, check_int, check_integer, check_positive, check_shape, check_tensor
from foundry_kernels.ops.log_probs import log_probs

#: No index has this value: none is ignored.
_NONE = -(1 << 62)


def selective_log_softmax(
    logits: Tensor,
    index: Tensor,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """``trl.trainer.utils.selective_log_softmax`` in one pass over the logits.

    Args:
        logits: ``[..., V]`` float32, bfloat16, float16 or float64.
        index: ``[...]``, a class for each token, or ``[..., K]``, several of them; int32 or int64, in 0 .. V - 1.
        temperature: the logits are divided by it.
        row_mask: a mask of index's shape, or None: where it is 0, the log-probability is 0 and the logits have no
            gradient from it.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        The log-probabilities, of index's shape and logits' dtype, with gradients. They are computed in float32.

    Raises:
        TypeError, ValueError, IndexError: an argument does not fit.
    """
    check_float("logits", logits)
    check_integer("index", index)
    check_positive("temperature", temperature)
    if row_mask is not None:
        check_tensor("row_mask", row_mask)
        check_shape("row_mask", row_mask, index.shape, "index's")
    scale = 1.0 / temperature
    if logits.dim() == index.dim() + 1:
        target = index if row_mask is None else index.long().masked_fill(row_mask == 0, _NONE)
        return log_probs(logits, target, logit_scale=scale, ignore_index=_NONE, backend=backend).to(logits.dtype)
    if logits.dim() != index.dim() or logits.shape[:-1] != index.shape[:-1]:
        raise ValueError(
            f"index must have the shape of logits, {tuple(logits.shape)}, without its last dimension, or with another "
            f"last dimension; got {tuple(index.shape)}"
        )
    first = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    if row_mask is not None:  # 0 times a gradient of NaN would be NaN
        first = first.masked_fill((row_mask == 0).all(-1), _NONE)
    _, lse = log_probs(logits, first, logit_scale=scale, ignore_index=_NONE, return_lse=True, backend=backend)
    found = (logits.gather(-1, index.long()).to(lse.dtype) * scale - lse.unsqueeze(-1)).to(logits.dtype)
    return found if row_mask is None else found.masked_fill(row_mask == 0, 0.0)


def entropy_from_logits(logits: Tensor, chunk_size: int = 128, *, backend: str = "auto") -> Tensor:
    """``trl.trainer.utils.entropy_from_logits`` in one pass over the logits.

    Args:
        logits: ``[..., V]`` float32, bfloat16, float16 or float64.
        chunk_size: at least 1. It has no effect: no copy of the logits is made that chunks could keep small.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        The entropy of each token's distribution, ``[...]``, in nats, of logits' dtype, with gradients. It is computed
        in float32.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    check_tensor("logits", logits)
    check_float("logits", logits)
    check_int("chunk_size", chunk_size, minimum=1)
    first = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    _, entropy = log_probs(logits, first, return_entropy=True, backend=backend)
    return entropy.to(logits.dtype)
