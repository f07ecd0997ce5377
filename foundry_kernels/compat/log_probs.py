"""TRL's functions of logits: log-probabilities of tokens, and entropies."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_float, check_int, check_integer, check_tensor
from foundry_kernels.ops.log_probs import log_probs

#: No index has this value: none is ignored.
_NONE = -(1 << 62)


def selective_log_softmax(logits: Tensor, index: Tensor, *, backend: str = "auto") -> Tensor:
    """``trl.trainer.utils.selective_log_softmax`` in one pass over the logits.

    Args:
        logits: ``[..., V]`` float32, bfloat16, float16 or float64.
        index: ``[...]``, a class for each token, or ``[..., K]``, several of them; int32 or int64, in 0 .. V - 1.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        The log-probabilities, of index's shape and logits' dtype, with gradients. They are computed in float32.

    Raises:
        TypeError, ValueError, IndexError: an argument does not fit.
    """
    check_float("logits", logits)
    check_integer("index", index)
    if logits.dim() == index.dim() + 1:
        return log_probs(logits, index, ignore_index=_NONE, backend=backend).to(logits.dtype)
    if logits.dim() != index.dim() or logits.shape[:-1] != index.shape[:-1]:
        raise ValueError(
            f"index must have the shape of logits, {tuple(logits.shape)}, without its last dimension, or with another "
            f"last dimension; got {tuple(index.shape)}"
        )
    first = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    _, lse = log_probs(logits, first, return_lse=True, backend=backend)
    return (logits.gather(-1, index.long()).to(lse.dtype) - lse.unsqueeze(-1)).to(logits.dtype)


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
