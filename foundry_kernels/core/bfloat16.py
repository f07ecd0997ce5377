"""Chooses how bfloat16 matmuls are computed on this processor: by its bfloat16 instructions, or in float32 after
widening the inputs (`csrc/cpu/processor.h`).

The instruction set does not tell whether an instruction is fast: `vdpbf16ps` has twice the rate of float32 on one
vendor's processors and half of it on the other's. The choice follows from the processor model if its speed is known,
otherwise from a measurement. The bits of results depend on the choice, so the measurement runs once and its outcome is
kept in the user's cache. If the cache cannot be written, nothing is measured and the instructions are used.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundry_kernels.core.cache_folder import cache_folder

#: Forces the choice: `WIDENED`, or the name of an instruction set of `INSTRUCTIONS`.
VARIABLE = "FOUNDRY_KERNELS_BFLOAT16"
WIDENED = "widened"

#: Instruction sets with bfloat16 matmuls, the best one last; True means that they are matrix instructions.
INSTRUCTIONS = {"neon_bf16": False, "avx512_bf16": False, "amx_bf16": True}

AMD, INTEL = "AuthenticAMD", "GenuineIntel"
#: AMD families with fast instructions: Zen 4 and 5.
FAST_FAMILIES = (0x19, 0x1A)
#: Models of Intel's family 6 on which `vdpbf16ps` is slower than the float32 instructions. This was measured on 0xCF
#: and is assumed for the others.
SLOW_MODELS = {0x8F: "Sapphire Rapids", 0xCF: "Emerald Rapids", 0xAD: "Granite Rapids", 0xAE: "Granite Rapids D"}
#: Model and steppings of the first processor with the instruction. It is assumed to be fast there, without a
#: measurement.
COOPER_LAKE = (0x55, (10, 11))

#: Instructions count as slow if they take this many times as long as float32.
MARGIN = 1.15
FORMAT = "foundry_kernels bfloat16, 1"

Seconds = Mapping[str, float]


@dataclass(frozen=True)
class Processor:
    """What CPUID says, and the best of our instruction sets that the processor has."""

    vendor: str
    family: int
    model: int
    stepping: int
    instruction_set: str

    def __str__(self) -> str:
        if not self.vendor:
            return self.instruction_set
        return f"{self.vendor} family {self.family} model {self.model} stepping {self.stepping}"


@dataclass(frozen=True)
class Choice:
    """Which matmuls use bfloat16 instructions; False means that the inputs are widened to float32. `why` is the
    reason."""

    tiles: bool  # attention, by matrix instructions
    pairs: bool  # attention and decoding, by dot products of pairs
    products: bool  # linear layers, grouped matmuls and losses, by oneDNN
    why: str

    def __str__(self) -> str:
        attention = "by matrix instructions" if self.tiles else "by dot products" if self.pairs else WIDENED
        return f"attention {attention}, matmuls {'by oneDNN' if self.products else WIDENED}: {self.why}"


def choose(
    processor: Processor, usable: tuple[str, ...], environment: Mapping[str, str], measure: Callable[[], Seconds]
) -> Choice:
    """Returns the choice for a processor. `usable` are the instruction sets that the processor has and the build
    contains.

    Raises:
        ValueError: `VARIABLE` is no known name, or the processor or the build lacks the instructions that it names.
    """
    if asked := environment.get(VARIABLE, ""):
        return forced(asked, processor, usable)
    if processor.instruction_set not in INSTRUCTIONS:
        return Choice(False, False, False, f"{processor.instruction_set} has no bfloat16 instructions")
    fast = pairs_are_fast(processor)
    if INSTRUCTIONS[processor.instruction_set]:  # little work is left to pairs, so it is not measured
        return Choice(True, fast is not False, True, f"{processor} multiplies matrices")
    if fast is None:
        return measured(processor, measure)
    speed = "is fast" if fast else "is slower than float32"
    return Choice(False, fast, fast, f"bfloat16 on {processor} {speed}")


def forced(asked: str, processor: Processor, usable: tuple[str, ...]) -> Choice:
    """Returns the choice that `VARIABLE` asks for."""
    why = f"{VARIABLE}={asked}"
    if asked == WIDENED:
        return Choice(False, False, False, why)
    if asked not in INSTRUCTIONS:
        raise ValueError(f"{VARIABLE} must be {WIDENED} or one of {', '.join(INSTRUCTIONS)}; got {asked!r}")
    if asked not in usable:
        has = f"this processor ({processor}) has {processor.instruction_set}, and usable are {', '.join(usable)}"
        raise ValueError(f"{why} names instructions that are not available: {has}")
    return Choice(INSTRUCTIONS[asked], True, True, why)


def pairs_are_fast(processor: Processor) -> bool | None:
    """Returns whether dot products of bfloat16 pairs are faster than float32; None if this is unknown."""
    if processor.instruction_set == "neon_bf16":
        return True
    if processor.vendor == AMD:
        return True if processor.family in FAST_FAMILIES else None
    if processor.vendor == INTEL and processor.family == 6:
        model, steppings = COOPER_LAKE
        if processor.model == model and processor.stepping in steppings:
            return True
        return False if processor.model in SLOW_MODELS else None
    return None


def measured(processor: Processor, measure: Callable[[], Seconds]) -> Choice:
    """Returns the measured choice for this processor. The measurement runs only if the user's cache does not have
    one."""
    unknown = f"{processor} is unknown"
    try:
        path = cache_folder() / f"bfloat16-{processor.vendor}-{_key(processor)}.json"
        with suppress(FileNotFoundError):
            return read(path)
        keep(path, lambda: {"format": FORMAT, "processor": str(processor), **_outcome(measure())})
        return read(path)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        return Choice(False, True, True, f"{unknown}, and no measurement can be kept ({error})")


def _key(processor: Processor) -> str:
    return f"{processor.family}-{processor.model}-{processor.stepping}-{processor.instruction_set}"


def _outcome(seconds: Seconds) -> dict[str, Any]:
    """Whether each kind of instructions is fast."""
    fast = {name: seconds[name] < MARGIN * seconds["float32"] for name in ("pairs", "products")}
    return {**fast, "seconds": dict(seconds)}


def read(path: Path) -> Choice:
    """Returns the choice that is stored in a file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or of another version.
    """
    found: Any = json.loads(path.read_bytes())
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by this package")
    pairs, products = found.get("pairs"), found.get("products")
    if not isinstance(pairs, bool) or not isinstance(products, bool):
        raise ValueError(f"{path} is damaged")
    return Choice(False, pairs, products, f"measured, see {path}")


def keep(path: Path, measure: Callable[[], Mapping[str, Any]]) -> None:
    """Writes a measurement to a file unless the file exists. If several processes measure at the same time, all use the
    outcome of the first one that writes.

    Raises:
        OSError: the file cannot be written; nothing was measured then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, new = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(measure(), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(new, path)  # atomic, and never replaces an existing file
    finally:
        os.unlink(new)
