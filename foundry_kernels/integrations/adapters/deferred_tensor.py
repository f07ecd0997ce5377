"""What stands for a tensor that is not computed: any use that a subclass does not know computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from foundry_kernels.integrations.adapters.base import split_names


class Deferred:
    """Looks like a tensor to the forward of a model.

    call: the call that was not made, whose `release` computes all that came from it. made: the tensor, once it is
    computed. shape, dtype, device: those of the tensor.
    """

    call: Any
    made: Tensor | None
    shape: Any
    dtype: Any
    device: Any

    def tensor(self) -> Tensor:
        """Returns the tensor itself."""
        raise NotImplementedError

    def computed(self) -> Tensor:
        """Returns the tensor itself, for a use that may write to it."""
        self.call.release()
        return self.tensor()

    def dim(self) -> int:
        return len(self.shape)

    @property
    def ndim(self) -> int:
        return self.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> Any:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return True

    def __len__(self) -> int:
        length: int = self.shape[0]
        return length

    def __getattr__(self, name: str) -> Any:
        if not hasattr(Tensor, name):
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        return getattr(self.computed(), name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})" if self.made is None else repr(self.made)

    __hash__: ClassVar[Any] = object.__hash__


def _real(name: str) -> Callable[..., Any]:
    def method(self: Deferred, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.computed(), name)(*args, **kwargs)

    return method


for _name in split_names(
    "setitem getitem iter bool int float index array contains format neg pos abs invert add radd sub rsub mul rmul "
    "truediv pow rpow rtruediv floordiv rfloordiv mod rmod matmul rmatmul eq ne lt le gt ge and or xor rand ror rxor "
    "iadd isub imul itruediv ipow deepcopy"
):
    setattr(Deferred, f"__{_name}__", _real(f"__{_name}__"))


def computed(value: Any) -> Any:
    """Returns arguments of a function with the tensors in place of what stands for them."""
    if isinstance(value, Deferred):
        return value.computed()
    if isinstance(value, (tuple, list)):
        made = (computed(x) for x in value)
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return {k: computed(x) for k, x in value.items()} if type(value) is dict else value


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
