"""What the Gluon forward of attention is launched with, and which calls it does not support; nothing is launched."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from attention_inputs import plain_options
from torch import Tensor

from foundry_kernels import _triton
from foundry_kernels._triton import devices, tuning, tuning_file

if _triton.MISSING is None:
    from foundry_kernels.ops.flash_attention.triton import gluon_launch
    from foundry_kernels.ops.flash_attention.triton import launch as launching

MISSING = _triton.MISSING or gluon_launch.MISSING
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
GPU = "NVIDIA H100 80GB HBM3"


class Launches:
    """Stands in for the kernels, and keeps what was launched by which name."""

    def __init__(self, names: list[str]) -> None:
        self.names = names  # of the Gluon kernel's arguments
        self.made: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []

    def default(self, kernel: Any, plan: Any, *tensors: Any) -> None:
        self.made.append((kernel.__name__, plan.grid, {}))

    def decode(self, *args: Any) -> None:
        self.made.append(("decode", (), {}))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, enable_fp_fusion: bool, **constants: Any) -> None:
            self.made.append(("gluon", grid, dict(zip(self.names, args, strict=False)) | constants))

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Launches are chosen as on compute capability 9.0."""
    made = Launches(gluon_launch.flash_attention_fwd_gluon_kernel.arg_names)
    before = devices._RECORDED
    monkeypatch.setattr(gluon_launch, "flash_attention_fwd_gluon_kernel", made)
    monkeypatch.setattr(launching, "launch", made.default)
    monkeypatch.setattr(launching, "launch_decode", made.decode)
    devices.record_for(90)
    yield made
    devices.record_for(before)


