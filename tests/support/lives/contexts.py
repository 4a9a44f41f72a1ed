"""Enters and leaves ``offload``, with the budgets, device, activations and disk of a program's operation."""

from __future__ import annotations

import threading
from typing import Any

import hydra_ext
from hydra_ext import _C, Checks, SimulatedDevice
from hydra_ext.errors import BudgetTooSmall, HostBudgetTooSmall
from hydra_ext.runtime import engine
from support.lives.sides import Side
from support.lives.subjects import MODELS

BUDGETS = ("tight", "middling", "roomy")
DEVICES = ("plain", "asynchronous", "slow", "slow and asynchronous")
# Left out are Compress, whose gradients are only exact up to its bound, and Offload("dynamic"), which needs a budget of
# the stash's own.
ACTIVATIONS = ("none", "keep", "offload", "conv", "recompute", "recompute the first")
RANDOM_STATES = 5 * 6000
SPEED = 2e7  # bytes a second of a slow host's memory: an update takes longer than a forward


def activations_of(kind: str) -> Any:
    offload, again = hydra_ext.Offload(), hydra_ext.Recompute()
    return {
        "none": None,
        "keep": hydra_ext.Keep(),
        "offload": offload,
        "conv": hydra_ext.Offload("conv"),
        "recompute": {"": offload, "blocks.*": again},
        "recompute the first": {"blocks.0": again},
    }[kind]


def device_of(kind: str, seed: int) -> SimulatedDevice:
    speed = SPEED if kind.startswith("slow") else None
    return SimulatedDevice(asynchronous=kind.endswith("asynchronous"), seed=seed, host_memory_bytes_per_second=speed)


def budget_of(side: Side, kind: str, activations: str, blocks: list[str] | None) -> int:
    if kind == "roomy":
        return 2**24
    try:
        hydra_ext.offload(side.model, budget=1, blocks=blocks)
        smallest = 1
    except BudgetTooSmall as error:
        smallest = error.smallest_budget
    room = MODELS[side.program.model].room[side.program.wide]
    # Each call that is repeated keeps a random state of five thousand bytes.
    states = RANDOM_STATES if activations.startswith("recompute") else 0
    return 2 * smallest + (2**13 + 4 * room + states if kind == "tight" else 2**15 + 8 * room + 4 * states)


def enter(side: Side, **how: Any) -> None:
    if not side.ours:
        return
    blocks = [f"blocks.{index}" for index in range(len(side.model.blocks))] if how["named"] else None
    options: dict[str, Any] = {
        "budget": budget_of(side, how["budget"], how["activations"], blocks),
        "device": device_of(how["device"], how["seed"]),
        "activations": activations_of(how["activations"]),
        "blocks": blocks,
        "checks": Checks(poison_hosts=how["poison"]),
    }
    if how["spills"]:
        folder = side.folder() / "spill"
        try:
            context = hydra_ext.offload(side.model, side.optimizer, host_budget=1, spill_dir=folder, **options)
            run = context.__enter__()
        except HostBudgetTooSmall as error:
            room = int(error.smallest_budget * 1.05)
            context = hydra_ext.offload(side.model, side.optimizer, host_budget=room, spill_dir=folder, **options)
            run = context.__enter__()
    else:
        context = hydra_ext.offload(side.model, side.optimizer, **options)
        run = context.__enter__()
    side.run, side.kept["context"] = run, context


def stash(side: Side, *, policy: str, budget: int | None, device: str, seed: int) -> None:
    end_stash(side)
    if policy == "none":
        return
    chosen = hydra_ext.Offload("dynamic") if policy == "dynamic" else activations_of(policy)
    room = budget or 2**16 if policy == "dynamic" else budget
    made = hydra_ext.stash(chosen, budget=room, model=side.model, device=device_of(device, seed))
    side.stash = made


def end_stash(side: Side) -> None:
    """Ends the stash. No graph is left, so all memory has to be returned."""
    ended, side.stash = side.stash, None
    if ended is None:
        return
    report = ended.report()
    if report.held_bytes or report.host_bytes or report.copies.disk_bytes:
        raise LeftBehind(
            f"a stash holds {report.held_bytes} bytes on the device, {report.host_bytes} on the host, "
            f"{report.copies.disk_bytes} on the disk"
        )


def leave(side: Side) -> None:
    if side.run is None:
        return
    run, side.run = side.run, None
    side.kept.pop("context").__exit__(None, None, None)
    report_left(side, run)


class LeftBehind(AssertionError):
    """State of a context that is left after its end."""


def report_left(side: Side, run: hydra_ext.Run) -> None:
    held = {
        "resident bytes": run.core.pager.resident_bytes,
        "slots": run.core.memory.slot_bytes,
        "weights": run.core.memory.ledger.in_use_by(_C.MemoryClass.WEIGHTS),
        "buffers": run.core.memory.ledger.in_use_by(_C.MemoryClass.BUFFERS),
        "the engine's wrapper": int(engine.installed()),
        "threads": len(set(threading.enumerate()) - side.threads),
    }
    left = {name: number for name, number in held.items() if number}
    if left:
        raise LeftBehind(f"the context has ended, and left {left}")


def passed(side: Side) -> list[str]:
    """Lists the conditions that hold between operations and that the run violates."""
    if side.run is None:
        return []
    run = side.run
    found = []
    peak = run.report().peak_bytes
    if peak > run.budget:
        found.append(f"budget: peak {peak} of {run.budget} bytes")
    if run.core.pager.resident_bytes > run.budget:
        found.append(f"budget: {run.core.pager.resident_bytes} of {run.budget} bytes are resident")
    if run.core.gate.open:
        found.append("a window is open")
    if run.core.pager.pins:
        found.append(f"{run.core.pager.pins} pins")
    return found
