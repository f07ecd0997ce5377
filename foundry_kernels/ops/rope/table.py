r"""Tables of angles, and the methods to extend them beyond the length that a model was trained on.

Pair :math:`i` of R/2 has the frequency :math:`\theta_i = b^{-2i/R}`: at position p its angle is :math:`p \theta_i`.
With the factor f and the trained length L (`original_max_position_embeddings`), a scaling replaces the frequencies by

- linear: :math:`\theta_i / f`. Chen et al., "Extending Context Window via Positional Interpolation", 2023,
  arXiv:2306.15595.
- dynamic (NTK-aware): those of the base :math:`b \, (f n / L - (f - 1))^{R/(R-2)}` where n is the table's length or
  L, whichever is larger: nothing changes up to L; beyond it the lowest frequency decreases.
- yarn: a blend of :math:`\theta_i / f` and :math:`\theta_i` by the number of rotations :math:`L \theta_i / 2\pi`
  that the pair makes over the trained length: with `beta_fast` or more it keeps its frequency, with `beta_slow` or
  fewer the frequency is divided by f; between, the blend is linear in i. cos and sin are multiplied by the attention
  factor, by default :math:`0.1 \ln f + 1`.
  Peng et al., "YaRN", 2023, arXiv:2309.00071.
- llama3: a pair of wavelength :math:`2\pi/\theta_i` up to L / `high_freq_factor` keeps its frequency; from
  L / `low_freq_factor` on the frequency is divided by f; between, the blend is linear in the number of rotations.
  "The Llama 3 Herd of Models", 2024, arXiv:2407.21783.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core.checks import check_int, check_not_negative, check_positive, constants, device_or_default

#: By type: the parameters that must be given and those that may be.
_PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": ((), ("original_max_position_embeddings",)),
    "dynamic": (("original_max_position_embeddings",), ()),
    "yarn": (
        ("original_max_position_embeddings",),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
}


@dataclass(frozen=True)
class RopeScaling:
    """How a rotary table is extended, with the field names of Hugging Face's ``rope_scaling``.

    Args:
        rope_type: "linear", "dynamic", "yarn" or "llama3"; see the formulas of this module.
        factor: ratio of the extended to the trained length, >= 1.
        original_max_position_embeddings: the trained length; required by all but "linear".
        low_freq_factor, high_freq_factor: bounds of llama3's blend, in rotations over the trained length; required by
            it (1 and 4 in Llama 3.1), 0 < low < high.
        beta_fast, beta_slow: bounds of yarn's blend, in rotations; 32 and 1 if None.
        attention_factor: yarn multiplies cos and sin by it. If None, ``0.1 * mscale * ln(factor) + 1`` divided by the
            same with `mscale_all_dim` if both are given, else ``0.1 * ln(factor) + 1``.
        mscale, mscale_all_dim: see `attention_factor`; a 0 counts as not given.
        truncate: whether yarn rounds the bounds of its blend outwards to whole pairs; True if None (gpt-oss: False).

    Raises:
        TypeError: a parameter is not a number (or, for `truncate`, not a bool).
        ValueError: the type is unknown, or a parameter is missing, out of range or meaningless for the type.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in _PARAMETERS:
            raise ValueError(f"rope_type must be one of {', '.join(_PARAMETERS)}; got {self.rope_type!r}")
        needed, optional = _PARAMETERS[self.rope_type]
        if self.truncate is not None and not isinstance(self.truncate, bool):
            raise TypeError(f"truncate must be a bool or None; got {type(self.truncate).__name__}")
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name == "rope_type":
                continue
            if value is None:
                if name in needed or name == "factor":
                    raise ValueError(f"{name} must be given for rope_type {self.rope_type!r}; got None")
                continue
            if name not in (*needed, *optional, "factor"):
                raise ValueError(f"{name} has no meaning for rope_type {self.rope_type!r}; got {value!r}, must be None")
            if name != "truncate":
                (check_not_negative if name.startswith("mscale") else check_positive)(name, value)
        if self.factor < 1.0:
            raise ValueError(f"factor must be >= 1; got {self.factor}")
        length = self.original_max_position_embeddings
        if length is not None and not isinstance(length, int):
            raise TypeError(f"original_max_position_embeddings must be an int; got {type(length).__name__}")
        _check_order("low_freq_factor", self.low_freq_factor, "high_freq_factor", self.high_freq_factor)
        if self.rope_type == "yarn":
            _check_order("beta_slow", self._beta_slow, "beta_fast", self._beta_fast)

    @classmethod
    def to_length(cls, rope_type: str, trained: int, length: int) -> RopeScaling:
        """Returns the scaling by which a model of `trained` positions is usually run on `length`: the factor is their
        ratio, in "llama3" the bounds are those of Llama 3.1 (1 and 4). In "dynamic" the factor is 1, for the
        frequencies follow the length by themselves.

        Raises:
            ValueError: an unknown type, or `length` below `trained`.
        """
        check_int("trained", trained, minimum=1)
        check_int("length", length, minimum=1)
        if length < trained:
            raise ValueError(f"length must be at least the trained {trained}; got {length}")
        bounds: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}
        factor = 1.0 if rope_type == "dynamic" else length / trained
        return cls(rope_type, factor, trained, **bounds)

    @property
    def _beta_fast(self) -> float:
        return 32.0 if self.beta_fast is None else self.beta_fast

    @property
    def _beta_slow(self) -> float:
        return 1.0 if self.beta_slow is None else self.beta_slow


