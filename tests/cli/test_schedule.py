"""`schedule`: draws, prints and writes; refuses with the reason."""

import json
from pathlib import Path

import pytest

from hydra_ext.cli import main
from hydra_ext.schedule import Schedule, make


def test_it_draws_a_schedule_and_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["schedule", "2bw", "--stages", "4", "--microbatches", "8", "--batches", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    drawn = make("2bw", stages=4, microbatches=8).simulate(batches=2).grid().splitlines()
    assert lines[: len(drawn)] == drawn
    assert lines[len(drawn) :] == [
        "24 s a batch, 57 s for 2 and the drain",
        "rank 0 (stage 0) at most: 4 in flight, 2 version(s) of weights, 2 batch(es) of gradients",
        "rank 1 (stage 1) at most: 3 in flight, 2 version(s) of weights, 2 batch(es) of gradients",
        "rank 2 (stage 2) at most: 2 in flight, 2 version(s) of weights, 2 batch(es) of gradients",
        "rank 3 (stage 3) at most: 1 in flight, 2 version(s) of weights, 2 batch(es) of gradients",
    ]


def test_it_draws_with_more_in_flight_and_hops_that_take_time(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--stages", "3", "--microbatches", "4", "--batches", "2"]
    assert main.run(["schedule", "2bw", *sizes, "--ahead", "1", "--latency", "1.5"]) == 0
    schedule = make("2bw", stages=3, microbatches=4, ahead=1)
    assert capsys.readouterr().out.startswith(schedule.simulate(batches=2, latency=1.5).grid())


def test_it_prints_the_text_and_reads_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = ["interleaved", "--stages", "4", "--ranks", "2", "--microbatches", "3"]
    assert main.run(["schedule", *made, "--text"]) == 0
    text = capsys.readouterr().out
    assert Schedule.parse(text) == make("interleaved", stages=4, ranks=2, microbatches=3)
    file = tmp_path / "mine.txt"
    file.write_text(text)
    pictures = []
    for source in (made, [str(file)]):
        assert main.run(["schedule", *source, "--forward", "2", "--backward", "2"]) == 0
        pictures.append(capsys.readouterr().out)
    assert pictures[0] == pictures[1]


def test_it_writes_a_picture_or_a_trace(tmp_path: Path) -> None:
    assert main.run(["schedule", "pipedream", "--vertical-sync", "--png", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert main.run(["schedule", "1f1b", "--perfetto", str(tmp_path / "a.json")]) == 0
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["2bw", "--stages", "4", "--microbatches", "1"], "give at least 3"),
        (["absent.txt"], "'absent.txt' is neither one of gpipe, 1f1b, interleaved, 2bw, pipedream nor a file that can"),
        (["absent.txt", "--stages", "4"], "'absent.txt' is read as a file, which has its own stages"),
        (["absent.txt", "--ahead", "1"], "'absent.txt' is read as a file"),
        (["1f1b", "--batches", "0"], "0 batches were asked for"),
        (["1f1b", "--perfetto", "/nowhere/at/all"], "the trace cannot be written to '/nowhere/at/all'"),
        (["1f1b", "--png", "/nowhere/at/all.png"], "the picture cannot be written to '/nowhere/at/all.png'"),
    ],
)
def test_what_cannot_be_is_said_without_a_traceback(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["schedule", *arguments]) == 1
    assert message in capsys.readouterr().err
