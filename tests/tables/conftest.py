"""Where tables are at home, for tests that hold in either case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.tables import HOST_BUDGET


@pytest.fixture(params=["host", "disk"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Arguments of ``hydra_ext.offload``. Nothing is left in the folder."""
    return {} if request.param == "host" else {"host_budget": HOST_BUDGET, "spill_dir": tmp_path / "spill"}
