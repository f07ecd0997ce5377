"""The tables of docs/dev/performance.md, "On a GPU", from what a script of its own has measured of a commit on an H100:
`python -m benchmarks.measured` prints them. A row of the file is an operation, a direction, a case and a form."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "results" / "h100-81e711d.json"
Row = dict[str, Any]

_ATTENTION = {
    "B4 H32/8 T4096 D128 causal": "D128 T4096 causal",
    "B1 H32/8 T16384 D128 causal": "D128 T16384 causal",
    "B4 H32/8 T4096 D128 full": "D128 T4096 full",
    "B4 H32/8 T4096 D64 causal": "D64 T4096 causal",
    "B4 H16/4 T4096 D256 causal": "D256 16/4 T4096 causal",
}
_FORMS = {
    "triton": "Triton",
    "gluon turns=False": "Gluon",
    "native": "native (mma.sync)",
    "SDPA flash": "SDPA flash",
    "SDPA cuDNN": "SDPA cuDNN",
    "Flex": "FlexAttention",
}
_STEPS = {
    "eager": "transformers, SDPA",
    "compiled": "transformers, `torch.compile`",
    "liger": "Liger 0.8.5",
    "patched": "`fk.patch`",
}
_LOSS = {
    "eager": "eager",
    "compile": "torch.compile",
    "Liger": "Liger",
    "fk chunk_size=tiles": "this package, tiles (the default then)",
    "fk chunk_size=2048": "this package, 2048 rows at a time",
    "fk chunk_size=8192": "this package, all rows",
}
_ROWS = ("rms_norm", "add_rms_norm", "layer_norm", "swiglu", "rope", "bias_gelu")
_PEERS = ("F.rms_norm", "F.layer_norm", "compile", "compile(tanh)", "Liger")


def load() -> list[Row]:
    rows: list[Row] = json.loads(PATH.read_text())["rows"]
    return rows


def tables(rows: list[Row]) -> dict[str, str]:
    """Returns the tables by name."""
    return {
        "model": _table(("", "ms", "peak GB"), [
            (label, f"{r['ms']:.1f}", f"{r['peakMB'] / 1e3:.1f}")
            for form, label in _STEPS.items() for r in _of(rows, op="model", form=form)
        ]),
        "attention": _table(("", *_ATTENTION.values()), [
            (f"{direction}: {label}", *_cells(rows, form, direction))
            for direction in ("fwd", "bwd") for form, label in _FORMS.items()
            if any(c != "–" for c in _cells(rows, form, direction))
        ]),
        "loss": _table(("", "8192 x 4096 x 128256", "peak MB", "8192 x 2048 x 128256", "peak MB"), [
            (label, *_of_loss(rows, form, "8192x4096x128256"), *_of_loss(rows, form, "8192x2048x128256"))
            for form, label in _LOSS.items()
        ]),
        "rows": _table(("", "Triton", "native", "torch", "torch.compile", "Liger"), _row_kernels(rows)),
        "products": _table(("", "Triton", "native", "torch"), [
            (f"grouped_mm {case}, {d}", *(_one(rows, "TFLOP/s", op="grouped_mm", case=case, dir=d, form=f)
                                          for f in ("triton", "native", "torch._grouped_mm")))
            for case in ("E8 16384x4096x14336", "E64 16384x2048x1408") for d in ("fwd", "bwd")
        ]),
        "decode": _table(("µs", "Triton", "native", "SDPA"), [
            (case, *(_one(rows, "ms", 1e3, op="decode", case=case, form=f) for f in ("triton", "native", "SDPA")))
            for case in ("B1 S4096", "B1 S16384", "B16 S4096", "B64 S4096")
        ]),
        "host": _table(("µs", "Triton", "native", "torch"), [
            (name, *(_one(rows, "us", 1, 1, op="host", form=form) for form in forms)) for name, *forms in _HOST
        ]),
    }  # fmt: skip


_HOST = (
    ("rms_norm", "rms_norm triton", "rms_norm native", "F.rms_norm"),
    ("with gradients", "rms_norm triton grad", "rms_norm native grad", "F.rms_norm grad"),
    ("swiglu", "swiglu triton", "swiglu native", "eager swiglu"),
    ("attention", "attention triton", "attention native", "SDPA"),
    ("with gradients", "attention triton grad", "attention native grad", "SDPA grad"),
)


def _of(rows: list[Row], **wanted: str) -> list[Row]:
    return [r for r in rows if all(r.get(k) == v for k, v in wanted.items()) and "error" not in r]


def _one(rows: list[Row], unit: str, factor: float = 1, digits: int = 0, **wanted: str) -> str:
    found = [r[unit] for r in _of(rows, **wanted) if unit in r]
    return f"{found[0] * factor:.{digits}f}" if found else "–"


def _cells(rows: list[Row], form: str, direction: str) -> list[str]:
    op = "gluon" if form.startswith("gluon") else "attention"
    return [_one(rows, "TFLOP/s", op=op, dir=direction, case=case, form=form) for case in _ATTENTION]


def _of_loss(rows: list[Row], form: str, case: str) -> tuple[str, str]:
    op = "linear_cross_entropy" if form in ("compile", "Liger") else "lce"
    ms = _one(rows, "ms", 1, 1, op=op, form=form, case=case)
    return ms, _one(rows, "peakMB", op=op, form=form, case=case)


def _row_kernels(rows: list[Row]) -> list[tuple[str, ...]]:
    made: list[tuple[str, ...]] = []
    for case, op in dict.fromkeys((r["case"], r["op"]) for r in rows if r["op"] in _ROWS):
        each = {
            form: ", ".join(_one(rows, "TB/s", 1, 2, op=op, case=case, dir=d, form=form) for d in ("fwd", "bwd"))
            for form in ("triton", "native", *_PEERS)
        }
        shown = {form: cell if cell != "–, –" else "–" for form, cell in each.items()}
        torch = shown["F.layer_norm" if op == "layer_norm" else "F.rms_norm"]
        compiled = shown["compile(tanh)" if op == "bias_gelu" else "compile"]
        made.append((f"{op} {case}", shown["triton"], shown["native"], torch, compiled, shown["Liger"]))
    return made


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = "|".join("---" for _ in head)
    return "\n".join([f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(line)} |" for line in lines)])


def main() -> None:
    """Print the tables of docs/dev/performance.md that are made from what an H100 measured."""
    print("\n\n".join(f"{name}\n\n{table}" for name, table in tables(load()).items()))


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m benchmarks.measured", description=__doc__).parse_args()
    main()
