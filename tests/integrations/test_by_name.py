"""`attn_implementation="foundry"` needs no import but that of the package, before or after that of transformers."""

from __future__ import annotations

import importlib
import sys
import textwrap
from pathlib import Path

import fresh
import pytest
from transformers import AttentionInterface

import foundry_kernels as fk
from foundry_kernels.core.late import _WAITING, module_above, when_imported

ROOT = Path(__file__).parents[2]

MODEL = """
    from transformers import AutoModelForCausalLM, LlamaConfig
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=8, num_hidden_layers=1, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="foundry")
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    assert model(tokens).logits.shape == (1, 4, 8)
    print("works")
"""


def run(*parts: str) -> str:
    """What code prints in a fresh process."""
    begin = "import sys, torch, warnings; warnings.simplefilter('error')"
    done = fresh.python("-c", "\n".join(textwrap.dedent(part) for part in (begin, *parts)), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_first() -> None:
    imported = """
        import foundry_kernels
        assert "transformers" not in sys.modules and "foundry_kernels.nn" not in sys.modules
        import transformers  # which imports its models when they are used
        assert "foundry_kernels.nn" not in sys.modules
    """
    after = """
        from transformers import modeling_utils
        assert type(modeling_utils.__loader__).__name__ == type(modeling_utils.__spec__.loader).__name__
        assert type(modeling_utils.__loader__).__module__.startswith("_frozen_importlib")
        from foundry_kernels.core.late import _WAITING
        assert "transformers.modeling_utils" not in _WAITING.actions
    """
    assert run(imported, MODEL, after) == "works\n"


@pytest.mark.slow  # `test_copies.py` has the package's own import after transformers
def test_transformers_first() -> None:
    registered = "from transformers import AttentionInterface\nprint('foundry' in AttentionInterface())"
    assert run("from transformers import modeling_utils\nimport foundry_kernels", registered) == "True\n"


@pytest.mark.slow
def test_both_in_threads_at_once() -> None:
    threads = """
        import threading
        import foundry_kernels
        import transformers
        together = threading.Barrier(3)

        def load(name):
            together.wait()
            __import__(name)

        names = (
            "transformers.modeling_utils",
            "transformers.masking_utils",
            "foundry_kernels.integrations.attention.functions",
        )
        threads = [threading.Thread(target=load, args=(name,)) for name in names]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    """
    assert run(threads, MODEL) == "works\n"


def test_an_old_transformers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "foundry_kernels.integrations.attention.functions"
    importlib.import_module(name)
    monkeypatch.setattr(fk.integrations.attention, "functions", sys.modules[name])  # to be restored
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(AttentionInterface._global_mapping, "foundry")
    monkeypatch.setattr(importlib.import_module("transformers"), "__version__", "4.57.1")
    module_above("by_name").register()
    assert name not in sys.modules
    assert "foundry" not in AttentionInterface._global_mapping
    with pytest.raises(ImportError, match=r"foundry_kernels needs transformers 5\.4 or newer; found 4\.57\.1"):
        importlib.import_module(name)


def test_actions_run_once_after_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which they were asked for; a look for the module, without an import, changes nothing."""
    (tmp_path / "foundry_waited_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    done: list[str] = []

    def then(name: str) -> None:
        assert sys.modules["foundry_waited_for"].value == 1
        done.append(name)

    for name in ("first", "second"):
        when_imported("foundry_waited_for", lambda name=name: then(name))
    assert _WAITING in sys.meta_path
    assert importlib.util.find_spec("foundry_waited_for") is not None
    assert done == []
    module = importlib.import_module("foundry_waited_for")
    assert done == ["first", "second"]
    assert importlib.reload(module).value == 1
    when_imported("foundry_waited_for", lambda: then("at once"))
    assert done == ["first", "second", "at once"]
    assert (_WAITING in sys.meta_path) == bool(_WAITING.actions)
    del sys.modules["foundry_waited_for"]
