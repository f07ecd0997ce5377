"""Peers' kernels beside ours in `python -m foundry_kernels inspect flash_attention --peers`."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace

import fresh
import pytest
import torch
from compiled import cost

from foundry_kernels import _triton
from foundry_kernels.tools.inspect import aot, estimate, peers
from foundry_kernels.tools.inspect.sass import Loop

needs_triton = pytest.mark.skipif(_triton.MISSING is not None, reason=str(_triton.MISSING))


def inspect(*args: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = ["-m", "foundry_kernels", "inspect", "flash_attention", "--arch", "90", "--peers", *args]
    done = fresh.python(*command, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    if "  missing: " in done.stdout and not torch.__version__.startswith("2.13."):
        pytest.skip(f"templates of torch {torch.__version__}: {done.stdout}")
    return done.stdout


@pytest.mark.slow
@needs_triton
def test_flex_attention_is_compiled_from_the_installed_template() -> None:
    """128 wide, of which an H100 measured 382 TFLOP/s; instructions of its tiles without a mask."""
    shown = inspect("--kernel", "flex_attention_fwd", "--case", "D=128")
    assert "  missing: " not in shown
    assert "flex_attention_fwd         B=2 H=8 Hk=2 T=512 D=128-causal bfloat16 BLOCK_M=128 BLOCK_N=64 " in shown
    masked, plain = (int(n) for n in re.findall(r"loop of (\d+) instructions", shown))
    assert 380 <= plain <= 480
    assert masked > plain
    found = re.search(r"D=128  forward: ours -, FlexAttention's (\d+); backward: ours -, FlexAttention's -", shown)
    assert found
    assert int(found[1]) == pytest.approx(382, rel=0.075)


@needs_triton
@pytest.mark.slow
def test_all_widths_stand_beside_ours() -> None:
    shown = inspect("--case", "D=")
    assert "  missing: " not in shown
    rows = re.findall(r"D=(\d+) +forward: ours (\S+), FlexAttention's (\S+); backward: ours (\S+), Fl\S+ (\S+)", shown)
    assert [int(row[0]) for row in rows] == list(peers.WIDTHS)
    assert all(100 < int(cell.rstrip("*")) < 800 for row in rows for cell in row[1:]), rows
    assert not any("*" in row[1] + row[3] for row in rows), "ours spill"


@pytest.mark.parametrize("reason", ["no template", "another template"])
def test_what_cannot_be_rendered_is_named_with_the_reason(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(name: str) -> str:
        if reason == "no template":
            raise FileNotFoundError(f"{name}.py.jinja")
        return "{{def_kernel('Q')}}\n    {{something_new()}}\n"

    monkeypatch.setattr(peers, "_read", read)
    found, missing = peers.launches(90, "bwd", "D=64-")
    assert found == []
    assert len(missing) == 1
    assert missing[0].startswith("flex_attention_bwd B=2 H=8 Hk=2 T=512 D=64-causal bfloat16: ")
    assert ("flex_backwards.py.jinja" if reason == "no template" else "something_new") in missing[0]


def loop(products: int, cycles: float, width: int = 128) -> Loop:
    """A warpgroup has 64 x 64 scores, and a thread 2 rows forward."""
    exponentials = 34 if products == 2 else 32
    return Loop(400, {"exponential": exponentials}, 0, 0, 0, products * 64 * 64 * width, cycles)


@pytest.mark.parametrize("products", [2, 3, 4, 5])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_matmuls_per_score(products: int, width: int) -> None:
    assert peers.matmuls_per_score(loop(products, 1.0, width), width) == products


def test_the_slowest_launch_and_its_fastest_loop_are_shown() -> None:
    def launch(name: str, case: str) -> aot.Launch:
        return aot.Launch(SimpleNamespace(__name__=name), (), (), (), (), case)

    table, ours = peers.Table(), "B=2 H=8 Hk=2 T=512 D=128-causal bfloat16"
    table.add(launch("flash_attention_fwd_kernel", ours), cost(warps=8), [loop(2, 900.0), loop(2, 512.0)])
    table.add(launch("flash_attention_fwd_kernel", ours), cost(warps=8), [loop(2, 600.0)])
    table.add(launch("flash_attention_fwd_kernel", "2x8.2x512.512x128-window bfloat16"), cost(), [loop(2, 9000.0)])
    table.add(launch("flex_attention_bwd", ours), cost(stack=8), [loop(3, 768.0), loop(4, 1024.0), loop(4, 2000.0)])
    lines = table.lines()
    cycles = 600 + estimate.REST * (400 + 34 * 8)
    tflops = estimate.REACHED * 2 * 2 * 64 * 64 * 128 / cycles * 132 * 1.65e9 / 1e12
    assert f"D=128  forward: ours {tflops:.0f}, FlexAttention's -; backward: ours -, FlexAttention's " in lines[2]
    assert lines[2].endswith("*")
    assert "D=64   forward: ours -, FlexAttention's -; backward: ours -, FlexAttention's -" in lines[1]
