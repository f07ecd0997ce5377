"""What `torch.jit.script` says of a module that TorchScript cannot compile."""

from __future__ import annotations

from torch import nn


def refuse_scripting(module: nn.Module) -> nn.Module:
    """A module's `__prepare_scriptable__`, which `torch.jit.script` calls first, of modules inside of others too.

    Raises:
        RuntimeError: always.
    """
    patched = ", or undo the patch" if hasattr(module, "_foundry_original") else ""
    raise RuntimeError(
        f"{type(module).__name__} cannot be compiled by torch.jit.script: foundry_kernels is not TorchScript. Use "
        f"torch.jit.trace within torch.no_grad(), torch.compile or torch.export{patched}"
    )
