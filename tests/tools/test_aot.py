"""Every Triton kernel in every launch configuration, compiled for GPUs that are not here."""

from __future__ import annotations

import re

import pytest
import torch
from compiled import OPS, cost, inspect, needs_triton
from slow import kernels_changed

from foundry_kernels import _triton
from foundry_kernels.__main__ import main
from foundry_kernels.tools.inspect import aot
from foundry_kernels.tools.inspect.sass import inner_loops, loaded_ahead

#: Of causal attention's shortest loops in 16 bits, by kernel and head dimension: the most instructions, 5 % more than
#: when this was written, and the fewest exponentials that a matmul hides.
LOOPS = {
    ("fwd", 64): (352, 27),
    ("fwd", 128): (395, 34),
    ("fwd", 256): (420, 18),
    ("dkdv", 64): (457, 0),
    ("dkdv", 128): (333, 0),
    ("dkdv", 256): (464, 0),
    ("dq", 64): (271, 29),
    ("dq", 128): (315, 26),
    ("dq", 256): (306, 16),
}
#: What `make test` compiles: a rotation; where kernels have changed an activation and a sum too.
FEW = ("rope", *(("bias_gelu", "combine_experts", "rms_norm") if kernels_changed() else ()))


@needs_triton
@pytest.mark.parametrize("op", [pytest.param(o, marks=() if o in FEW else pytest.mark.slow) for o in OPS])
def test_the_timed_shapes_are_within_the_limits(op: str) -> None:
    """And memory-bound kernels have as much in flight to a multiprocessor as memory needs to be busy."""
    code = ("--ptx", "--sass") if op == "rope" else ()
    shown = no_spills_and_within_the_limits(op, 90, "--timed", *code)
    assert (".target sm_90" in shown and "EXIT" in shown) == bool(code)
    found = re.findall(r"^(\w+_kernel) +(\S.*?) bfloat16 .* (\d+) KB in flight", shown, re.M)
    if op in PRODUCTS or _triton.VERSION < (3, 7):  # whose registers are others
        return
    assert found
    for kernel, shape, kilobytes in found:
        assert int(kilobytes) >= LESS_IN_FLIGHT.get((kernel, shape), NEEDED), (kernel, shape)
    for kernel, shape in LESS_IN_FLIGHT:
        here = [int(kilobytes) for *what, kilobytes in found if what == [kernel, shape]]
        assert not here or min(here) < NEEDED, f"{kernel} of {shape} has enough: take it out of the table"


#: Operations that are products of matrices and nothing else: memory is not their limit.
PRODUCTS = (
    "flash_attention",
    "flash_attention_varlen",
    "gated_delta_rule",
    "gated_linear_attention",
    "grouped_mm",
    "lora_linear",
    "ssd",
)
#: By Little's law: KB in flight to each multiprocessor with which an H200 fills its bandwidth; an H100 needs 16.
NEEDED = 25
#: What has fewer, and how many at least: cross-entropy of narrow rows, with label smoothing and with a soft cap; rows
#: that are not aligned; what hardly reads.
LESS_IN_FLIGHT = {
    ("cross_entropy_fwd_kernel", "64x16-32000"): 16,
    ("cross_entropy_fwd_kernel", "8192x32000-mean"): 16,
    ("cross_entropy_fwd_kernel", "8192x32000-none"): 16,
    ("cross_entropy_fwd_kernel", "8192x300-mean"): 7,
    ("cross_entropy_fwd_kernel", "8192x300-none"): 8,
    ("cross_entropy_fwd_kernel", "8192x40-none"): 24,
    ("cross_entropy_bwd_kernel", "8192x40-mean"): 18,
    ("cross_entropy_bwd_kernel", "8192x40-none"): 15,
    ("linear_cross_entropy_fwd_kernel", "64x16-32000"): 16,
    ("linear_cross_entropy_fwd_kernel", "64x16-70000"): 16,
    ("kl_div_kernel", "64x16-32000-capped"): 20,
    ("kl_div_kernel", "64x16-50257-capped-jsd"): 4,
    ("kl_div_kernel", "64x16-50257-forward"): 16,
    ("kl_div_kernel", "64x16-50257-jsd"): 10,
    ("kl_div_kernel", "64x16-50257-reverse"): 16,
    ("kl_div_kernel", "64x16-50257-tvd"): 16,
    ("log_probs_fwd_kernel", "64x16-32000"): 20,
    ("log_probs_fwd_kernel", "64x16-70000"): 22,
    ("combine_experts_rest_kernel", "T=16384 k=2 D=4096-mixtral-8x7b"): 10,  # a byte for each row that it may write
}

#: Their instructions are much those of 8.0: but for attention, whose kernels are close to the limits, a launch that is
#: the same there is compiled for that alone.
UNLIKE = {89: ("--unlike", "80"), 120: ("--unlike", "80")}


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("arch", aot.GPUS)
@pytest.mark.parametrize("op", OPS)
def test_all_shapes_are_within_the_limits(op: str, arch: int) -> None:
    no_spills_and_within_the_limits(op, arch, "--brief", *(() if "attention" in op else UNLIKE.get(arch, ())))


