"""The gated delta rule: what the parity suite does not ask."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from slow import rest_slow
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
@pytest.mark.parametrize("group", rest_slow([2, 1]))
def test_packed_documents_are_computed_as_separate_ones(backend: str, group: int) -> None:
    ends = [0, 20, 20, 53, 54]
    args = inputs(1, (1, group), ends[-1], n=4)
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
@pytest.mark.parametrize("name", rest_slow([*NAMES[::-1]], 2))
def test_nan_stays_in_its_document(backend: str, name: str) -> None:
    ends = torch.tensor([0, 20, 45, 63])
    args = inputs(1, (1, 2), 63, n=3)
    expected = results(args, cu_seqlens=ends, backend=backend)
    args[name] = args[name].clone()
    if name == "initial_state":
        args[name][1] = math.nan
    else:
        args[name][:, :, 20:45] = math.nan
    for x, e in zip(results(args, cu_seqlens=ends, backend=backend), expected, strict=True):
        for part in (slice(0, 1), slice(2, 3)) if x.shape[0] == 3 else (slice(0, 20), slice(45, 63)):
            own, other = (x[part], e[part]) if x.shape[0] == 3 else (x[:, :, part], e[:, :, part])
            assert torch.equal(own, other)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_chunks_do_not_change_the_result(backend: str) -> None:
    args = inputs(1, (1, 2), 70)
    args["initial_state"] = args["initial_state"][:1]
    expected = results({n: x.double() for n, x in args.items()}, backend="reference")
    for chunk_size in (None, 16, 32, 64, 128) if backend == "native" else (16, 64):
        for x, e in zip(results(args, chunk_size=chunk_size, backend=backend), expected, strict=True):
            torch.testing.assert_close(x.double(), e, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_bits_depend_on_nothing_but_the_head(threads: int) -> None:
    """With 7 threads, the columns of a head's values are divided among them."""
    args = inputs(3, (1, 2), 100, (40, 200), n=3)
    whole = results(args, backend="native")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        again = results(args, backend="native")
        one = fk.gated_delta_rule(**{n: x[1:2] for n, x in args.items()}, return_final_state=True, backend="native")
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, again, whole))
    assert torch.equal(one[0], whole[0][1:2])
    assert torch.equal(one[1], whole[1][1:2])


@over_backends
def test_steps_are_the_sequence(backend: str) -> None:
    args = inputs(tokens=20)
    for l2norm in (False, True):
        out, final = fk.gated_delta_rule(**args, return_final_state=True, qk_l2norm=l2norm, backend=backend)
        state = args["initial_state"].clone()
        rows = [args[name] for name in NAMES[:-1]]
        steps = [
            fk.gated_delta_rule_step(*(x[:, :, t] for x in rows), state, qk_l2norm=l2norm, backend=backend)
            for t in range(20)
        ]
        torch.testing.assert_close(torch.stack(steps, 2), out, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state, final, rtol=1e-4, atol=1e-5)


@over_backends
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


@over_backends
def test_linear_attention_is_a_masked_matmul(backend: str) -> None:
    args = inputs(heads=(2, 2), tokens=40)
    q, k, v, g = (args[name].double() for name in ("q", "k", "v", "g"))
    logs = g.cumsum(-1)
    decays = (logs[..., :, None] - logs[..., None, :]).tril().exp().tril()
    expected = 0.3 * (q @ k.transpose(-1, -2) * decays) @ v
    found = fk.gated_linear_attention(*(args[n] for n in ("q", "k", "v", "g")), scale=0.3, backend=backend)
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


def test_gradients_in_float64() -> None:
    args = inputs(1, (1, 2), 4, (3, 2), n=2)
    tensors = [x.double().requires_grad_() for x in args.values()]

    def function(*given: Tensor) -> Any:
        options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 3, 4]), "qk_l2norm": True}
        q, k, v, g, beta, state = given
        return fk.gated_delta_rule(q, k, v, g, beta, initial_state=state, return_final_state=True, **options)

    assert torch.autograd.gradcheck(function, tensors)


