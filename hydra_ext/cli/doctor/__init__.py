"""`python -m hydra_ext doctor`: what is installed, what will work here and what will not."""

from __future__ import annotations

import argparse

from hydra_ext.cli.doctor import build, device, gpu, host
from hydra_ext.cli.doctor.report import Report, to_json, to_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Returns 0 if everything that is needed works, even with warnings; otherwise 1."""
    report = examine()
    print(to_json(report) if options.json else to_text(report))
    return report.exit_code


def examine() -> Report:
    built = build.collect()
    machine = host.collect()
    accelerator = device.collect()
    gpus = gpu.collect() if accelerator.cuda_available else None
    sections = {
        "build": build.section(built),
        "host": host.section(machine),
        "device": device.section(accelerator),
        **({} if gpus is None else {"gpu": gpu.section(gpus)}),
    }
    found = [
        *build.checks(built),
        *host.checks(machine),
        *device.checks(accelerator, built.built_cuda, machine.memlock_limit_bytes),
        *([] if gpus is None else gpu.checks(gpus)),
    ]
    return Report(sections, found)
