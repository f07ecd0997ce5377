"""How many tokens' or classes' logits exist at a time where the caller gives no `chunk_size`. This file decides it for
all backends, and gives the direct call (csrc/direct_losses.cpp) its limits."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels._triton import INTERPRET
from foundry_kernels._triton.devices import total_memory
from foundry_kernels.core import extension
from foundry_kernels.ops._linear_loss.problem import ALL, TILES, Loss, Needs, Problem
from foundry_kernels.ops._products import fast_products

#: Tokens of a chunk on a CPU: at least so many, and at most this fraction of all where logits are of 4 bytes. Each
#: chunk reads and writes the whole sum of the weight's gradient, and a matmul is slower for fewer tokens.
_LEAST, _SHARE = 512, 16
#: Tokens of a chunk on a CPU where the weight's gradient is summed in 24 bits, which is cheap; and tokens up to which
#: the direct call makes all logits at once.
SUMMED24 = 256
#: Multiplications up to which a matmul of 16-bit inputs is small on a CPU, and in float32: above, copying a weight for
#: one token takes 2 to 4 times as long as PyTorch's bfloat16 matmul (Zen 4).
SMALL = 1 << 19
#: Bytes of logits that a single chunk may have on a CPU: as many as a chunk of float32 has by default over 32768
#: classes.
_ONE_CHUNK = 1 << 25
#: The number of logits that tiles hold at a time on a CPU, and the least number of classes: enough for fast matmuls.
_LOGITS, _LEAST_CLASSES = 1 << 21, 256

# Looked up here, where no compiler traces it.
_FAST_PRODUCTS = fast_products(torch.bfloat16)
#: Whether a fourth matmul takes less time on a CPU than the sum of the weight's gradient. With matrix instructions it
#: was faster than a float32 sum; the sum in 24 bits was not measured there.
_TILES_ARE_FASTER = _FAST_PRODUCTS and extension.build_info().get("instruction_set") == "amx_bf16"

#: With gradients, all logits may take 1 / SHARE of a GPU's memory, or those of a chunk.
SHARE = 32
#: Bytes of a block's logits on a GPU; the fewest and the most classes of a block, and a divisor of their number and of
#: the number of a chunk's tokens. On an H100 with 8192 tokens, 16032 classes were the fastest between 4008 and 32064.
#: With many tokens and fewer classes, hidden's float32 sum, which each block reads and writes, would take longer than
#: the matmul.
BLOCK, LEAST, MOST, MULTIPLE = 1 << 28, 2048, 1 << 15, 128

extension.set_single_chunk(SMALL, SUMMED24)


def chosen(loss: Loss, cpu: bool, hidden: Tensor, weight: Tensor, options: Problem, needs: Needs) -> int | None:
    """The `chunk_size` of a call; None where it depends on the tokens that count."""
    if not cpu:
        return on_gpu(hidden, weight, options, needs, loss.logits, loss.tiles)
    found = on_cpu(hidden, weight, options, needs)
    return found if loss.tiles or found != TILES else None


def on_cpu(hidden: Tensor, weight: Tensor, options: Problem, needs: Needs) -> int | None:
    """Returns a single chunk for few tokens; for many tokens chunks with three matmuls, or tiles with four
    (docs/dev/performance.md). None of these needs a float32 sum of a bfloat16 weight's gradient. None: by
    `tokens_of_a_chunk`."""
    if options.chunk_size is not None or options.batch_invariant:
        return options.chunk_size
    if not needs.weight or hidden.dtype != torch.bfloat16 or not _FAST_PRODUCTS:
        return None
    if options.reduction == "none":
        return TILES
    n_tokens = hidden.numel() // hidden.shape[-1]
    if 2 * n_tokens * weight.shape[0] <= _ONE_CHUNK:
        return ALL
    return TILES if _TILES_ARE_FASTER else None


def on_gpu(hidden: Tensor, weight: Tensor, options: Problem, needs: Needs, logits: int = 1, tiles: bool = True) -> int:
    """Depends on the shape and the device's memory, never on its free memory. Without gradients, blocks need no
    additional matmul. A chunk is as large as the limit allows: each reads and writes the float32 sum of the weight's
    gradient. logits, tiles: as of `Loss`."""
    n_tokens, asked = hidden.numel() // hidden.shape[-1], options.chunk_size
    if asked is not None:
        return ALL if asked not in (ALL, TILES) and _at_most(n_tokens, asked) else asked
    of_token = logits * weight.shape[0] * hidden.element_size()
    takes = n_tokens * of_token
    if needs.weight and hidden.dtype == torch.float16:  # its gradient is float32 before the mean
        takes += 4 * weight.numel()
    limit = total_memory(hidden.device) // SHARE if any(needs) else logits * BLOCK
    if _at_most(takes, limit):
        return ALL
    # Tiles sum hidden's gradient over blocks of classes. The number of blocks depends on the number of tokens.
    return TILES if tiles and not options.batch_invariant else max(limit // (of_token * MULTIPLE), 1) * MULTIPLE


def _at_most(size: int, limit: int) -> bool:
    """size <= limit; False if it is unknown because torch.compile traces a data-dependent number of tokens."""
    if not torch.compiler.is_compiling():
        return size <= limit
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(size <= limit)


def tokens_of_a_chunk(n_tokens: int, itemsize: int, sums24: bool) -> int:
    """Where `on_cpu` returned None, for logits of so many bytes each, of the tokens that count."""
    return SUMMED24 if sums24 else max(_LEAST, -(-n_tokens // (_SHARE * itemsize // 4)))


def classes(cpu: bool, n_tokens: int, n_classes: int, itemsize: int) -> int:
    """Classes of a tile."""
    return (classes_on_cpu if cpu else classes_on_gpu)(n_tokens, n_classes, itemsize)


def classes_on_cpu(n_tokens: int, n_classes: int, itemsize: int) -> int:
    return max(_LEAST_CLASSES, _LOGITS // n_tokens)


def classes_on_gpu(n_tokens: int, n_classes: int, itemsize: int) -> int:
    """All tiles but the last have as many, so that their sizes are nearly equal."""
    if INTERPRET:  # small cases must have several blocks
        return max(32, -(-n_classes // 4))
    n_blocks = -(-n_classes // min(max(LEAST, BLOCK // (n_tokens * itemsize)), MOST))
    return -(-n_classes // (n_blocks * MULTIPLE)) * MULTIPLE
