"""`plan`: solves a problem of a file, and prints the plan as JSON or as text."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config

from hydra_ext.cli import main
from hydra_ext.errors import PlanError
from hydra_ext.integrations.shapes import model_and_microbatch
from hydra_ext.plan import fit, pipeline

PROBLEM = {
    "num_blocks": 24,
    "num_workers": 4,
    "memory_capacity": 16e9,
    "computation_time_per_block": 0.001,
    "num_parameters_per_block": 10_000_000,
    "num_activations_per_block": 10_000_000,
    "output_activation_size": 1_000_000,
}
PLAN = {"objective": 24 * 0.001 / 4, "plan": [1, 4], "bound": 24 * 0.001 / 4, "gap": 0.0}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(PROBLEM))
    return path


def plan(file: Any, *more: str, kind: str = "width_depth") -> int:
    return main.run(["plan", "--kind", kind, "--problem", str(file), *more])


def test_it_prints_nothing_but_the_plan_as_json(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert plan(file, "--json") == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out) == PLAN
    assert list(json.loads(shown.out)) == ["objective", "plan", "bound", "gap"]
    assert shown.out.count("\n") == 1
    assert shown.err == ""


def test_jobs_of_a_file_are_scheduled(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = [{"gpus": 1, "runtime_s": 8.0}, {"gpus": 2, "runtime_s": 5.0}]
    file = tmp_path / "jobs.json"
    file.write_text(json.dumps({"nodes": [2], "jobs": [{"name": name, "options": options} for name in "ab"]}))
    assert plan(file, "--json", kind="spase") == 0
    assert json.loads(capfd.readouterr().out) == {
        "objective": 8.0,
        "plan": [[0, 0, 0.0], [0, 0, 0.0]],
        "bound": 8.0,
        "gap": 0.0,
    }


def test_without_json_it_prints_text(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(file) == 0
    assert capsys.readouterr().out == "objective 0.006, proved to be the best\n1\n4\n"


def test_a_problem_that_nothing_fits_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.json"
    file.write_text(json.dumps({**PROBLEM, "memory_capacity": 1}))
    assert plan(file, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"objective": None, "plan": None, "bound": None, "gap": None}
    assert plan(file) == 0
    assert capsys.readouterr().out == "no plan fits into the memory\n"


def test_it_reads_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(PROBLEM).encode())))
    assert plan("-", "--json") == 0
    assert json.loads(capsys.readouterr().out) == PLAN


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no JSON"),
        (b"{", "is no JSON"),
        (b"\xff\xfe\x00", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[1]", "is a list: give an object"),
        (b"{}", "problem has no 'num_blocks': add it; there are no entries"),
        (json.dumps({**PROBLEM, "num_workers": -4}).encode(), "problem['num_workers'] is -4: give a whole number"),
        (json.dumps({**PROBLEM, "memory_capacity": float("nan")}).encode(), "is nan: give a finite number"),
    ],
)
def test_a_bad_problem_is_refused_on_standard_error(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    assert plan(file, "--json") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err


def test_a_missing_file_and_an_unknown_kind_are_refused(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path / "none.json") == 2
    assert "none.json cannot be read" in capsys.readouterr().err
    assert plan(file, kind="width") == 2
    assert "kind='width' is not known: give one of chain" in capsys.readouterr().err


# ---- a model --------------------------------------------------------------------------------------------------------
SMALL = ("--model", "support.models.small:Small")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=64, vocab_size=96)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    return tmp_path


def fitted(model: Any, *more: str) -> int:
    return main.run(["plan", "--model", str(model), "--batch", "2x32", "--gpu", "t4-16", *more])


def test_a_folder_is_planned_without_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fitted(folder, "--dtype", "float16") == 0
    shown = capsys.readouterr().out
    assert "what would help" in shown
    assert "transformer.h.*" in shown


def test_a_class_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", "--model", "support.models.small:Small", "--batch", "16x8", "--budget", "1GiB"]) == 0
    assert "budget 1.00 GiB" in capsys.readouterr().out


def test_a_model_that_reads_numbers_is_made_and_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--model", "support.models.small:Reading", "--batch", "16x8", "--gpu", "t4-16"]
    assert main.run(arguments) == 0
    shown = capsys.readouterr().out
    assert "from a real microbatch, as a dry run has no numbers: DataDependentOutputException" in shown
    assert "y.sum().item() > 0" in shown
    monkeypatch.setattr("hydra_ext.runtime.placement.host_memory.memory_limit", lambda: 1000)
    assert main.run(arguments) == 2  # it is too large to be made
    assert "y.sum().item() > 0" in capsys.readouterr().err


@pytest.mark.full
def test_several_cards_are_planned_beside_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fitted(folder, "--dtype", "float16", "--gpus", "2", "--microbatches", "2", "--state-bytes", "6") == 0
    shown = capsys.readouterr().out
    model, batch, fn = model_and_microbatch(str(folder), [2, 32], torch.float16)
    together = pipeline(model, batch, fn, devices=2, batch=4, device="t4-16", state_copies=3.0)
    alone = fit(model, batch, fn, microbatches=2, optimizer=6, device="t4-16")
    assert shown.splitlines()[0] == (
        f"a step of 4 samples: one device {alone.seconds:.3g} s, 2 devices {together.seconds:.3g} s"
    )
    assert f"2 devices:\n{together}\n" in shown
    assert shown.endswith(f"one device:\n{alone}\n")


def test_several_cards_that_are_too_small_are_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["plan", *SMALL, "--batch", "16x8", "--gpu", "t4-16", "--gpus", "2"]
    assert main.run([*small, "--budget", "1KiB"]) == 0
    shown = capsys.readouterr().out
    assert "one device fits no plan, 2 devices fits no plan" in shown
    assert "the leanest plan needs" in shown
    assert "give at least" in shown


def test_a_budget_that_is_too_small_is_an_answer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fitted(folder, "--budget", "1KiB") == 0
    assert "give at least" in capsys.readouterr().out


def test_a_host_budget_that_is_too_small_is_an_answer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fitted(folder, "--host-budget", "40KiB", "--state-bytes", "0") == 0
    shown = capsys.readouterr().out
    assert "host 40.00 KiB, disk" in shown
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hydra_ext.plan.steps.problem.StepProblem.solve", refuse)
        assert fitted(folder, "--host-budget", "1B") == 0
    assert "Give a host_budget of" in capsys.readouterr().out


def refuse(*_: Any, **__: Any) -> None:
    raise PlanError("no treatment fits the host")


@pytest.mark.full
def test_a_plan_is_drawn(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ((), ("--budget", "1MiB"), ("--budget", "1MiB", "--round-size", "4")):
        assert fitted(folder, "--png", str(tmp_path / "plan.png"), *more) == 0
        assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
        assert "what would help" in capsys.readouterr().out


def test_a_picture_without_matplotlib(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert fitted(folder, "--png", "plan.png") == 2
    assert "picture of a plan needs matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "no_such_folder"], "config.json"),
        (["--model", "no_such_module:Model"], "cannot be imported"),
        (["--model", "json:loads"], "torch.nn.Module"),
        ([*SMALL, "--batch", "many"], "no shape"),
        ([*SMALL, "--gpu", "abacus"], "rtx4090-24"),
        ([*SMALL, "--batch", "16x8", "--link", "0GB"], "link"),
        ([*SMALL, "--batch", "16x8", "--disk", "0GB"], "disk"),
        ([*SMALL, "--batch", "16x9"], "fails with --batch 16x9: RuntimeError"),
        ([*SMALL, "--batch", "0x8"], "no shape"),
        ([*SMALL, "--batch", "16x8", "--gpus", "0"], "--gpus 0: give a number of cards"),
        ([*SMALL, "--batch", "16x8", "--round-size", "5"], "contradicts microbatches=4"),
        ([*SMALL, "--batch", "16x8", "--host-budget", "much"], "host_budget"),
        ([*SMALL, "--batch", "16x8", "--png", "/nowhere/at/all.png"], "the picture cannot be written"),
        (["--model", "torch.nn:Linear"], "missing 2 required positional arguments"),
        (["--kind", "width_depth"], "nothing to plan"),
    ],
)
def test_questions_that_make_no_sense(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert text in shown.err
