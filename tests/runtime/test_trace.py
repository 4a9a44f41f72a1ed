"""``run.trace``: the file says what the report says, event by event, and recording changes no bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hydra_ext
from hydra_ext import _C, Checks, Report, Run, SimulatedDevice, optim
from hydra_ext.runtime.reporting import trace
from support import traces
from support.models.zoo import FAMILIES
from support.rounds.rounds import Plan, activations_of_rounds, peak_of_loop
from support.runtime.native import stack
from support.training import parameter_bytes

GPT2 = FAMILIES["gpt2"]
M = 2
STEPS = 4
TRACED = 2  # the last ones
BATCHES = GPT2.batches(1, STEPS * M)


def rounds(run: Run, step: int) -> list[Tensor]:
    model = run.model
    return list(run.step(BATCHES[step * M : (step + 1) * M], lambda b: GPT2.loss(model, b), round_size=M).losses)


def loop(run: Run, step: int) -> list[Tensor]:
    losses = []
    for batch in BATCHES[step * M : (step + 1) * M]:
        loss = GPT2.loss(run.model, batch)
        loss.backward()
        losses.append(loss.detach())
    assert run.optimizer is not None
    run.optimizer.step()
    run.optimizer.zero_grad()
    return losses


PROGRAMS: dict[str, Callable[[Run, int], list[Tensor]]] = {"rounds": rounds, "loop": loop}


@dataclass
class Traced:
    """A run whose last steps were traced."""

    program: str
    file: traces.TraceFile
    before: Report
    after: Report
    names: list[str]
    order: dict[str, list[str]]  # of blocks in the last pass of each kind
    update_bytes: dict[str, int]
    outcome: list[Tensor]


@cache
def activation_bytes(program: str) -> int:
    if program == "loop":
        return peak_of_loop(GPT2, Plan())
    return activations_of_rounds(GPT2, Plan(m=M), BATCHES[: 2 * M], round_size=M, recompute=False)


def train(program: str, path: Path | None) -> tuple[list[Tensor], Run, Report, Report]:
    model = GPT2.make(0)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    budget = activation_bytes(program) + parameter_bytes(model) // 3
    losses: list[Tensor] = []
    checks = Checks(poison_hosts=True)
    with hydra_ext.offload(model, optimizer, budget=budget, checks=checks, activations=None) as run:
        torch.manual_seed(7)
        for step in range(STEPS - TRACED):
            losses += PROGRAMS[program](run, step)
        run.sync()
        before = run.report()
        if path is None:
            for step in range(STEPS - TRACED, STEPS):
                losses += PROGRAMS[program](run, step)
        else:
            with run.trace(path):
                for step in range(STEPS - TRACED, STEPS):
                    losses += PROGRAMS[program](run, step)
        after = run.report()
        run.sync()
    assert after.windows > before.windows > 0
    assert (after.refusals, after.fallbacks, after.faults) == (0, 0, 0)
    assert after.evictions > before.evictions, "the budget is not what it is taken for"
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())], run, before, after


@pytest.fixture(scope="module", params=PROGRAMS)
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    path = tmp_path_factory.mktemp("trace") / "step.json"
    outcome, run, before, after = train(request.param, path)
    names = [block.name for block in run.layout.blocks]
    kinds = {"forward": _C.PassKind.FORWARD, "backward": _C.PassKind.BACKWARD}
    return Traced(
        program=request.param,
        file=traces.read(path),
        before=before,
        after=after,
        names=names,
        order={name: [names[block] for block, _ in run.core.pager.recorded(kind)] for name, kind in kinds.items()},
        # fp32: weights and two moments are read and written, the gradient is read.
        update_bytes={block.name: 7 * block.nbytes for block in run.layout.blocks},
        outcome=outcome,
    )


# ---- what is in it --------------------------------------------------------------------------------------------------


def test_every_row_is_there_and_has_events(traced: Traced) -> None:
    assert list(traced.file.rows) == list(traces.ROWS)
    assert {event["tid"] for event in traced.file.events} == set(traced.file.rows.values())
    assert traced.file.about["dropped_events"] == 0
    assert traced.file.about["device"] == "simulated"
    for event in traced.file.events:
        assert traces.begin(event) >= 0
        assert event["dur"] >= 0
        assert event["pid"] == traced.file.events[0]["pid"]


def test_loads_and_bytes_to_the_device_are_those_of_the_report(traced: Traced) -> None:
    copies = traced.file.row("host to device", "copy")
    loads = [event for event in copies if "continued" not in event["args"]]
    assert len(loads) == traced.after.loads - traced.before.loads > 0
    assert traces.moved(copies) == traced.after.weights_moved_bytes - traced.before.weights_moved_bytes
    assert {event["name"] for event in loads} == {event["args"]["block"] for event in loads} <= set(traced.names)


def test_bytes_to_the_host_are_those_of_the_report_and_named_by_their_parameters(traced: Traced) -> None:
    copies = traced.file.row("device to host", "copy")
    assert traces.moved(copies) == traced.after.gradients_moved_bytes - traced.before.gradients_moved_bytes > 0
    blocks = {event["args"]["block"] for event in copies}
    assert blocks == set(traced.names)
    assert all(event["name"].startswith(event["args"]["block"]) for event in copies)


def test_events_of_a_lane_do_not_overlap(traced: Traced) -> None:
    for row in ("host to device", "device to host", "optimizer"):
        assert traces.overlapping(traced.file.row(row)) == []


def test_passes_hold_the_blocks_in_the_order_they_were_recorded_in(traced: Traced) -> None:
    compute = traced.file.row("compute")
    assert traces.misnested([(traces.begin(event), traces.end(event)) for event in compute]) == []
    passes = [event for event in compute if event["cat"] == "pass"]
    assert traces.overlapping(passes) == []
    assert len(passes) == traced.after.windows - traced.before.windows
    assert len({event["name"] for event in passes}) == len(passes)
    last = {event["name"].split()[0]: event for event in passes}
    assert set(last) == {"forward", "backward"}
    for kind, event in last.items():
        inside = [block for block in compute if block["cat"] == "block" and block["args"]["pass"] == event["name"]]
        assert [block["name"] for block in inside] == traced.order[kind]
        for block in inside:
            assert traces.begin(event) <= traces.begin(block) <= traces.end(block) <= traces.end(event)


def test_every_block_is_updated_once_a_step(traced: Traced) -> None:
    updates = traced.file.row("optimizer", "update")
    for name in traced.names:
        found = [event for event in updates if event["name"] == name]
        assert [event["args"]["bytes"] for event in found] == [traced.update_bytes[name]] * TRACED
    assert len(updates) == TRACED * len(traced.names)


def test_the_steps_are_numbered(traced: Traced) -> None:
    steps = traced.file.row("steps")
    assert [event["name"] for event in steps] == [f"step {number + 1}" for number in range(STEPS - TRACED, STEPS)]
    assert traces.overlapping(steps) == []


def test_the_counter_divides_the_budget(traced: Traced) -> None:
    assert len(traced.file.counters) > 2 * len(traced.names)
    seen = 0
    for counter in traced.file.counters:
        assert sum(counter["args"].values()) == traced.file.about["budget_bytes"]
        assert min(counter["args"].values()) >= 0
        seen = max(seen, counter["args"]["weights"])
    assert 0 < seen <= traced.after.peak_bytes


def test_recording_changes_no_bit(traced: Traced) -> None:
    plain, run, _, _ = train(traced.program, None)
    assert all(torch.equal(a, b) for a, b in zip(traced.outcome, plain, strict=True))
    run.core.memory.backend.activity.start(10)
    record = run.core.memory.backend.activity.stop()
    assert (list(record.activities), list(record.memory)) == ([], [])


def test_compute_nests_by_itself() -> None:
    """The file would nest anyhow: this is what was recorded."""
    model = GPT2.make(0)
    with hydra_ext.offload(
        model, optim.AdamW(model.parameters()), budget="64MiB", checks=Checks(poison_hosts=True)
    ) as run:
        run.core.memory.backend.activity.start(10_000)
        rounds(run, 0)
        loop(run, 1)
        activities = run.core.memory.backend.activity.stop().activities
    compute = [a for a in activities if a.row == _C.ActivityRow.COMPUTE]
    assert len(compute) > 100
    assert {a.thread for a in compute} == {0}
    assert traces.misnested([(a.begin, a.end) for a in compute]) == []


# ---- waits ----------------------------------------------------------------------------------------------------------


def test_where_compute_waits_for_weights_there_is_a_gap_that_says_so(tmp_path: Path) -> None:
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    # A block takes 10 ms to come, and a fraction of a millisecond to compute.
    device = SimulatedDevice(to_device_bytes_per_second=100 * parameter_bytes(model) / len(model))
    with hydra_ext.offload(model, optimizer, budget="1MiB", device=device, checks=Checks(poison_hosts=True)) as run:
        with run.trace(tmp_path / "step.json"):
            model(torch.ones(4, 64)).sum().backward()
            optimizer.step()
        report = run.report()
    file = traces.read(tmp_path / "step.json")
    waits = [event for event in file.row("compute", "wait") if event["name"] == "waits for weights"]
    blocks = file.row("compute", "block")
    assert waits
    assert {event["args"]["block"] for event in waits} <= {block.name for block in run.layout.blocks}
    for wait in waits:
        assert not any(
            traces.begin(block) < traces.end(wait) and traces.begin(wait) < traces.end(block) for block in blocks
        )
    assert sum(event["dur"] for event in waits) / 1e6 >= 0.999 * report.waited_for_weights_seconds > 0.02
    assert [event["name"] for event in file.row("optimizer")] == ["optimizer.step()"]


class Peeking(nn.Module):
    """Reads the second layer's weight before that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(F.linear(x, self.second.weight)))


