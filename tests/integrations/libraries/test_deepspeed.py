"""A patched model in DeepSpeed's engine on a CPU, in one process: ZeRO's stages, the last of which frees every
parameter between the calls of its module. Several devices are not tried."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("deepspeed") is None:  # whose import starts much
    pytest.skip("deepspeed is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[3]

TRAIN = """
import json, sys
import torch, deepspeed
import foundry_kernels as fk
from foundry_kernels.integrations.adapters.tiny import tiny_model

ids = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(0))
stage, families = int(sys.argv[1]), sys.argv[2:]
config = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_force_ds_cpu_optimizer": False,
}
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
for family in families:
    found = {}
    for patched in (True, False):
        model = tiny_model(family).train()
        handle = fk.patch(model) if patched else None
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        freed = sum(p.numel() == 0 for p in model.parameters())
        losses = []
        for _ in range(3):
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if handle is not None:
            handle.undo()
        found["ours" if patched else "theirs"] = losses
        found["freed"] = freed == len(list(model.parameters()))
    print("RESULT", json.dumps(found))
"""


@pytest.mark.parametrize(
    ("stage", "families"), [(1, ["llama"]), (2, ["llama"]), (3, ["llama", "qwen3", "gpt_oss", "gpt2"])], ids=str
)
def test_as_without(stage: int, families: list[str]) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29700 + stage)}
    env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", TRAIN, str(stage), *families]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(families)
    for line in lines:
        found = json.loads(line.removeprefix("RESULT "))
        assert found["freed"] == (stage == 3)
        assert found["ours"] == pytest.approx(found["theirs"], rel=1e-4)
        assert found["ours"][-1] < found["ours"][0]
