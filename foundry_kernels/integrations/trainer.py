"""The import path of `PatchCallback` for transformers' `Trainer`."""

from foundry_kernels.integrations.trainers.trainer import PatchCallback as PatchCallback
