"""The health of a model in training: entropy of attention, rank of activations, norms of gradients.

    with diagnostics.record(model) as recorder:
        _, loss = model(tokens, targets)
        loss.backward()
    health = recorder.health()
    print("\\n".join(health.concerns()))

Any model works: of this package, of transformers (patched or not), of torch.nn, or your own. Entropy and the largest
logit of each row come from the attention kernels, or are computed in blocks of rows; no T x S matrix is allocated.
`python -m foundry_kernels.diagnostics CHECKPOINT --text FILE` draws a page of them. The commands `attention`,
`positions` and `initialization` draw one picture each (:mod:`foundry_kernels.diagnostics.pictures`).
"""

from foundry_kernels.diagnostics.clip import QKClip
from foundry_kernels.diagnostics.health import Health, LayerHealth
from foundry_kernels.diagnostics.history import HealthHistory, write_history_png
from foundry_kernels.diagnostics.maps import attention_maps, attention_weights, encoder_decoder_maps
from foundry_kernels.diagnostics.ranks import effective_rank, qk_ranks
from foundry_kernels.diagnostics.recorder import Recorder, record
from foundry_kernels.diagnostics.reparam import SigmaReparam

__all__ = [
    "Health",
    "HealthHistory",
    "LayerHealth",
    "QKClip",
    "Recorder",
    "SigmaReparam",
    "attention_maps",
    "attention_weights",
    "effective_rank",
    "encoder_decoder_maps",
    "qk_ranks",
    "record",
    "write_history_png",
]
