"""A process of `make gpu-check`, which runs checks and comparisons on the GPU, one after another. With `--stub` the CPU
and small sizes take the GPU's place."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
STUB = "--stub" in sys.argv
if not STUB:
    os.environ.pop("TRITON_INTERPRET", None)
os.environ["FOUNDRY_KERNELS_TUNING"] = "off"

import gluon_cases  # noqa: E402
import gpu_archive  # noqa: E402
import gpu_shapes  # noqa: E402
import pytest  # noqa: E402
import table  # noqa: E402
import torch  # noqa: E402
from isolated import serve  # noqa: E402

import foundry_kernels as fk  # noqa: E402
from benchmarks import isa, models, rows, suite, test_model  # noqa: E402
from foundry_kernels._triton import devices  # noqa: E402
from foundry_kernels.core import extension  # noqa: E402
from foundry_kernels.core.registry import short_dtype  # noqa: E402
from foundry_kernels.ops.flash_attention import hopper  # noqa: E402
from foundry_kernels.ops.flash_attention.triton import gluon_launch  # noqa: E402
from foundry_kernels.testing import Arg, Case, Expected, call  # noqa: E402
from foundry_kernels.tools import check  # noqa: E402
from foundry_kernels.tools.environment import versions  # noqa: E402

CARD = gpu_shapes.Stub() if STUB else gpu_shapes.Card()
#: Whether attention's kernels for compute capability 9.0 can run.
HOPPER = STUB or hopper.supports("cuda", torch.bfloat16)
Checks = dict[str, Callable[[], Any]]
#: Of the operations with comparisons the part, the endings of the cases' names, and rows that are left out.
TIMED: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "attention": (("flash_attention",), "causal", ("eager", "torch.compile", "FlexAttention")),
    "losses": (("linear_cross_entropy", "cross_entropy", "linear_kl_div", "linear_log_probs"), "", ()),
    "delta": (("gated_delta_rule",), "linear", ()),
}
#: The number of small cases of each kernel under compute-sanitizer.
FEW = 2


# --- checks -----------------------------------------------------------------------------------------------------------


def units() -> None:
    """Samples of the instructions of compute capability 9.0."""
    chosen = ["--collect-only"] if STUB else ["-k", "on_gpu"]
    path = str(ROOT / "tests" / "proof" / "cuda" / "test_hopper_units.py")
    code = pytest.main([path, *chosen, "-x", "-q", "-p", "no:cacheprovider"])
    assert code == 0, f"pytest ended with {code!r}; see the log"


def parity(row: table.Row, dtype: torch.dtype, case: Case) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory has NaN
    try:
        with row.active():
            importlib.import_module("tests.proof.test_parity").test_parity(row, dtype, case)
    finally:
        torch.use_deterministic_algorithms(False)


def parity_of(on_hopper: bool) -> Checks:
    """The cases of the parity suite on this device. Those that together cover every choice come first, attention's
    before others; of the kernels for compute capability 9.0, or of all others."""
    found = []
    for row in table.hopper_rows() if on_hopper and not STUB else table.rows():
        if row.device != CARD.device or row.hopper != (on_hopper and not STUB):
            continue
        telling = importlib.import_module("slow").telling(row)
        for dtype in row.dtypes:
            for case in row.cases:
                if row.op.cases.why_not(case, row.backend, row.device, dtype) is None:
                    place = (case.id not in telling[dtype], not row.op.name.startswith("flash_attention"))
                    found.append((place, f"{row.id}-{short_dtype(dtype)}-{case.id}", partial(parity, row, dtype, case)))
    found.sort(key=lambda each: each[0])
    return {name: run for _, name, run in (found[:2] if STUB else found)}


def gluon() -> Checks:
    """The Gluon kernel of attention's forward pass: it runs, and has the same bits each time."""
    cases = (
        gluon_cases.case(2, (8, 2), (512, 512), 128, layout="swapped", causal=True),
        gluon_cases.case(2, (8, 2), (512, 512), 64, layout="swapped"),
        gluon_cases.case(1, (4, 1), (193, 321), 64, causal=True),
        gluon_cases.case(1, (4, 4), (300, 131), 128, causal=True),
        gluon_cases.case(1, (4, 4), (300, 131), 128, causal=True, align="top_left"),
        gluon_cases.case(1, (2, 2), (129, 7), 64),
        gluon_cases.case(1, (2, 1), (1025, 4099), 128, causal=True),
    )

    def hold(case: Case, dtype: torch.dtype) -> None:
        expected = Expected.of(gpu_shapes.OP, case, dtype, CARD.device)
        with torch.no_grad(), mock.patch.object(gluon_launch, "launch_gluon", wraps=gluon_launch.launch_gluon) as made:
            results = [call(gpu_shapes.OP, expected.args, case.options, backend="triton") for _ in range(20)]
        assert STUB or made.call_count == 20, f"{made.call_count} of 20 launches"
        gluon_cases.hold(expected, results[0])
        assert all(all(map(torch.equal, each, results[0])) for each in results), "other bits"

    dtypes = (torch.bfloat16, torch.float16)
    found: Checks = {f"{d}-{case.id}-{i}": partial(hold, case, d) for d in dtypes for i, case in enumerate(cases)}
    return dict([*found.items()][5:6]) if STUB else found


