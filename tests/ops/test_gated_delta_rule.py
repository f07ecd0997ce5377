"""The gated delta rule: what the parity suite does not ask."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.ops.gated_delta_rule import reference

BACKENDS = [b for b in ("reference", "triton", "native") if fk.OPS["gated_delta_rule"].why_not(b, "cpu") is None]
NAMES = ("q", "k", "v", "g", "beta", "initial_state")
over_backends = pytest.mark.parametrize("backend", BACKENDS)


def inputs(
    batch: int = 2, heads: tuple[int, int] = (2, 4), tokens: int = 37, dims: tuple[int, int] = (16, 24), n: int = 2
) -> dict[str, Tensor]:
    """Arguments by name, n states; keys of length 1."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def between(low: float, high: float) -> Tensor:
        return torch.rand(batch, heads[1], tokens, generator=generator) * (high - low) + low

    return {
        "q": normal(batch, heads[0], tokens, dims[0]),
        "k": torch.nn.functional.normalize(normal(batch, heads[0], tokens, dims[0]), dim=-1),
        "v": normal(batch, heads[1], tokens, dims[1]),
        "g": between(-0.5, 0.0),
        "beta": between(0.0, 1.0),
        "initial_state": normal(n, heads[1], *dims),
    }


def results(args: dict[str, Tensor], **options: Any) -> list[Tensor]:
    """Output, final state, and the gradients of all arguments."""
    made = {name: x.detach().requires_grad_() for name, x in args.items()}
    out, final = fk.gated_delta_rule(**made, return_final_state=True, **options)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (out, final)]
    return [out, final, *torch.autograd.grad((out, final), list(made.values()), cotangents)]


