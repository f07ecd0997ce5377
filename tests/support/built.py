"""Tests of the C++ extension."""

import pytest

from foundry_kernels.core import extension

needs_native = pytest.mark.skipif(extension.MISSING is not None, reason=str(extension.MISSING))
