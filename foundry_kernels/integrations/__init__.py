"""Other people's models on the operations of this package. `foundry_kernels.patch` is where to begin.

`foundry_kernels.integrations.transformers` registers the attention of Hugging Face transformers; it is imported when a
model of that package is patched, or by whoever wants ``attn_implementation="foundry"`` without a patch.
"""

from foundry_kernels.integrations import from_hf, seq2seq
from foundry_kernels.integrations.handle import PatchHandle, unpatch
from foundry_kernels.integrations.patch import Entry, Report, patch
from foundry_kernels.models import EncoderDecoder, Transformer

__all__ = ["Entry", "PatchHandle", "Report", "patch", "unpatch"]

Transformer.read_hf, Transformer.check_hf = staticmethod(from_hf.read), staticmethod(from_hf.check)
EncoderDecoder.read_hf = staticmethod(seq2seq.read)
