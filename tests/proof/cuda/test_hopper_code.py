"""The machine code of csrc/cuda/hopper, by nvcc: what results do not show, and an H100 would in time.

The limits forward are those of the sketch that reached 476 to 761 TFLOP/s there; backward they are what the kernels
have, which is more than the sketch of 391 to 581 TFLOP/s had. Who moves one has a faster kernel to show.
"""

from __future__ import annotations

from pathlib import Path

import nvcc
import pytest
from wgmma_steps import Loop, executed_between_waits, product_loops

needs_nvcc = pytest.mark.skipif(nvcc.nvcc() is None, reason="nvcc is neither in CUDA_HOME/bin nor on the PATH")
FOLDER = nvcc.ROOT / "csrc" / "cuda" / "hopper"
TYPES = ("bfloat16", "__half")

#: Forward by the widths of keys and values: registers of a thread when the kernel begins, before warpgroups take them
#: from one another; of the loop without masks and options all instructions, and those between the waits with so many
#: exponentials.
FORWARD = {
    (64, 64): (128, 500, 302, 66),
    (96, 96): (168, 500, 296, 66),
    (128, 128): (168, 500, 296, 66),
    (192, 128): (168, 570, 296, 66),
    (192, 192): (168, 560, 264, 58),
    (256, 256): (168, 565, 199, 42),
}
#: What a step with a soft cap executes if all of a warp's scores are in the polynomial's interval: 1,656 with tanhf.
CAPPED = 690

#: Backward by width: all instructions of the loop without options, of sums in any order and in order (the sketch's: 783
#: and 812, 497 and 524, and 575 in order), its products, its exponentials, and how many of them are hidden at least. At
#: 192 wide, registers suffice only if dP^T follows the weights, and dS^T dV; the other warpgroup's matmuls run beside.
BACKWARD = {
    64: ((925, 955), 32, 64, 64),
    128: ((570, 605), 32, 32, 32),
    192: ((0, 775), 40, 32, 0),
    256: ((0, 670), 48, 32, 32),
}
BACKWARD_REGISTERS = 168


def forward_kernel(dtype: str, widths: tuple[int, int], options: bool = False, ways: int = 0) -> str:
    shape = f"hopper::forward::Shape<{widths[0]}, {widths[1]}, {ways}>"
    return f"hopper::forward::attention_forward<{dtype}, {shape}, {str(options).lower()}>"


def backward_kernel(dtype: str, width: int, options: bool, in_order: bool) -> str:
    flags = f"{str(options).lower()}, {str(in_order).lower()}"
    return f"hopper::attention_backward_kernel<hopper::BackwardShape<{dtype}, {width}, {flags}> >"


def orders(width: int) -> tuple[bool, ...]:
    """Whether dq is added up in order: at 192 and 256 wide it always is."""
    return (True,) if width > 128 else (False, True)


def plain_loop(code: str) -> Loop:
    return min((loop for loop in product_loops(code) if loop.steps), key=lambda loop: loop.instructions)


@needs_nvcc
def test_registers_are_those_that_are_planned() -> None:
    kernels = {k.name: k.registers for k in nvcc.compile_kernels(FOLDER / "attention_forward.cu", "90a")}
    expected = {
        forward_kernel(dtype, widths, options): registers
        for dtype in TYPES
        for options in (False, True)
        for widths, (registers, *_) in FORWARD.items()
    }
    assert kernels == expected


@needs_nvcc
@pytest.mark.parametrize("width", BACKWARD)
def test_registers_of_the_backward_pass_are_those_that_are_planned(width: int) -> None:
    kernels = {k.name: k.registers for k in nvcc.compile_kernels(FOLDER / f"attention_backward_{width}.cu", "90a")}
    assert kernels == {
        backward_kernel(dtype, width, options, in_order): BACKWARD_REGISTERS
        for dtype in TYPES
        for options in (False, True)
        for in_order in orders(width)
    }


@needs_nvcc
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("widths", FORWARD)
def test_a_step_forward_is_as_short_as_the_sketch_and_hides_its_exponentials(
    widths: tuple[int, int], dtype: str
) -> None:
    code = nvcc.machine_code(FOLDER / "attention_forward.cu", "90a")
    loop = plain_loop(code[forward_kernel(dtype, widths)])
    print(loop)
    _, most, most_between, exponentials = FORWARD[widths]
    [(between, hidden)] = loop.steps
    assert hidden == loop.hidden == loop.exponentials == exponentials
    assert between <= most_between
    assert loop.instructions <= most


@needs_nvcc
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("widths", FORWARD)
def test_a_step_with_a_soft_cap_is_short(widths: tuple[int, int], dtype: str) -> None:
    code = nvcc.machine_code(FOLDER / "attention_forward.cu", "90a")[forward_kernel(dtype, widths, options=True)]
    steps = executed_between_waits(code, through="VOTE.ALL")
    print(steps)
    assert len(steps) == 3  # right edge, no edge, left edge
    assert min(steps) <= CAPPED