@over_backends
def test_packed_documents_are_computed_as_separate_ones(backend: str) -> None:
    ends = [0, 18, 18, 35, 36] if backend == "triton" else [0, 20, 20, 53, 54]
    args = inputs(1, (1, 1 if backend == "triton" else 2), ends[-1], n=4)
    packed = results(args, cu_seqlens=torch.tensor(ends), backend=backend, chunk_size=16)
    out_gradient = torch.randn(packed[0].shape, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    torch.randn(packed[0].shape, generator=generator)
    state_gradient = torch.randn(packed[1].shape, generator=generator)
    for i, (first, last) in enumerate(pairwise(ends)):
        own = {name: x[:, :, first:last].detach().requires_grad_() for name, x in args.items() if x.shape[0] == 1}
        own["initial_state"] = args["initial_state"][i : i + 1].detach().requires_grad_()
        alone = fk.gated_delta_rule(**own, return_final_state=True, backend=backend, chunk_size=16)
        cotangents = out_gradient[:, :, first:last], state_gradient[i : i + 1]
        found = (*alone, *torch.autograd.grad(alone, [own[name] for name in NAMES], cotangents))
        for x, whole in zip(found, packed, strict=True):
            part = whole[i : i + 1] if whole.shape[0] == 4 else whole[:, :, first:last]
            assert torch.equal(x, part) if backend == "native" else torch.allclose(x, part, atol=1e-5)


@over_backends
def test_nan_stays_in_its_document(backend: str) -> None:
    """All that belongs to the second of three."""
    ends = torch.tensor([0, 3, 20, 22])
    args = inputs(1, (1, 1), 22, n=3)
    expected = results(args, cu_seqlens=ends, backend=backend, chunk_size=16)
    for name, x in args.items():
        (x[1] if name == "initial_state" else x[:, :, 3:20]).fill_(math.nan)
    for x, e in zip(results(args, cu_seqlens=ends, backend=backend, chunk_size=16), expected, strict=True):
        for part in (slice(0, 1), slice(2, 3)) if x.shape[0] == 3 else (slice(0, 3), slice(20, 22)):
            own, other = (x[part], e[part]) if x.shape[0] == 3 else (x[:, :, part], e[:, :, part])
            assert torch.equal(own, other)


@over_backends
def test_steps_are_the_sequence(backend: str) -> None:
    tokens = 5 if backend == "triton" else 20
    args = inputs(tokens=tokens)
    for l2norm in (True,) if backend == "triton" else (False, True):
        out, final = fk.gated_delta_rule(**args, return_final_state=True, qk_l2norm=l2norm, backend=backend)
        state = args["initial_state"].clone()
        rows = [args[name] for name in NAMES[:-1]]
        steps = [
            fk.gated_delta_rule_step(*(x[:, :, t] for x in rows), state, qk_l2norm=l2norm, backend=backend)
            for t in range(tokens)
        ]
        torch.testing.assert_close(torch.stack(steps, 2), out, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state, final, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_function(backend: str, dtype: torch.dtype) -> None:
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    args = inputs(tokens=70)
    state = args.pop("initial_state")
    args |= {name: args[name].to(dtype) for name in "qkv"}
    ours = fk.gated_delta_rule(**args, initial_state=state, return_final_state=True, qk_l2norm=True, backend=backend)
    rows = [x.transpose(1, 2) for x in args.values()]
    for function in (module.torch_chunk_gated_delta_rule, module.torch_recurrent_gated_delta_rule):
        out, final = function(*rows, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(ours[0], out.transpose(1, 2), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ours[1], final.float(), rtol=tolerance, atol=tolerance)


def test_linear_attention_is_a_masked_matmul() -> None:
    args = inputs(heads=(2, 2), tokens=40)
    q, k, v, g = (args[name].double() for name in ("q", "k", "v", "g"))
    logs = g.cumsum(-1)
    decays = (logs[..., :, None] - logs[..., None, :]).tril().exp().tril()
    expected = 0.3 * (q @ k.transpose(-1, -2) * decays) @ v
    found = fk.gated_linear_attention(*(args[n] for n in ("q", "k", "v", "g")), scale=0.3)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@over_backends
def test_the_delta_rule_recalls_the_last_value_of_a_key(backend: str) -> None:
    """With orthogonal keys and beta of 1, a state is a table that a key's next value overwrites."""
    keys = torch.eye(4)[torch.tensor([0, 1, 2, 1, 3, 0])][None, None]
    v = torch.arange(12.0).view(1, 1, 6, 2)
    out, table = fk.delta_rule(keys, keys, v, scale=1.0, return_final_state=True, backend=backend)
    torch.testing.assert_close(out, v)
    torch.testing.assert_close(table[0, 0], v[0, 0, [5, 3, 2, 4]])


@over_backends
def test_an_infinite_decay_starts_anew(backend: str) -> None:
    args = inputs(1, (1, 1), 50, n=1)
    args["g"][:, :, 30] = -math.inf
    whole = results(args, backend=backend)
    assert all(x.isfinite().all() for x in whole)
    rest = {n: x[:, :, 30:] for n, x in args.items() if n != "initial_state"}
    torch.testing.assert_close(whole[0][:, :, 30:], fk.gated_delta_rule(**rest, backend=backend), rtol=1e-4, atol=1e-5)


@over_backends
def test_a_step_writes_to_a_part_of_a_cache(backend: str) -> None:
    args = inputs(tokens=1)
    rows = [args[name][:, :, 0] for name in NAMES[:-1]]
    cache = torch.randn(3, 2, 6, 16, 24, generator=torch.Generator().manual_seed(2))
    before, state = cache.clone(), cache[1, :, 1:5]
    expected = reference.gated_delta_rule_step(*rows, before[1, :, 1:5], None, None, 0.25, False, None)
    version = cache._version
    torch.testing.assert_close(fk.gated_delta_rule_step(*rows, state, backend=backend), expected)
    torch.testing.assert_close(cache, before)
    assert torch.equal(cache[0], before[0])
    assert cache._version > version


def test_a_step_has_no_gradient() -> None:
    args = inputs(tokens=1)
    rows = [args[name][:, :, 0].requires_grad_() for name in NAMES[:-1]]
    out = fk.gated_delta_rule_step(*rows, args["initial_state"])
    with pytest.raises(RuntimeError, match=r"gated_delta_rule_step has no gradient"):
        out.sum().backward()


@pytest.mark.skipif("native" not in BACKENDS, reason="the extension is not built")
def test_float32_is_almost_as_exact_as_the_recurrence() -> None:
    """Without what the rule adds for small errors. Sums of all terms one after another would double these errors."""
    args = inputs(1, (1, 1), 128, (128, 128), 1)
    oracle = results({name: x.double() for name, x in args.items()}, backend="reference")
    errors = []
    for backend in ("native", "reference"):
        found = results(args, backend=backend)
        errors.append(
            [(x.detach().double() - of.detach()).square().mean().sqrt() for x, of in zip(found, oracle, strict=True)]
        )
    ratios = dict(
        zip(("out", "final state", *NAMES), (float(a / b) for a, b in zip(*errors, strict=True)), strict=True)
    )
    limits = {"out": 0.8, "q": 1.2, "k": 1.6, "v": 1.4, "initial_state": 1.2}
    assert all(ratios[name] < most for name, most in limits.items()), ratios
