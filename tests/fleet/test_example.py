"""The example of a fleet runs as it is, and goes on with its folder."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet_sweep.py"


@pytest.mark.full
def test_the_sweep_prints_its_table_and_writes_its_report(tmp_path: Path) -> None:
    """Twice: the second run finds all jobs done."""
    folder = tmp_path / "sweep"
    printed = [
        subprocess.run(
            [sys.executable, str(EXAMPLE), str(folder)], capture_output=True, text=True, check=True, cwd=tmp_path
        ).stdout
        for _ in range(2)
    ]
    assert printed[0] == printed[1]
    lines = printed[0].splitlines()
    assert sorted(line.split()[:3] for line in lines[1:7]) == sorted(
        [f"width={width}-lr={rate}", "done", "25"] for width in (32, 96) for rate in (0.01, 0.003, 0.001)
    )
    assert all("offload" in line or "pipeline" in line for line in lines[1:7] if line.startswith("width=96"))
    assert lines[7:] == [f"the report is in {folder / 'report.html'}"]
    assert (folder / "report.html").read_text().count("<svg") >= 2