def streams() -> Checks:
    """Each kernel in a CUDA graph, on a stream that is not the default, and on a GPU that is not the current one; and
    more than 2^31 elements."""
    found: Checks = {}
    for row in table.rows():
        if row.device == "cuda":
            case = row.small_cases[0]
            found[f"{row.id} graph"] = partial(check.cuda_graph, row.op, row.backend, case)
            found[f"{row.id} stream"] = partial(check.side_stream, row.op, row.backend, case)
            if torch.cuda.device_count() > 1:
                found[f"{row.id} device"] = partial(check.second_device, row.op, row.backend, case)
            if row.op.name == "rms_norm":  # for all
                found[f"{row.id} large"] = partial(large, row.backend)
    return {"none on a CPU": lambda: None} if STUB else found


def large(backend: str) -> None:
    if torch.cuda.mem_get_info()[0] < 30e9:
        return
    x = torch.zeros(2**19 + 3, 4096, dtype=torch.bfloat16, device="cuda")
    x[-2:] = torch.randn(2, 4096, device="cuda").bfloat16()
    results = []
    for rows_of in (x, x[-2:].clone()):
        y = fk.rms_norm(rows_of.requires_grad_(), backend=backend)
        results.append((y[-2:], torch.autograd.grad(y, rows_of, torch.ones_like(y))[0][-2:]))
    assert all(map(torch.equal, *results))


def forward_and_backward(op: str, case: Case, backend: str, on_hopper: bool = False) -> None:
    """Forward and backward, without a comparison."""
    before = CARD.passes() if on_hopper else ()
    with fk.batch_invariant() if on_hopper else nullcontext():
        check.forward_and_backward(fk.OPS[op], backend, case.make(torch.bfloat16, CARD.device), case)
    CARD.synchronize()
    if on_hopper:
        gpu_shapes.moved(before, CARD)