def test_autocast_and_storage_order() -> None:
    args = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in inputs().items() if x.dim() == 4}
    with torch.autocast("cpu", torch.bfloat16):
        out = fk.gated_delta_rule(args["q"], args["k"], args["v"], initial_state=args["initial_state"])
    assert out.dtype == torch.bfloat16
    assert out.transpose(1, 2).is_contiguous()


@over_backends
def test_a_step_writes_to_a_part_of_a_cache(backend: str) -> None:
    args = inputs(tokens=1)
    rows = [args[name][:, :, 0] for name in NAMES[:-1]]
    cache = torch.randn(3, 2, 6, 16, 24, generator=torch.Generator().manual_seed(2))
    before, state = cache.clone(), cache[1, :, 1:5]
    expected = reference.gated_delta_rule_step(*rows, before[1, :, 1:5], 0.25, False)
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


def test_a_compiled_step_changes_its_state() -> None:
    args = inputs(tokens=1)
    rows = [args[name][:, :, 0] for name in NAMES[:-1]]

    def twice(state: Tensor) -> Tensor:
        fk.gated_delta_rule_step(*rows, state)
        return fk.gated_delta_rule_step(*rows, state) + state.sum()

    expected, found = args["initial_state"].clone(), args["initial_state"].clone()
    out = twice(expected)
    assert torch.equal(torch.compile(twice, fullgraph=True, backend="aot_eager")(found), out)
    assert torch.equal(found, expected)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.zeros(2, 2, 37, 16, dtype=torch.int64)}, TypeError, "q must be float32"),
    ({"k": torch.zeros(2, 2, 37, 15)}, ValueError, "k must have shape"),
    ({"k": torch.zeros(2, 2, 37, 16).bfloat16()}, ValueError, "k must have q's dtype"),
    ({"v": torch.zeros(2, 3, 37, 24)}, ValueError, "v must have a multiple of q's 2 heads; got 3"),
    ({"v": torch.zeros(2, 4, 36, 24)}, ValueError, r"v must be \[B, H_v, T, D_v\]"),
    ({"v": torch.zeros(2, 4, 37, 257)}, ValueError, "v must have a head dimension of 1 to 256; got 257"),
    ({"g": torch.zeros(2, 4, 37, 16)}, ValueError, "g must have shape .*one number for each head"),
    ({"g": torch.zeros(2, 4, 37).bfloat16()}, TypeError, "g must be float32"),
    ({"beta": torch.zeros(2, 4, 36)}, ValueError, "beta must have shape"),
    ({"initial_state": torch.zeros(1, 4, 16, 24)}, ValueError, "initial_state must have shape"),
    ({"initial_state": torch.zeros(2, 4, 16, 24).double()}, TypeError, "initial_state must be torch.float32"),
    ({"scale": 0.0}, ValueError, "scale must be"),
    ({"chunk_size": 48}, ValueError, "chunk_size must be None or one of 16, 32, 64, 128; got 48"),
    ({"qk_l2norm": 1}, TypeError, "qk_l2norm must be a bool"),
    ({"cu_seqlens": torch.tensor([0, 37])}, ValueError, "q, k and v must have a batch of 1 with cu_seqlens; got 2"),
    ({"backend": "cuda"}, ValueError, "backend must be one of"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[m for *_, m in WRONG])
def test_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fk.gated_delta_rule(**{**inputs(), **changes})


@pytest.mark.parametrize("ends", [[1, 37], [0, 36], [0, 20, 10, 37], [0.0, 37.0], []])
def test_wrong_ends_of_documents(ends: list[int]) -> None:
    args = inputs(1)
    del args["initial_state"]
    with pytest.raises((TypeError, ValueError), match="cu_seqlens must"):
        fk.gated_delta_rule(**args, cu_seqlens=torch.tensor(ends))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.zeros(2, 4, 24, 16).transpose(2, 3), "state must be contiguous in its last two dimensions"),
        (torch.zeros(1, 4, 16, 24).expand(2, 4, 16, 24), "state must be contiguous in its last two dimensions"),
        (torch.zeros(2, 4, 16, 23), "state must have shape"),
    ],
)
def test_wrong_states_of_a_step(state: Tensor, message: str) -> None:
    args = inputs(tokens=1)
    with pytest.raises(ValueError, match=message):
        fk.gated_delta_rule_step(*(args[name][:, :, 0] for name in NAMES[:-1]), state)
