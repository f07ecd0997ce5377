"""Compiles FlexAttention's kernels from the installed PyTorch ahead of time, to compare them with this package's.

PyTorch's compiler renders its templates for tensors on a GPU. This module reads the same templates and renders them for
one causal call, with the few functions that they need and with the tiles of PyTorch's table for the GPU. The kernels
are compiled but never run.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from foundry_kernels.tools.inspect.aot import Cost, Launch
from foundry_kernels.tools.inspect.estimate import estimate
from foundry_kernels.tools.inspect.sass import Loop

#: The call: sequences, heads, key-value heads and tokens, as for this package's kernels, and PyTorch's block size for
#: masks.
_B, _H, _HK, _T, _BLOCK = 2, 8, 2, 512, 128
WIDTHS = (64, 128, 256)

#: The templates' "subgraphs" by their result, for a causal mask_mod and no score_mod.
_MODIFICATIONS: dict[str | None, Callable[[dict[str, str]], str]] = {
    "post_mod_scores": lambda x: f"post_mod_scores = ({x['score']})",
    "grad_scores": lambda x: f"grad_scores = ({x['grad_score_mod']})",
    "mask_mod_output": lambda x: f"mask_mod_output = ({x['m']}) >= ({x['n']})",
    None: lambda x: "",  # gradients of tensors that a score_mod reads
}


@dataclass(frozen=True)
class _Template:
    name: str
    files: tuple[str, ...]
    tiles: str  # the name of the method that returns PyTorch's tiles
    options: dict[str, str]  # the template's names of a tile's fields
    more: dict[str, Any]

    def pointers(self, argnames: tuple[str, ...]) -> dict[str, str]:
        """Types by argument: tensors of rows are float32, those of blocks int32."""
        kinds = {"LSE": "*fp32", "MAX": "*fp32", "DELTA": "*fp32"}
        return {n: kinds.get(n, "*i32" if n.endswith(("_BLKS", "_IDX")) else "*bf16") for n in argnames}


_TEMPLATES = (
    _Template(
        "flex_attention_fwd",
        ("flex_attention", "utilities", "common"),
        "get_flex_attn_fwd_configs",
        {"block_m": "BLOCK_M", "block_n": "BLOCK_N"},
        {"OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False},
    ),
    _Template(
        "flex_attention_bwd",
        ("flex_backwards", "utilities"),
        "get_flex_attn_bwd_configs",
        {"block_m1": "BLOCK_M1", "block_n1": "BLOCK_N1", "block_m2": "BLOCK_M2", "block_n2": "BLOCK_N2"},
        {"WRITE_DQ": True},
    ),
)


def launches(arch: int, kernel: str = "", case: str = "") -> tuple[list[Launch], list[str]]:
    """FlexAttention's bfloat16 kernels, forward and backward, whose name and case contain these; and the reasons for
    missing ones."""
    found, missing = [], []
    for template, width in product(_TEMPLATES, WIDTHS):
        name = f"B={_B} H={_H} Hk={_HK} T={_T} D={width}-causal bfloat16"
        if kernel in template.name and case in name:
            try:
                found.append(_launch(template, arch, width, name))
            except Exception as error:  # templates differ between releases of PyTorch
                why = " ".join(str(error).split())[:200]
                missing.append(f"{template.name} {name}: {type(error).__name__}: {why}")
    return found, missing


def _launch(template: _Template, arch: int, width: int, name: str) -> Launch:
    tile = _tile(template, arch, width)
    constants = {
        **{option: getattr(tile, field) for field, option in template.options.items()},
        **template.more,
        "FLOAT32_PRECISION": "'ieee'", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False,
        "BLOCKS_ARE_CONTIGUOUS": False, "IS_DIVISIBLE": True, "SM_SCALE": width**-0.5,
        "GQA_SHARED_HEADS": _H // _HK, "HAS_FULL_BLOCKS": True, "QK_HEAD_DIM": width, "QK_HEAD_DIM_ROUNDED": width,
        "V_HEAD_DIM": width, "V_HEAD_DIM_ROUNDED": width, "SAFE_HEAD_DIM": True, "USE_TMA": False,
        "SPARSE_Q_BLOCK_SIZE": _BLOCK, "SPARSE_KV_BLOCK_SIZE": _BLOCK, "INDEX_DTYPE": "tl.int32",
    }  # fmt: skip
    source, signature = render(template, constants)
    options = tuple(sorted({"num_warps": tile.num_warps, "num_stages": tile.num_stages}.items()))
    tiles = " ".join(f"{option}={constants[option]}" for option in template.options.values())
    function = _function(source, template.name)
    return Launch(function, tuple(signature.items()), (), tuple(signature), options, f"{name} {tiles}")


def _tile(template: _Template, arch: int, width: int) -> Any:
    """The tile of PyTorch's table, which asks PyTorch for the GPU."""
    heuristics = importlib.import_module("torch._inductor.template_heuristics.triton").CUDAConfigHeuristic()
    with mock.patch("torch.cuda.get_device_capability", return_value=divmod(arch, 10)):
        (tile,) = getattr(heuristics, template.tiles)(width, torch.bfloat16)
    return tile


