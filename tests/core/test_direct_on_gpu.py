"""Which calls on a GPU go to the native kernels directly (csrc/direct.cpp). Without a GPU: tensors without memory take
the place of its tensors and go the same way as far as the kernels."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from built import needs_native
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.core import extension, registry
from foundry_kernels.core.registry import OPS, BackendUnavailable, OpSpec, override
from foundry_kernels.ops.flash_attention import hopper
from foundry_kernels.ops.flash_attention.checks import dense_options
from foundry_kernels.testing import Case

_C = extension._C

pytestmark = [
    needs_native,
    pytest.mark.skipif(not hasattr(_C, "serve_on_accelerator"), reason="the extension was built before such calls"),
]
BIT = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 4}
ALL = sum(BIT.values())

#: linear_cross_entropy has no native kernels on a GPU.
DIRECT = tuple(
    s for s in OPS.values() if (native := s.impl("native")) is not None and "cuda" in native.sources and s.native_on_cpu
)


@pytest.fixture(autouse=True)
def meta() -> Iterator[None]:
    """Tensors on the meta device count as a GPU's, of which nothing is known yet."""
    _C.accelerator("meta")
    _C.attention_gpus(False, False)
    try:
        yield
    finally:
        _C.accelerator("cuda")
        for spec in OPS.values():
            spec.choose()


class NotDirectError(Exception):
    pass


def serve(name: str, native: int = 0, automatic: int = 0, unmeasured: int = 0) -> None:
    _C.serve_on_accelerator(name, native, automatic, unmeasured)


