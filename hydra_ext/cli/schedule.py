"""`schedule`: draws a pipeline schedule, says what it needs, prints it as text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hydra_ext.errors import HydraError, InvalidSchedule
from hydra_ext.schedule import KINDS, Schedule, Simulation, Verification, make


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", help=f"{', '.join(KINDS)}, or a file with a schedule's text")
    parser.add_argument("--stages", type=int, help="stages of the model (4)")
    parser.add_argument("--ranks", type=int, help="ranks that share them (one a stage)")
    parser.add_argument("--microbatches", type=int, help="microbatches in a batch (8; 1 for pipedream)")
    parser.add_argument("--vertical-sync", action="store_true", help="pipedream: one version on all stages")
    parser.add_argument("--ahead", type=int, default=0, help="1f1b, 2bw: microbatches in flight to hide hops (0)")
    parser.add_argument("--batches", type=int, default=3, help="steps that are drawn (3)")
    parser.add_argument("--forward", type=float, default=1.0, help="seconds of a microbatch's forward on a stage (1)")
    parser.add_argument("--backward", type=float, default=2.0, help="seconds of its backward (2)")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds from a stage to the next (0)")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--text", action="store_true", help="print the schedule's text instead of drawing it")
    output.add_argument("--png", type=Path, metavar="FILE", help="draw the schedule to this file")
    output.add_argument("--perfetto", type=Path, metavar="FILE", help="write a trace for https://ui.perfetto.dev")


def run(options: argparse.Namespace) -> int:
    try:
        _show(options)
    except HydraError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _show(options: argparse.Namespace) -> None:
    schedule = _read(options)
    verified = schedule.verify()
    if options.text:
        print(schedule.text, end="")
        return
    simulation = schedule.simulate(
        batches=options.batches, forward=options.forward, backward=options.backward, latency=options.latency
    )
    if options.png:
        simulation.save_png(options.png)
    elif options.perfetto:
        simulation.save_trace(options.perfetto)
    else:
        print(simulation.grid())
    print(_summary(schedule, verified, simulation))


def _read(options: argparse.Namespace) -> Schedule:
    if options.kind in KINDS:
        stages = 4 if options.stages is None else options.stages
        usual = 1 if options.kind == "pipedream" else 8
        return make(
            options.kind,
            stages=stages,
            ranks=options.ranks,
            microbatches=usual if options.microbatches is None else options.microbatches,
            vertical_sync=options.vertical_sync,
            ahead=options.ahead,
        )
    given = (options.stages, options.ranks, options.microbatches, options.vertical_sync, options.ahead)
    if given != (None, None, None, False, 0):
        raise InvalidSchedule(
            f"'{options.kind}' is read as a file, which has its own stages and microbatches: leave out --stages, "
            "--ranks, --microbatches, --vertical-sync and --ahead"
        )
    try:
        return Schedule.parse(Path(options.kind).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(KINDS)
        raise InvalidSchedule(
            f"'{options.kind}' is neither one of {names} nor a file that can be read: {error}"
        ) from error


def _summary(schedule: Schedule, verified: Verification, simulation: Simulation) -> str:
    lines = [f"{simulation.period:g} s a batch, {simulation.makespan:g} s for {simulation.batches} and the drain"]
    for rank, peaks in enumerate(verified.ranks):
        stages = ", ".join(map(str, schedule.stages_of(rank)))
        lines.append(
            f"rank {rank} (stage {stages}) at most: {peaks.in_flight} in flight, {peaks.versions} version(s) of "
            f"weights, {peaks.gradients} batch(es) of gradients"
        )
    return "\n".join(lines)
