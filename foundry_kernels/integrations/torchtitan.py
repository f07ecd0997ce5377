"""The import path of `FoundryConverter` for torchtitan."""

from foundry_kernels.integrations.trainers.torchtitan import FoundryConverter as FoundryConverter