def rope_table(
    rotary_dim: int,
    max_positions: int,
    *,
    base: float = 10000.0,
    scaling: RopeScaling | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles of positions 0 .. max_positions - 1.

    ``cos[p, i] = cos(p * base^(-2i / rotary_dim))``, sin likewise; the frequencies changed by `scaling`, if any.

    Args:
        rotary_dim: R, the number of rotated dimensions: even, >= 2.
        max_positions: P >= 0, the rows of the table. With "dynamic" scaling the frequencies depend on it.
        base: b > 1 (``rope_theta``).
        scaling: a :class:`RopeScaling` or None.
        device: of the result; torch's default device if None.

    Returns:
        ``(cos, sin)``, each ``[P, R/2]`` float32. They are computed in float64 on the CPU and rounded once, so that
        late positions are as exact as early ones and the tables are bitwise equal on all devices.

    Raises:
        TypeError: an argument is not a number, or `scaling` not a RopeScaling.
        ValueError: an argument is out of range.

    Su et al., "RoFormer", 2021, arXiv:2104.09864.
    """
    (base,) = constants(base)
    check_table(rotary_dim, base, scaling)
    check_int("max_positions", max_positions, minimum=0)
    if scaling is not None and is_dynamo_compiling():
        scaling = RopeScaling(*constants(*[getattr(scaling, field) for field in scaling.__dataclass_fields__]))
    device = device_or_default(device)
    cos, sin = rope_rows(rotary_dim, 0, max_positions, max_positions, base, scaling)
    return cos.to(device), sin.to(device)


def check_table(rotary_dim: int, base: float, scaling: RopeScaling | None) -> None:
    """Raises TypeError or ValueError where there is no such table."""
    check_int("rotary_dim", rotary_dim)
    check_positive("base", base)
    if rotary_dim < 2 or rotary_dim % 2 != 0:
        raise ValueError(f"rotary_dim must be even and >= 2; got {rotary_dim}")
    if base <= 1.0:
        raise ValueError(f"base must be > 1; got {base}")
    if scaling is not None and not isinstance(scaling, RopeScaling):
        raise TypeError(f"scaling must be a RopeScaling or None; got {type(scaling).__name__}")


def rope_rows(
    rotary_dim: int, start: int, stop: int, length: int, base: float, scaling: RopeScaling | None
) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of the positions from `start` to before `stop`, ``[stop - start, R/2]`` float32 on the CPU:
    rows of the table of `length` positions, which matters to "dynamic" scaling alone."""
    frequencies, factor = _frequencies(rotary_dim, length, base, scaling)
    angles = torch.arange(start, stop, dtype=torch.float64, device="cpu")[:, None] * frequencies
    return (angles.cos() * factor).float(), (angles.sin() * factor).float()


def _frequencies(rotary_dim: int, length: int, base: float, scaling: RopeScaling | None) -> tuple[Tensor, float]:
    """The frequencies [R/2] in float64, and what cos and sin are multiplied by."""
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float64, device="cpu")
    plain = base ** (-2.0 * pairs / rotary_dim)
    if scaling is None:
        return plain, 1.0
    slow = plain / scaling.factor
    if scaling.rope_type == "linear":
        return slow, 1.0
    trained = scaling.original_max_position_embeddings
    assert trained is not None  # by RopeScaling's own check
    if scaling.rope_type == "dynamic":
        if rotary_dim == 2:  # one pair, of frequency 1 for every base
            return plain, 1.0
        ratio = scaling.factor * max(length, trained) / trained - (scaling.factor - 1.0)
        return (base * ratio ** (rotary_dim / (rotary_dim - 2))) ** (-2.0 * pairs / rotary_dim), 1.0
    if scaling.rope_type == "yarn":
        keep = _yarn_keep(scaling, trained, pairs, rotary_dim, base)
        return keep * plain + (1.0 - keep) * slow, _yarn_attention_factor(scaling)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None
    assert high is not None
    (tau,) = constants(math.tau)
    rotations = trained * plain / tau
    keep = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * slow, 1.0


def _yarn_keep(scaling: RopeScaling, trained: int, pairs: Tensor, rotary_dim: int, base: float) -> Tensor:
    """How much of its own frequency a pair keeps: 1 for fast pairs, 0 for slow ones."""

    def pair_of(rotations: float) -> float:
        """The (fractional) pair that makes this many rotations over the trained length."""
        return rotary_dim * math.log(trained / (rotations * tau)) / (2.0 * math.log(base))

    (tau,) = constants(math.tau)
    first, last = pair_of(scaling._beta_fast), pair_of(scaling._beta_slow)
    if scaling.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001  # a step, not a division by 0
    return 1.0 - ((pairs - first) / (last - first)).clamp(0.0, 1.0)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)


def _check_order(low_name: str, low: float | None, high_name: str, high: float | None) -> None:
    if low is not None and high is not None and low >= high:
        raise ValueError(f"{low_name} must be less than {high_name}; got {low} and {high}")