def test_an_absent_parameter_that_an_operation_meets_is_waited_for_as_a_fault(tmp_path: Path) -> None:
    model = Peeking()
    with hydra_ext.offload(model, budget="1MiB", blocks=["first", "second"], checks=Checks(poison_hosts=True)) as run:
        with run.trace(tmp_path / "step.json"), torch.no_grad():
            model(torch.ones(4, 64))
        assert run.report().faults == 1
    compute = traces.read(tmp_path / "step.json").row("compute")
    (fault,) = [event for event in compute if event["name"] == "waits for a fault"]
    assert fault["args"] == {"block": "second", "pass": "inference 1"}


# ---- less usual ways home -------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Writes to its weight in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100), requires_grad=False)
        self.linear = nn.Linear(100, 100)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.add_(1)
        return self.linear(x + self.weight)


@pytest.mark.filterwarnings("ignore:Using backward")  # with create_graph=True
@pytest.mark.parametrize("create_graph", [False, True])
def test_weights_written_back_and_gradients_with_a_graph_are_on_the_row_too(create_graph: bool, tmp_path: Path) -> None:
    model = Counting()
    with hydra_ext.offload(model, budget="1MiB", checks=Checks(poison_hosts=True), activations=None) as run:
        with run.trace(tmp_path / "step.json"):
            model(torch.ones(4, 100)).pow(2).sum().backward(create_graph=create_graph)
        report = run.report()
        assert run.core.gradients.statistics.synchronous == (2 if create_graph else 0)
        model.zero_grad()
    file = traces.read(tmp_path / "step.json")
    copies = file.row("device to host", "copy")
    assert report.weights_written_back_bytes > 0
    assert traces.moved(copies) == report.gradients_moved_bytes + report.weights_written_back_bytes
    assert traces.moved([e for e in copies if e["name"] == "written back"]) == report.weights_written_back_bytes
    assert traces.overlapping(file.row("device to host")) == []


