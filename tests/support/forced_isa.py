"""`make test-isa`: runs the tests that depend on instruction sets as on processors with fewer of them, or with slow
instructions for bfloat16 matmuls ("widened").

This package's kernels, torch, oneDNN and MKL are restricted to one set at a time, in fresh processes, because they read
their switches at first use (`benchmarks/isa.py`). `python tests/support/forced_isa.py avx2 -x` only tests this set;
unknown options are passed to pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import isa  # noqa: E402
from foundry_kernels.core import bfloat16, extension  # noqa: E402

#: Tests whose results depend on such instructions: in this package's kernels, in torch's matmuls, or in both.
FILES = (
    "tests/proof/test_parity.py::test_parity",
    "tests/nn/test_decode.py",
    "tests/models/test_decode_block.py",
    "tests/models/test_decode_block_pages.py",
    "tests/ops/test_decode_linear.py",
    "tests/models/test_generate.py",
    "tests/models/test_model.py",
    "tests/models/test_model_loss.py",
    "tests/nn/test_moe.py",
    "tests/nn/test_products.py",
    "tests/proof/test_precision.py",
    "tests/ops/test_linear_cross_entropy.py",
    "tests/ops/test_linear_cross_entropy_class_blocks.py",
    "tests/ops/flash_attention/test_native.py",
    "tests/ops/test_cross_entropy.py",
    "tests/ops/test_rope_native.py",
    "tests/ops/test_grouped_mm.py",
)
#: Of these, the tests that run natively in float32 or bfloat16, and do not already test all instruction sets.
CHOICE = "not (triton or cuda_on_cpu or compile or every_instruction_set) and (bfloat16 or not float16)"


def to_run(names: Sequence[str], usable: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the instruction sets to test, and the reasons for skipping the others. `usable` are the processor's, the
    best one last."""
    chosen, skipped = [], []
    for name in names:
        if name == bfloat16.WIDENED:
            if usable and usable[-1] in bfloat16.INSTRUCTIONS:
                chosen.append(name)
            else:
                skipped.append(f"{name}: skipped, because `make test` already widens bfloat16 here")
        elif name not in usable:
            skipped.append(f"{name}: skipped, because this processor or this build of the extension lacks it")
        elif name == usable[-1]:
            skipped.append(f"{name}: skipped, because it is the best one here, which `make test` uses")
        else:
            chosen.append(name)
    return chosen, skipped


def run(name: str, arguments: Sequence[str]) -> int:
    """Returns pytest's exit code."""
    environment = os.environ | {"OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "--numprocesses=2", "--dist=worksteal"]
    if name == bfloat16.WIDENED:
        environment[bfloat16.VARIABLE] = name
    else:
        isa.switch(name, environment)
        command.append(f"--held-to={name}")
    command += ["-m", "not slow", "-k", CHOICE, *FILES, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="ISA", help="default: all of avx2, avx512, avx512_bf16, amx_bf16, widened"
    )
    given, arguments = parser.parse_known_args(argv)  # the rest is for pytest
    names = given.names or [*(name for name in isa.SWITCHES if name != "baseline"), bfloat16.WIDENED]
    chosen, skipped = to_run(names, extension.build_info().get("usable_instruction_sets", []))
    print(*skipped, sep="\n", flush=True)
    failed = False
    for name in chosen:
        began = time.monotonic()
        code = run(name, arguments)
        print(f"restricted to {name}: {'failed' if code else 'passed'} in {time.monotonic() - began:.0f} s", flush=True)
        failed |= code != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
