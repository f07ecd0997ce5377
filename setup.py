"""Installs the package with its C++ extension, or says in one line why the extension cannot be built.

FOUNDRY_KERNELS_SKIP_EXTENSION=1 installs without it, with the reference and Triton: the wheel is then for every
platform. build_extension.py compiles the extension.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import setuptools
from setuptools import setup

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))  # pip does not

import bootstrap  # noqa: E402

#: Commands that compile; others, such as sdist, need neither a compiler nor torch.
COMPILING = {"build", "build_ext", "bdist_wheel", "editable_wheel", "install"}


def why_not() -> str | None:
    """What is missing to build the extension."""
    if (problem := bootstrap.missing_for_extension()) is not None:
        return problem
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
        reason = f"torch cannot be imported by {sys.executable} ({bootstrap.last_line(str(error))})"
        return f"{reason}: pip install torch, then install with --no-build-isolation"
    return None


def main() -> None:
    if int(setuptools.__version__.split(".")[0]) < 77:  # older ones reject project.license
        found = f"foundry_kernels needs setuptools 77 or newer, not {setuptools.__version__}"
        sys.exit(f"error: {found}: pip install 'setuptools>=77'")
    if "develop" in sys.argv:  # whose setuptools would start such a pip again, without end
        sys.exit(
            "error: foundry_kernels needs pip 21.3 or newer for an editable installation: pip install --upgrade pip"
        )
    extension: dict[str, Any] = {}
    if bootstrap.wants_extension():
        problem = why_not()
        if problem is None:
            import build_extension

            extension = {
                "ext_modules": [build_extension.extension()],
                "cmdclass": {"build_ext": build_extension.Build},
            }
        elif COMPILING & set(sys.argv):
            sys.exit(f"error: the C++ extension of foundry_kernels cannot be built: {problem}; {bootstrap.WITHOUT}")
    setup(**extension)


if __name__ == "__main__":
    main()
