"""Runs programs by their numbers and reports: python -m support.lives --seeds 0:1000, in tests/."""

from __future__ import annotations

import argparse
import faulthandler
import re
import sys
import time

import torch

from support.lives.drawing import program_of
from support.lives.reporting import Tally
from support.lives.running import run
from support.lives.shortening import shortened


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m support.lives", description=__doc__)
    parser.add_argument("--seeds", default="0:300", help="range first:last, without the last one")
    parser.add_argument("--without", default="", help="operations to leave out, such as 'rounds,share how=vector'")
    parser.add_argument("--of", default="", help="only programs whose model or optimizer matches this expression")
    parser.add_argument("--stash", action="store_true", help="programs with only a stash")
    parser.add_argument("--shorten", action="store_true", help="print each failing program as the shortest script")
    parser.add_argument("--first", action="store_true", help="end at the first failing program")
    options = parser.parse_args()
    torch.set_num_threads(1)
    first, _, last = options.seeds.partition(":")
    without = frozenset(filter(None, options.without.split(",")))
    tally = Tally()
    begun = time.perf_counter()
    for seed in range(int(first), int(last)):
        faulthandler.dump_traceback_later(600, exit=True)
        print(f"\r{seed} ", end="", file=sys.stderr, flush=True)
        program = program_of(seed, without=without, stash=options.stash)
        if not re.search(options.of, f"{program.model} {program.optimizer}"):
            continue
        outcome = run(program)
        tally.count(seed, program, outcome)
        if outcome.wrong:
            print(f"seed {seed}: {'; '.join(outcome.wrong)[:1000]}", flush=True)
            if options.shorten:
                print(shortened(program).script(), flush=True)
            if options.first:
                break
    faulthandler.cancel_dump_traceback_later()
    print(tally.text(), f"{time.perf_counter() - begun:.1f} s", sep="\n")
    return bool(tally.wrong)


if __name__ == "__main__":
    sys.exit(main())
