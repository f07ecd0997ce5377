"""What is imported with the package, and what by its first use."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import fresh
import pytest

import foundry_kernels as fk
from foundry_kernels import _triton

LAZY = ("compat", "diagnostics", "distributed", "integrations", "losses", "models", "nn")
needs_triton = pytest.mark.skipif(_triton.MISSING is not None, reason=str(_triton.MISSING))


def run(code: str, *, interpret: bool = False, fails: bool = False, cwd: Path | None = None) -> str:
    """What code prints in a fresh process, or its error."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(fk.__file__).parents[1]), env.get("PYTHONPATH", "")]))
    code = textwrap.dedent(code)
    done = fresh.python("-c", code, env=env, cwd=cwd)
    assert bool(done.returncode) == fails, done.stderr
    return done.stderr if fails else done.stdout


def test_the_package_imports_what_every_program_needs_and_no_more() -> None:
    printed = run(
        """
        import sys
        import foundry_kernels as fk
        print(*sorted(n.split(".")[1] for n in sys.modules if n.count(".") == 1 and n.startswith("foundry_kernels.")))
        others = ("triton", "transformers", "torch.distributed.tensor", "torch._dynamo", "pytest", "matplotlib")
        print([n for n in others if n in sys.modules])
        print([n for n in dir(fk) if not n.startswith("_")] == sorted([*fk.__all__, *{lazy!r}]))
        assert fk.models.ModelConfig and fk.compat.flash_attn and fk.batch_invariant and fk.integrations.unpatch
        assert callable(fk.patch) and "nn" in vars(fk)
        """.replace("{lazy!r}", str(("core", "diagnostics", "distributed", "integrations", "ops", "tuning")))
    ).splitlines()
    assert set(printed[0].split()) <= {"_C", "_triton", "core", "ops"}
    assert printed[1:] == ["[]", "True"]


def test_a_misspelled_name_is_suggested() -> None:
    assert set(LAZY) <= set(dir(fk))
    assert "Did you mean: 'models'?" in run("import foundry_kernels\nfoundry_kernels.modles", fails=True)
    with pytest.raises(AttributeError, match="module 'foundry_kernels' has no attribute 'importlib'"):
        fk.importlib  # noqa: B018


@pytest.mark.slow
def test_patch_imports_no_model_of_ours() -> None:
    pytest.importorskip("transformers")
    printed = run(
        """
        import sys
        import foundry_kernels as fk
        from transformers import LlamaConfig, LlamaForCausalLM
        config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                             num_attention_heads=2, num_key_value_heads=1)
        model = LlamaForCausalLM(config)
        assert "Attention" in str(fk.patch(model).report())
        print([n for n in sys.modules if n.startswith("foundry_kernels.models")])
        fk.models.Transformer.from_hf(LlamaForCausalLM(config))
        ours = fk.models.Transformer(fk.models.ModelConfig(dim=16, n_layers=1, n_heads=2, vocab_size=8))
        print(fk.patch(ours).report())
        """
    )
    assert printed.startswith("[]\n")
    assert "Transformer" in printed


TRACED = """
    import sys
    import torch
    import foundry_kernels as fk
    from foundry_kernels.core.registry import OPS, override

    class Norm(torch.nn.Module):
        def forward(self, x):
            return fk.rms_norm(x, backend="triton")

    assert "triton" not in sys.modules
    with override(OPS["rms_norm"], "triton", devices=("cpu",)):  # stands in for a GPU, on which nothing runs here
"""


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
def test_tracing_may_be_the_first_call_and_the_graph_loads_elsewhere(tmp_path: Path, strict: bool) -> None:
    run(
        TRACED
        + f"""
        torch.export.save(torch.export.export(Norm(), (torch.ones(2, 8),), strict={strict}), "norm.pt2")
    """,
        cwd=tmp_path,
    )
    printed = run(
        """
        import sys
        import torch
        import foundry_kernels
        assert "triton" not in sys.modules
        print([n.target for n in torch.export.load("norm.pt2").graph.nodes])
        """,
        cwd=tmp_path,
    )
    assert "foundry_kernels.triton_rms_norm_fwd" in printed


@needs_triton
def test_a_fake_tensor_may_come_first() -> None:
    printed = run(
        TRACED
        + """
        with torch._subclasses.FakeTensorMode():
            print(tuple(Norm()(torch.ones(2, 8)).shape))
    """
    )
    assert printed == "(2, 8)\n"


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("interpret", [False, True])
def test_compile_may_be_the_first_call(interpret: bool) -> None:
    printed = run(
        """
        import torch
        import foundry_kernels as fk
        backend = "triton" if fk._triton.INTERPRET else "auto"
        x = torch.randn(3, 8, requires_grad=True)
        y = torch.compile(lambda x: fk.rms_norm(x, backend=backend), backend="aot_eager", fullgraph=True)(x)
        y.sum().backward()
        torch.testing.assert_close(y, fk.rms_norm(x, backend="reference"))
        print(fk._triton.INTERPRET)
        """,
        interpret=interpret,
    )
    assert printed == f"{interpret}\n"


@needs_triton
def test_kernels_are_there_once_cuda_is_initialised() -> None:
    """`torch.cuda` runs what waits for CUDA before any tensor is on a GPU; here the test runs it."""
    printed = run(
        """
        import os, sys
        import torch
        queued = []
        torch.cuda._lazy_call = lambda call, **_: queued.append(call)
        import foundry_kernels as fk
        os.environ["TRITON_INTERPRET"] = "1"  # after the import: too late
        before = fk.OPS["rms_norm"].impl("triton").fn
        torch.cuda.device_count = lambda: 0
        for call in queued:
            call()
        from foundry_kernels.ops.rms_norm import triton
        spec = fk.OPS["rms_norm"]
        assert spec.impl("triton").fn is triton.rms_norm is spec.chosen["auto", "cuda", torch.float32] is not before
        assert type(triton.__dict__.get("rms_norm")).__name__ == "function"
        print(fk._triton.INTERPRET, os.environ["TRITON_INTERPRET"], "triton" in sys.modules)
        """
    )
    assert printed == "False 1 True\n"


def test_a_triton_that_does_not_import_says_so(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("__version__ = '3.7.1'\nraise ImportError('a broken library')")
    printed = run(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import torch
        import foundry_kernels as fk
        from foundry_kernels import _triton
        assert _triton.load() and not _triton.load()
        print(fk.OPS["rms_norm"].why_not("triton", "cuda"))
        """
    )
    assert printed == "Triton does not import (a broken library); `pip install triton`\n"
