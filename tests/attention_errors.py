"""The accuracy of float32 attention, as an error against float64 beside that of the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.ops.flash_attention import flash_attention
from foundry_kernels.testing import MAX_FACTOR, RMS_FACTOR


def assert_errors_of_the_reference(
    backend: str, shape: tuple[int, int, int, int], s: int, spread: float, device: str = "cpu"
) -> None:
    """The policy of foundry_kernels.testing without what it forgives a few values: here are enough of them.

    Inputs [B, H, T, D] = `shape` with `s` keys are normal, or give scores of up to 200 (`spread`: q and k are uniform
    within it), whose weights any error of lse would change in its own size.
    """
    b, h, t, d = shape
    g = torch.Generator().manual_seed(0)
    made = [torch.randn(b, h, n, d, generator=g) for n in (t, s, s, t)]
    if spread:
        made = [(torch.rand(x.shape, generator=g) * 2 - 1) * (spread if i < 2 else 1) for i, x in enumerate(made)]

    def errors(backend: str) -> dict[str, Tensor]:
        results = []
        for dtype, of in ((torch.float32, backend), (torch.float64, "reference")):
            q, k, v, dout = (x.to(device, dtype) for x in made)
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            out = flash_attention(q, k, v, backend=of)
            results.append((out.detach(), *torch.autograd.grad(out, (q, k, v), dout)))
        return {n: (a.double() - b) for n, a, b in zip(("out", "dq", "dk", "dv"), *results, strict=True)}

    kernel, reference = errors(backend), errors("reference")
    for n, error in kernel.items():
        assert error.abs().max() <= MAX_FACTOR * reference[n].abs().max(), n
        if spread and n in ("dq", "dk"):
            continue  # up to 1.2: in a row with one key to speak of, they cancel exactly in the reference
        assert error.square().mean().sqrt() <= RMS_FACTOR * reference[n].square().mean().sqrt(), n
