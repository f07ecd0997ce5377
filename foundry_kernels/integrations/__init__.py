"""Other people's models on the operations of this package. `foundry_kernels.patch` is where to begin.

`foundry_kernels.integrations.transformers` registers the attention of Hugging Face transformers; it is imported when a
model of that package is patched, or by whoever wants ``attn_implementation="foundry"`` without a patch.
`foundry_kernels.integrations.from_hf` and `.seq2seq`, by `from_hf` of a model of ours.
"""

from foundry_kernels.integrations.handle import PatchHandle, unpatch
from foundry_kernels.integrations.patch import Entry, Report, patch

__all__ = ["Entry", "PatchHandle", "Report", "patch", "unpatch"]
