"""`make test-isa`: what depends on instruction sets, tested as on processors that have fewer of them than this one, or
on which those for products of bfloat16 are slow ("widened").

Our kernels, torch, oneDNN and MKL are held to one set after another, in a fresh process each: they read their switches
when they are first used (`benchmarks/isa.py`). `python tests/support/forced_isa.py avx2 -x` takes that set alone, and
options that it does not know are pytest's.
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

#: Tests of results in which such instructions have a part: of kernels here, of torch's products, or of both.
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
    "tests/ops/test_linear_cross_entropy_vocabulary_blocks.py",
    "tests/ops/flash_attention/test_native.py",
    "tests/ops/test_cross_entropy_native.py",
    "tests/ops/test_rope_native.py",
    "tests/ops/test_grouped_mm.py",
)
#: Of these what runs on the CPU itself in float32 or bfloat16, and does not try all instruction sets of ours by itself.
CHOICE = "not (triton or cuda_on_cpu or compile or every_instruction_set) and (bfloat16 or not float16)"


def to_run(names: Sequence[str], usable: Sequence[str]) -> tuple[list[str], list[str]]:
    """Chooses the instruction sets to hold the tests to, and why not the others; `usable` are the processor's, the
    best one last."""
    chosen, skipped = [], []
    for name in names:
        if name == bfloat16.WIDENED:
            if usable and usable[-1] in bfloat16.INSTRUCTIONS:
                chosen.append(name)
            else:
                skipped.append(f"{name}: skipped, as products of bfloat16 are so here, which `make test` uses")
        elif name not in usable:
            skipped.append(f"{name}: skipped, as this processor or this build of the extension lacks it")
        elif name == usable[-1]:
            skipped.append(f"{name}: skipped, as it is the best that there is here, which `make test` uses")
        else:
            chosen.append(name)
    return chosen, skipped


def run(name: str, arguments: Sequence[str]) -> int:
    """pytest's exit code."""
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
        print(f"held to {name}: {'failed' if code else 'passed'} in {time.monotonic() - began:.0f} s", flush=True)
        failed |= code != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
