"""The recipe "A new operation" of CONTRIBUTING.md, followed in a copy of the checkout: the suites find the result."""

from __future__ import annotations

import os
import re
from pathlib import Path

import fresh
import pytest
import torch

ROOT = Path(__file__).parents[2]
RECIPE = (
    (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## A new operation\n")[2].partition("\n## ")[0]
)
#: Steps 1 to 4 for an operation with one argument. Its native kernel (step 5) is left out.
FOLDER = {
    "reference.py": """
from foundry_kernels.core.registry import wide_dtype

def square(x):
    wide = x.contiguous().to(wide_dtype(x.dtype))
    return (wide * wide).to(x.dtype)
""",
    "__init__.py": '''
from foundry_kernels.core.checks import check_float
from foundry_kernels.core.registry import resolve
from foundry_kernels.ops._register import register_op
from foundry_kernels.ops.square import reference

def square(x, *, backend="auto"):
    """``x * x``."""
    check_float("x", x)
    if x.dim() == 0:
        raise ValueError("x must have a dimension; got a scalar")
    return resolve(SQUARE, backend, x)(x)

SQUARE = register_op(square, reference.square)
''',
    "cases.py": """
from foundry_kernels.testing import Arg, Case

CASES = {"square": (Case("3x5", {"x": Arg((3, 5))}), Case("2x300-sliced", {"x": Arg((2, 300), "sliced")}))}

def scales(args, options, cotangents):
    return {}
""",
    "bench.py": """
from foundry_kernels.testing import Arg, Case

def bench_cases(op, device):
    return (Case("512x2048-cached", {"x": Arg((512, 2048))}),)

def peers(op, case, device):
    return {"eager": lambda x: x * x}
""",
    "fuzz.py": """
from hypothesis import strategies as st

from foundry_kernels.testing import Case
from foundry_kernels.testing.fuzzing import layouts, sizes, spreads, tensors

@st.composite
def random_case(draw, op):
    shape = (draw(sizes(9)), draw(sizes(300)))
    return Case("random", {"x": draw(tensors(shape, spreads(1e-4, 3.0)))}, {}, draw(layouts(2)))
""",
    "sharding.py": """
OPERATORS = ("square_fwd", "square_bwd")
DIMS = dict.fromkeys(("x", "y"), "...")
""",
    "triton.py": """
import torch
import triton
import triton.language as tl

from foundry_kernels._triton.functions import round_to
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.operators import apply, define, requires_grad
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import compute_dtype, empty_like
from foundry_kernels.core.inference import refuse_second_derivative

@triton.jit
def square_fwd_kernel(x_ptr, y_ptr, n, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(COMPUTE)
    tl.store(y_ptr + at, round_to(b_x * b_x, y_ptr.dtype.element_ty), mask=at < n)

@triton.jit
def square_bwd_kernel(dy_ptr, x_ptr, dx_ptr, n, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_dy = tl.load(dy_ptr + at, mask=at < n, other=0.0).to(COMPUTE)
    b_x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(COMPUTE)
    tl.store(dx_ptr + at, round_to(2.0 * b_dy * b_x, dx_ptr.dtype.element_ty), mask=at < n)

@planned
def _plan(n, dtype):
    return Plan((triton.cdiv(n, 256),), (n,), {"COMPUTE": compute_dtype(dtype), "BLOCK": 256})

def _fwd(x):
    y = empty_like(x)
    if y.numel():
        launch(square_fwd_kernel, _plan(x.numel(), x.dtype), x.contiguous(), y)
    return y

def _bwd(dy, x):
    dx = empty_like(x)
    if dx.numel():
        launch(square_bwd_kernel, _plan(x.numel(), x.dtype), dy.contiguous(), x.contiguous(), dx)
    return dx

_forward = define("triton_square_fwd(Tensor x) -> Tensor", _fwd, empty_like)
_backward = define("triton_square_bwd(Tensor dy, Tensor x) -> Tensor", _bwd, lambda dy, x: empty_like(x))

class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return _forward(x)

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative("square")
        return _backward(dy, *ctx.saved_tensors)

def square(x):
    return apply(_Square, x) if requires_grad(x) else _forward(x)
""",
}
#: What other files get, after which text: names, an import and a line of the reference.
INSERTED = {
    "foundry_kernels/ops/__init__.py": {'    "short_conv1d",\n': '    "square",\n'},
    "foundry_kernels/__init__.py": {
        "import short_conv1d, short_conv1d_step\n": "from foundry_kernels.ops.square import square\n",
        '    "short_conv1d_step",\n': '    "square",\n',
    },
    "docs/api/operators.md": {"# foundry_kernels\n": "\n::: foundry_kernels.ops.square.square\n"},
}
KINDS = ("Cases", "Bench", "Fuzz", "Sharding")
#: Tests that must be among those that find the operation, all of which must pass.
EXPECTED = {
    *(f"test_a_module_offers_what_is_written_of_it[foundry_kernels.ops.square-{kind}]" for kind in KINDS),
    f"test_parity[square-triton-{'cuda' if torch.cuda.is_available() else 'cpu'}-float32-3x5]",
    "test_gradcheck[square-reference-cpu]",
    "test_what_no_operation_takes[square-x]",
    "test_every_public_name_is_in_the_reference[]",
}


def copy(to: Path) -> None:
    """The checkout by links, with files of its own where the recipe changes a folder."""
    changed = {path for name in (*INSERTED, "foundry_kernels/ops/square/x") for path in Path(name).parents}
    for folder in sorted(changed):
        (to / folder).mkdir(exist_ok=True)
        for entry in (ROOT / folder).iterdir() if (ROOT / folder).exists() else ():
            name = folder / entry.name
            if name not in changed and name.as_posix() not in INSERTED and entry.name not in (".git", "__pycache__"):
                (to / name).symlink_to(entry)


def follow(root: Path) -> None:
    for name, code in FOLDER.items():
        (root / "foundry_kernels" / "ops" / "square" / name).write_text(code)
    for name, lines in INSERTED.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for after, line in lines.items():
            assert text.count(after) == 1, f"{name}: {after!r}"
            text = text.replace(after, after + line)
        (root / name).write_text(text, encoding="utf-8")


def test_the_recipe_names_the_files() -> None:
    """And in the operation's folder no other files than those that are optional."""
    named = set(re.findall(r"`(?:ops/<op>/)?(\w+\.py)`", RECIPE))
    assert named - {"native.py", "options.py", "build_extension.py"} == FOLDER.keys()
    for name in INSERTED:
        assert f"`{name}`" in RECIPE or f"`{name.removeprefix('foundry_kernels/')}`" in RECIPE, name


@pytest.mark.slow
def test_the_suites_find_the_operation(tmp_path: Path) -> None:
    copy(tmp_path)
    follow(tmp_path)
    suites = ("core/test_contract", "proof/test_parity", "proof/test_refusals", "proof/test_readme")
    chosen = ["-vv", "-p", "no:cacheprovider", "-k", "square or test_contract or every_public_name"]
    call = ["-m", "pytest", *(f"tests/{name}.py" for name in suites), *chosen]
    done = fresh.python(*call, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    passed = set(re.findall(r"test_\w+\.py::(.+?) PASSED", done.stdout))
    assert passed >= EXPECTED, EXPECTED - passed
