"""The CUDA sources through nvcc, where it is installed: no GPU is needed to compile."""

from __future__ import annotations

from pathlib import Path

import nvcc
import pytest

needs_nvcc = pytest.mark.skipif(nvcc.nvcc() is None, reason="nvcc is neither in CUDA_HOME/bin nor on the PATH")


@needs_nvcc
@pytest.mark.parametrize(("source", "arch"), [pytest.param(s, a, id=f"{s.stem}-{a}") for s, a in nvcc.JOBS])
def test_no_spill_and_no_stack_frame(source: Path, arch: str) -> None:
    kernels = nvcc.compile_kernels(source, arch)
    assert kernels
    for kernel in kernels:
        print(kernel)
    assert [k for k in kernels if k.problem] == []


@needs_nvcc
def test_a_spill_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcc, "REPORTS", tmp_path)
    source = tmp_path / "spill.cu"
    source.write_text(
        "__global__ void __launch_bounds__(1024) spills(float* p, int n) {\n"
        "  float v[128];\n"
        "  for (int i = 0; i < 128; ++i) v[i] = p[i * n];\n"
        "  for (int k = 0; k < n; ++k)\n"
        "    for (int i = 0; i < 128; ++i) v[i] = v[i] * v[(i * k) % 128];\n"
        "  for (int i = 0; i < 128; ++i) p[i * n] = v[i];\n"
        "}\n"
    )
    (kernel,) = nvcc.compile_kernels(source, "90a")
    assert kernel.problem


def test_the_report_is_read() -> None:
    report = """ptxas info    : Compiling entry function '_Z1kPf' for 'sm_80'
ptxas info    : Function properties for _Z1kPf
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 64 bytes smem, 384 bytes cmem[0]"""
    (kernel,) = nvcc.parse(report)
    assert (kernel.registers, kernel.stack, kernel.spilled, kernel.shared) == (40, 16, 12, 64)
    assert "spilled" in kernel.problem


@pytest.mark.parametrize("where", ["in function", "in the function", "for the function"])
def test_each_form_of_the_warning_about_products_is_read(where: str) -> None:
    report = f"""ptxas info    : (C7512) Potential Performance Loss: wgmma is serialized {where} 'k'
ptxas info    : Compiling entry function 'k' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers"""
    (kernel,) = nvcc.parse(report)
    assert kernel.problem == "Potential Performance Loss: wgmma is serialized"
