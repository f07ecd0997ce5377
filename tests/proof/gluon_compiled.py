"""The Gluon forward of attention compiled for compute capability 9.0, and what its machine code says.

test_gluon_launch.py runs this in a process of its own, where kernels are not interpreted."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from stub_gpu import StubDriver, stub_gpu, uncompiled

import foundry_kernels as fk
from foundry_kernels.tools.inspect import aot
from foundry_kernels.tools.inspect.sass import Loop, _parse

OP, KERNEL = fk.OPS["flash_attention"], "flash_attention_fwd_gluon_kernel"
#: By head dimension and whether there is a right bound.
CASES = [(64, True), (128, True), (128, False)]
over_cases = pytest.mark.parametrize(("width", "causal"), CASES)
#: The most instructions of a tile without a mask, of one consumer.
MOST_INSTRUCTIONS = {64: 290, 128: 326}


@cache
def launches() -> dict[tuple[int, bool], aot.Launch]:
    made = [launch for launch in aot.record(OP, 90, everything=False) if launch.name == KERNEL]
    found = {}
    for launch in made:
        constants = dict(launch.constants)
        if "bf16" in dict(launch.signature)["q_desc"]:
            found[constants["D"], constants["HAS_RIGHT"]] = launch
    return found


@cache
def compiled(width: int, causal: bool) -> aot.Cost:
    return aot.compile_for(launches()[width, causal], 90)


@cache
def code(width: int, causal: bool) -> tuple[list[str], dict[str, int]]:
    cubin = compiled(width, causal).cubin
    instructions, labels = _parse(aot.run_on_cubin([aot.tool("nvdisasm"), "-c"], cubin))
    return [re.sub(r"^@!?U?P\w+\s+", "", text) for text in instructions], labels


def loops(width: int, causal: bool) -> tuple[list[Loop], list[Loop]]:
    """Each consumer has a loop of tiles with a mask and one of tiles without."""
    found = compiled(width, causal).loops()
    masked = [loop for loop in found if loop.counts.get("select", 0) > 16]
    return masked, [loop for loop in found if loop not in masked]


@over_cases
def test_it_fits(width: int, causal: bool) -> None:
    """No spill; and the registers that the partitions ask for are no more than the program has, or they would wait for
    each other for ever."""
    cost = compiled(width, causal)
    assert cost.problems(aot.GPUS[90]) == []
    assert (cost.registers, cost.stack, cost.warps) == (168, 0, 12)
    assert cost.shared <= 227 << 10
    asked = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", cost.ptx)]
    assert set(asked) == {24, 120, 240, 256}
    both_and_producer, before_and_after = 240 + 240 + 24, 256 + 120 + 120  # of threads, each in groups of four warps
    assert max(both_and_producer, before_and_after) <= 3 * cost.registers


@over_cases
def test_products_are_under_way_during_the_softmax(width: int, causal: bool) -> None:
    """All products of every loop, those of the next scores and those with values, have exponentials between them and
    the wait for them; at 128 wide without a mask these are all exponentials, but for
    the two of a tile by which earlier sums shrink."""
    masked, plain = loops(width, causal)
    assert len(plain) == 2
    assert len(masked) == (2 if causal else 0)
    for loop in masked + plain:
        tiles = 1 if loop in masked else 2
        assert loop.counts["matmul"] == loop.overlapped == tiles * (width // 16 + 4)
        exponentials = loop.counts["exponential"]
        most = exponentials - 2 * tiles
        assert loop.hidden >= (most if width == 128 and loop in plain else 0.6 * exponentials)
        assert not loop.counts.get("local")
    for loop in plain:
        assert loop.instructions <= 2 * MOST_INSTRUCTIONS[width]


def bodies(width: int, causal: bool) -> list[list[str]]:
    """The instructions of each innermost loop that multiplies."""
    instructions, labels = code(width, causal)
    spans = []
    for at, text in enumerate(instructions):
        target = re.search(r"BRA.*`\((\.L_\w+)\)", text)
        if target and labels.get(target[1], at + 1) <= at:
            spans.append((labels[target[1]], at + 1))
    innermost = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    found = [instructions[begin:end] for begin, end in innermost]
    return [body for body in found if any(text.startswith("HGMMA") for text in body)]


KINDS = {
    "S": r"HGMMA\.64x64x16\.\S+ R\d+, gdesc",  # scores: both sides in shared memory
    "V": r"HGMMA\.\S+ R\d+, R\d+, gdesc",  # with values
    "e": r"MUFU\.EX2",
    "w": r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0$",  # for all products
    "?": r"WARPGROUP\.DEPBAR",  # for some
    "a": r"SYNCS\.ARRIVE\.TRANS64\.A1T0",
    "b": r"BAR\.SYNC\.DEFER_BLOCKING 0x\d, 0x80",  # of a consumer's four warps
}


def tiles(body: list[str]) -> list[str]:
    """What a loop does, a letter for each instruction of `KINDS`: of each tile, from behind one wait to the next."""
    kinds = (next((kind for kind, pattern in KINDS.items() if re.match(pattern, text)), "") for text in body)
    *before, after = "".join(kinds).split("w")
    return [after + before[0], *before[1:]]


@over_cases
def test_the_order_of_a_tile(width: int, causal: bool) -> None:
    """The next tile's scores are begun before most of the exponentials, and neither they nor the products with values
    are waited for before these."""
    for body in bodies(width, causal):
        for tile in tiles(body):
            assert "?" not in tile
            assert (tile.count("S"), tile.count("V")) == (width // 16, 4)
            assert tile.rindex("S") < tile.index("V")
            assert tile[tile.rindex("S") :].count("e") >= 17, "of 34"


@over_cases
def test_all_warps_have_read_before_one_thread_says_so(width: int, causal: bool) -> None:
    """One thread arrives for its group of warps: for keys and values, after the wait for the products and a barrier of
    the group."""
    for body in bodies(width, causal):
        for tile in tiles(body):
            assert re.match("[^a]*b[^a]*a[^aSV]*a[^a]*S[^a]*V[^a]*$", tile), tile


@over_cases
def test_tiles_are_copied_by_the_engine(width: int, causal: bool) -> None:
    """Two consumers' queries, keys and values, 64 columns at a time, and what each consumer writes; lse alone goes by
    ordinary stores."""
    instructions, _ = code(width, causal)
    count = {name: sum(text.startswith(name) for text in instructions) for name in ("UTMALDG.4D", "UTMASTG.4D", "LDG")}
    assert count == {"UTMALDG.4D": (2 + 2) * width // 64, "UTMASTG.4D": 2, "LDG": 0}


def test_what_is_launched_is_what_was_compiled() -> None:
    """Triton makes of the arguments of a real launch the very types, constants and attributes that were compiled."""

    def compiled_from(src: Any, target: Any, options: Any) -> Any:
        made.append((src, options))
        return uncompiled(driver, src)

    made: list[Any] = []
    driver = StubDriver()
    import triton

    with pytest.MonkeyPatch.context() as patch, stub_gpu(driver):
        patch.setattr(triton.compiler, "compile", compiled_from)
        q, k, v = (torch.empty(2, h, 512, 64, dtype=torch.bfloat16) for h in (8, 2, 2))
        fk.flash_attention(q, k, v, causal=True, backend="triton")
    ((src, options),) = made
    ahead = aot.source_of(launches()[64, True])
    assert type(src) is type(ahead)
    assert src.fn is ahead.fn
    assert src.signature == ahead.signature
    assert src.constants == ahead.constants
    assert {where: what for where, what in src.attrs.items() if what} == ahead.attrs
    assert options["num_warps"] == 4


def test_inspect_lists_it(capsys: pytest.CaptureFixture[str]) -> None:
    from foundry_kernels.__main__ import main

    assert main(["inspect", "flash_attention", "--arch", "90", "--timed", "--kernel", "gluon"]) == 0
    shown = capsys.readouterr().out
    assert len(re.findall(rf"^{KERNEL} .*168 registers  0 spilled .* 12 warps .*wgmma", shown, re.M)) >= 3
    assert shown.count("exponentials are hidden") >= 10
