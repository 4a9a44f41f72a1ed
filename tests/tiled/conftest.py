"""What all tests of strips share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _memory_is_born_as_nan() -> Iterator[None]:
    """Rows that nothing was loaded or stored into show: torch fills what is allocated without values with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
