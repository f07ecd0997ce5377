"""`make gpu-check` runs this under compute-sanitizer: small cases of every kernel, forward and backward, without
asserts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import foundry_kernels as fk
from foundry_kernels.testing import Case, make_cotangents, run

#: The number of small cases for each kernel; all cases would take minutes.
FEW = 2


def main() -> None:
    for op in fk.OPS.values():
        for backend in op.backends("cuda"):
            if backend == "reference":
                continue
            small = [case for case in op.cases.CASES[op.name] if 0 < elements(case) < 20_000]
            for case in small[:: max(1, len(small) // FEW)]:
                args = case.make(torch.bfloat16, "cuda")
                outputs = run(op, args, case.options, backend=backend).outputs
                run(op, args, case.options, make_cotangents(outputs, case.cotangent), backend=backend)
    torch.cuda.synchronize()


def elements(case: Case) -> int:
    return sum(torch.Size(a.shape).numel() for a in case.args.values() if a is not None)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="tests/support/gpu_sanitize.py", description=__doc__).parse_args()
    main()
