"""What is timed, against what, and what it moves and computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foundry_kernels.core.contract import SAMPLED, Options, Peers, Sample, Tensors, Work
from foundry_kernels.ops.flash_attention import bench_encoder, bench_masked, bench_paged
from foundry_kernels.testing import Arg, Case

#: (B, H, Hk, T, D), by device. On a GPU 16384 tokens each, the heads of Llama-3-8B.
_SHAPES: dict[str, tuple[tuple[int, int, int, int, int], ...]] = {
    "cpu": ((1, 8, 2, 512, 64), (1, 8, 2, 2048, 64), (1, 8, 2, 1024, 128)),
    "cuda": tuple((16384 // t, 32, 8, t, d) for d in (64, 128) for t in (512, 2048, 4096, 8192, 16384)),
}
#: Keys that one new query sees, heads of Llama-3-8B; and sequences at a time, by device.
_DECODE_KEYS = (512, 1024, 2048, 4096, 8192, 16384)
_DECODE_BATCH = {"cpu": (1,), "cuda": (1, 16)}
#: Tokens of the sequences that are packed, on a CPU, with the heads and the width of the others.
_PACKED = (1024, 512, 384, 128)
#: Beyond this many queries, implementations that materialize the matrix of scores are left out.
_WHOLE_MATRIX = 4096
#: Beyond this many tokens the reference, which materializes all scores, is given fewer.
_CHECKED = 2048
BENCH_QUICK = (
    *("Hk=2 T=512 D=64-causal", "Hk=2 T=2048 D=64-causal", "Hk=2 T=1024 D=128-causal"),
    *("Hk=8 T=4096 D=128-causal", "Hk=8 T=16384 D=128-causal", "Hk=8 T=4096 D=64-causal"),
    *("S=512 D=128-decode", "S=4096 D=128-decode", "S=16384 D=128-decode"),
    "D=64-packed",
    *("-half-masked", "-bias", "-bias-gradient", "-dropout"),
    *bench_encoder.QUICK,
    *bench_paged.QUICK,
)
UNCHECKED = (bench_masked.PLAIN,)


@dataclass(frozen=True)
class CuSeqlens:
    lengths: tuple[int, ...]

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.float64)


def bench_case(b: int, h: int, hk: int, t: int, d: int, causal: bool, dv: int | None = None) -> Case:
    dv = d if dv is None else dv
    args: dict[str, Arg | None] = {"q": Arg((b, h, t, d)), "k": Arg((b, hk, t, d)), "v": Arg((b, hk, t, dv))}
    name = f"B={b} H={h} Hk={hk} T={t} D={d if d == dv else f'{d}.{dv}'}-{'causal' if causal else 'full'}"
    return Case(name, args, {"causal": causal})


def decode_case(b: int, keys: int) -> Case:
    """One new token: its query against the keys and values of a cache; no gradient."""
    kv = Arg((b, 8, keys, 128), grad=False)
    q = Arg((b, 32, 1, 128), grad=False)
    return Case(f"B={b} H=32 Hk=8 T=1 S={keys} D=128-decode", {"q": q, "k": kv, "v": kv}, _FULL)


_FULL = {"causal": False}


def packed_case(lengths: tuple[int, ...], h: int, hk: int, d: int) -> Case:
    q, kv = Arg((sum(lengths), h, d)), Arg((sum(lengths), hk, d))
    ends = Arg((len(lengths) + 1,), values=CuSeqlens(lengths), dtype=torch.int32, grad=False)
    args = {"q": q, "k": kv, "v": kv, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
    longest = {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    name = f"H={h} Hk={hk} T={'+'.join(map(str, lengths))} D={d}-packed"
    return Case(name, args, {"causal": True, **longest})


def bench_cases(op: str, device: str) -> tuple[Case, ...]:
    if op != "flash_attention":
        packed = packed_case(_PACKED, 8, 2, 64)
        dropped = replace(packed, id=f"{packed.id}-dropout", options={**packed.options, "dropout_p": 0.1})
        return (*((packed, dropped) if device == "cpu" else ()), *bench_paged.cases(device))
    whole = (bench_case(*shape, causal) for shape in _SHAPES[device] for causal in (True, False))
    decode = (decode_case(b, keys) for b in _DECODE_BATCH[device] for keys in _DECODE_KEYS)
    return (*whole, *decode, *bench_masked.cases(device), *bench_encoder.cases(device))


def scaling_cases(op: str, device: str) -> dict[str, tuple[tuple[int, Case], ...]]:
    """Growing shapes: T is the tokens, B the sequences, D the width of a head, S the keys of a cache that one new query
    sees."""
    if op != "flash_attention":
        return {}
    b, h, hk, d = (1, 8, 2, 64) if device == "cpu" else (1, 32, 8, 128)
    tokens, some = (range(7, 15), 512) if device == "cpu" else (range(9, 15), 2048)
    return {
        "T": tuple((2**i, bench_case(b, h, hk, 2**i, d, True)) for i in tokens),
        "B": tuple((2**i, bench_case(2**i, h, hk, some, d, True)) for i in range(5)),
        "D": tuple((2**i, bench_case(b, h, hk, some, 2**i, True)) for i in range(5, 9)),
        "S": tuple((keys, decode_case(1, keys)) for keys in _DECODE_KEYS),
    }


def parity_case(case: Case) -> Case:
    """`case`, or one sequence of `_CHECKED` tokens where the reference would materialize too many scores."""
    q, k = case.given("q", "k")
    if _packed(q) or max(q.shape[2], k.shape[2]) <= _CHECKED or q.shape[2] == 1:
        return case
    args = {n: a and replace(a, shape=(1, a.shape[1], _CHECKED, a.shape[3])) for n, a in case.args.items()}
    return replace(case, id=f"B=1 H={q.shape[1]} Hk={k.shape[1]} T={_CHECKED} D={q.shape[3]}", args=args)


def sample(case: Case) -> Sample | None:
    """All queries, or the last ones of long sequences, which see all keys."""
    (q,) = case.given("q")
    if _packed(q) or q.shape[2] <= _CHECKED:
        return None
    assert not case.options.get("dropout_p"), "what dropout leaves depends on a query's place"
    rows, dims = torch.arange(q.shape[2] - SAMPLED, q.shape[2]), {"q": 2}
    if "attn_mask" in case.args:
        return Sample(rows, dims | {"attn_mask": 2})
    mask = case.options.get("attn_mask")
    return Sample(rows, dims, options={} if mask is None else {"attn_mask": bench_masked.of_rows(mask, rows)})


def _packed(q: Arg | Tensor) -> bool:
    """Whether sequences are packed, ``[T, H, D]``."""
    return len(q.shape) == 3


def tokens_made(case: Case) -> int | None:
    """Tokens that a call generates: one per sequence in decoding, None elsewhere."""
    q = case.args["q"]
    if q is not None and bench_paged.is_decoding(case):
        return q.shape[0]
    return q.shape[0] if q is not None and not _packed(q) and q.shape[2] == 1 else None


def workspace_bytes(case: Case) -> int:
    """Returns what the check against the reference takes: it materializes some copies of the scores in float64."""
    q, k = case.given("q", "k")
    if bench_paged.is_decoding(case):
        return _COPIES * q.shape[0] * q.shape[1] * int(case.options["max_seqlen_k"])
    if _packed(q):
        return _COPIES * q.shape[1] * int(case.options["max_seqlen_q"]) ** 2
    b, h, t, _ = q.shape
    chosen = sample(case)
    return _COPIES * b * h * (t if chosen is None else len(chosen.rows)) * k.shape[2]


#: Bytes that one float64 score needs at a time.
_COPIES = 88
#: Peers that materialize all scores.
_MATERIALIZE = ("eager", "torch.compile", "torch.compile, max-autotune", "SDPA math")


def peer_bytes(case: Case, name: str) -> int:
    """Returns what a form takes that keeps all scores for a backward pass, in 16 bits and in float32."""
    q, k = case.given("q", "k")
    if name not in _MATERIALIZE or _packed(q):
        return 0
    return 16 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]


def bytes_moved(args: Tensors) -> Work:
    """The least that must be read and written. Forward: q, k, v and out once. Backward: these and dout are read, and
    dq, dk and dv written. lse, one number per row, is left out."""
    q, k, v = (args[name] for name in "qkv")
    out = q.numel() // q.shape[-1] * v.shape[-1]
    once = (q.numel() + k.numel() + v.numel() + out) * q.element_size()
    return once, 2 * once


def flops(args: Tensors, options: Options) -> Work:
    """Counts the matmuls over the pairs of a query and a key that it sees, two per multiply-add. Forward: q k and p v.
    Backward: q k again, dout v, and those of dq, dk and dv; what a kernel computes twice counts once."""
    q, k, v = (args[name] for name in "qkv")
    d, dv = q.shape[-1], v.shape[-1]
    if _packed(q) and options["max_seqlen_q"] == 1:
        pairs = bench_paged.pairs(q)
    elif _packed(q):  # the lengths are in memory: of others than the benchmark's all are taken for the longest
        lengths = _PACKED if q.shape[0] == sum(_PACKED) else (int(options["max_seqlen_q"]),)
        pairs = q.shape[1] * sum(t * (t + 1) // 2 for t in lengths)
    else:
        b, h, t, _ = q.shape
        pairs = b * h * (t * (t + 1) // 2 if options["causal"] else t * k.shape[2])
        if (mask := options.get("attn_mask")) is not None:  # the same for all sequences and heads
            pairs = b * h * bench_masked.pairs(mask)
        elif bench_encoder.is_padded(args):
            pairs = bench_encoder.pairs(q)
    return 2 * pairs * (d + dv), 2 * pairs * (3 * d + 2 * dv)


def _eager(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Computes it as models in Hugging Face's transformers do: heads repeated, a mask added, softmax in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))
    weights = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.full(weights.shape[2:], torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device).triu(1)
        weights = weights + hidden
    return torch.softmax(weights, -1, dtype=torch.float32).to(q.dtype) @ v


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, kernel: SDPBackend) -> Tensor:
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


def _varlen_attn(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, longest: int) -> Tensor:
    """PyTorch's own of packed sequences."""
    from torch.nn.attention.varlen import varlen_attn

    ends = (cu_seqlens_q, cu_seqlens_k, longest, longest)
    out: Any = varlen_attn(q, k, v, *ends, window_size=(-1, 0), enable_gqa=True)
    return out


