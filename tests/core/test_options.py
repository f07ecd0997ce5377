"""The base of the objects that hold the options of an operation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foundry_kernels.core.options import Options
from foundry_kernels.core.registry import BackendUnavailable


class Example(Options, not_in_schema=("return_lse",), schema_types={"ignore_index": "int"}):
    """An option of every kind."""

    scale: float
    lengths: Tensor
    longest: int
    reduction: str
    ignore_index: int
    window: int | None = None
    softcap: float | None = 1.5
    slopes: Tensor | None = None
    exact: bool = True
    code: tuple[int, ...] | None = None
    tables: tuple[Tensor, ...] | None = None
    return_lse: bool = False

    @property
    def causal(self) -> bool:
        return self.window == 0


LENGTHS, SLOPES = torch.tensor([0, 4]), torch.ones(2)
OPTIONS = Example(0.5, LENGTHS, 7, "mean", -100, 3, slopes=SLOPES, return_lse=True)


def test_the_schema_follows_from_the_fields() -> None:
    assert Example.SCHEMA == (
        "float scale, Tensor lengths, SymInt longest, str reduction, int ignore_index, SymInt? window=None, "
        "float? softcap=1.5, Tensor? slopes=None, bool exact=True, int[]? code=None, Tensor[]? tables=None"
    )
    schema = torch._C.parse_schema(f"example({Example.SCHEMA}) -> Tensor")
    assert tuple(a.name for a in schema.arguments) == Example._fields[:-1]
    assert [a.default_value for a in schema.arguments[5:]] == [None, 1.5, None, True, None, None]


def test_tensors_are_kept_apart() -> None:
    assert OPTIONS.tensors() == (LENGTHS, SLOPES)
    bare = OPTIONS.without_tensors()
    assert bare.tensors() == (None, None)
    assert (bare.scale, bare.return_lse) == (0.5, True)
    assert bare.with_tensors((LENGTHS, SLOPES)) == OPTIONS
    with pytest.raises(ValueError, match="shorter"):
        bare.with_tensors((LENGTHS,))
    several = OPTIONS._replace(slopes=None, code=(1, 2), tables=(SLOPES, LENGTHS))
    assert several.tensors() == (LENGTHS, None, SLOPES, LENGTHS)
    assert several.without_tensors().with_tensors(several.tensors()) == several
    assert Example.from_operator_args([*several[:9], [1, 2], [SLOPES, LENGTHS]])[0] == several._replace(
        return_lse=False
    )


def test_options_that_a_backend_does_not_support_are_refused() -> None:
    OPTIONS.refuse_others(Example._fields, "example", "native")
    known = tuple(name for name in Example._fields if name != "window")
    OPTIONS._replace(window=None).refuse_others(known, "example", "native")
    with pytest.raises(BackendUnavailable, match=r"example: backend 'native' does not support window; got 3"):
        OPTIONS.refuse_others(known, "example", "native")


def test_a_class_that_cannot_be_flattened_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Sides: its fields must have the types of SCHEMA_TYPES; got .*window"):

        class Sides(Options):
            window: tuple[int, int]

    with pytest.raises(TypeError, match="Mixed: fields that are not in the schema must come last"):

        class Mixed(Options, not_in_schema=("first",)):
            first: bool = False
            second: bool = False

    with pytest.raises(TypeError, match="Lists: at most one field may be a list of tensors"):

        class Lists(Options):
            first: tuple[Tensor, ...] | None
            second: tuple[Tensor, ...] | None
