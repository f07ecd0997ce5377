"""Models of other packages on the operations of this package. Start with `foundry_kernels.patch`.

`foundry_kernels.integrations.transformers` registers the attention of Hugging Face transformers; it is imported when a
model of that package is patched. Import it to use ``attn_implementation="foundry"`` without a patch. `from_hf` of this
package's models imports `foundry_kernels.integrations.from_hf` and `.seq2seq`.
"""

from foundry_kernels.integrations.handle import PatchHandle, unpatch
from foundry_kernels.integrations.patch import Entry, Report, patch

__all__ = ["Entry", "PatchHandle", "Report", "patch", "unpatch"]
