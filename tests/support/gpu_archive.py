"""The archive that `make gpu-cache` makes and `make gpu-check` uses: Triton's kernels, the extension for one GPU, and
the samples of Hopper's instructions. Only the standard library is needed, and Triton by `made_with`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import sysconfig
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: The archive, and the folder with its contents, which is Triton's cache.
FOLDER = ROOT / "build" / "gpu-cache"
ARCHIVE = FOLDER.with_name(f"{FOLDER.name}.tar.xz")
MANIFEST, INDEX = "manifest.json", "__grp__"
#: Its folder of what nvcc compiles: the extension, whose name has the Python version and the platform, and the samples.
COMPILED = "compiled"
EXTENSION = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def digest(*parts: str) -> str:
    """Returns a digest of the sources in these files and folders."""
    found = hashlib.sha256()
    for part in parts:
        for path in sorted((ROOT / part).rglob("*")) if (ROOT / part).is_dir() else [ROOT / part]:
            if path.suffix in (".py", ".cpp", ".cu", ".h", ".cuh"):
                found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def compiled_sources() -> str:
    """Returns a digest of what nvcc compiles."""
    return digest("csrc", "build_extension.py", "tests/support/cuda_on_cpu")


def samples() -> Path:
    """The file in `FOLDER` with the samples of Hopper's instructions, compiled from these sources."""
    return FOLDER / COMPILED / f"hopper_samples.{compiled_sources()}.so"


def why_not_writable(folder: Path) -> str | None:
    """Returns the reason why the folder (which is created if needed) is not writable, or None."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        return f"{folder} cannot be written to ({error})"
    return None


def made_with() -> dict[str, str]:
    """Returns the properties that must be equal on both machines so that kernels are found."""
    import triton
    from triton.runtime.cache import triton_key

    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"triton": triton.__version__, "python": python, "key": triton_key()}


def why_it_would_miss(about: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Returns the reason why an archive's kernels would not be found `here` (see `made_with`; "arch" is the GPU's), or
    None."""
    for name in ("arch", "triton", "python"):
        if about.get(name) != here[name]:
            return f"it was made for {name} {about.get(name)}, and here is {here[name]}"
    return None if about.get("key") == here["key"] else "it was made with another build of the same release of Triton"


def pack(folder: Path, archive: Path, about: dict[str, Any]) -> None:
    """Packs the files of Triton's cache in `folder` that launches need, what nvcc compiled, and `about`."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    about_file = folder / MANIFEST
    about_file.write_text(json.dumps(about))
    partial = archive.with_name(archive.name + ".partial")
    with tarfile.open(partial, "w:xz", preset=6) as tar:
        # Sorted by name, because variants of a kernel compress well next to each other.
        for path in [about_file, *sorted(folder.glob("*/*"), key=lambda path: (path.suffix, path.name, path))]:
            if path.suffix in (".json", ".cubin", ".so") and not path.name.startswith(INDEX):
                tar.add(path, str(path.relative_to(folder)))
    partial.replace(archive)


def unpack(archive: Path, folder: Path) -> dict[str, Any]:
    """Unpacks the archive into `folder`, for TRITON_CACHE_DIR. Returns its `about`.

    Raises:
        ValueError: it is damaged, or not such an archive.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        about = json.loads((folder / MANIFEST).read_text())
    except (OSError, EOFError, tarfile.TarError, ValueError) as error:
        raise ValueError(f"{archive} is not a cache that `make gpu-cache` made, or is damaged: {error}") from None
    for described in folder.glob("*/*.json"):
        if not described.name.startswith(INDEX):
            code = described.with_suffix(".cubin")
            paths = {path.name: str(path.resolve()) for path in (described, code) if path.exists()}
            (described.parent / f"{INDEX}{described.name}").write_text(json.dumps({"child_paths": paths}))
    return dict(about)


def place_extension(folder: Path, about: dict[str, Any]) -> str:
    """Puts the unpacked extension into the package, if it is of these sources and for this Python; says so, or why not.

    One that another torch was built for does not load."""
    extension = folder / COMPILED / EXTENSION
    if not extension.exists():
        found = ", ".join(path.name for path in sorted((folder / COMPILED).glob("_C*"))) or "none"
        return f"no extension {EXTENSION} was brought along ({found})"
    if about.get("sources") != compiled_sources():
        return "the extension that was brought along is of other sources"
    shutil.copyfile(extension, ROOT / "foundry_kernels" / EXTENSION)
    return f"the extension was brought along, for torch {about.get('torch')}"
