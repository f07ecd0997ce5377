"""The repository that `hub-layout` writes, loaded by the Hub's library `kernels` from its path."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from foundry_kernels.__main__ import main

pytest.importorskip("kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hub") / "foundry-kernels"
    assert main(["hub-layout", str(path), "--backend", "cpu"]) == 0
    return path


def run(code: str, *paths: Path) -> str:
    """What code prints in a fresh process, where the package is not installed."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    env.pop("TRITON_INTERPRET", None)
    # An editable installation of the package is found by a hook.
    code = "import sys\nsys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n" + code
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)], capture_output=True, text=True, env=env, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_loader_takes_it_from_a_path(folder: Path) -> None:
    printed = run(f"""
import torch
from pathlib import Path
from kernels import get_local_kernel, get_loaded_kernels

kernel = get_local_kernel(Path({str(folder)!r}))
x = torch.randn(3, 8, requires_grad=True)
kernel.rms_norm(x, torch.ones(8)).sum().backward()
print(torch.allclose(kernel.rms_norm(x), torch.nn.functional.rms_norm(x, (8,)), atol=1e-6))
print(sorted(kernel.__all__) == sorted(["layers", *sys.modules["foundry_kernels"].__all__]))
print(Path(sys.modules["foundry_kernels"].__file__).is_relative_to({str(folder)!r}))
print(get_loaded_kernels()[0].metadata.name, kernel.nn.RMSNorm(8)(x).shape)
""")
    assert printed.splitlines() == ["True", "True", "True", "foundry-kernels torch.Size([3, 8])"]


LAYERS = """
import copy, torch
from pathlib import Path
from kernels import (
    LocalLayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_forward_from_hub,
    use_kernel_mapping,
)
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

class Rotate(torch.nn.Module):
    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)

# What transformers does with those releases of kernels that it supports.
replace_kernel_forward_from_hub(LlamaRMSNorm, "RMSNorm")
Rotate = use_kernel_forward_from_hub("rotary_pos_emb")(Rotate)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=2, **sizes))
model.rotate = Rotate()
plain = copy.deepcopy(model)
layers = {"RMSNorm": "RMSNorm", "rotary_pos_emb": "RotaryPosEmb"}
mapping = {name: {"cpu": LocalLayerRepository(Path(FOLDER), layer_name=layer)} for name, layer in layers.items()}
with use_kernel_mapping(mapping, inherit_mapping=False):
    kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu", use_fallback=False)
print(*sorted({module.forward.__func__.__module__ for module in model.modules() if "forward" in vars(module)}))
tokens = torch.randint(128, (2, 12))
q, k, cos = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 5, 4).repeat(1, 1, 2)
results = []
for each in (model, plain):
    each.zero_grad()
    each(tokens, labels=tokens).loss.backward()
    turned = each.rotate(q, k, cos, -cos) + each.rotate(q.transpose(1, 2), k.transpose(1, 2), cos, -cos, 2)
    gradients = [p.grad for p in each.parameters()]
    results.append(torch.cat([x.flatten() for x in (*turned, *gradients)]))
print(bool((results[0] - results[1]).abs().max() < 1e-5 * results[1].abs().max()))
"""


def test_layers_go_into_a_model_of_transformers(folder: Path) -> None:
    assert run(LAYERS.replace("FOLDER", repr(str(folder)))).splitlines() == [
        "foundry_kernels.integrations.trainers.hub_layers",
        "True",
    ]


def test_another_version_in_the_process_is_named(folder: Path, tmp_path: Path) -> None:
    package = tmp_path / "foundry_kernels"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.0.1'\n__all__ = []\n")
    printed = run(
        f"""
from pathlib import Path
from kernels import get_local_kernel
try:
    get_local_kernel(Path({str(folder)!r}))
except ImportError as error:
    print(error)
""",
        tmp_path,
    )
    assert printed.startswith("this kernel is foundry_kernels 0.1.0, the process has 0.0.1 from ")


def test_a_folder_with_files_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["hub-layout", str(folder)])
    assert f"folder must be new or empty; got {folder}" in capsys.readouterr().err
