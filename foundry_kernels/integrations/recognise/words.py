"""The words of the forms: what the code of a norm or of an MLP may use. Whatever uses another word is left."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.integrations.adapters.base import split_names

#: Functions and methods of PyTorch. None of them draws random numbers, chooses by values, or writes into a tensor.
WORDS = split_names(
    "pow square mean sum rsqrt sqrt var reciprocal neg mul multiply add div divide true_divide sub subtract "
    "rms_norm layer_norm to float double half bfloat16 type type_as dtype device finfo eps "
    "shape size dim ndim numel view view_as reshape contiguous unsqueeze flatten unflatten chunk split narrow "
    "unbind silu gelu relu sigmoid tanh erf exp glu softplus logsigmoid hardswish mish matmul linear weight bias "
    "normalized_shape inplace forward"
)
#: Functions of Python.
BUILTINS = frozenset((float, int, tuple, len, isinstance, hasattr, getattr, super))
#: What is known without being run.
CONSTANTS = (bool, int, float, str, bytes, type(None), torch.dtype, torch.Size, torch.device, type(...), slice)


def is_constant(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(is_constant, value))
    return isinstance(value, CONSTANTS)


def is_library(value: Any) -> bool:
    """Returns whether it is PyTorch, a part of it, or `math`."""
    return value is math or (isinstance(value, ModuleType) and value.__name__.split(".")[0] == "torch")


def is_theirs(value: Any) -> bool:
    """Returns whether a function is PyTorch's own or `math`'s, which is known by its name."""
    home = getattr(value, "__module__", None) or getattr(getattr(value, "__self__", None), "__name__", "") or ""
    return str(home).split(".")[0] in ("torch", "math") or getattr(value, "__objclass__", None) is Tensor


def is_activations(value: Any) -> bool:
    """Returns whether it is transformers' table of activations."""
    return type(value).__module__ == "transformers.activations"
