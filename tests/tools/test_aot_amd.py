"""The Triton kernels compiled for AMD GPUs by Triton's own backend. None of them has run on one."""

from __future__ import annotations

import re

import pytest
from compiled import OPS, inspect, needs_triton
from slow import ahead_of_time, rest_slow

from foundry_kernels import __main__
from foundry_kernels.tools.inspect import amd
from foundry_kernels.tools.inspect.amd import AmdCost
from foundry_kernels.tools.inspect.aot import Launch

MI300, MI350 = amd.GPUS["gfx942"], amd.GPUS["gfx950"]

#: A few launches that compile in seconds: what has a row of its own for AMD, and one that has not.
FEW = {
    "swiglu": ("--timed", "--kernel", "fwd", "--case", "qwen3-0.6b"),
    "rms_norm": ("--kernel", "rms_norm_fwd", "--case", "16384x32768"),
    "flash_attention": ("--kernel", "flash_attention_d", "--case", "T=512 D=128-causal"),
}


def fits(op: str, *options: str) -> list[str]:
    """What `inspect` prints of each launch, if all is well."""
    done = inspect(op, *options)
    assert done.returncode == 0, "\n".join(
        line for line in (done.stdout + done.stderr).splitlines() if "PROBLEM" in line or "rror" in line
    )
    assert "(compiled, never run)" in done.stdout
    lines = re.findall(r" VGPRs \(\d+ AGPRs\) +\d+ SGPRs  0 spilled.* B LDS +\d+ warps .*", done.stdout)
    found = re.search(r": (\d+) launches$", done.stdout, re.M)
    assert found, done.stdout
    assert len(lines) == done.stdout.count(" VGPRs ") == int(found[1])
    assert all("maxnreg" not in line for line in lines), "an option that only NVIDIA's backend has"
    return lines


@needs_triton
@ahead_of_time
@pytest.mark.parametrize("gpu", ["gfx942", pytest.param("gfx950", marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", rest_slow([*FEW]))
def test_a_few_launches_fit(op: str, gpu: str) -> None:
    lines = fits(op, *FEW[op], "--arch", gpu)
    assert len(lines) >= 2
    assert all("mfma" in line for line in lines) == (op == "flash_attention")
    assert any(" 16/" in line or " 16 B" in line for line in lines), "no kernel moves 16 bytes at a time"


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("arch", amd.GPUS)
@pytest.mark.parametrize("op", OPS)
def test_all_launches_fit(op: str, arch: str) -> None:
    """Compiles for gfx950, but for attention, those that are not the same as on gfx942: it has more LDS and as many
    registers."""
    unlike = ("--unlike", "gfx942") if arch == "gfx950" and "attention" not in op else ()
    assert len(fits(op, "--arch", arch, *unlike)) >= (0 if unlike else 1)


@needs_triton
def test_an_architecture_without_a_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        __main__.inspect(["rms_norm", "--arch", "gfx1100"])
    assert stopped.value.code == 2
    assert "got gfx1100 (of AMD's GPUs gfx942, gfx950)" in capsys.readouterr().err


def test_options_of_other_gpus_are_left_out() -> None:
    kernel = "a kernel"
    options = {"num_warps": 8, "num_stages": 2, "maxnreg": 128}
    launches = [Launch(kernel, (), (), (), tuple((options | {"maxnreg": n}).items()), "a case") for n in (128, 255)]
    (kept,) = amd.without_foreign_options(launches)
    assert kept.options == (("num_warps", 8), ("num_stages", 2))


def cost(**changes: object) -> AmdCost:
    base: dict[str, object] = {"vgprs": 64, "agprs": 0, "sgprs": 32, "access_bytes": (16,), "waves": 4}
    base |= dict.fromkeys(("spilled", "sgprs_spilled", "scratch", "lds"), 0)
    base |= dict.fromkeys(("matrix", "llir", "code"), "")
    return AmdCost(**(base | changes))  # type: ignore[arg-type]


def test_what_must_not_ship_is_named() -> None:
    assert cost().problems(MI300) == []
    assert cost(spilled=3, scratch=12).problems(MI300) == ["3 vector registers are spilled, 12 bytes of scratch"]
    assert cost(lds=65 << 10).problems(MI300) == ["66560 bytes of LDS, of 65536"]
    assert cost(lds=65 << 10).problems(MI350) == []
    assert cost(waves=32).problems(MI300) == ["32 waves of 64 lanes, of 16"]
    assert cost(matrix="missing").problems(MI300) == ["a dot did not become mfma"]


def test_occupancy() -> None:
    """At 64 registers 8 waves a SIMD, on 4 SIMDs, in workgroups of 4 waves."""
    for changes, workgroups in (({"vgprs": 64}, 8), ({"vgprs": 65}, 7), ({"vgprs": 512}, 1), ({"lds": 24 << 10}, 2)):
        assert cost(**changes).resident(MI300) == workgroups
        assert cost(**changes).occupancy(MI300) == workgroups * 4 / 32


def test_what_is_read_in_the_code() -> None:
    code = """
	buffer_load_dwordx4 v[10:13], v9, s[8:11], 0 offen
	global_load_ushort v1, v[2:3], off
	global_store_dword v[2:3], v1, off
amdhsa.kernels:
  - .agpr_count:     4
    .sgpr_spill_count: 2
    .vgpr_count:     17
"""
    assert amd._access_bytes(code) == (16, 4, 2)
    assert [amd._number(code, name) for name in ("agpr_count", "sgpr_spill_count", "vgpr_count")] == [4, 2, 17]
