"""What programs that live on would gain, by the same estimate as the loops' (`tests/tools/test_aot.py`)."""

from __future__ import annotations

import pytest

from foundry_kernels.tools.inspect.estimate import BEFORE_AND_AFTER, BEGUN, last_end, persistent_gain

#: Cycles of a tile of 128 queries and 64 keys, 128 and 64 wide, at 574 and 371 TFLOP/s.
WIDE, NARROW = 1592, 1230


def test_programs_begin_where_one_has_ended() -> None:
    assert last_end([5, 3, 2, 2], 2) == 7  # the third follows the second, the fourth the first or the third
    assert last_end([3, 2, 2, 5], 2) == 8
    assert last_end([4], 3) == 4


def test_a_gain_by_hand() -> None:
    """Two sequences of 2 and 1 tiles, not causal, two programs at a time."""
    now, hidden = persistent_gain([256, 128], 1, 1000.0, causal=False, at_once=2)
    more = BEFORE_AND_AFTER
    first, second = 4000 + more + BEGUN, 2000 + more + BEGUN  # of the longer sequence each, and of the shorter
    end = second + first  # the program without work ends before
    assert now == pytest.approx(end / max(4000 + more, (10_000 + 3 * more) / 2) - 1)
    assert hidden == pytest.approx(end / 5000 - 1)


@pytest.mark.parametrize("n_batch", [1, 4])
@pytest.mark.parametrize("length", [2048, 4096, 8192])
@pytest.mark.parametrize("causal", [True, False])
def test_programs_that_live_on_are_not_worth_it(n_batch: int, length: int, causal: bool) -> None:
    """Of 32 heads, less than 5 %, so there are none; docs/performance.md has the table."""
    assert persistent_gain([length] * n_batch, 32, WIDE, causal=causal)[0] < 0.05
    two_at_a_time = persistent_gain([length] * n_batch, 32, 2 * NARROW, causal=causal, at_once=264)
    assert two_at_a_time[0] < 0.05


def test_packed_sequences_of_very_unequal_lengths_pay_for_programs_without_work() -> None:
    """One that is long and many that are short: nearly all of what is lost are programs that begin and end."""
    assert persistent_gain([8192, 4096, 2048, 1024], 32, WIDE)[0] < 0.05
    assert persistent_gain([8192] + [128] * 63, 32, WIDE)[0] > 0.3
