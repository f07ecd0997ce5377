"""The import path of `PatchCallback` for Lightning."""

from foundry_kernels.integrations.trainers.lightning import PatchCallback as PatchCallback
