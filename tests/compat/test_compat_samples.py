"""torch's own samples of the functions that fk.compat has under torch's signatures: OpInfo's, every one of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_kernels import OPS, compat
from foundry_kernels.core.registry import BackendUnavailable

#: The functions of compat by torch's names, with the operation whose kernels they call.
FUNCTIONS = {
    "cross_entropy": "cross_entropy",
    "linear_cross_entropy": "linear_cross_entropy",
    "gelu": "bias_gelu",
    "silu": "swiglu",
    "rms_norm": "rms_norm",
    "layer_norm": "layer_norm",
}
#: How many samples torch 2.11 and later have of each, at least: a loop over none passes anything.
AT_LEAST = {
    "cross_entropy": 21, "linear_cross_entropy": 100, "gelu": 8, "silu": 3, "rms_norm": 6, "layer_norm": 6,
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
ROUNDING = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
BACKENDS = ("auto", "reference", "triton")


def samples(name: str, dtype: torch.dtype) -> list[Any]:
    # Here and not above: the import takes two seconds, of each process that collects tests.
    methods = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    infos = [info for info in methods.op_db if info.name == f"nn.functional.{name}" and dtype in info.dtypes]
    if name == "linear_cross_entropy" and not infos:
        pytest.skip("this torch has no linear_cross_entropy")
    torch.manual_seed(0)
    return [sample for info in infos for sample in info.sample_inputs("cpu", dtype, requires_grad=True)]


def leaves(sample: Any) -> list[Tensor]:
    every = (sample.input, *sample.args, *sample.kwargs.values())
    return [t for t in every if isinstance(t, Tensor) and t.requires_grad]


def run(
    function: Callable[..., Tensor], sample: Any, wide: bool = False, plain: bool = False, **extra: Any
) -> list[Tensor]:
    """The result and the gradients of all inputs that require one; in float64 if `wide`, `plain` without chunks."""

    def argument(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().double() if wide and value.is_floating_point() else value.detach()

    of_ours = [argument(t) for t in (sample.input, *sample.args)]
    named = {key: argument(value) for key, value in sample.kwargs.items()}
    theirs = (sample.input, *sample.args, *sample.kwargs.values())
    inputs = []
    for value, original in zip((*of_ours, *named.values()), theirs, strict=True):
        if isinstance(original, Tensor) and original.requires_grad:
            inputs.append(value.requires_grad_())
    if (wide or plain) and "options" in named:
        del named["options"]  # how PyTorch makes chunks
    result = function(*of_ours, **named, **extra)
    g = torch.Generator().manual_seed(1)
    cotangent = torch.randn(result.shape, generator=g, dtype=torch.float64).to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, inputs, cotangent)]


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        pytest.param(dtype, backend, id=f"{dtype}-{backend}", marks=pytest.mark.slow if i > 1 or j > 1 - i else ())
        for i, dtype in enumerate(DTYPES)
        for j, backend in enumerate(BACKENDS)
    ],
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_torchs_samples(name: str, dtype: torch.dtype, backend: str) -> None:
    """Results and gradients are those of PyTorch in float64, rounded; PyTorch's own round log-softmax in between."""
    if backend == "triton":
        if (reason := OPS[FUNCTIONS[name]].why_not("triton", "cpu", dtype)) is not None:
            pytest.skip(reason)
        if dtype != torch.float32:
            pytest.skip("the interpreter takes long: one dtype")
    found = samples(name, dtype)
    assert len(found) >= AT_LEAST[name]
    if backend == "triton":
        found = found[:: 9 if len(found) > 50 else 4] + found[-1:]
    function, theirs = getattr(compat, name), getattr(F, name)
    for sample in found:
        if backend == "triton" and sample.kwargs.get("eps", 0.0) < 0.0:
            with pytest.raises(BackendUnavailable, match=r"takes no negative eps; got -0\.5"):
                run(function, sample, backend=backend)
            continue
        ours = run(function, sample, backend=backend)
        largest = (
            max(float(t.detach().abs().max()) for t in leaves(sample) if t.numel()) if sample.input.numel() else 1.0
        )
        expected = run(theirs, sample, wide=True)
        # The reference's logits are rounded, as plain PyTorch's are: where they are large, that is most of the error.
        rounded = backend == "reference" and name == "linear_cross_entropy"
        plain = run(theirs, sample, plain=True) if rounded else expected
        for a, e, p in zip(ours, expected, plain, strict=True):
            assert a.shape == e.shape
            assert a.dtype == dtype
            near = 2.0 * ROUNDING[dtype] * max([1.0, largest, *e.nan_to_num().abs().flatten().tolist()])  # of sums
            near = max([near, *(2.0 * (p.double() - e)).nan_to_num().abs().flatten().tolist()])
            torch.testing.assert_close(a.double(), e, rtol=ROUNDING[dtype], atol=near, equal_nan=True)


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if hasattr(F, n)])
def test_the_signature_is_torchs(name: str) -> None:
    ours = list(inspect.signature(getattr(compat, name)).parameters.values())
    assert ours[-1].name == "backend"
    if name == "gelu":  # torch's is written in C
        assert [(p.name, p.default) for p in ours[:-1]] == [("input", inspect.Parameter.empty), ("approximate", "none")]
        return
    theirs = list(inspect.signature(getattr(F, name)).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours[:-1]] == [(p.name, p.kind, p.default) for p in theirs]
