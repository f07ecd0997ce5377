"""decode_linear beyond the parity suite: bits, layouts, and the operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foundry_kernels.core import extension
from foundry_kernels.ops.decode_linear import DECODE_LINEAR, decode_linear

NATIVE = DECODE_LINEAR.why_not("native", "cpu")
needs_native = pytest.mark.skipif(NATIVE is not None, reason=str(NATIVE))
SETS = extension.build_info().get("usable_instruction_sets", [])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("name", [n for n in SETS if n.endswith("bf16")])
def test_bfloat16_that_is_widened_has_the_bits_of_fewer_instructions(
    name: str, instruction_set: Callable[[str], None], bfloat16_choice: Callable[..., None]
) -> None:
    less = {"avx512_bf16": "avx512", "amx_bf16": "avx512", "neon_bf16": "neon"}[name]
    if less not in SETS:
        pytest.skip(f"not compiled for {less}")
    for rows in (1, 2, 3, 8):
        x, w = draw(rows, 333, dtype=torch.bfloat16), draw(100, 333, dtype=torch.bfloat16, seed=1)
        instruction_set(less)
        wanted = decode_linear(x, w, backend="native")
        instruction_set(name)
        bfloat16_choice(False, False, False)
        assert torch.equal(decode_linear(x, w, backend="native"), wanted)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_operator_takes_any_number_of_rows(dtype: torch.dtype) -> None:
    """Which are computed as they are alone; more than those of one task, and a last few."""
    op = torch.ops.foundry_kernels.decode_linear
    x, weights = draw(150, 90, dtype=dtype), [draw(70, 90, dtype=dtype, seed=1), draw(65, 90, dtype=dtype, seed=2)]
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            y = op(x.view(3, 50, 90), weights).view(150, 135)
            for rows in ([0], [8, 63, 64], [149]):
                assert torch.equal(op(x[rows], weights), y[rows])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", DECODE_LINEAR.backends("cpu"))
def test_any_layout(backend: str) -> None:
    x, weight = draw(7, 12).T, draw(7, 5, seed=1).T  # neither has a unit last stride
    torch.testing.assert_close(decode_linear(x[:6], weight, backend=backend), x[:6] @ weight.T)
    assert decode_linear(x[:0].reshape(2, 0, 7), weight, backend=backend).shape == (2, 0, 5)
    assert decode_linear(x[0], weight, weight4=weight, backend=backend).shape == (10,)
    assert not decode_linear(x[:2, :0], weight[:, :0], backend=backend).any()


X, W = draw(2, 4), draw(3, 4)


@needs_native
def test_the_operator_refuses_what_is_called_without_checks() -> None:
    op = torch.ops.foundry_kernels.decode_linear
    with pytest.raises(ValueError, match=r"weights must be \[N, K\]"):
        op(X, [W.T])
    with pytest.raises(TypeError, match="weights must have x's dtype"):
        op(X, [W.half()])
    with pytest.raises(ValueError, match="weights must be 1 to 4 matrices; got 0"):
        op(X, [])
    with pytest.raises(TypeError, match="unsupported dtype"):
        op(X.double(), [W.double()])
    with pytest.raises(ValueError, match="has no gradient"):
        op(X, [W.clone().requires_grad_()])
