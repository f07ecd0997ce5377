"""Shared code of kernel tests: calls to try, and the parity check of an operation against its reference."""

from foundry_kernels.core.case import Arg, Case, Values, alike, lay_out, normal, uniform
from foundry_kernels.testing.policy import (
    MAX_FACTOR,
    RMS_FACTOR,
    Expected,
    Result,
    assert_parity,
    call,
    compare,
    make_cotangents,
    run,
    tiny,
    to_float64,
    untouched,
)

__all__ = [
    "MAX_FACTOR",
    "RMS_FACTOR",
    "Arg",
    "Case",
    "Expected",
    "Result",
    "Values",
    "alike",
    "assert_parity",
    "call",
    "compare",
    "lay_out",
    "make_cotangents",
    "normal",
    "run",
    "tiny",
    "to_float64",
    "uniform",
    "untouched",
]
