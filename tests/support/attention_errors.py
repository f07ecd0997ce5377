"""The accuracy of attention: the error against float64 relative to the reference's error, in float32 and for gradients
that cancel. `python tests/support/attention_errors.py` prints the table of docs/dev/proof.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from foundry_kernels import _triton
from foundry_kernels.core import extension
from foundry_kernels.ops.flash_attention import flash_attention
from foundry_kernels.testing import MAX_FACTOR, RMS_FACTOR, Arg, Case, Values, alike, normal, uniform


def assert_errors_of_the_reference(
    backend: str, shape: tuple[int, int, int, int], s: int, spread: float, device: str = "cpu"
) -> None:
    """The policy of foundry_kernels.testing, without its allowance for few values.

    Inputs [B, H, T, D] = `shape` with `s` keys are normal, or q and k are uniform in ±`spread`, which gives scores of
    up to 200. Then an error of lse changes weights by as much.
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
            continue  # up to 1.2: in rows with one dominant key, they cancel exactly in the reference
        assert error.square().mean().sqrt() <= RMS_FACTOR * reference[n].square().mean().sqrt(), n


# --- where gradients cancel -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Leading:
    """Keys of which the first has nearly all weight: its score leads by `lead` for queries that are about 1
    everywhere."""

    lead: float

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        k = torch.randn(shape, generator=g, dtype=torch.float64) * 0.2
        k[..., 0, :] += self.lead / shape[-1] ** 0.5
        return k


def _case(note: str, tokens: tuple[int, int], dim: int, q: Values, k: Values, v: Values = normal()) -> Case:  # noqa: B008
    t, s = tokens
    args = {"q": Arg((1, 8, t, dim), values=q), "k": Arg((1, 8, s, dim), values=k), "v": Arg((1, 8, s, dim), values=v)}
    return Case(note, args, {"causal": True})


#: Ordinary scores; sharp scores with few and with many rows; and equal keys.
ORDINARY = _case("ordinary", (128, 128), 32, normal(), normal())
SHARP = tuple(_case(f"sharp-{a}", (3, 6), 8, uniform(a), uniform(a)) for a in (1, 3, 9))
LEADING = _case("leading", (64, 64), 16, normal(0.2, 1.0), _Leading(7.0))
ALIKE = _case("alike", (64, 64), 16, normal(), alike(2), normal(1.0, 4.0))


def ratios(case: Case, dtype: torch.dtype, attention: Callable[..., Tensor], seed: int) -> Tensor:
    """Errors of dq and dk relative to plain PyTorch's, [the largest, RMS] x [dq, dk], without allowances."""
    args = case.make(dtype, seed=seed)
    t, d = args["q"].shape[-2:]  # type: ignore[union-attr]
    dout = torch.randn(1, 8, t, d, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64).to(dtype)

    def gradients(attend: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in args.values() if x is not None)
        found = torch.autograd.grad(attend(q, k, v), (q, k), dout.to(dtype))
        return tuple(x.to(dout.dtype).double() for x in found)  # as a caller with 16 bits gets them

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, causal=True, backend="reference")

    def figures(found: tuple[Tensor, ...]) -> Tensor:
        errors = [a - o for a, o in zip(found, exact, strict=True)]
        return torch.stack([torch.stack([e.abs().max(), e.square().mean().sqrt()]) for e in errors], 1)

    q, k, v = (x.detach().double().requires_grad_() for x in args.values() if x is not None)
    exact = torch.autograd.grad(reference(q, k, v), (q, k), dout.double())
    return figures(gradients(attention, dtype)) / figures(gradients(reference, dtype))


def by_backend(backend: str, dtype: torch.dtype | None = None) -> Callable[..., Tensor]:
    """The kernel. `dtype`: the dtype to which inputs are converted first."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        of = q.dtype
        q, k, v = (x.to(dtype or of) for x in (q, k, v))
        return flash_attention(q, k, v, causal=True, backend=backend).to(of)

    return attend


def torch_flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    t, s = q.shape[-2], k.shape[-2]
    mask = torch.ones(t, s, dtype=torch.bool).tril(s - t)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def table() -> Iterator[str]:
    """The table of docs/dev/proof.md for the backends that run here."""
    columns = {"torch's flash": torch_flash}
    if _triton.INTERPRET:
        columns = {"triton": by_backend("triton")}
    else:
        columns |= {f"native, {name}": _forced(name) for name in extension.build_info()["usable_instruction_sets"]}
        columns["native, float32 inputs"] = by_backend("native", torch.float32)
    yield f"| case | dtype | {' | '.join(columns)} |"
    for case in (ORDINARY, *SHARP, LEADING, ALIKE):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            draws = 30 if case in SHARP else 3
            cells = []
            for attention in columns.values():
                worst = torch.stack([ratios(case, dtype, attention, seed) for seed in range(draws)]).amax((0, 2))
                cells.append(f"{worst[0]:.1f} ({worst[1]:.1f})")
            yield f"| {case.id} | {str(dtype)[6:]} | {' | '.join(cells)} |"


def _forced(instruction_set: str) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        extension._C.force_instruction_set(instruction_set)
        return flash_attention(q, k, v, causal=True, backend="native")

    return attend


if __name__ == "__main__":  # TRITON_INTERPRET=1 for the column of Triton
    torch.set_num_threads(1)
    for line in table():
        print(line, flush=True)