def direct(spec: OpSpec, backend: str, case: Case, dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> Any:
    """What the public function gets from the direct call, of a case on `device`; None where it took none."""
    own, asked = spec.direct, False

    def call(*given: Any) -> Any:
        nonlocal asked
        asked = True
        if (found := own(*given)) is None:
            raise NotDirectError
        return found

    spec.direct = call
    try:
        out = spec.public(**case.make(dtype, device), **case.options, backend=backend)
        return out if asked else None
    except (NotDirectError, BackendUnavailable):  # the general path has no kernels for this device
        return None
    finally:
        spec.direct = own


def plain(spec: OpSpec) -> list[Case]:
    """Calls that are direct on the CPU, which has kernels for them."""
    small = [
        c
        for c in spec.cases.CASES[spec.name]
        if sum(0 if a is None else torch.Size(a.shape).numel() for a in c.args.values()) < 20000
    ]
    return [c for c in small if is_usual(c) and direct(spec, "native", c, device="cpu") is not None]


def is_usual(case: Case) -> bool:
    """Without masks and dropout, which go the general path."""
    return "attn_mask" not in {*case.args, *case.options} and not case.options.get("dropout_p")


def one(spec: OpSpec) -> Case:
    return plain(spec)[0]


@pytest.mark.parametrize("spec", DIRECT, ids=lambda spec: spec.name)
def test_what_is_direct_on_the_cpu_is_direct_on_a_gpu(spec: OpSpec) -> None:
    _C.attention_gpus(True, False)
    serve(spec.name, native=ALL)
    cases = plain(spec)
    assert cases
    for case in cases:
        got, expected = direct(spec, "native", case), direct(spec, "native", case, device="cpu")
        assert got is not None, case.id
        for a, b in zip(flat(got), flat(expected), strict=True):
            assert a.device.type == "meta"
            assert (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad), case.id


def flat(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("spec", DIRECT, ids=lambda spec: spec.name)
def test_by_dtype_and_backend(spec: OpSpec) -> None:
    _C.attention_gpus(True, False)
    case = one(spec)
    serve(spec.name)
    assert direct(spec, "auto", case) is direct(spec, "native", case) is None
    serve(spec.name, native=ALL)
    assert direct(spec, "auto", case) is None
    serve(spec.name, native=ALL, automatic=BIT[torch.bfloat16], unmeasured=ALL)
    assert direct(spec, "auto", case) is not None
    assert direct(spec, "auto", case, torch.float32) is None
    assert direct(spec, "native", case, torch.float32) is not None
    assert direct(spec, "reference", case) is None


def test_tensors_of_two_devices_get_the_general_error() -> None:
    serve("rms_norm", ALL, ALL)
    with pytest.raises(ValueError, match="weight must be on x's device"):
        fk.rms_norm(torch.empty(2, 4, device="meta"), torch.ones(4))
    with pytest.raises(ValueError, match="weight must be on x's device"):
        fk.rms_norm(torch.ones(2, 4), torch.empty(4, device="meta"))


def test_gpus_that_are_too_old_get_the_general_error() -> None:
    spec = OPS["flash_attention"]
    serve(spec.name, ALL, ALL)
    assert direct(spec, "native", one(spec)) is None
    _C.attention_gpus(True, False)
    assert direct(spec, "native", one(spec)) is not None


HEADS = (64, 72, 60, 256, 264)


def attention_inputs() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Dense tensors whose last dimension is dense, as most calls have, that TMA copies from or not."""
    for tokens in (63, 128, 300):
        for width in HEADS:
            q = torch.empty(2, 4, tokens, width, dtype=torch.bfloat16, device="meta")
            k = torch.empty(2, 2, 90, width, dtype=torch.bfloat16, device="meta")
            yield q, k, k
            yield q.half(), k.half(), k.half()
            yield q, k, k[..., : width - 8] if width > 8 else k
            yield q.transpose(1, 2).contiguous().transpose(1, 2), k, k
    wide = torch.empty(2, 2, 128, 68, dtype=torch.bfloat16, device="meta")
    yield wide[..., :64], wide[..., :64], wide[..., :64]  # strides of 68
    yield wide[:, :, :, 4:68], wide[..., :64], wide[..., :64]
    even = torch.empty(2, 2, 128, 72, dtype=torch.bfloat16, device="meta")
    yield even[..., :64], even[..., 8:], even[..., 8:]
    yield even[..., :64], even[..., 4:68], even[..., 8:]
    yield even[:1, :1, :, :64].expand(2, 2, 128, 64), even[..., 8:], even[..., 8:]
    yield even.float(), even.float(), even.float()
    yield even[:0], even[:0], even[:0]
    yield even, even[:, :, :0], even[:, :, :0]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_auto_takes_on_hopper_what_its_kernels_take(batch_invariant: bool) -> None:
    """`is_for_hopper` of csrc/direct_attention.cpp is `takes` of hopper.py for these."""
    spec, taken = OPS["flash_attention"], []
    _C.attention_gpus(True, True)
    serve(spec.name, native=ALL, unmeasured=ALL)
    for q, k, v in attention_inputs():
        got = spec.direct(*call_of(spec, q, k, v, batch_invariant))
        options = dense_options(q, k, batch_invariant=batch_invariant)
        assert (got is not None) == hopper.takes(q, k, v, options), (q.shape, q.stride(), k.stride(), v.shape)
        taken.append(got is not None)
    assert 0.2 < sum(taken) / len(taken) < 0.9
    serve(spec.name, native=ALL)  # a measured order goes first
    assert all(spec.direct(*call_of(spec, *qkv, batch_invariant)) is None for qkv in attention_inputs())


def call_of(spec: OpSpec, q: Tensor, k: Tensor, v: Tensor, batch_invariant: bool) -> tuple[Any, ...]:
    parameters = inspect.signature(spec.public).parameters
    given = {"q": q, "k": k, "v": v, "batch_invariant": batch_invariant, "backend": "auto"}
    order = ("backend", "q", "k", "v", "causal", "scale", "window", "softcap", "alibi_slopes", "sinks", "attn_mask")
    order += (
        "dropout_p",
        "dropout_seed",
        "score_mod",
        "align",
        "deterministic",
        "batch_invariant",
        "return_lse",
        "return_stats",
    )
    return tuple(given.get(name, parameters[name].default) for name in order)


def test_the_registry_tells_what_it_chooses() -> None:
    spec, told = OPS["swiglu"], []
    with override(spec, "native", devices=("cpu", "cuda"), set_served=lambda *bits: told.append(bits)):
        registry.prefer("cuda", {("swiglu", "bfloat16"): ("triton", "native")})
        registry.prefer("cuda", {})
    has_triton = spec.why_not("triton", "cuda") is None
    without = ALL - BIT[torch.bfloat16]
    assert told == [(ALL, ALL, ALL), (ALL, without if has_triton else ALL, without), (ALL, ALL, ALL)]
