"""What is timed, against what, and what it moves and computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foundry_kernels.testing import Arg, Case

#: (B, H, Hk, T, D), by device. On a GPU 16384 tokens each, the heads of Llama-3-8B.
_SHAPES: dict[str, tuple[tuple[int, int, int, int, int], ...]] = {
    "cpu": ((1, 8, 2, 512, 64), (1, 8, 2, 2048, 64), (1, 8, 2, 1024, 128)),
    "cuda": tuple((16384 // t, 32, 8, t, d) for d in (64, 128) for t in (512, 2048, 4096, 8192, 16384)),
}
#: Beyond this many keys the forms that keep the whole matrix of scores are left out.
_WHOLE_MATRIX = 4096


def bench_case(b: int, h: int, hk: int, t: int, d: int, causal: bool) -> Case:
    args: dict[str, Arg | None] = {"q": Arg((b, h, t, d)), "k": Arg((b, hk, t, d)), "v": Arg((b, hk, t, d))}
    return Case(f"{b}x{h}.{hk}x{t}x{d}-{'causal' if causal else 'full'}", args, {"causal": causal})


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    if op != "flash_attention":
        return ()
    return tuple(bench_case(*shape, causal) for shape in _SHAPES[device] for causal in (True, False))


def bytes_moved(args: Mapping[str, Tensor | None], direction: str) -> int:
    """The least that must be read and written. Forward: q, k, v and the output once. Backward: these and the incoming
    gradient are read, three gradients written. What belongs to a row and has no width (lse) is left out."""
    q, k, v = (x for name in "qkv" if (x := args[name]) is not None)
    out = q.numel() // q.shape[-1] * v.shape[-1]
    once = q.numel() + k.numel() + v.numel()
    moved = {"forward": once + out, "backward": 2 * once + 2 * out}
    moved["both"] = moved["forward"] + moved["backward"]
    return moved[direction] * q.element_size()


def flops(args: Mapping[str, Tensor | None], options: Mapping[str, Any], direction: str) -> int:
    """Of the matrix products over the pairs of query and key that see each other, two a multiply-add. Forward: q k and
    p v. Backward: q k again, g v, and those of the three gradients; what a kernel computes twice counts once."""
    q, k, v = (x for name in "qkv" if (x := args[name]) is not None)
    (b, h, t, d), dv = q.shape, v.shape[-1]
    pairs = b * h * (t * (t + 1) // 2 if options["causal"] else t * k.shape[2])
    done = {"forward": 2 * pairs * (d + dv), "backward": 2 * pairs * (3 * d + 2 * dv)}
    done["both"] = done["forward"] + done["backward"]
    return done[direction]


def _eager(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """As models in Hugging Face's transformers write it: heads repeated, a mask added, softmax in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))
    weights = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.full(weights.shape[2:], torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device).triu(1)
        weights = weights + hidden
    return torch.softmax(weights, -1, dtype=torch.float32).to(q.dtype) @ v


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, kernel: SDPBackend | None = None) -> Tensor:
    if kernel is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def _not_after(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


@lru_cache
def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@lru_cache
def _block_mask(t: int, s: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(_not_after, None, None, t, s, device=str(device))


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    mask = _block_mask(q.shape[2], k.shape[2], q.device) if causal else None
    return _flex()(q, k, v, block_mask=mask, enable_gqa=True)


def peers(op: str, case: Case, device: str) -> dict[str, Callable[..., Any]]:
    """What else computes this, by name. "eager" is also what torch.compile is given."""
    causal, q = case.options["causal"], case.args["q"]
    assert q is not None
    whole = device == "cpu" or q.shape[2] <= _WHOLE_MATRIX
    found: dict[str, Callable[..., Any]] = {"eager": partial(_eager, causal=causal)} if whole else {}
    if device == "cpu":
        return found | {"SDPA": partial(_sdpa, causal=causal)}
    kernels = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    if whole:
        kernels |= {"efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
    found |= {f"SDPA {name}": partial(_sdpa, causal=causal, kernel=kernel) for name, kernel in kernels.items()}
    return found | {"FlexAttention": partial(_flex_attention, causal=causal)}
