"""A copy of a process that has imported torch is to a program what a new interpreter is."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import fresh
import pytest


def test_a_program_is_run_as_by_an_interpreter(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv, repr(sys.path[0]), __name__, os.getcwd(), dict(os.environ)); sys.exit(3)"
    done = fresh.python("-c", code, "x", env={"NAME": "value"}, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == f"['-c', 'x'] '' __main__ {tmp_path} {{'NAME': 'value'}}\n"
    (tmp_path / "program.py").write_text("import sys; print(sys.argv, sys.path[0], __name__)")
    assert fresh.python(str(tmp_path / "program.py")).stdout == f"['{tmp_path}/program.py'] {tmp_path} __main__\n"
    assert fresh.python("-m", "program", "x", cwd=tmp_path).stdout.endswith(f"'x'] {tmp_path} __main__\n")


def test_errors_and_signals_end_it_and_not_the_next() -> None:
    done = fresh.python("-c", "print('before'); 1 / 0")
    assert (done.returncode, done.stdout) == (1, "before\n")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    done = fresh.python("-c", "import os; os.kill(os.getpid(), 9)")
    assert done.returncode == -signal.SIGKILL
    assert fresh.python("-c", "print('next')").stdout == "next\n"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is an interpreter")
def test_it_has_imported_torch_and_nothing_of_ours() -> None:
    code = "import sys; print(*(n in sys.modules for n in ('torch', 'triton', 'pytest', 'foundry_kernels')))"
    assert fresh.python("-c", code).stdout == "True False False False\n"
    code = "import os; os.environ['SET'] = 'here'; import torch; torch.set_num_threads(7)"
    assert fresh.python("-c", code).returncode == 0
    code = "import os, torch; print('SET' in os.environ, torch.get_num_threads() == 7)"
    assert fresh.python("-c", code, env=dict(os.environ)).stdout == "False False\n"
