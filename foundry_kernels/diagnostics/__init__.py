"""The health of a model in training: entropy of attention, rank of activations, norms of gradients.

    with diagnostics.record(model) as recorder:
        _, loss = model(tokens, targets)
        loss.backward()
    health = recorder.health()
    print("\\n".join(health.concerns()))

The model may be any: of this package, of transformers, patched or not, of torch.nn or one's own. Entropy and the
largest logit come from the attention kernels themselves, a number a row, or are computed in blocks of rows: no T x S
matrix is made. `python -m foundry_kernels.diagnostics CHECKPOINT --text FILE` draws a page of it; `attention`,
`positions` and `initialization` are commands that draw one picture (:mod:`foundry_kernels.diagnostics.pictures`).
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
