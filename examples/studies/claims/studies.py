"""The studies of the claims: variants of the ablation that differ in one thing, and the settings of each scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from examples.studies.ablation.settings import Settings, UsageError, keep, settle
from examples.studies.ablation.training import train_all
from examples.studies.ablation.variants import check_parameters, config_of
from foundry_kernels.models import ModelConfig

SCALES = ("small", "tutorial")

# A run takes 5 to 15 seconds on one core, with a size at which the claim can show. There are 12 attention heads if a
# third and a twelfth of them are needed. Widths are chosen so that two thirds of 4d need no rounding.
_SMALL = Settings(
    dim=96, layers=4, heads=6, kv_heads=6, seq_len=64, batch=16, steps=200, lr=3e-3, dtype="bfloat16", held_out=16384
)
_DEEP = dataclasses.replace(_SMALL, layers=24, dim=64, heads=4, kv_heads=4, steps=120, dtype="float32")
# 10 million parameters, like nanoGPT's small character model.
_TUTORIAL = Settings(
    dim=384, layers=6, heads=12, kv_heads=12, seq_len=256, batch=64, steps=5000, lr=1e-3, dtype="bfloat16"
)


@dataclass(frozen=True)
class Study:
    """Compared variants by their labels on the page; the first is the baseline.

    Attributes:
        variants: names of the ablation's variants by label.
        settings: settings by scale.
        curves: whether losses during training are stored.
        note: the page's text about all variants.
    """

    variants: Mapping[str, str]
    settings: Mapping[str, Settings]
    curves: bool = False
    note: str = ""

    def configs(self, scale: str) -> dict[str, ModelConfig]:
        """The models by label.

        Raises:
            ValueError: their sizes differ.
        """
        found = {label: config_of(name, self.settings[scale].shape) for label, name in self.variants.items()}
        check_parameters(found)
        return found


def _scales(small: Settings, **tutorial: object) -> dict[str, Settings]:
    return {"small": small, "tutorial": dataclasses.replace(_TUTORIAL, **tutorial)}  # type: ignore[arg-type]


_PLACED = {
    f"{placement}-norm, {'10 % warm-up' if warm else 'no warm-up'}": f"llama+norm_placement={placement}"
    + ("" if warm else "+warm_up=0")
    for placement in ("pre", "post")
    for warm in (True, False)
}
_XAVIER = {label: f"{name}+init=xavier" for label, name in _PLACED.items()}
_PLACED["post-norm, no warm-up, a learning rate of 0.001"] = "llama+norm_placement=post+warm_up=0+lr=0.001"
_DROPPED = {"dropout 0": "llama", "dropout 0.1": "llama+dropout=0.1"}
_DRAWN = {"N(0, 0.02)": "llama", "Xavier": "llama+init=xavier", "depth-scaled": "llama+init=depth_scaled"}

STUDIES: dict[str, Study] = {
    "heads": Study(
        {
            "MHA, 12 key-value heads": "llama+kv_heads=12",
            "GQA, 4": "llama+kv_heads=4",
            "MQA, 1": "llama+kv_heads=1",
        },
        _scales(dataclasses.replace(_SMALL, dim=192, heads=12, kv_heads=12)),
    ),
    "placement_shallow": Study(_PLACED, _scales(dataclasses.replace(_DEEP, layers=4), lr=3e-3), curves=True),
    "placement_deep": Study(_PLACED, _scales(_DEEP, layers=24, lr=3e-3), curves=True),
    "placement_xavier": Study(
        _XAVIER, _scales(_DEEP, layers=24, lr=3e-3), curves=True, note="The initial weights are Xavier's."
    ),
    "activations": Study(
        {
            "GELU": "llama+activation=gelu",
            "ReLU": "llama+activation=relu",
            "SiLU": "llama+activation=silu",
            "GLU (sigmoid gate)": "llama+activation=glu",
            "ReGLU": "llama+activation=reglu",
            "GEGLU": "llama+activation=geglu",
            "SwiGLU": "llama+activation=swiglu",
        },
        _scales(_SMALL),
    ),
    "dropout_once": Study(_DROPPED, _scales(_SMALL, batch=16, steps=240)),
    "dropout_often": Study(
        _DROPPED,
        _scales(dataclasses.replace(_SMALL, steps=400, train_bytes=10_000)),
        curves=True,
    ),
    "init_shallow": Study(_DRAWN, _scales(_SMALL)),
    "init_deep": Study(_DRAWN, _scales(_DEEP, layers=24)),
}


def train(
    folder: Path, path: Path | None, scale: str, seeds: list[int], keys: list[str], overrides: Mapping[str, object]
) -> None:
    """Trains the runs that are missing in the folder; each study has its own subfolder.

    Raises:
        UsageError: the folder has runs with other settings or on another text.
    """
    for key in keys:
        study, place = STUDIES[key], folder / key
        try:
            study.configs(scale)
        except ValueError as error:
            raise UsageError(f"{key}: {error}") from None
        settings = settle(place, dataclasses.asdict(study.settings[scale]) | dict(overrides))
        keep(place, settings)
        print(f"-- {key}", flush=True)
        train_all(place, path, settings, list(study.variants.values()), seeds, may_diverge=True)
