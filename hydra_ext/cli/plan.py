"""`plan`: says whether a model fits a card and how fast it trains, or solves a planning problem of a file."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

from hydra_ext.errors import HydraError, PlanError
from hydra_ext.plan import PipelinePlan, Plan, Solution, solve

logger = logging.getLogger(__name__)

_SHARE_OF_MODEL = 0.5  # of the host's memory, at most, for a model that is built to be measured
_STATE_BYTES = {"float32": 8.0, "bfloat16": 10.0, "float16": 12.0}  # of hydra_ext.optim.AdamW, by dtype of weights


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("a model")
    model.add_argument("--model", metavar="MODEL", help="folder with a config.json, or a class as package.module:Class")
    model.add_argument("--batch", default="1x2048", help="shape of a microbatch, such as 4x2048 for rows and tokens")
    model.add_argument("--gpu", metavar="CARD", help="a known card, such as rtx4090-24; by default this machine")
    model.add_argument("--gpus", type=int, default=1, metavar="N", help="cards that train it together (default: 1)")
    model.add_argument("--budget", help="device memory for training, such as 20GiB; by default most of the card's")
    model.add_argument("--link", help="bytes a second between host and device, such as 25GB; by default the card's")
    model.add_argument("--microbatches", type=int, default=4, help="microbatches of a step (default: %(default)s)")
    model.add_argument("--round-size", type=int, help="microbatches that run together; by default the best number")
    model.add_argument("--host-budget", help="host memory for training, such as 64GiB; the rest is on the disk")
    model.add_argument("--disk", help="bytes a second of the disk, such as 2GB, for activations beyond --host-budget")
    model.add_argument("--state-bytes", type=float, help="optimizer state a parameter (default: that of AdamW)")
    model.add_argument("--png", type=Path, metavar="FILE", help="draw the step's memory and what each lane does when")
    model.add_argument("--dtype", choices=_STATE_BYTES, default="bfloat16", help="of weights (default: %(default)s)")
    problem = parser.add_argument_group("a problem of a file")
    problem.add_argument("--kind", help="kind of the problem, such as unequal_split")
    problem.add_argument("--problem", metavar="FILE", help="the problem as JSON; - reads standard input")
    problem.add_argument("--json", action="store_true", help="print objective, plan, bound and gap as JSON")


def run(options: argparse.Namespace) -> int:
    """Returns 0, also where nothing fits, and 2 for a problem that makes no sense."""
    try:
        if options.model is not None:
            print(_fitted(options))
            return 0
        if options.kind is None or options.problem is None:
            raise PlanError("nothing to plan: give --model and --batch, or --kind and --problem")
        solution = solve(options.kind, _read(options.problem))
    except HydraError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(_values(solution), allow_nan=False) if options.json else _text(solution))
    return 0


def _fitted(options: argparse.Namespace) -> str:
    from hydra_ext.errors import NotOnFakeTensors

    shape = _shape(options.batch)
    if options.gpus < 1:
        raise PlanError(f"--gpus {options.gpus}: give a number of cards from 1 on")
    try:
        try:
            return _answers("meta", options, shape)
        except NotOnFakeTensors as error:
            if not _has_room(options, shape):
                raise
            logger.info("the model is made with numbers: %s", error.reason)
            return _answers("cpu", options, shape)
    except HydraError:
        raise
    except Exception as error:  # the model's own
        first = (str(error).strip() or "no reason was given").splitlines()[0]
        raise PlanError(
            f"--model {options.model} fails with --batch {options.batch}: {type(error).__name__}: {first}"
        ) from error


def _answers(device: str, options: argparse.Namespace, shape: list[int]) -> str:
    """The plan for one device, and before it the one for several, where these were asked for."""
    import torch

    from hydra_ext.integrations.shapes import model_and_microbatch

    subject = model_and_microbatch(options.model, shape, getattr(torch, options.dtype), device)
    alone = _on_one_device(options, *subject)
    if options.png is not None and not isinstance(alone, str):
        from hydra_ext.cli.plan_picture import draw

        draw(alone, options.png)
    if options.gpus == 1:
        return str(alone)
    samples = shape[0] * options.microbatches
    together = _on_several(options, samples, *subject)
    head = f"a step of {samples} samples: one device {_seconds(alone)}, {options.gpus} devices {_seconds(together)}"
    return "\n".join([head, "", f"{options.gpus} devices:", str(together), "", "one device:", str(alone)])


def _seconds(plan: Plan | PipelinePlan | str) -> str:
    return "fits no plan" if isinstance(plan, str) else f"{plan.seconds:.3g} s"


def _on_one_device(options: argparse.Namespace, model: Any, batch: Any, fn: Any) -> Plan | str:
    """The plan, or why there is none."""
    from hydra_ext.errors import BudgetTooSmall, HostBudgetTooSmall
    from hydra_ext.plan import fit

    try:
        return fit(
            model,
            batch,
            fn,
            microbatches=options.microbatches,
            round_size=options.round_size,
            budget=options.budget,
            host_budget=options.host_budget,
            optimizer=_state_bytes(options),
            device=options.gpu,
            link=options.link,
            disk=options.disk,
        )
    except (BudgetTooSmall, HostBudgetTooSmall) as error:
        return str(error)


def _on_several(options: argparse.Namespace, samples: int, model: Any, batch: Any, fn: Any) -> PipelinePlan | str:
    """The plan for as many samples a step, or why there is none."""
    import torch

    from hydra_ext.errors import PlanDoesNotFit
    from hydra_ext.plan import pipeline

    try:
        return pipeline(
            model,
            batch,
            fn,
            devices=options.gpus,
            batch=samples,
            budget=options.budget,
            device=options.gpu,
            link=options.link,
            state_copies=_state_bytes(options) / getattr(torch, options.dtype).itemsize,
        )
    except PlanDoesNotFit as error:
        return str(error)


def _state_bytes(options: argparse.Namespace) -> float:
    """Of the optimizer, for each parameter."""
    return _STATE_BYTES[options.dtype] if options.state_bytes is None else options.state_bytes


def _has_room(options: argparse.Namespace, shape: list[int]) -> bool:
    """Whether the host has room for the model with numbers, beside a microbatch."""
    import torch

    from hydra_ext.integrations.shapes import model_and_microbatch
    from hydra_ext.runtime.placement.host_memory import memory_limit

    model, _, _ = model_and_microbatch(options.model, shape, getattr(torch, options.dtype))
    built = 4 * sum(parameter.numel() for parameter in model.parameters())  # constructors work in float32
    limit = memory_limit()
    return limit is None or _SHARE_OF_MODEL * limit > built


def _shape(batch: str) -> list[int]:
    sizes = batch.split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise PlanError(f"--batch {batch} is no shape: give positive numbers with x between, such as 4x2048")
    return [int(size) for size in sizes]


def _read(file: str) -> dict[str, object]:
    try:
        text = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise PlanError(f"--problem {file} cannot be read: {error}") from error
    try:
        problem = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"--problem {file} is no JSON: {error}") from error
    if not isinstance(problem, dict):
        raise PlanError(f"--problem {file} is a {type(problem).__name__}: give an object, with the problem's entries")
    return problem


def _values(solution: Solution) -> dict[str, object]:
    return {
        "objective": solution.objective,
        "plan": solution.plan,
        "bound": solution.bound,
        "gap": solution.gap,
    }


def _text(solution: Solution) -> str:
    if solution.objective is None or solution.plan is None:
        return "no plan fits into the memory" + ("" if solution.bound is None else f" (bound {solution.bound:g})")
    if solution.gap is None:
        proof = "no bound is known"
    elif solution.gap == 0:
        proof = "proved to be the best"
    else:
        proof = f"at most {100 * solution.gap:.3g} % from the best, whose bound is {solution.bound:g}"
    return "\n".join([f"objective {solution.objective:g}, {proof}", *(json.dumps(part) for part in solution.plan)])
