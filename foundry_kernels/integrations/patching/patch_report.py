"""`python -m foundry_kernels patch-report`: what `fk.patch` replaces in a family of transformers, or in a checkpoint.

A family is shown by a small model of it. A checkpoint's folder, or its `config.json`, says all that matters: a model of
that shape is made without memory for its weights, which are not read.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import torch

from foundry_kernels.integrations.adapters.table import LLAMA_LIKE, PATCHED
from foundry_kernels.integrations.patching.patch import patch
from foundry_kernels.integrations.patching.report import Report, parts


class NoModel(Exception):
    """There is no model to show; the message says why."""


def main(argv: list[str]) -> int:
    """Patch a small model of each family, or a model of a checkpoint's shape, and print how many modules were replaced
    by which operations."""
    parser = argparse.ArgumentParser(prog="python -m foundry_kernels patch-report", description=main.__doc__)
    parser.add_argument(
        "family", nargs="*", metavar="FAMILY_CLASS_OR_PATH",
        help="model types or classes of transformers, folders of checkpoints, config.json files (default: the families "
        "like Llama)",
    )  # fmt: skip
    options = parser.parse_args(argv)
    try:
        version = importlib.import_module("transformers").__version__
    except ImportError as e:
        parser.error(f"transformers cannot be imported ({e}); pip install transformers")
    for name in options.family:
        if not is_family(name) and not is_path(name) and not is_class(name):
            parser.error(
                f"family must be one of {', '.join(PATCHED)}, or another model type or a class of transformers, or a "
                f"folder with a config.json, or such a file; got {name}"
            )
    rows: list[tuple[str, ...]] = [("family", "norms", "MLP", "attention", "loss", "recognised", "left as it was")]
    rows.append(tuple("-" * len(title) for title in rows[0]))
    chosen = options.family or LLAMA_LIKE
    try:
        for name in chosen:
            rows.append((_title(name), *parts(report_on(name))))
    except NoModel as error:
        parser.error(str(error))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    usual = any(name not in PATCHED and not is_path(name) for name in chosen)
    whole = ["a checkpoint's model"] * any(map(is_path, chosen)) + ["a class's usual model"] * usual
    small = ["a two-layer model"] * any(name in PATCHED for name in chosen)
    models = ", ".join(small + whole)
    print(f"transformers {version}: modules of {models}, and the operations that serve them")
    print("\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in rows))
    return 0


def is_family(name: str) -> bool:
    return name in PATCHED or name in importlib.import_module("transformers").CONFIG_MAPPING


def is_path(name: str) -> bool:
    """Whether it is a path, and no family: one that exists, or could be nothing else."""
    return not is_family(name) and ("/" in name or "\\" in name or name.endswith(".json") or Path(name).exists())


def is_class(name: str) -> bool:
    """Whether it is spelled as a class is, and names neither a family nor a path."""
    return not is_family(name) and name.isidentifier() and name[0].isupper() and not is_path(name)


def usual_model(name: str) -> Any:
    """Returns the model that a class of transformers, or a model type, makes of its configuration's defaults, on the
    meta device.

    Raises:
        NoModel: transformers has no such class, or makes no model of it.
    """
    transformers = importlib.import_module("transformers")
    if is_family(name):
        with torch.device("meta"):
            return _by_mapping(transformers.CONFIG_MAPPING[name]())
    named: Any = getattr(transformers, name, None)
    if getattr(named, "config_class", None) is None:
        raise NoModel(f"transformers has no model {name}")
    try:
        with torch.device("meta"):
            return named._from_config(named.config_class())
    except Exception as error:
        raise NoModel(f"transformers makes no {name} of its defaults ({type(error).__name__}: {error})") from error


def _title(name: str) -> str:
    if not is_path(name):
        return name
    path = Path(name).resolve()
    return path.parent.name if path.name == "config.json" else path.stem if path.is_file() else path.name


def report_on(name: str) -> Report:
    """Returns the report on a family's small model, or on that of a checkpoint.

    Raises:
        NoModel: the checkpoint has none.
    """
    if is_path(name):
        return patch(model_of(Path(name))).report()
    if name not in PATCHED:
        return patch(usual_model(name)).report()
    from foundry_kernels.integrations.adapters.tiny import tiny_model

    return patch(tiny_model(name)).report()


def model_of(path: Path) -> Any:
    """Returns the model that a `config.json` describes, on the meta device, where it takes no memory.

    Raises:
        NoModel: there is no such file, transformers cannot read it, or has no such model.
    """
    import transformers

    if path.is_dir() and not (path / "config.json").exists():
        adapter = (path / "adapter_config.json").exists()
        hint = ": it holds an adapter, give the folder of the model that it is for" if adapter else ""
        raise NoModel(f"{path} has no config.json{hint}")
    if not path.exists():
        raise NoModel(f"{path} does not exist: give a checkpoint's folder, or its config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        names = getattr(config, "architectures", None) or ()
        named = next((found for name in names if (found := getattr(transformers, name, None)) is not None), None)
        with torch.device("meta"):
            return named._from_config(config) if named is not None else _by_mapping(config)
    except Exception as error:  # whatever a file that is no model's leads to, in transformers' own words
        reason = " ".join(str(error).split())[:300]
        raise NoModel(f"transformers makes no model of {path} ({type(error).__name__}: {reason})") from error


def _by_mapping(config: Any) -> Any:
    """What transformers makes of a config that names no class; of an encoder without its head."""
    import transformers

    kind: Any = transformers.AutoModel
    if config.is_encoder_decoder and type(config) in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        kind = transformers.AutoModelForSeq2SeqLM
    elif type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        encodes = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
        kind = transformers.AutoModel if encodes else transformers.AutoModelForCausalLM
    return kind.from_config(config)