def draw(
    b: int = 2, h: int = 4, hk: int = 2, t: int = 200, s: int = 300, d: int = 64, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Makes tensors as a model does: [B, T, H, D] in memory."""
    shapes = ((b, t, h, d), (b, s, hk, d), (b, s, hk, d))
    q, k, v = (torch.zeros(shape, dtype=dtype).transpose(1, 2) for shape in shapes)
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, save_lse: bool = True, save_stats: bool = False, **given: Any) -> Any:
    options = plain_options(q.shape[-2], k.shape[-2], q.shape[-1] ** -0.5, window_right=0)
    return launching.launch_fwd(q, k, v, options._replace(**given), save_lse, save_stats)


@pytest.mark.parametrize("width", [64, 128])
def test_it_is_the_default(width: int, launches: Launches) -> None:
    """But within a batch-invariant call: which of two kernels takes one may depend on the batch."""
    attend(*draw(d=width))
    with tuning.pretend(GPU):
        attend(*draw(d=width))
    attend(*draw(d=width), batch_invariant=True)
    assert [name for name, _, _ in launches.made] == ["gluon", "gluon", "flash_attention_fwd_kernel"]


def asked(width: int = 64) -> tuple[tuning.Choice, tuning.Choice]:
    """The choices of a call: the default kernel's config, and whether that or the other kernel is launched."""
    with tuning.watched() as seen:
        attend(*draw(d=width))
    default, choice = seen.values()
    assert (default.kernel, choice.kernel) == ("flash_attention_fwd_kernel",) * 2
    return default, choice


def test_the_default_kernel_is_taken_where_it_was_measured_to_be_faster(launches: Launches, tmp_path: Path) -> None:
    _, choice = asked()
    faster = {"row": choice.configs[1], "speedup": 1.5}
    entry = tuning_file.Entry(
        GPU, tuning.triton_version(), 90, rows={"flash_attention_fwd_kernel": {choice.key: faster}}
    )
    file = tmp_path / "tuning.json"
    file.write_text(
        json.dumps({"format": tuning_file.FORMAT, "version": tuning_file.VERSION, "entries": [vars(entry)]})
    )
    launches.made.clear()
    tuning.use(file)
    try:
        with tuning.pretend(GPU):
            attend(*draw())
            attend(*draw(d=128))
    finally:
        tuning.use(None)
    assert [name for name, _, _ in launches.made] == ["flash_attention_fwd_kernel", "gluon"]


@pytest.mark.parametrize("width", [64, 128])
def test_what_is_launched(width: int, launches: Launches) -> None:
    q, k, v = draw(d=width, dtype=torch.float16)
    k = torch.zeros(2, 2, 320, width + 16, dtype=torch.float16)[:, :, 10:310, 8 : 8 + width]  # with gaps
    launches.made.clear()
    out, lse, _, _ = attend(q, k, v)
    ((name, grid, given),) = launches.made
    assert name == "gluon"
    assert grid == (2 * 2 * 4,), "two tiles of 128 queries, of 2 x 4 heads"
    rows = {"q_desc": (q, 64), "k_desc": (k, 64), "v_desc": (v, 64), "out_desc": (out, 64)}
    for name, (tensor, block) in rows.items():
        found = given.pop(name)
        assert found.base.data_ptr() == tensor.data_ptr(), name
        assert (tuple(found.shape), tuple(found.strides)) == (tensor.shape, tensor.stride()), name
        assert found.block_shape == [1, 1, block, width]
        assert (found.layout.swizzle_byte_width, found.layout.element_bitwidth) == (128, 16)
        assert found.padding == "zero"
    assert given.pop("lse_ptr") is lse
    assert lse.dtype == torch.float32
    assert given.pop("scale") == pytest.approx(width**-0.5 * 1.4426950408889634)
    assert given == {
        "n_batch": 2, "n_heads": 4, "group": 2, "section": 8, "tokens_q": 200, "tokens_k": 300, "right": 0,
        "BOTTOM_RIGHT": True, "HAS_RIGHT": True, "D": width,
        "BLOCK_M": 64, "BLOCK_N": 64, "STAGES": 4, "num_warps": 4,
    }  # fmt: skip


def test_unaligned_rows_are_copied_first(launches: Launches) -> None:
    _, k, v = draw()
    wide = torch.zeros(2, 4, 200, 67, dtype=torch.bfloat16)[..., 2:66]
    attend(wide, k, v)
    ((name, _, given),) = launches.made
    assert name == "gluon"
    assert given["q_desc"].base.data_ptr() != wide.data_ptr()
    assert given["q_desc"].base.data_ptr() % 16 == 0
    assert all(s % 8 == 0 for s in given["q_desc"].strides[:3])


def expanded() -> tuple[Tensor, ...]:
    q, k, v = draw()
    return q, k[:1].expand(2, -1, -1, -1), v


NOT_SUPPORTED: dict[str, tuple[Any, dict[str, Any]]] = {
    "left-window": (draw, {"window_left": 50}),
    "softcap": (draw, {"softcap": 30.0}),
    "alibi": (draw, {"alibi_slopes": torch.zeros(4)}),
    "sinks": (draw, {"sinks": torch.zeros(4)}),
    "statistics": (draw, {"save_stats": True}),
    "negative-scale": (draw, {"scale": -1.0}),
    "float32": (lambda: draw(dtype=torch.float32), {}),
    "96-wide": (lambda: draw(d=96), {}),
    "256-wide": (lambda: draw(d=256), {}),
    "narrow-values": (lambda: (*draw(d=128)[:2], draw(d=64)[2]), {}),
    "wide-values": (lambda: (*draw(d=64)[:2], draw(d=128)[2]), {}),
    "expanded": (expanded, {}),
    "packed": (
        lambda: tuple(x[0].transpose(0, 1) for x in draw()),
        {"cu_seqlens_q": torch.tensor([0, 90, 200]), "cu_seqlens_k": torch.tensor([0, 100, 300]), "max_seqlen_q": 110,
         "max_seqlen_k": 200},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_the_default_kernel_takes_the_rest(name: str, launches: Launches) -> None:
    make, options = NOT_SUPPORTED[name]
    attend(*make(), **options)
    assert [made for made, _, _ in launches.made] == ["flash_attention_fwd_kernel"]


@pytest.mark.parametrize("place", ["problem", "flags"])
def test_and_what_is_not_declared(place: str, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that is new to the problem, or to the default kernel's launch."""
    supported = gluon_launch.supports

    def with_flag(p: Any, flags: dict[str, bool], out: tuple[int, ...]) -> bool:
        assert supported(p, flags, out)
        off = {"MADE_UP": False}
        assert supported(p, flags | off, out)
        on = {"MADE_UP": True}
        if place == "flags":
            return supported(p, flags | on, out)
        monkeypatch.setattr(p, "constants", p.constants | on)
        return supported(p, flags, out)

    monkeypatch.setattr(gluon_launch, "supports", with_flag)
    attend(*draw(t=201))
    assert [made for made, _, _ in launches.made] == ["flash_attention_fwd_kernel"]


@pytest.mark.parametrize("arch", [80, 89, 100, 120])
def test_and_other_devices(arch: int, launches: Launches) -> None:
    devices.record_for(arch)
    attend(*draw())
    assert [made for made, _, _ in launches.made] == ["flash_attention_fwd_kernel"]


def test_few_queries_have_kernels_of_their_own(launches: Launches) -> None:
    attend(*draw(t=4))
    assert [made for made, _, _ in launches.made] == ["decode"]


@pytest.mark.parametrize("release", [None, (3, 5), (3, 8), (3, 10), (4, 0)], ids=str)
def test_without_gluon(release: tuple[int, int] | None, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton that has none, or has it elsewhere, or that nobody has looked at."""
    if release is None:
        monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    else:
        monkeypatch.setattr(_triton, "VERSION", release)
    monkeypatch.delitem(sys.modules, gluon_launch.__name__)
    monkeypatch.delattr("foundry_kernels.ops.flash_attention.triton.gluon_launch")
    devices.record_for(90)  # plans that were made before are forgotten
    attend(*draw())
    assert [made for made, _, _ in launches.made] == ["flash_attention_fwd_kernel"]
    missing = sys.modules[gluon_launch.__name__].MISSING
    assert "Gluon does not import" in missing
    assert release is None or f"Triton {release[0]}.{release[1]}" in missing


@pytest.mark.slow
def test_what_is_compiled() -> None:
    """tests/proof/gluon_compiled.py, in a process of its own: this one may interpret Triton's kernels."""
    command = ["-m", "pytest", "-p", "no:cacheprovider"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"TRITON_INTERPRET": "0"}
    file = str(Path(__file__).with_name("gluon_compiled.py"))
    done = fresh.python(*command, file, env=env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