def test_threads_that_compute_at_once_have_rows_of_their_own(tmp_path: Path) -> None:
    model = stack()
    inside = threading.Barrier(2)

    def meet(*_: object) -> None:
        inside.wait(300)

    model[0].register_forward_pre_hook(meet)

    def forward() -> None:
        with torch.no_grad():
            model(torch.ones(4, 64))

    with hydra_ext.offload(model, budget="1MiB", checks=Checks(poison_hosts=True)) as run:
        with run.trace(tmp_path / "step.json"):
            other = threading.Thread(target=forward)
            other.start()
            forward()
            other.join()
        assert run.report().windows > 0
    file = traces.read(tmp_path / "step.json")
    assert [name for name in file.rows if name.startswith("compute")] == ["compute", "compute, thread 2"]
    names = sorted(block.name for block in run.layout.blocks)
    for name in ("compute", "compute, thread 2"):
        events = file.row(name)
        assert sorted(event["name"] for event in events if event["cat"] == "block") == names
        assert traces.misnested([(traces.begin(event), traces.end(event)) for event in events]) == []


def test_what_ends_after_what_it_began_in_is_cut_there() -> None:
    def event(name: str, begin: int, end: int) -> trace.Event:
        return {"name": name, "ts": begin, "dur": end - begin}

    given = [event("late", 5, 20), event("pass", 0, 10), event("next", 10, 30), event("inner", 6, 8)]
    nested = [(found["name"], found["ts"], found["ts"] + found["dur"]) for found in trace._nested(given)]
    assert nested == [("pass", 0, 10), ("late", 5, 10), ("inner", 6, 8), ("next", 10, 30)]
