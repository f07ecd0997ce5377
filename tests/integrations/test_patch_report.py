"""`python -m foundry_kernels patch-report`: of families, classes and checkpoints, and of what is none of these."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from foundry_kernels.__main__ import main
from foundry_kernels.integrations.adapters.table import LLAMA_LIKE


def test_patch_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch-report"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines[1:]}
    assert rows.keys() == {"family", "------", *LLAMA_LIKE}
    assert all("flash_attention" in rows[family] and "rms_norm" in rows[family] for family in LLAMA_LIKE)
    assert not [family for family in LLAMA_LIKE if "Experts:" in rows[family]]
    assert main(["patch-report", "bert", "t5"]) == 0
    assert capsys.readouterr().out.count("flash_attention") == 2
    assert main(["patch-report", "Qwen2ForCausalLM"]) == 0
    assert "65 rms_norm" in capsys.readouterr().out  # of its 32 layers
    for name, message in (("llamas", "family must be one of llama"), ("Unknown", "transformers has no model Unknown")):
        with pytest.raises(SystemExit):
            main(["patch-report", name])
        assert message in capsys.readouterr().err


def test_patch_report_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of any size: nothing is read but the config, and the model takes no memory."""
    wide = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "vocab_size": 128256}
    config = CONFIG_MAPPING["llama"](**wide, num_key_value_heads=8, num_hidden_layers=80)
    config.save_pretrained(tmp_path / "llama-70b")
    CONFIG_MAPPING["bert"](num_hidden_layers=3).save_pretrained(tmp_path / "encoder")
    CONFIG_MAPPING["t5"](architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path / "t5-small")
    given = [str(tmp_path / "llama-70b"), str(tmp_path / "encoder" / "config.json"), str(tmp_path / "t5-small")]
    assert main(["patch-report", *given]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert "modules of a checkpoint's model" in head
    cells = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]] for row in rows[2:]}
    assert cells.keys() == {"llama-70b", "encoder", "t5-small"}
    assert cells["llama-70b"][:2] == ["161 rms_norm", "80 swiglu"]
    assert cells["llama-70b"][2:] == [
        "80 rope, 80 flash_attention", "1 linear_cross_entropy, 1 cross_entropy", "242 of 322", ""
    ]  # fmt: skip
    assert cells["encoder"][2] == "3 flash_attention"
    assert cells["t5-small"][2] == "18 flash_attention"
    assert main(["patch-report", "llama", given[0]]) == 0
    assert "a two-layer model, a checkpoint's model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no config.json"),
        ({"adapter_config.json": "{}"}, "it holds an adapter, give the folder of the model that it is for"),
        ({"config.json": "{nothing"}, "transformers makes no model of .*not a valid JSON"),
        ({"config.json": '{"dim": 4}'}, "transformers makes no model of .*Unrecognized model"),
        ({"config.json": '{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}'}, "custom code"),
        (None, "does not exist: give a checkpoint's folder, or its config.json"),
    ],
)
def test_patch_report_of_no_checkpoint(
    files: dict[str, str] | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (files or {}).items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as stopped:
        main(["patch-report", str(tmp_path if files is not None else tmp_path / "nothing")])
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)