def _one_by_one(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`attend` for each of the packed sequences."""

    def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
        outs = []
        for a, b in pairwise(cu_seqlens_q.tolist()):
            one = (x[a:b].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            outs.append(attend(*one).squeeze(0).transpose(0, 1))
        return torch.cat(outs)

    return call


def peers(op: str, case: Case, device: str) -> Peers:
    """What else computes this, by name, or the reason why it cannot here. "eager" is also what torch.compile is
    given."""
    if op != "flash_attention":
        if bench_paged.is_decoding(case):
            return bench_paged.peers()
        if case.options.get("dropout_p"):
            return {"eager": _one_by_one(bench_masked.eager_with_dropout)}
        flash = partial(_sdpa, causal=True, kernel=SDPBackend.FLASH_ATTENTION)
        packed: dict[str, Callable[..., Any] | str] = {"eager": _one_by_one(partial(_eager, causal=True))}
        packed["SDPA flash"] = _one_by_one(flash)
        longest = int(case.options["max_seqlen_q"])
        packed["varlen_attn"] = "has no CPU kernel" if device == "cpu" else partial(_varlen_attn, longest=longest)
        return packed
    if bench_encoder.is_padded(case.args):
        return bench_encoder.peers(case, device)
    if bench_masked.is_masked(case):
        return bench_masked.peers(case, device)
    causal, (q,) = case.options["causal"], case.given("q")
    too_long = None
    if q.shape[2] > _WHOLE_MATRIX:
        too_long = f"materializes the matrix of scores, left out beyond {_WHOLE_MATRIX} tokens"
    found: dict[str, Callable[..., Any] | str] = {"eager": too_long or partial(_eager, causal=causal)}
    for name, kernel in _KERNELS.items():
        reason = "has no CPU kernel" if device == "cpu" and name not in _ON_CPU else None
        if name == "math":
            reason = too_long
        found[f"SDPA {name}"] = reason or partial(_sdpa, causal=causal, kernel=kernel)
    return found | {"FlexAttention": partial(_flex_attention, causal=causal)}


#: The backends of torch's own attention, and those of them that a CPU has.
_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_ON_CPU = ("flash", "math")
