"""Attention at the sizes of training, on its kernels for compute capability 9.0: which ran, the same bits each time, on
two streams and in a CUDA graph, and how near SDPA in float32 compared with SDPA in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import foundry_kernels as fk

HEADS = 16
#: The largest error, over that of SDPA in the same dtype; and relative to the result, if SDPA has none.
FACTOR, ROUNDING = 1.25, 1e-4


class Shape(NamedTuple):
    tokens: int
    width: int
    width_v: int
    kv_heads: int
    deterministic: bool

    @property
    def name(self) -> str:
        width = f"{self.width}" if self.width == self.width_v else f"{self.width}/{self.width_v}"
        return f"T={self.tokens} D={width} Hk={self.kv_heads} {'in order' if self.deterministic else 'any order'}"


SHAPES = tuple(
    Shape(tokens, *widths, kv_heads, deterministic)
    for tokens in (4096, 16384)
    for widths in ((128, 128), (64, 64), (192, 128), (256, 256), (192, 192))
    for kv_heads in (8, 1, 2)
    for deterministic in (True, False)
)

Pass = Callable[[], tuple[Tensor, ...]]


@dataclass
class Card:
    """The GPU, as these checks use it."""

    device: str = "cuda"
    #: All sizes are divided by it.
    scale: int = 1

    def passes(self) -> tuple[int, ...]:
        return tuple(torch.ops.foundry_kernels.flash_attention_hopper_passes())

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def on_streams(self, first: Pass, second: Pass) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The results of two passes at the same time."""
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        found = []
        for stream, run in zip(streams, (first, second), strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(run())
        self.synchronize()
        return found[0], found[1]

    def in_graph(self, run: Pass) -> tuple[Tensor, ...]:
        """The results of a pass that was captured and replayed twice."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        for _ in range(2):
            for x in found:
                x.fill_(torch.nan)
            graph.replay()
        self.synchronize()
        return found


class Stub(Card):
    """The CPU in its place, for a dry run."""

    def __init__(self) -> None:
        super().__init__("cpu", 256)
        self._count = 0

    def passes(self) -> tuple[int, ...]:
        self._count += 1
        return self._count, self._count

    def synchronize(self) -> None:
        pass

    def on_streams(self, first: Pass, second: Pass) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return first(), second()

    def in_graph(self, run: Pass) -> tuple[Tensor, ...]:
        return run()


def inputs(shape: Shape, card: Card, seed: int) -> list[Tensor]:
    """q, k, v and the output's gradient."""
    generator = torch.Generator(card.device).manual_seed(seed)
    t = shape.tokens // card.scale
    sizes = ((HEADS, shape.width), (shape.kv_heads, shape.width), (shape.kv_heads, shape.width_v))
    made = [
        torch.randn(1, h, t, d, device=card.device, generator=generator) for h, d in (*sizes, (HEADS, shape.width_v))
    ]
    return [x.bfloat16().requires_grad_(i < 3) for i, x in enumerate(made)]


def ours(shape: Shape, given: list[Tensor]) -> tuple[Tensor, ...]:
    """The output and the gradients of q, k and v."""
    q, k, v, dout = given
    options: dict[str, Any] = {"causal": True, "deterministic": shape.deterministic, "backend": "native"}
    out = fk.flash_attention(q, k, v, **options)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def sdpa(given: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, k, v, dout = (x.detach().to(dtype) for x in given)
    for x in (q, k, v):
        x.requires_grad_()
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))  # not all of its kernels have groups
    out = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def error(x: Tensor, exact: Tensor) -> float:
    """The relative error."""
    return float((x.float() - exact).norm() / exact.norm())


def check(shape: Shape, card: Card) -> dict[str, Any]:
    """Returns the errors of the output and the gradients: this package's, and SDPA's."""
    first, second = inputs(shape, card, 0), inputs(shape, card, 1)
    before = card.passes()
    found = ours(shape, first)
    card.synchronize()
    after = card.passes()
    assert all(a > b for a, b in zip(after, before, strict=True)), f"passes before {before}, after {after}"
    other = ours(shape, second)
    same = len(found) if shape.deterministic else 1  # a sum in any order has other bits
    again = {f"call {n}": ours(shape, first) for n in (2, 3)}
    together = card.on_streams(lambda: ours(shape, first), lambda: ours(shape, second))
    again |= {"two streams": together[0], "graph": card.in_graph(lambda: ours(shape, first))}
    for how, results in again.items():
        assert all(map(torch.equal, results[:same], found[:same])), f"{how}: other bits"
    assert all(map(torch.equal, together[1][:same], other[:same])), "two streams: other bits in the second"
    exact, peer = sdpa(first, torch.float32), sdpa(first, torch.bfloat16)
    errors = {}
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        of_peer = error(peer[i], exact[i])
        of_ours = max(error(results[i], exact[i]) for results in (found, *again.values()))
        errors[name] = (round(of_ours, 6), round(of_peer, 6))
        assert of_ours <= FACTOR * of_peer + ROUNDING, f"{name}: error {of_ours:.2e}, of SDPA {of_peer:.2e}"
    return errors
