"""The first minutes on a GPU: what matters most first, each stage's outcome written as soon as it is known.

``make gpu-test`` runs it. The file has versions, figures and every failure, also if the run is stopped in the middle.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
_STEPS = 50
_TAIL = 4000  # characters of a stage's output that are kept
_ON_THE_EMULATED_MACHINE = """import runpy, sys
import emulated_cuda
emulated_cuda.load()
del sys.argv[0]
run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
run(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Stage:
    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    seconds: int = 300


def stages(contract: Sequence[str], *, emulated: bool) -> list[Stage]:
    """The stages, in the order in which their faults would spoil what comes after them."""

    def python(what: str, *arguments: str) -> list[str]:
        if emulated:
            return [sys.executable, "-c", _ON_THE_EMULATED_MACHINE, what, *arguments]
        return [sys.executable, *([] if what.endswith(".py") else ["-m"]), what, *arguments]

    def tests(*arguments: str) -> list[str]:
        plugin = ["-p", "emulated_cuda.pytest_plugin"] if emulated else []
        return [sys.executable, "-m", "pytest", "-q", *plugin, "-m", "gpu", *arguments]

    few = ["--steps=5", "--rows=16"] if emulated else []
    retries = python(str(Path(__file__)), "--retries", *few)
    found = [
        Stage("doctor", python("hydra_ext", "doctor", "--json"), seconds=60),
        *([Stage("contract of the device", contract)] if contract else []),
        Stage("an activation larger than an eighth of the budget", tests("cuda/test_allocator.py", "-k", "any_size")),
        Stage("retries of the allocator", retries, seconds=120),
        Stage(
            "retries with fixed segments",
            retries,
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
            seconds=120,
        ),
        Stage("parity under jitter, not poisoned", tests("cuda/test_parity.py", "-k", "as_it_is and jitter")),
        Stage("homes", tests("cuda/test_homes.py")),
    ]
    if nsys := shutil.which("nsys"):
        profile = [nsys, "profile", "--force-overwrite=true", "-o", "gpu-session", *retries, "--steps=3"]
        found.append(Stage("profile of a step", profile))
    return found


def run(stage: Stage, folder: Path) -> dict[str, object]:
    begin = time.monotonic()
    try:
        done = subprocess.run(
            stage.command,
            cwd=folder,
            env={**os.environ, **stage.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=stage.seconds,
            check=False,
        )
        code, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, said = -1, f"longer than {stage.seconds} s\n{(error.stdout or b'').decode(errors='replace')}"
    return {
        "stage": stage.name,
        "command": " ".join(stage.command),
        "environment": dict(stage.environment),
        "passed": code == 0,
        "seconds": round(time.monotonic() - begin, 1),
        "output": said[-_TAIL:],
    }


def versions(*, emulated: bool) -> dict[str, object]:
    if emulated:
        import emulated_cuda

        emulated_cuda.load()
    import torch

    from hydra_ext import _build_info

    return {
        "begun": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "emulated": emulated,
        "built_for": _build_info.CUDA,
    }


def show_retries(steps: int, rows: int) -> bool:
    """Trains with room for half of the weights, and prints how often the allocator ran out after the order was known.

    Returns whether blocks were evicted, and the allocator never ran out.
    """
    import torch
    from torch import nn

    import hydra_ext

    model = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(24)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    weights, activations = 24 * 16 * MIB, 24 * 2 * rows * 2048 * 4
    batch, budget = torch.randn(rows, 2048), int(1.1 * (weights // 2 + activations))
    seen = []
    with hydra_ext.offload(model, optimizer, budget=budget, device="cuda") as run:
        for _ in range(steps):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append((torch.cuda.memory_stats()["num_alloc_retries"], run.report().spills))
        report = run.report()
    known = min(3, steps - 1)
    figures = {
        "steps": steps,
        "budget_mib": budget // MIB,
        "peak_mib": report.peak_bytes // MIB,
        "retries": seen[-1][0] - seen[known][0],
        "spills": seen[-1][1] - seen[known][1],
        "loads_per_step": round(report.loads / steps, 1),
        "evictions_per_step": round(report.evictions / steps, 1),
    }
    print(json.dumps(figures))
    return report.evictions > 0 and seen[-1] == seen[known]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-session.json")
    parser.add_argument(
        "--contract", nargs=argparse.REMAINDER, default=[], help="the command of the C++ contract tests; last"
    )
    parser.add_argument("--retries", action="store_true", help="only count the allocator's retries, and print them")
    parser.add_argument("--steps", type=int, default=_STEPS)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--emulated", action="store_true", help="on the emulated machine, to try the stages themselves")
    options = parser.parse_args()
    if options.retries:
        return 0 if show_retries(options.steps, options.rows) else 1
    outcome = versions(emulated=options.emulated)
    done: list[dict[str, object]] = []
    outcome["stages"] = done
    for stage in stages(options.contract, emulated=options.emulated):
        print(f"{stage.name} ...", flush=True)
        done.append(run(stage, ROOT / "tests"))
        options.out.write_text(json.dumps(outcome, indent=2))
        print(f"  {'passed' if done[-1]['passed'] else 'FAILED'} in {done[-1]['seconds']} s", flush=True)
    print(f"written to {options.out}")
    return 0 if all(each["passed"] for each in done) else 1


if __name__ == "__main__":
    sys.exit(main())