def no_spills_and_within_the_limits(op: str, arch: int, *options: str) -> str:
    done = inspect(op, "--arch", str(arch), *options)
    assert done.returncode == 0, "\n".join(
        line for line in (done.stdout + done.stderr).splitlines() if "PROBLEM" in line or "rror" in line
    )
    assert f"compute capability {arch / 10}" in done.stdout
    found = re.search(r": (\d+) launches$", done.stdout, re.M)
    assert found, done.stdout
    assert done.stdout.count(" registers  0 spilled ") == int(found[1])
    if "--unlike" not in options:  # of which there may be none
        assert int(found[1]) >= 1
        assert "16/" in done.stdout or " 16 B" in done.stdout, "no kernel moves 16 bytes at a time"
    return done.stdout


@needs_triton
def test_rows_for_one_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the place of a config of the table where all that it depends on is the same, and nowhere else."""
    from foundry_kernels.ops.flash_attention.triton import config as table

    def row(*what: object) -> tuple[int, ...]:
        launch = table.config(*what)
        return tuple(launch[k] for k in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"))

    half, single = torch.bfloat16, torch.float32
    asked = [
        (kernel, arch, width, dtype, needs)
        for kernel in ("fwd", "dkdv", "dq")
        for arch in (0, *aot.GPUS)
        for width in (32, 64, 128, 256)
        for dtype in (half, single)
        for needs in (False, True)
    ]
    asked += [
        (kernel, arch, 512, half, n) for kernel in ("fwd", "dk", "dv", "dq") for arch in aot.GPUS for n in (False, True)
    ]
    asked += [(kernel, 90, 64, half, False, True) for kernel in ("fwd", "dkdv", "dq")]  # with masks, biases or dropout
    monkeypatch.setattr(table, "VERSION", (3, 7))
    usual = {what: row(*what) for what in asked}

    def differ(*version: int) -> dict[tuple[object, ...], tuple[int, ...]]:
        monkeypatch.setattr(table, "VERSION", version)
        return {what: row(*what) for what in asked if row(*what) != usual[what]}

    assert differ(3, 8) == {("dq", 90, 512, half, True): (32, 16, 8, 2)}
    assert {arch for _, arch, *_ in differ(3, 9)} == {90}
    assert {arch for _, arch, *_ in differ(3, 6)} == {80, 90}


def shortest_loops(stdout: str) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """Reads what `inspect` prints of causal attention: by kernel and head dimension, of the shortest loop of each
    launch, the instructions and the hidden exponentials."""
    found: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for launch in re.split(r"\n(?=flash_attention_)", stdout):
        made = re.match(
            r"flash_attention_(\w+)_kernel +(?:B=2 H=8 Hk=2 T=512 D=|2x8\.2x512\.512x)(\d+)-causal b", launch
        ) or re.match(  # Gluon's kernel serves the other calls
            r"flash_attention_(fwd)_kernel +2x8\.2x512\.512x(64|128)-batch-invariant b", launch
        )
        loops = re.findall(r"loop of (\d+) instructions: .* (\d+) exponentials are hidden", launch)
        if made and loops:
            shortest = min((int(instructions), int(hidden)) for instructions, hidden in loops)
            found.setdefault((made[1], int(made[2])), []).append(shortest)
    return found


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(not (3, 7) <= _triton.VERSION < (3, 9), reason="other releases of Triton have other configs")
def test_the_loops_of_attention_are_as_short_and_overlap_as_much_as_before() -> None:
    """Tiles without a mask. An edit that loses the overlap, or needs more instructions, fails here without a GPU."""
    found = shortest_loops(inspect("flash_attention", "--arch", "90", "--timed").stdout)
    assert found.keys() >= LOOPS.keys()
    for key, (most, hidden) in LOOPS.items():
        assert max(instructions for instructions, _ in found[key]) <= most, key
        assert min(each for _, each in found[key]) >= hidden, key


@needs_triton
@pytest.mark.slow
def test_decoding_waits_for_memory_alone() -> None:
    """One query: enough bytes in flight for an H200's bandwidth, by Little's law, and a tile of 64 keys, 128 wide, is
    issued by its 4 warps in half of the time in which its 32 KB come: 4.3 TB/s over 132 multiprocessors at 1.65 GHz."""
    done = inspect("flash_attention", "--arch", "90", "--timed")
    launches = re.findall(
        r"flash_attention_decode_kernel 1x8\.2x1\.2048x128-few-queries b.* 4 warps .* (\d+) KB copied ahead .*"
        r"BLOCK_N=64 .*\n +loop of (\d+) instructions",
        done.stdout,
    )
    assert launches, done.stdout
    for kilobytes, instructions in launches:
        assert int(kilobytes) >= 25
        assert int(instructions) <= 0.5 * 32768 / (4.3e12 / 132 / 1.65e9)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("rms_norm", "--arch", "75"), "--arch must be one of 80, 89, 90, 100, 120; got 75"),
        (("rms_norm", "--unlike", "75"), "--unlike must be one of 80, 89, 90, 100, 120; got 75"),
        (("no_such_op",), "invalid choice: 'no_such_op'"),
    ],
)
@needs_triton
def test_bad_arguments(args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["inspect", *args])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


GPU = aot.GPUS[90]


def test_what_must_not_ship_is_named() -> None:
    assert cost().problems(GPU) == []
    assert "spilled" in cost(stack=8).problems(GPU)[0]
    assert "shared memory" in cost(shared=228 << 10).problems(GPU)[0]
    assert cost(shared=120 << 10).problems(GPU) == []
    assert "shared memory" in cost(shared=120 << 10).problems(aot.GPUS[89])[0]
    assert "do not fit" in cost(registers=128, warps=32).problems(GPU)[0]
    assert "wgmma" in cost(matrix="missing").problems(GPU)[0]


def test_bytes_that_are_copied_ahead() -> None:
    copies = {"ptx": "cp.async.cg.shared.global", "shared": 32 << 10, "warps": 16}
    assert cost(**copies).copied_ahead(GPU) == 64 << 10, "of two programs"
    assert cost(**copies | {"registers": 65}).copied_ahead(GPU) == 32 << 10
    assert cost(**copies | {"ptx": "ld.global"}).copied_ahead(GPU) == 0


def code(*body: str) -> str:
    return "\n".join(f"        /*{16 * i:04x}*/    {text} ;    /* 0x0 */" for i, text in enumerate(body))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (("LDG.E.128 R4, [R2.64]", "LDG.E.128 R8, [R2.64+0x10]", "FADD R4, R4, R8", "LDG.E.64 R4, [R2.64]"), 32),
        (("LDG.E.128 R4, [R2.64]", "FADD R0, R7, R1", "LDG.E.128 R8, [R2.64]"), 16),
        (("@P0 LDG.E.U16.CONSTANT R4, [R2.64]", "@!P0 LDG.E R5, [R2.64]"), 6),
        (("LDG.E.64 R2, [R2.64]", "LDG.E.128 R4, [R2.64]"), 16),  # an address is a use
        (("LDG.E.128 R4, [R2.64]", "STG.E.128 [R2.64], R4", "LDG.E.128 R4, [R2.64]"), 16),
        (("LDG.E.64 R6, [R2.64]", "STG.E.128 [R2.64], R4", "LDG.E.128 R8, [R2.64]"), 16),  # of which R6 is a part
        (("LDG.E.128 R4, [R2.64]", "@P0 BRA `(.L_x_1)", "LDG.E.128 R8, [R2.64]"), 32),
        (("LDG.E.128 R4, [R2.64]", "BRA `(.L_x_1)", "LDG.E.64 R8, [R2.64]"), 16),
        (("LDS.128 R4, [R2]", "FADD R4, R4, R5"), 0),
    ],
)
def test_bytes_that_are_loaded_before_any_is_used(body: tuple[str, ...], expected: int) -> None:
    assert loaded_ahead(code(*body)) == expected


def test_occupancy() -> None:
    assert cost(registers=32).occupancy(GPU) == 1.0
    assert cost(registers=128).occupancy(GPU) == 0.25
    assert cost(registers=32, shared=113 << 10).occupancy(GPU) == 2 * 4 / 64
    assert cost(registers=32, warps=32).occupancy(aot.GPUS[89]) == 32 / 48


def loop(*body: str) -> str:
    """Writes a loop as nvdisasm prints it, with an outer loop around it and a loop without products after it."""
    lines = [".L_x_0:", "S2R R0, SR_TID.X ;", ".L_x_1:", *(f"{text} ;" for text in body), "@P0 BRA `(.L_x_1) ;"]
    lines += ["@P1 BRA `(.L_x_0) ;", ".L_x_2:", "FADD R1, R1, R2 ;", "@!P0 BRA `(.L_x_2) ;", "EXIT ;"]
    return "\n".join(x if x.startswith(".") else f"        /*{i:04x}*/    {x}" for i, x in enumerate(lines))


QK, PV, EXP = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4]", "@P2 HGMMA.64x128x16.F32.BF16 R24, R4", "MUFU.EX2 R5, R5"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


@pytest.mark.parametrize(
    ("body", "overlapped", "hidden"),
    [
        ((QK, WAIT, EXP, EXP, PV), 0, 0),
        ((QK, EXP, EXP, WAIT, EXP, PV), 2, 2),
        ((EXP, QK, EXP, WAIT, PV, "WARPGROUP.DEPBAR.LE gsb0, 0x1"), 2, 2),
        ((QK, WAIT, EXP, PV, WAIT), 0, 0),
    ],
    ids=["one-by-one", "ahead", "both", "waits"],
)
def test_what_matmuls_hide(body: tuple[str, ...], overlapped: int, hidden: int) -> None:
    """Over the loop's end too: a product of the round before is waited for in this one."""
    (found,) = inner_loops(loop(*body))
    assert (found.instructions, found.counts["matmul"]) == (len(body) + 1, 2)
    assert found.counts["exponential"] == body.count(EXP)
    assert (found.overlapped, found.hidden) == (overlapped, hidden)