WAYS = """
#include "{header}"
namespace foundry {{ namespace cuda {{ namespace hopper {{ namespace forward {{
template <int kWays> constexpr auto instance = &attention_forward<__nv_bfloat16, Shape<64, 64, kWays>, false>;
template <int... kWays> void take(std::integer_sequence<int, kWays...>) {{
  (cudaFuncSetAttribute(instance<kWays>, cudaFuncAttributeMaxDynamicSharedMemorySize, 0), ...);
}}
void all() {{ take(std::integer_sequence<int, 1, 2, 3>()); }}
}}}}}}}}
"""


@needs_nvcc
def test_each_way_of_64_is_ready_to_be_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maxima of integers save 20 of 295 instructions between the waits; neither they nor turns spill."""
    monkeypatch.setattr(nvcc, "REPORTS", tmp_path)
    source = tmp_path / "ways.cu"
    source.write_text(WAYS.format(header=FOLDER / "attention_forward_kernel.cuh"))
    kernels = nvcc.compile_kernels(source, "90a")
    names = [forward_kernel("bfloat16", (64, 64), ways=ways) for ways in (1, 2, 3)]
    assert sorted(k.name for k in kernels) == names
    assert [(k.problem, k.registers) for k in kernels] == [("", 128)] * 3
    code = nvcc.machine_code(source, "90a")
    plain = [min(executed_between_waits(code[name], through="MUFU.EX2")) for name in names]
    print(plain)
    assert plain[0] <= 275
    assert plain[2] <= 275
    assert plain[1] <= 302


@needs_nvcc
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("width", "in_order"), [(width, order) for width in BACKWARD for order in orders(width)])
def test_a_step_backward_is_short_and_hides_its_exponentials(width: int, dtype: str, in_order: bool) -> None:
    code = nvcc.machine_code(FOLDER / f"attention_backward_{width}.cu", "90a")[
        backward_kernel(dtype, width, False, in_order)
    ]
    most, products, exponentials, hidden = BACKWARD[width]
    loops = [loop for loop in product_loops(code) if loop.products == products]
    loop = min(loops, key=lambda loop: loop.instructions)
    print(loop)
    assert loop.exponentials == exponentials
    assert loop.hidden >= hidden
    assert loop.instructions <= most[in_order]


@needs_nvcc
@pytest.mark.parametrize("source", nvcc.HOPPER, ids=lambda p: p.stem)
def test_no_loop_uses_memory_of_a_thread(source: Path) -> None:
    """The loop over tiles of rows may read and write an allowed number of its stack; that of a step never does."""
    code = nvcc.machine_code(source, "90a")
    loops = {name: product_loops(text) for name, text in code.items()}
    assert any(loops.values()) or source.stem == "backward_rows"  # which multiplies no matrices
    for name, several in loops.items():
        assert [x for x in several if x.local > nvcc.STACK.get(name, 0) // 4] == []
        assert [x for x in several[:3] if x.local] == []


SERIALISED = """
#include "{header}"
using namespace foundry::cuda::hopper;
__global__ void __launch_bounds__(128) too_early(float* out, const uint64_t* m, int n) {{
  float d[32] = {{}};
  for (int i = 0; i < n; ++i) {{
    wgmma_fence();
    Wgmma<64>::shared<__half, false, false>(d, m[0], m[1], true);
    wgmma_commit();
    {use}
    wgmma_wait<0>();
    settle(d);
  }}
  for (int i = 0; i < 32; ++i) out[threadIdx.x * 32 + i] = d[i];
}}
"""


@needs_nvcc
@pytest.mark.parametrize(("use", "problem"), [("", ""), ("d[3] += 1.f;", "wgmma|warpgroup")], ids=["intact", "broken"])
def test_products_that_ptxas_orders_itself_are_found(
    use: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result that is used before the wait for it."""
    monkeypatch.setattr(nvcc, "REPORTS", tmp_path)
    source = tmp_path / "wgmma.cu"
    source.write_text(SERIALISED.format(header=FOLDER / "products.cuh", use=use))
    (kernel,) = nvcc.compile_kernels(source, "90a")
    if not problem:
        assert kernel.problem == ""
        return
    assert any(word in kernel.problem for word in problem.split("|")), kernel


LOOP = """
.L_x_1:
        /*0000*/                   HGMMA.64x128x16.F32.BF16 R24, R184, gdesc[UR8], R24, gsb0 ;
.L_x_2:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R12+URZ], R9 ;
        /*0020*/               @P0 BRA `(.L_x_2) ;
        /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0040*/                   FADD R1, R2, R3 ;
        /*0050*/                   MUFU.EX2 R1, R1 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/               @P1 BRA `(.L_x_1) ;
"""


def test_steps_are_counted() -> None:
    """The loop that waits for a barrier is no part of the one around it."""
    assert product_loops(LOOP) == [Loop(6, 1, 1, 1, ((2, 1),), 0)]
    exponential = next(line for line in LOOP.splitlines() if "MUFU" in line)
    wait = next(line for line in LOOP.splitlines() if "0x0 " in line)
    moved = LOOP.replace(exponential + "\n", "").replace(wait, wait + "\n" + exponential)
    assert product_loops(moved) == [Loop(6, 1, 1, 0, ((1, 0),), 0)]
