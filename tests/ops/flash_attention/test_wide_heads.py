"""Heads wider than 256 in Triton: what is launched for them, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from foundry_kernels import BackendUnavailable, _triton
from foundry_kernels.ops.flash_attention import FLASH_ATTENTION, flash_attention
from foundry_kernels.ops.flash_attention.case_makers import ALL_OPTIONS, DROPOUT, bias_arg, dense_case, mask_arg
from foundry_kernels.testing import Case, assert_parity, normal

DEVICE = "cpu" if _triton.INTERPRET else "cuda"
pytestmark = pytest.mark.skipif(
    FLASH_ATTENTION.why_not("triton", DEVICE) is not None, reason=str(FLASH_ATTENTION.why_not("triton", DEVICE))
)
HALF, SINGLE = torch.bfloat16, torch.float32

CASES = (
    dense_case(1, (4, 2), (40, 37), 512, "gradients-of-keys", frozen="q", causal=True),
    dense_case(1, (4, 2), (33, 40), 400, "all", alibi_slopes=(4,), sinks=normal(), head_dim_v=257, **ALL_OPTIONS),
    dense_case(1, (4, 2), (33, 40), 320, "bias-dropout", attn_mask=bias_arg(4, 33, 40), **DROPOUT),
    dense_case(1, (4, 2), (33, 40), 512, "mask", attn_mask=mask_arg(33, 40), head_dim_v=64),
    dense_case(2, (4, 1), (2, 90), 512, "few-queries", attn_mask=bias_arg(2, 90), head_dim_v=320, causal=True),
)


#: Two of the cases in each dtype; the others are left to `make test-slow`.
QUICK = {HALF: ("all", "few-queries"), SINGLE: ("gradients-of-keys", "mask")}


@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        pytest.param(dtype, c, id=f"{dtype}-{c.id}", marks=() if c.id.endswith(quick) else pytest.mark.slow)
        for dtype, quick in QUICK.items()
        for c in CASES
    ],
)
@pytest.mark.usefixtures("poisoned")
def test_parity(case: Case, dtype: torch.dtype) -> None:
    assert_parity(FLASH_ATTENTION, case, backend="triton", dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("width", "dtype", "wanted", "expected"),
    [
        (320, HALF, "kv", [(True, False), (False, True)]),
        (320, HALF, "k", [(True, False)]),
        (320, HALF, "v", [(False, True)]),
        (320, SINGLE, "kv", [(True, True)]),
        (256, HALF, "kv", [(True, True)]),
    ],
)
def test_gradients_of_keys_and_values_are_apart_in_16_bits(
    width: int, dtype: torch.dtype, wanted: str, expected: list[tuple[bool, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As (NEED_DK, NEED_DV) of each launch."""
    from foundry_kernels.ops.flash_attention.triton import backward_launch

    seen = []
    launch = backward_launch.launch

    def noted(kernel, plan, *tensors) -> None:  # type: ignore[no-untyped-def]
        if kernel is backward_launch.flash_attention_dkdv_kernel:
            seen.append((plan.constants["NEED_DK"], plan.constants["NEED_DV"]))
        launch(kernel, plan, *tensors)

    monkeypatch.setattr(backward_launch, "launch", noted)
    tensors = {name: torch.randn(1, 1, 20, width, device=DEVICE, dtype=dtype) for name in "qkv"}
    for name in wanted:
        tensors[name].requires_grad_()
    flash_attention(*tensors.values(), backend="triton").sum().backward()
    assert seen == expected


@pytest.fixture
def device_at_hand() -> Iterator[None]:
    from foundry_kernels._triton import devices

    before = devices._RECORDED
    yield
    devices.record_for(before)


REFUSED = (
    # capability, dtype, D, Dv, backward: the pass that does not fit, bytes that it needs and that there are
    (89, SINGLE, 512, 512, True, "backward", 131072, 101376),
    (90, torch.float64, 512, 512, True, "backward", 262144, 232448),
)


@pytest.mark.parametrize(("chip", "dtype", "d", "dv", "backward", "which", "needed", "there"), REFUSED)
@pytest.mark.usefixtures("device_at_hand")
def test_what_does_not_fit_is_refused(
    chip: int, dtype: torch.dtype, d: int, dv: int, backward: bool, which: str, needed: int, there: int
) -> None:
    """Before any kernel runs, by its width and its shared memory."""
    from foundry_kernels._triton import devices

    devices.record_for(chip)
    q, v = (torch.zeros(1, 1, 8, n, dtype=dtype, device=DEVICE, requires_grad=backward) for n in (d, dv))
    message = (
        rf"the {which} pass in {dtype} with head_dim {d} \(v's is {dv}\) needs {needed} bytes of shared memory; a "
        rf"program on this GPU, of compute capability {chip / 10}, has {there}\. Use 16 bits, or backend 'reference'"
    )
    with pytest.raises(BackendUnavailable, match=message):
        flash_attention(q, q, v, backend="triton")


@pytest.mark.usefixtures("device_at_hand")
def test_a_backward_pass_that_spills_on_amd_is_refused() -> None:
    from foundry_kernels._triton import devices

    devices.record_for(942)
    q, v = (torch.zeros(1, 1, 8, n, device=DEVICE, requires_grad=True) for n in (257, 64))
    message = r"the backward pass in torch\.float32 with head_dim 257 \(v's is 64\) is for heads of at most 256 on this"
    with pytest.raises(BackendUnavailable, match=message):
        flash_attention(q, q, v, backend="triton")


@pytest.mark.parametrize(
    ("chip", "dtype", "d", "dv", "backward"),
    [
        (0, torch.float64, 512, 512, True),
        (942, SINGLE, 512, 512, False),
        (89, HALF, 512, 512, True),
        (89, SINGLE, 512, 256, True),
        (80, torch.float64, 512, 512, False),
    ],
)
@pytest.mark.usefixtures("device_at_hand")
def test_what_fits_is_not_refused(chip: int, dtype: torch.dtype, d: int, dv: int, backward: bool) -> None:
    from foundry_kernels._triton import devices
    from foundry_kernels.ops.flash_attention.triton.launch import refuse_wide

    devices.record_for(chip)
    refuse_wide(torch.empty(1, d, dtype=dtype), torch.empty(1, dv, dtype=dtype), backward)