def render(template: _Template, constants: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """The kernel's source and the types of its arguments."""
    jinja2 = importlib.import_module("jinja2")
    signature: dict[str, str] = {}
    defines = "".join(f"{name}: tl.constexpr = {value}\n" for name, value in constants.items())
    width = constants["QK_HEAD_DIM"]

    def argdefs() -> str:
        return ", ".join(signature)

    def def_kernel(*argnames: str) -> str:
        signature.update({f"arg_{name}": kind for name, kind in template.pointers(argnames).items()})
        signature["out_ptr0"] = "*bf16"
        begun = f"@triton.jit\ndef {template.name}({argdefs()}):\n"
        return begun + _indent(defines) + "".join(f"    {name} = arg_{name}\n" for name in argnames)

    def shape(name: str) -> list[int]:
        if name.endswith("_NUM_BLKS"):
            return [1, 1, _T // _BLOCK]
        if name.endswith("_IDX"):
            return [1, 1, _T // _BLOCK, _T // _BLOCK]
        return [_B, _HK if name in ("K", "V", "DV") else _H, _T, width]

    def stride(name: str, index: int | None = None) -> str:
        sizes = shape(name)
        strides = [str(torch.Size(sizes[i + 1 :]).numel()) for i in range(len(sizes))]
        return ", ".join(strides) if index is None else strides[index]

    def store_output(indices: tuple[str, ...], value: str, mask: str, indent_width: int = 4, **_: Any) -> str:
        at = " + ".join(f"{i} * {s}" for i, s in zip(indices, stride("Q").split(", "), strict=True))
        return f"tl.store(out_ptr0 + ({at}), {value}, {mask})"

    env = jinja2.Environment(undefined=jinja2.StrictUndefined)
    env.filters["indent_except_first"] = lambda text, n: text.replace("\n", "\n" + "    " * n)
    text = "".join(_read(name) for name in template.files)
    given = {name: value for name, value in constants.items() if isinstance(value, bool)}
    rendered = env.from_string(text).render(
        def_kernel=def_kernel,
        gen_argdefs=argdefs,
        gen_defines=lambda: defines,
        size=lambda name, index: str(shape(name)[index]),
        stride=stride,
        modification=lambda output_name, **x: _MODIFICATIONS[output_name](x),
        store_output=store_output,
        **given,
    )
    return "import triton\nimport triton.language as tl\n\n\n" + rendered, signature


def _indent(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def _read(name: str) -> str:
    """A template of the installed PyTorch."""
    package = importlib.util.find_spec("torch._inductor.kernel.flex")
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError("no torch/_inductor/kernel/flex")
    return (Path(package.submodule_search_locations[0]) / "templates" / f"{name}.py.jinja").read_text()


def _function(source: str, name: str) -> Any:
    """Imports a module from a file, since Triton reads a kernel's source from there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name)


#: The number of matmuls per score in this package's kernels.
_MATMULS = {"flash_attention_fwd_kernel": 2, "flash_attention_dq_kernel": 3, "flash_attention_dkdv_kernel": 4}


class Table:
    """Estimated TFLOP/s of causal attention in bfloat16, for this package and peers. For each kind of loop, takes a
    launch's fastest loop, which has no mask, and the slowest of these over the launches."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int, int], float] = {}
        self._spilled: set[tuple[str, int, int]] = set()

    def add(self, launch: Launch, cost: Cost, loops: list[Loop]) -> None:
        case = re.fullmatch(
            r"(?:B=\d+ H=\d+ Hk=\d+ T=\d+ D=|[\d.]+x[\d.]+x[\d.]+x)(\d+)-causal bfloat16\b.*", launch.case
        )
        best: dict[int, float] = {}
        for loop in loops if case else ():
            estimated = estimate(loop, cost.warps)
            if case and estimated:
                matmuls = _MATMULS.get(launch.name) or matmuls_per_score(loop, int(case[1]))
                best[matmuls] = max(best.get(matmuls, 0.0), estimated.tflops)
        for matmuls, tflops in best.items():
            key = "theirs" if launch.name.startswith("flex_") else "ours", matmuls, int(case[1]) if case else 0
            self._found[key] = min(tflops, self._found.get(key, tflops))
            if cost.stack:
                self._spilled.add(key)

    def cell(self, whose: str, width: int, kinds: tuple[int, ...]) -> str:
        """Returns the TFLOP/s of a forward or backward pass. A backward pass has two kinds of loops, with 4 and 3
        matmuls per score; only 5 of them count as useful work."""
        keys = [(whose, matmuls, width) for matmuls in kinds]
        if any(key not in self._found for key in keys):
            return "-"
        useful = 5 if len(kinds) == 2 else sum(kinds)
        tflops = useful / sum(matmuls / self._found[whose, matmuls, width] for matmuls in kinds)
        return f"{tflops:.0f}{'*' if self._spilled.intersection(keys) else ''}"

    def lines(self) -> list[str]:
        shown = ["estimates side by side, causal, bf16, tiles without a mask, TFLOP/s (* with registers spilled):"]
        for width in WIDTHS:
            line = f"  D={width:<4}"
            for name, kinds in (("forward", (2,)), ("backward", (4, 3))):
                ours, theirs = (self.cell(whose, width, kinds) for whose in ("ours", "theirs"))
                line += f" {name}: ours {ours}, FlexAttention's {theirs};"
            shown.append(line.rstrip(";"))
        return shown


def matmuls_per_score(loop: Loop, width: int) -> int:
    """The number of matmuls, with `width` multiply-adds each, that a loop computes per score: 2 in the forward pass, 3
    for dQ, 4 for dK and dV. The number of scores is the number of exponentials in the 128 threads of a warpgroup. Each
    score has one; in the forward pass each row has one more."""
    exponentials = loop.counts.get("exponential", 0)
    return round(loop.multiply_adds / (max(exponentials, 1) * 128 * width))
