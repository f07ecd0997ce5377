"""`python -m foundry_kernels hub-layout`: this package as a repository of the Hub's `kernels`, which loads it from a
path.

    FOLDER/build/torch-cuda/__init__.py, metadata.json, foundry_kernels/

The copies hold Python alone: Triton kernels and the reference. A kernel that is loaded so is the module
`foundry_kernels` of its folder, or of the environment if one of the same version is installed there: operators are
registered with PyTorch once in a process, by their names.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import foundry_kernels

BACKENDS = ("cuda", "rocm", "cpu")

#: The module that the loader runs, by which all names of the package are found, and the layers.
LOADED = '''"""foundry_kernels {version}, as the library `kernels` loads it."""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # behind an installed one

import foundry_kernels

if foundry_kernels.__version__ != "{version}":
    raise ImportError(
        f"this kernel is foundry_kernels {version}, the process has {{foundry_kernels.__version__}} from "
        f"{{foundry_kernels.__path__[0]}}: use one of them"
    )

from foundry_kernels.integrations.trainers import hub_layers as layers

__version__ = "{version}"
__all__ = ["layers", *foundry_kernels.__all__]


def __getattr__(name: str) -> Any:
    return getattr(foundry_kernels, name)
'''


def main(argv: list[str]) -> int:
    """Write this package as a kernel repository, which `kernels.get_local_kernel(path)` loads."""
    parser = argparse.ArgumentParser(prog="python -m foundry_kernels hub-layout", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="the folder to write, which must be new or empty")
    parser.add_argument(
        "--backend", nargs="+", choices=BACKENDS, default=["cuda", "cpu"], help="default: cuda cpu; a copy for each"
    )
    options = parser.parse_args(argv)
    if options.folder.exists() and (not options.folder.is_dir() or any(options.folder.iterdir())):
        parser.error(f"folder must be new or empty; got {options.folder}")
    for path in write(options.folder, options.backend):
        print(path)
    return 0


def write(folder: Path, backends: list[str]) -> list[Path]:
    """Writes the repository and returns the folders of its variants."""
    version = foundry_kernels.__version__
    package = Path(foundry_kernels.__path__[0])
    written = []
    for backend in backends:
        variant = folder / "build" / f"torch-{backend}"
        shutil.copytree(package, variant / "foundry_kernels", ignore=_ignored)
        (variant / "__init__.py").write_text(LOADED.format(version=version), encoding="utf-8")
        metadata = {
            "name": "foundry-kernels",
            "id": f"_foundry_kernels_{backend}_{re.sub(r'[^0-9a-z]', '_', version)}",
            "version": 1,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        written.append(variant)
    return written


def _ignored(folder: str, names: list[str]) -> list[str]:
    """What is built for one Python and one PyTorch."""
    return [name for name in names if name == "__pycache__" or name.endswith((".so", ".pyd", ".pyc"))]
