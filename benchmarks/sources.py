"""A digest of the sources of each operation's kernels, without comments. Results store it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import foundry_kernels as fk
from foundry_kernels.core.registry import OpSpec

ROOT = Path(__file__).parents[1]
#: Files for tests and benchmarks, which do not affect how an operation runs.
_BESIDE = ("cases.py", "bench.py", "fuzz.py", "sharding.py")
#: By device: names of files for only the other device.
_OTHER = {"cpu": ("triton", "cuda", "hopper"), "cuda": ("cpu",)}
#: Sources of shared headers.
_OF_HEADER = {
    "products.h": ("torch/products_cpu.cpp", "cpu/matmul.cpp", "cpu/decode_linear.cpp"),
    "../cuda/hopper/attention.h": ("cuda/hopper/*.cu",),
}
_COMMENTS = {".py": r'""".*?"""|#[^\n]*'}
_C_COMMENTS = r"//[^\n]*|/\*.*?\*/"


def digests(device: str, root: Path = ROOT) -> dict[str, str]:
    """Returns a hash by operation. Edits of comments, docstrings and blanks do not change it."""
    return {op.name: digest(files(op, device, root), root) for op in fk.OPS.values()}


def digest(paths: list[Path], root: Path = ROOT) -> str:
    found = hashlib.sha256()
    for path in paths:
        comments = re.compile(_COMMENTS.get(path.suffix, _C_COMMENTS), re.DOTALL)
        code = re.sub(r"\s+", " ", comments.sub(" ", path.read_text(encoding="utf-8"))).strip()
        found.update(f"{path.relative_to(root).as_posix()}\n{code}\n".encode())
    return found.hexdigest()[:16]


def files(op: OpSpec, device: str, root: Path = ROOT) -> list[Path]:
    """The operation's folder, the neighbouring folder and modules that it imports; the files of csrc with its name,
    with the names of operations in folders that these folders import, or of operators that they look up; and their
    includes."""
    folder = root / Path(*op.package.split("."))

    def read(folder: Path) -> tuple[list[Path], str, list[str]]:
        """The files of a folder, their text, and the neighbours that they import."""
        paths = [p for p in sorted(folder.rglob("*.py")) if p.name not in _BESIDE]
        text = "\n".join(p.read_text(encoding="utf-8") for p in paths)
        return paths, text, sorted(set(re.findall(r"foundry_kernels\.ops\.(_(?!register)\w+)", text)))

    python, text, neighbours = read(folder)
    for name in neighbours:  # which the engine of several operations adds to
        if (folder.parent / name).is_dir():
            more, of_engine, others = read(folder.parent / name)
            python, text = python + more, text + of_engine
            neighbours += [other for other in others if other not in neighbours]
        else:
            python.append(folder.parent / f"{name}.py")
    imported = set(re.findall(r"foundry_kernels\.ops(?:\.| import )([a-z]\w*)", text)) | {folder.name}
    names = imported | {other.name for other in fk.OPS.values() if other.package.rpartition(".")[2] in imported}
    names |= set(re.findall(r'operator\("(\w+?)_?"\)', text))

    def belongs(path: Path) -> bool:
        parts = path.relative_to(root).with_suffix("").parts
        return not any(part == other or part.endswith(f"_{other}") for part in parts for other in _OTHER[device])

    found = {p for p in python if belongs(p)}
    pending = [p for p in (root / "csrc").rglob("*.*") if p.stem.startswith(tuple(names))]
    while pending:
        path = pending.pop()
        if path not in found and belongs(path):
            found.add(path)
            included = re.findall(r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE)
            pending += [p for name in included if (p := (path.parent / name).resolve()).is_file()]
            beside = [name for header in included for name in _OF_HEADER.get(header, ())]
            pending += [p for name in beside for p in (root / "csrc").glob(name)]
    return sorted(found)


def changed(kept: dict[str, Any], now: dict[str, str]) -> list[str]:
    """Returns the measured operations whose kernels differ `now`, or for which the results have no digest."""
    before = kept.get("sources", {})
    measured = dict.fromkeys(r["op"] for r in kept["rows"] if r.get("kind", "op") == "op")
    return [op for op in measured if op in now and before.get(op) != now[op]]
