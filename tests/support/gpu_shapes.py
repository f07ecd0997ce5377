"""Attention at the sizes of training, on its kernels for compute capability 9.0: which ran, the same bits each time, on
two streams and in a CUDA graph, and how near SDPA in float32 compared with SDPA in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.ops.flash_attention.bench import bench_case
from foundry_kernels.testing import Case, call, make_cotangents
from foundry_kernels.tools import check

OP = fk.OPS["flash_attention"]
#: The largest error, over that of SDPA in the same dtype; and relative to the result, if SDPA has none.
FACTOR, ROUNDING = 1.25, 1e-4
#: Timed beside the benchmarks' own: other widths, and few heads for keys and values, as in tensor parallelism.
TIMED = tuple(
    bench_case(b, h, hk, t, d, True, dv)
    for b, h, hk, t, d, dv in (
        *((1, 32, 2, 4096, 128, 128), (1, 8, 1, 8192, 128, 128)),
        *((4, 16, 4, 4096, 256, 256), (4, 16, 16, 4096, 192, 128)),
    )
)
Tensors = tuple[Tensor, ...]


class Card:
    """The GPU, as these checks use it."""

    device = "cuda"
    #: The number of tokens is divided by it.
    scale = 1

    def passes(self) -> tuple[int, ...]:
        return tuple(torch.ops.foundry_kernels.flash_attention_hopper_passes())

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def at_once(self, *runs: Callable[[], Tensors]) -> list[Tensors]:
        """The results of passes that run at the same time, on a stream each."""
        found = []
        for run in runs:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(run())
        self.synchronize()
        return found

    def graph(self, case: Case) -> None:
        check.cuda_graph(OP, "native", case)


class Stub(Card):
    """The CPU in its place, for a dry run."""

    device, scale = "cpu", 256
    count = 0

    def passes(self) -> tuple[int, ...]:
        self.count += 1
        return self.count, self.count

    def synchronize(self) -> None:
        pass

    def at_once(self, *runs: Callable[[], Tensors]) -> list[Tensors]:
        return [run() for run in runs]

    def graph(self, case: Case) -> None:
        pass


def shapes(card: Card) -> dict[str, Case]:
    """The cases by name. The most frequent ones come first."""
    found = {}
    for tokens in (4096, 16384):
        for d, dv in ((128, 128), (64, 64), (192, 128), (256, 256), (192, 192)):
            for kv_heads in (8, 1, 2):
                for order in ("in order", "any order"):
                    case = bench_case(1, 16, kv_heads, tokens // card.scale, d, True, dv)
                    name = f"T={tokens} D={d if d == dv else f'{d}/{dv}'} Hk={kv_heads} {order}"
                    found[name] = replace(case, options={**case.options, "deterministic": order == "in order"})
    return found


def sdpa(args: Mapping[str, Any], dout: Tensor, dtype: torch.dtype) -> Tensors:
    q, k, v = (args[name].detach().to(dtype).requires_grad_() for name in "qkv")
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))  # not all kernels have groups
    out = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout.to(dtype))


def error(x: Tensor, exact: Tensor) -> float:
    """The relative error."""
    return float((x.detach().float() - exact).norm() / exact.norm())


def moved(before: tuple[int, ...], card: Card) -> None:
    after = card.passes()
    assert all(a > b for a, b in zip(after, before, strict=True)), f"passes before {before}, after {after}"


def hold(case: Case, card: Card) -> dict[str, Any]:
    """Returns the errors of the output and the gradients: this package's, and SDPA's."""
    in_order = case.options["deterministic"]
    args, others = (case.make(torch.bfloat16, card.device, seed=seed, drawn_on=card.device) for seed in (0, 1))
    (dout,) = make_cotangents(call(OP, args, case.options, backend="native"), "contiguous", drawn_on=card.device)
    first, second = (
        partial(check.forward_and_backward, OP, "native", given, case, (dout,)) for given in (args, others)
    )
    before = card.passes()
    found = first()
    moved(before, card)
    other = second()
    same = len(found) if in_order else 1  # a sum in any order has other bits
    again = {f"call {n}": first() for n in (2, 3)}
    again["two streams"], beside = card.at_once(first, second)
    for how, results in again.items():
        assert all(map(torch.equal, results[:same], found[:same])), f"{how}: other bits"
    assert all(map(torch.equal, beside[:same], other[:same])), "two streams: other bits in the second"
    if in_order:
        card.graph(case)
    exact, peer = sdpa(args, dout, torch.float32), sdpa(args, dout, torch.bfloat16)
    errors = {}
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        of_ours = max(error(results[i], exact[i]) for results in (found, *again.values()))
        errors[name] = round(of_ours, 6), round(of_peer := error(peer[i], exact[i]), 6)
        assert of_ours <= FACTOR * of_peer + ROUNDING, f"{name}: error {of_ours:.2e}, of SDPA {of_peer:.2e}"
    return errors