def sanitized() -> Checks:
    """Attention for compute capability 9.0 with more than a tile of queries, then small cases of every kernel."""
    found: Checks = {}
    for width, width_v in ((128, 128), (64, 64), (192, 128), (256, 256)) if HOPPER else ():
        for deterministic in (True, False):
            args = {"q": Arg((1, 2, 136, width)), "k": Arg((1, 1, 200, width)), "v": Arg((1, 1, 200, width_v))}
            case = Case(f"D={width}/{width_v}", args, {"causal": True, "deterministic": deterministic})
            name = f"flash_attention-hopper-{case.id}-{'in order' if deterministic else 'any order'}"
            found[name] = partial(forward_and_backward, "flash_attention", case, "native", True)
    for op in fk.OPS.values():
        for backend in op.backends(CARD.device):
            cases = [case for case in op.cases.CASES[op.name] if 0 < check.numel(case) < 20_000]
            cases = [case for case in cases if op.cases.why_not(case, backend, CARD.device, torch.bfloat16) is None]
            for case in cases[:: max(1, len(cases) // FEW)] if backend != "reference" else ():
                found[f"{op.name}-{backend}-{case.id}"] = partial(forward_and_backward, op.name, case, backend)
    return dict(list(found.items())[:2]) if STUB else found


# --- times ------------------------------------------------------------------------------------------------------------


def compared(group: suite.Group, left_out: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of a comparison."""
    names = ("native",) if STUB else tuple(name for name in group.chosen(False) if name not in left_out)
    quick: Any = {"effort": (0.0, 1), "least": 2, "checked": False} if STUB else {}
    measured = rows.Measured(group, names=names, **quick)
    return [measured.row(name) for name in names]


def comparisons(part: str) -> Checks:
    ops, ending, left_out = TIMED[part]
    groups = [g for g in suite.groups(False) if g.op.name in ops and g.case.id.endswith(ending)]
    if part == "attention" and not STUB:
        more = (replace(groups[0], case=case) for case in gpu_shapes.TIMED)
        groups += [replace(g, direction=direction) for g in more for direction in ("forward", "backward")]
    groups.sort(key=lambda g: (ops.index(g.op.name), "D=128" not in g.case.id))
    if STUB:
        groups = sorted(groups, key=lambda g: g.size)[:1]
    return {g.id: partial(compared, g, left_out) for g in groups}


@functools.cache
def alone(group: models.ModelGroup) -> test_model._Alone:
    return test_model._Alone(group)


def step(group: models.ModelGroup, name: str) -> list[dict[str, Any]]:
    return [alone(group).row(name)]


def steps(family: str) -> Checks:
    """A training step of each form of a model, each its own check. Compiled forms come last."""
    if STUB:
        chosen = [models.ModelGroup(family, models.TINY, "step", torch.float32)]
    else:
        chosen = [g for g in models.model_groups(False) if g.family == family]
    return {f"{g.id}-{n}": partial(step, g, n) for g in chosen for n in (g.names[:3] if STUB else g.names)}


# --- the process ------------------------------------------------------------------------------------------------------


@functools.cache
def checks_of(part: str) -> Checks:
    if part in TIMED:
        return comparisons(part)
    if part in ("units", "shapes", "gluon") and not HOPPER:
        return {}
    if part == "shapes":
        shapes = gpu_shapes.shapes(CARD)
        return {name: partial(gpu_shapes.hold, case, CARD) for name, case in [*shapes.items()][: 2 if STUB else None]}
    makers: dict[str, Callable[[], Checks]] = {
        "units": lambda: {"samples": units},
        "hopper": partial(parity_of, True),
        "gluon": gluon,
        "streams": streams,
        "sanitize": sanitized,
        "parity": partial(parity_of, False),
        "model": partial(steps, "training"),
        "lora": partial(steps, "lora"),
    }
    return makers[part]()


def about() -> dict[str, Any]:
    """What the parent process asks before it begins: the GPU, the extension and the versions."""
    if not STUB and (reason := devices.why_no_gpu()) is not None:
        return {"no_gpu": reason}
    found: dict[str, Any] = {
        "gpu": "stub" if STUB else torch.cuda.get_device_name(),
        "capability": "9.0" if STUB else ".".join(map(str, torch.cuda.get_device_capability())),
        "extension": extension.build_info() | {"missing": extension.MISSING},
        "isa": isa.found().kept(),
        "environment": dict(line.strip().split(None, 1) for line in versions()),
    }
    return found if STUB else found | {"made_with": gpu_archive.made_with()}


def broken() -> bool:
    """Whether no more can run on the GPU in this process, as after an access to memory that is not there."""
    try:
        CARD.synchronize()
    except Exception:
        return True
    return False


def answer(name: str) -> Any:
    """The names of a part's checks, or what one of them returns: "PART" or "PART: NAME"."""
    part, _, rest = name.partition(": ")
    if not rest:
        return list(checks_of(part))
    found = checks_of(part)[rest]()
    CARD.synchronize()
    return found


if __name__ == "__main__":
    serve(about(), answer, broken)
