"""Models of other packages on the operations of this package. Start with `foundry_kernels.patch`.

`foundry_kernels.integrations.attention.functions` registers the attention of Hugging Face transformers for
``attn_implementation="foundry"``; it is imported with `foundry_kernels` as soon as transformers has models. `from_hf`
of this package's models imports `foundry_kernels.integrations.convert.from_hf` and `.seq2seq`.
"""

from foundry_kernels.integrations.patching.handle import PatchHandle, unpatch
from foundry_kernels.integrations.patching.patch import patch
from foundry_kernels.integrations.patching.report import Entry, Report

__all__ = ["Entry", "PatchHandle", "Report", "patch", "unpatch"]
