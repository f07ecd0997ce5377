"""The Gluon forward of attention, whose source runs here in an emulation of a Hopper GPU's primitives: its results, and
that what would be wrong with its barriers is reported."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_inputs import plain_options
from gluon_cases import case, hold
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels._triton import devices
from foundry_kernels.testing import Expected

if _triton.MISSING is None:
    from foundry_kernels.ops.flash_attention.triton import gluon_launch
    from foundry_kernels.ops.flash_attention.triton.problem import _problem

    if gluon_launch.MISSING is None:
        from foundry_kernels.ops.flash_attention.triton import gluon_forward

pytestmark = pytest.mark.skipif(
    _triton.MISSING is not None or gluon_launch.MISSING is not None,
    reason=str(_triton.MISSING or gluon_launch.MISSING),
)
TILES = {"BLOCK_M": 16, "BLOCK_N": 16, "STAGES": 2, "num_warps": 4}


@pytest.fixture
def hopper() -> Iterator[None]:
    """Launches are chosen as on compute capability 9.0."""
    before = devices._RECORDED
    devices.record_for(90)
    yield
    devices.record_for(before)


class Emulator:
    """Stands in for the kernel: runs what the launcher launches, in the interleavings of a seed."""

    def __init__(self, module: Any, seed: int, programs: list[int] | None = None) -> None:
        from gluon_emulation import emulated, stand_ins

        self.kernel, self.seed, self.programs = module.flash_attention_fwd_gluon_kernel, seed, programs
        self.function = emulated(self.kernel, stand_ins(module.gl))
        self.worlds: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, num_warps: int, enable_fp_fusion: bool, **constants: Any) -> None:
            from gluon_emulation import Pointer
            from gluon_emulation import launch as emulate

            given = dict(zip(self.kernel.arg_names, args, strict=False)) | constants
            for name, x in given.items():
                if hasattr(x, "block_shape"):
                    x.dtype = getattr(gluon_launch.gl, str(x.base.dtype).removeprefix("torch."))
                    x.written = torch.zeros(x.base.untyped_storage().nbytes() // x.base.element_size())
                elif isinstance(x, Tensor):
                    x.written = torch.zeros(x.shape)
                    given[name] = Pointer(x)
            assert num_warps == 4
            self.worlds = emulate(self.function, grid[0], given, self.seed, self.programs)
            if self.programs is None:
                written = given["out_desc"].written
                assert int(written.sum()) == given["out_desc"].base.numel(), "an element of out"
                assert written.max() == 1
                assert given["lse_ptr"] is None or (given["lse_ptr"].tensor.written == 1).all(), "an element of lse"

        return launch


def attend(
    emulator: Emulator, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], **row: Any
) -> tuple[Tensor, Tensor]:
    plan = gluon_launch.plan(problem(q, k, v, **options), tuple((TILES | row).items()))
    out, lse = torch.empty_like(q), torch.full(q.shape[:3], torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gluon_launch, "flash_attention_fwd_gluon_kernel", emulator)
        gluon_launch.launch_gluon(plan, q, k, v, out, lse)
    return out, lse


def problem(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
    right, scale = 0 if given.get("causal") else None, given.get("scale") or q.shape[3] ** -0.5
    bottom_right = given.get("align") != "top_left"
    options = plain_options(
        q.shape[2], k.shape[2], scale, window_left=given.get("left"), window_right=right, softcap=given.get("softcap"),
        alibi_slopes=given.get("alibi_slopes"), bottom_right=bottom_right, return_lse=True,
    )  # fmt: skip
    return _problem(q, k, v, options)


HARD = {
    "one": case(1, (1, 1), (1, 1), causal=True),
    "one-query": case(1, (2, 1), (1, 67), causal=True),
    "one-key": case(1, (2, 2), (37, 1)),
    "primes": case(2, (4, 1), (61, 53), causal=True),  # the first queries see no key
    "more-keys": case(1, (4, 1), (31, 97), causal=True),
    "top-left": case(1, (2, 2), (33, 80), causal=True, align="top_left"),
    "top-left-more-queries": case(1, (1, 1), (64, 17), causal=True, align="top_left"),
    "powers": case(1, (2, 1), (64, 64), causal=True),
    "powers-plus-one": case(1, (2, 1), (65, 129), causal=True, scale=0.3),
    "powers-minus-one": case(1, (2, 1), (31, 127), layout="swapped"),
    "wide": case(1, (2, 1), (33, 49), 128, causal=True),
    "large-scores": case(1, (2, 1), (32, 81), std=8.0),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", HARD)
@pytest.mark.usefixtures("hopper")
def test_results(name: str, dtype: torch.dtype) -> None:
    """Results obey the policy of every kernel. Each program runs in an interleaving of its own."""
    expected = Expected.of(fk.OPS["flash_attention"], HARD[name], dtype)
    args = {n: x.detach() for n, x in expected.args.items() if x is not None}
    options = {n: x for n, x in HARD[name].options.items() if n != "return_lse"}
    stages = 2 + (dtype == torch.float16)
    hold(expected, attend(Emulator(gluon_forward, 0), **args, options=options, STAGES=stages))


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.usefixtures("hopper")
def test_rows_of_the_table(width: int) -> None:
    """The tiles that a GPU would be given: two programs of each head, of up to 5 tiles of keys."""
    tiles = dict(zip(("BLOCK_M", "BLOCK_N", "STAGES"), gluon_launch._TILES[width], strict=True))
    wanted = case(1, (2, 1), (150, 300), width, causal=True)
    expected = Expected.of(fk.OPS["flash_attention"], wanted, torch.bfloat16)
    args = {n: x.detach() for n, x in expected.args.items() if x is not None}
    hold(expected, attend(Emulator(gluon_forward, 1), **args, options={"causal": True}, **tiles))


#: Two programs with 7 tiles of keys at most, 3 of which need a mask for some of the queries.
SMALL = {"q": (1, 1, 33, 64), "k": (1, 1, 107, 64), "v": (1, 1, 107, 64)}


def small() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    return {n: torch.randn(shape, generator=g).bfloat16() for n, shape in SMALL.items()} | {"options": {"causal": True}}


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.usefixtures("hopper")
def test_every_interleaving_gives_the_same_bits(stages: int) -> None:
    found, orders = [], set()
    for seed in range(12):
        emulator = Emulator(gluon_forward, seed)
        found.append(attend(emulator, **small(), STAGES=stages))
        orders.add(str([world.order for world in emulator.worlds]))
    assert len(orders) == 12
    for out, lse in found:
        assert torch.equal(out, found[0][0])
        assert torch.equal(lse, found[0][1])


# --- planted errors ---------------------------------------------------------------------------------------------------

UNKNOWN, OVERWRITES, DEADLOCK = "which nothing has written|is known to have arrived", "which may still be", "deadlock: "
WAIT = "    mbarrier.wait(tiles.ready.index(i % form.STAGES), (i // form.STAGES) & 1)\n"
FREE = "    mbarrier.wait(tiles.free.index(at), ((i // form.STAGES) & 1) ^ 1)\n"
EXPECT = "    mbarrier.expect(tiles.ready.index(at), form.BLOCK_N * form.D * 2)\n"
KEYS_FREE = "    mbarrier.arrive(given.k.free.index((i + 1) % form.STAGES), count=1)\n"
VALUES_FREE = "    mbarrier.arrive(given.v.free.index((i - 1) % form.STAGES), count=1)\n"
BOTH = "    b_s, b_acc = hopper.warpgroup_mma_wait(0, deps=[t_s, t_acc])\n"
SOFTMAX = "_softmax(state.s, state.m, state.l, given.stop, key, given.scale, MASKED, form)\n"
FIRST_WAIT = "    b_s = hopper.warpgroup_mma_wait(0, deps=[t_s])\n"
FIRST_FREE = "    mbarrier.arrive(k.free.index(0), count=1)\n"

#: What is edited, into what, and what the emulation must say of it.
ERRORS: dict[str, tuple[str, str, str]] = {
    "no wait for a tile": (WAIT, "    pass\n", UNKNOWN),
    "no wait for the queries": ("    mbarrier.wait(q.ready.index(WHO), 0)\n", "", UNKNOWN),
    "no wait for a free buffer": (FREE, "", f"{OVERWRITES}|more arrivals"),
    "phase of a tile": (WAIT, WAIT.replace("& 1", "& 1 ^ 1"), f"{UNKNOWN}|{DEADLOCK}"),
    "phase that never changes": (
        WAIT, WAIT.replace("(i // form.STAGES) & 1", "0"), f"{UNKNOWN}|{OVERWRITES}|{DEADLOCK}"
    ),
    "phase of a free buffer": (FREE, FREE.replace(" ^ 1)", ")"), DEADLOCK),
    "another buffer's wait": (WAIT, WAIT.replace("i % form", "(i + 1) % form"), f"{UNKNOWN}|{DEADLOCK}"),
    "freed before the wait": (FIRST_WAIT + FIRST_FREE, FIRST_FREE + FIRST_WAIT, OVERWRITES),
    "values freed before the wait": (
        BOTH + KEYS_FREE + VALUES_FREE, VALUES_FREE + BOTH + KEYS_FREE, OVERWRITES
    ),
    "never freed": (KEYS_FREE, "", DEADLOCK),
    "another buffer freed": (KEYS_FREE, KEYS_FREE.replace("i + 1", "i"), f"{OVERWRITES}|more arrivals|{DEADLOCK}"),
    "freed twice": (VALUES_FREE, VALUES_FREE * 2, f"{OVERWRITES}|more arrivals|one too many|{DEADLOCK}"),
    "freed by one of two": (
        "mbarrier.init(k_free.index(stage), count=CONSUMERS)", "mbarrier.init(k_free.index(stage), count=1)",
        f"{OVERWRITES}|more arrivals|{DEADLOCK}",
    ),
    "half of the bytes expected": (EXPECT, EXPECT.replace(" * 2", ""), f"{UNKNOWN}|{DEADLOCK}"),
    "too many bytes expected": (EXPECT, EXPECT.replace(" * 2", " * 4"), DEADLOCK),
    "nothing expected": (EXPECT, "", DEADLOCK),
    "waits for one of two products": (BOTH, BOTH.replace("wait(0", "wait(1"), "still under way"),
    "scores used before the wait": (SOFTMAX, SOFTMAX.replace("state.s", "t_s"), "used before"),
    "sums used before the wait": (
        BOTH, BOTH.replace("b_s, b_acc =", "b_s, _ =") + "    b_acc = t_acc\n", "used before"
    ),
    "no fence after initializing": (
        "    hopper.fence_async_shared()  #", "    #", "no fence since it was initialized"
    ),
    "no fence": ("    hopper.fence_async_shared()\n    copy_out", "    copy_out", "without a fence"),
    "no wait for the store": ("    tma.store_wait(0)\n", "", "ends without a wait"),
    "one tile too few": ("in range(n_tiles):", "in range(n_tiles - 1):", DEADLOCK),
    "one tile too many": ("in range(n_tiles):", "in range(n_tiles + 1):", "nobody has read|being copied"),
    "the other's queries": ("own = q.mem.index(WHO)", "own = q.mem.index(1 - WHO)", UNKNOWN),
    "not initialized": ("        mbarrier.init(v_ready.index(stage), count=1)\n", "", "not initialized"),
    "rows of the other consumer": ("n, head, at, row + BLOCK_M,", "n, head, at, row,", "an element of out"),
    "lse beyond the last row": ("mask=rows < tokens_q)", "mask=rows >= 0)", "a store to elements"),
    "group of heads": ("kv_head = head // group", "kv_head = head + 1", "coordinate 1 of 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.usefixtures("hopper")
def test_errors_are_reported(name: str, tmp_path: Path) -> None:
    """Faults show in a few interleavings at most; races whether or not the interleaving shows them."""
    edited, replacement, expected = ERRORS[name]
    source = Path(gluon_forward.__file__).read_text()
    assert source.count(edited) == 1, "the kernel was changed: plant the error anew"
    wrong = module_of(source.replace(edited, replacement), tmp_path)
    reports = []
    for seed in range(4):
        try:
            attend(Emulator(wrong, seed), **small())
        except AssertionError as report:
            reports.append(str(report))
    assert reports, "not reported"
    assert all(re.search(expected, report) for report in reports), reports


def module_of(source: str, folder: Path) -> Any:
    file = folder / "edited.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location("edited", file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
