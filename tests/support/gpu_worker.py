"""A process of `make gpu-check`, which runs checks and comparisons on the GPU, one after another. With `--stub` the CPU
and small sizes take the GPU's place; with `--sanitize` it has only the checks for compute-sanitizer."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
STUB = "--stub" in sys.argv
if not STUB:
    os.environ.pop("TRITON_INTERPRET", None)
os.environ["FOUNDRY_KERNELS_TUNING"] = "off"

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
from foundry_kernels.testing import Arg, Case, make_cotangents, run  # noqa: E402
from foundry_kernels.tools.check import numel  # noqa: E402
from foundry_kernels.tools.environment import versions  # noqa: E402

CARD = gpu_shapes.Stub() if STUB else gpu_shapes.Card()
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


def parity_of(hopper: bool) -> Checks:
    """The cases of the parity suite on this device. Those that together cover every choice come first, attention's
    before others; of the kernels for compute capability 9.0, or of all others."""
    found = []
    for row in table.hopper_rows() if hopper and not STUB else table.rows():
        if row.device != CARD.device or row.hopper != (hopper and not STUB):
            continue
        telling = importlib.import_module("slow").telling(row)
        for dtype in row.dtypes:
            for case in row.cases:
                if row.op.cases.why_not(case, row.backend, row.device, dtype) is None:
                    place = (case.id not in telling[dtype], not row.op.name.startswith("flash_attention"))
                    found.append((place, f"{row.id}-{short_dtype(dtype)}-{case.id}", partial(parity, row, dtype, case)))
    found.sort(key=lambda each: each[0])
    return {name: check for _, name, check in (found[:2] if STUB else found)}


def call(op: str, case: Case, backend: str, on_hopper: bool = False) -> None:
    """Forward and backward, without a comparison."""
    before, args = CARD.passes() if on_hopper else (), case.make(torch.bfloat16, CARD.device)
    outputs = run(fk.OPS[op], args, case.options, backend=backend).outputs
    run(fk.OPS[op], args, case.options, make_cotangents(outputs, case.cotangent), backend=backend)
    CARD.synchronize()
    if on_hopper:
        after = CARD.passes()
        assert all(a > b for a, b in zip(after, before, strict=True)), f"passes before {before}, after {after}"


def sanitized() -> Checks:
    """Attention for compute capability 9.0 with more than a tile of queries, then small cases of every kernel."""
    found: Checks = {}
    for width, width_v in ((128, 128), (64, 64), (192, 128), (256, 256)):
        for deterministic in (True, False):
            args = {"q": Arg((1, 2, 136, width)), "k": Arg((1, 1, 200, width)), "v": Arg((1, 1, 200, width_v))}
            case = Case(f"D={width}/{width_v}", args, {"causal": True, "deterministic": deterministic})
            name = f"flash_attention-hopper-{case.id}-{'in order' if deterministic else 'any order'}"
            found[name] = partial(call, "flash_attention", case, "native", True)
    for op in fk.OPS.values():
        for backend in op.backends(CARD.device):
            cases = [case for case in op.cases.CASES[op.name] if 0 < numel(case) < 20_000]
            cases = [case for case in cases if op.cases.why_not(case, backend, CARD.device, torch.bfloat16) is None]
            for case in cases[:: max(1, len(cases) // FEW)] if backend != "reference" else ():
                found[f"{op.name}-{backend}-{case.id}"] = partial(call, op.name, case, backend)
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


def parts() -> dict[str, Checks]:
    if "--sanitize" in sys.argv:
        return {"sanitize": sanitized()}
    shapes: Checks = {shape.name: partial(gpu_shapes.check, shape, CARD) for shape in gpu_shapes.SHAPES}
    return {
        "units": {"samples": units},
        "hopper": parity_of(hopper=True),
        "shapes": dict(list(shapes.items())[:2]) if STUB else shapes,
        "parity": parity_of(hopper=False),
        **{part: comparisons(part) for part in TIMED},
        "model": steps("training"),
        "lora": steps("lora"),
    }


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


def main() -> None:
    known = about()
    checks = {} if "no_gpu" in known else parts()

    def check(name: str) -> Any:
        part, _, rest = name.partition(": ")
        found = checks[part][rest]()
        CARD.synchronize()
        return found

    serve(known | {"parts": {part: list(of) for part, of in checks.items()}}, check, broken)


if __name__ == "__main__":
    main()
