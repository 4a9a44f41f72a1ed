"""Pictures of a simulated schedule: in text, as PNG, as a trace."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import hydra_ext.schedule
from hydra_ext.errors import MissingDependency, TraceFileError
from hydra_ext.schedule import make
from support.schedules import BU, RF, SF, B, F, R, U

ONE_BATCH = """\
a column is 1 s; 3 is a forward of microbatch 3, [3] its backward
rank 0 | 0  1  .  . [ 0  ] 2 [ 1  ] . [ 2  ]| 25% idle
rank 1 | .  0 [ 0  ] 1 [ 1  ] 2 [ 2  ] .  . | 25% idle"""

TWO_VERSIONS = """\
a column is 2 s; 3 is a forward of microbatch 3, [3] its backward
rank 0 | 0  1  . [0] 2 [1] 3 [2] . [3]| 0% idle
rank 1 | .  0 [0] 1 [1] 2 [2] 3 [3] . | 0% idle"""

SEVERAL_STAGES = """\
a column is 1 s; 3 is a forward of microbatch 3, [3] its backward; a, b, ... are the stages of a rank
rank 0 | 0a  1a  0b  1b  .   .  [0b][1b][0a][1a]{      Ub      }{      Ua      }| 11% idle
rank 1 | .   0a  1a  0b  1b [0b][1b][0a][1a] .   .   .   .   .   .   .   .   .  | 56% idle"""


def test_the_grid_has_a_column_for_every_unit_of_time() -> None:
    assert make("1f1b", stages=2, microbatches=3).simulate(batches=1).grid() == ONE_BATCH


def test_microbatches_are_counted_through_batches() -> None:
    simulation = make("2bw", stages=2, microbatches=2).simulate(batches=2, forward=2, backward=2)
    assert simulation.grid() == TWO_VERSIONS
    assert simulation.grid(column=1).splitlines()[1].startswith("rank 0 |  0     1    .  . [ 0  ]")


def test_stages_of_one_rank_have_letters() -> None:
    schedule = make("gpipe", stages=4, ranks=2, microbatches=2)
    simulation = schedule.simulate(batches=1, forward=1, backward=1, update=[4, 0, 4, 0])
    assert simulation.grid() == SEVERAL_STAGES


@pytest.mark.parametrize("kind", hydra_ext.schedule.KINDS)
def test_every_row_of_a_grid_is_as_long(kind: str) -> None:
    ranks = 2 if kind in ("interleaved", "2bw") else 4
    schedule = make(kind, stages=4, ranks=ranks, microbatches=1 if kind == "pipedream" else 12)
    rows = schedule.simulate(batches=4, forward=0.7, backward=1.3, latency=0.2).grid().splitlines()[1:]
    assert len(rows) == ranks
    assert len({row.rindex("|") for row in rows}) == 1
    assert all(row.count("[") == 4 // ranks * 4 * schedule.microbatches for row in rows)


def test_the_packages_own_words_show_what_is_drawn() -> None:
    shown = (hydra_ext.schedule.__doc__ or "").splitlines()
    drawn = make("1f1b", stages=2, microbatches=3).simulate(batches=1).grid().splitlines()
    assert [line.strip() for line in shown if line.strip() in drawn] == drawn


def test_a_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "picture"
    make("2bw", stages=3, microbatches=4).simulate(update=1.0).save_png(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_has_a_bar_for_every_action_in_the_colour_of_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **options: figures.append((figure, options["format"])))
    simulation = make("2bw", stages=3, microbatches=4).simulate(batches=3, update=1.0)
    simulation.save_png(tmp_path / "picture")
    ((figure, kind),) = figures
    assert kind == "png"
    (axes,) = figure.axes
    assert axes.get_ylim() == (2.5, -0.5)  # the first rank on top
    bars = {
        (round(bar.get_y() + bar.get_height() / 2), bar.get_x()): (bar.get_width(), to_hex(bar.get_facecolor()))
        for bar in axes.patches
        if bar.get_width()
    }
    works = [timed for timed in simulation.actions if timed.action.kind in (F, B, U)]
    assert len(bars) == len(works)
    colours: dict[Any, set[str]] = {}
    for timed in works:
        width, colour = bars[timed.rank, timed.start]
        assert width == timed.end - timed.start
        colours.setdefault((timed.action.kind, timed.action.batch % 2), set()).add(colour)
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == 5  # updates of all batches have one


def test_without_matplotlib_it_is_said_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match=r"pip install 'hydra-ext\[demo\]'"):
        make("2bw", stages=3, microbatches=4).simulate().save_png(tmp_path / "picture")


def test_a_trace_has_a_process_for_every_rank_and_the_time_of_every_action(tmp_path: Path) -> None:
    schedule = make("2bw", stages=3, microbatches=4)
    simulation = schedule.simulate(batches=3, latency=0.25, reduce=2.0, update=0.5)
    path = tmp_path / "trace.json"
    simulation.save_trace(path)
    document = json.loads(path.read_text())
    assert document["otherData"]["schedule"] == schedule.text
    events = document["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    whole = {(e["pid"], e["name"], e["args"]["batch"]): e for e in events if e["ph"] == "X"}
    opened = {(e["pid"], e["name"], e["args"]["batch"]): e for e in events if e["ph"] == "b"}
    closed = {e["id"]: e for e in events if e["ph"] == "e"}
    for timed in simulation.actions:
        key = timed.rank, timed.action.token, timed.action.batch
        if timed.action.kind in (F, B, R, U):
            assert whole[key]["ts"] == timed.start * 1e6
            assert whole[key]["dur"] == (timed.end - timed.start) * 1e6
        elif timed.action.kind == SF:
            assert opened[key]["ts"] == timed.start * 1e6
            assert closed[opened[key]["id"]]["ts"] == timed.end * 1e6
        assert timed.action.kind != F or whole[key]["args"]["version"] == max(timed.action.batch - 1, 0)
        assert timed.action.kind not in (RF, BU) or key not in whole
    instants = [(e["pid"], e["name"], e["args"]["batch"], e["ts"]) for e in events if e["ph"] == "i"]
    begins = [timed for timed in simulation.actions if timed.action.kind == BU]
    assert instants == [(t.rank, t.action.token, t.action.batch, t.start * 1e6) for t in begins]
    assert len(begins) == 3 * 3


def test_a_trace_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="No such file or directory; give a path"):
        make("gpipe", stages=1, microbatches=1).simulate().save_trace(tmp_path / "absent" / "trace.json")
