"""The codec of activations on one core: python benchmarks/codec.py [--rounds 11] [--values 16777216]

For each kind of numbers and each error bound, a fraction of their standard deviation:

    bits     a value, against the entropy of the quantised numbers: dense data within 1.0 of it, ReLU within 0.65,
             real feature maps at or below it
    speed    as a fraction of libc's memcpy of the uncompressed numbers, by turns in one process; medians

Goals with AVX-512: sign-magnitude (`fast=True`) compresses dense data at 100 % of memcpy, the shortest encoding at 60 %
(feature maps 40 %), everything decompresses at 100 %. With AVX2: 65 % and 75 %, of dense data with up to 8 planes.
Exits with 1 if one is missed; instructions that this machine lacks are left out, and the last line says so. Where two
identical copies of a round differ by more than 10 % (half the interquartile range), speeds are void: shown, not judged.

Feature maps are those of a 3 x 3 convolution of scikit-learn's photograph china.jpg, normalised; of them after a ReLU;
and after one more layer. zfp (zfpy) and SZ3 (pysz) compress a part of the same numbers within the same bound, for
comparison. What of these is not installed is left out, and the output says so.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import Series, by_turns, timed
from torch import Tensor
from torch.nn import functional as F

from hydra_ext import _C, codec

Run = Callable[[], None]
AVX2, AVX512 = _C.InstructionSet.AVX2, _C.InstructionSet.AVX512
BOUNDS = (0.1, 0.01, 0.001)  # of the standard deviation
PART = 2**21  # values for the other libraries, which are slow
MOST_SPREAD = 0.10


@dataclass(frozen=True)
class Kind:
    """Numbers, and what is expected of their compression.

    Attributes:
        scale: what a bound is a fraction of.
        bits_over_entropy: goal, if there is one.
        shortest: goal of the shortest encoding against memcpy.
        signed: goal of sign-magnitude, if there is one.
    """

    name: str
    numbers: Tensor
    scale: float
    bits_over_entropy: float | None
    shortest: float
    signed: float | None


def random_kinds(values: int) -> list[Kind]:
    normal = torch.randn(values, generator=torch.Generator().manual_seed(0))
    return [
        Kind("normal", normal, 1.0, 1.0, 0.60, 1.0),
        Kind("relu", normal.relu(), 1.0, 0.65, 0.60, None),
        Kind("gelu", F.gelu(normal), 1.0, None, 0.60, None),
    ]


def photograph() -> Tensor | None:
    """1 x 3 x 427 x 640; None without scikit-learn and Pillow."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None or importlib.util.find_spec("PIL") is None:
        return None
    image = importlib.import_module("PIL.Image").open(Path(spec.origin).parent / "datasets" / "images" / "china.jpg")
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, image.height, image.width, 3)
    return pixels.permute(0, 3, 1, 2).contiguous().float() / 255  # rows of one channel lie together


def feature_maps() -> list[Kind]:
    image = photograph()
    if image is None:
        print("feature maps: left out, scikit-learn or Pillow is not installed")
        return []
    generator = torch.Generator().manual_seed(1)

    def layer(x: Tensor) -> Tensor:
        weight = torch.randn(64, x.size(1), 3, 3, generator=generator)
        return F.batch_norm(F.conv2d(x, weight, padding=1), None, None, training=True)

    first = layer(image)
    second = layer(first.relu()).relu()
    maps = {"feature maps": first, "feature maps, relu": first.relu(), "of the second layer": second}
    return [Kind(name, numbers, 1.0, 0.0, 0.40, None) for name, numbers in maps.items()]


def entropy(numbers: Tensor, bound: float) -> float:
    """Bits a value of the quantised numbers, if each were drawn alone."""
    quanta = (numbers.flatten() / (2 * bound)).round().to(torch.int32)
    counts = (quanta - quanta.min()).bincount()
    shares = counts[counts > 0].double() / quanta.numel()
    return float(-(shares * shares.log2()).sum())


class Goals:
    """Prints every figure as it comes, and remembers how many missed their goals, or could not be judged."""

    def __init__(self) -> None:
        self.missed = 0
        self.void = 0
        self.left_out: set[str] = set()

    def check(self, what: str, figure: str, holds: bool, goal: str) -> None:
        self.missed += not holds
        print(f"    {what:<44} {figure:>10}, goal {goal}: {'holds' if holds else 'MISSED'}", flush=True)

    def show(self, what: str, figure: str) -> None:
        print(f"    {what:<44} {figure:>10}", flush=True)


def copier(target: Tensor, source: Tensor) -> Run:
    return functools.partial(ctypes.memmove, target.data_ptr(), source.data_ptr(), source.nbytes)


def make_runs(numbers: Tensor, bound: float, sets: list[_C.InstructionSet]) -> tuple[dict[str, Run], dict[str, int]]:
    """What is measured by turns, and how many bytes each encoding came to."""
    pool = _C.ThreadPool(1)
    target = torch.zeros_like(numbers)
    runs: dict[str, Run] = {"memcpy": copier(target, numbers)}
    lengths = {}
    for fast in (True, False):
        encoding = "signed" if fast else "shortest"
        stream = torch.zeros(_C.codec.most_bytes(numbers), dtype=torch.uint8)
        for instructions in sets:
            how: dict[str, Any] = {"pool": pool, "instructions": instructions}
            compress = functools.partial(
                _C.codec.compress, numbers, stream, error_bound=bound, keep_signs=False, fast=fast, **how
            )
            lengths[encoding] = compress()
            whole = stream[: lengths[encoding]]
            name = f"{instructions.name} {encoding}"
            runs[f"{name}, compress"] = compress
            runs[f"{name}, decompress"] = functools.partial(_C.codec.decompress, whole, target, **how)
    runs["memcpy again"] = runs["memcpy"]
    return runs, lengths


def judge_speed(kind: Kind, planes: float, series: Series, goals: Goals) -> None:
    void = series.spread("memcpy", "memcpy again") > MOST_SPREAD
    few = planes <= 8 and kind.signed is not None
    wanted = {
        "AVX512 signed, compress": kind.signed,
        "AVX512 shortest, compress": kind.shortest,
        "AVX512 signed, decompress": 1.0,
        "AVX512 shortest, decompress": 1.0,
        "AVX2 signed, compress": 0.65 if few else None,
        "AVX2 signed, decompress": 0.75 if few else None,
    }
    for name in series.seconds:
        if name.startswith("memcpy"):
            continue
        speed, goal = series.speed(name, "memcpy"), wanted.get(name)
        if goal is None:
            goals.show(name, f"{speed:.0%}")
        elif void:
            goals.show(name, f"{speed:.0%}, goal {goal:.0%}: VOID, the copies differ too much")
            goals.void += 1
        else:
            goals.check(name, f"{speed:.0%}", speed >= goal, f"{goal:.0%}")


def others(kind: Kind, bound: float, goals: Goals) -> None:
    """Of a part of the numbers, as each library takes them by default."""
    part = kind.numbers.flatten()[:PART].contiguous()
    ways = {"ours": ours, "zfp": zfp(), "SZ3": sz3()}
    goals.left_out |= {name for name, compress in ways.items() if compress is None}
    for name, compress in ways.items():
        if compress is not None:
            lengths: list[int] = []
            seconds = timed(lambda run=compress, into=lengths: into.append(run(part.numpy(), bound)))  # type: ignore[misc]
            rate = f"{part.nbytes / seconds / 1e9:.2f} GB/s"
            goals.show(f"{name}: bits a value of a part", f"{8 * lengths[0] / part.numel():.2f}, {rate}")


def ours(array: Any, bound: float) -> int:
    return codec.compress(torch.from_numpy(array), error_bound=bound, threads=1).nbytes


def zfp() -> Callable[[Any, float], int] | None:
    if importlib.util.find_spec("zfpy") is None:
        return None
    library: Any = importlib.import_module("zfpy")
    return lambda array, bound: len(library.compress_numpy(array, tolerance=bound))


def sz3() -> Callable[[Any, float], int] | None:
    if importlib.util.find_spec("pysz") is None:
        return None
    library: Any = importlib.import_module("pysz")

    def compress(array: Any, bound: float) -> int:
        config = library.szConfig(array.shape)
        config.errorBoundMode, config.absErrorBound = library.szErrorBoundMode.ABS, bound
        return int(library.sz.compress(array, config)[0].nbytes)

    return compress


def measure(kind: Kind, bound: float, rounds: int, goals: Goals) -> None:
    there = _C.codec.supported_instruction_sets()
    sets = [one for one in (AVX2, AVX512) if one in there]
    goals.left_out |= {one.name for one in (AVX2, AVX512) if one not in there}
    runs, lengths = make_runs(kind.numbers, bound * kind.scale, sets)
    series = by_turns(runs, rounds=rounds)
    rate = kind.numbers.nbytes / series.median("memcpy") / 1e9
    print(f"{kind.name}, bound {bound}: memcpy {rate:.1f} GB/s, spread {series.spread('memcpy', 'memcpy again'):.1%}")
    count, expected = kind.numbers.numel(), entropy(kind.numbers, bound * kind.scale)
    bits = {encoding: 8 * length / count for encoding, length in lengths.items()}
    for encoding in sorted(bits):
        goals.show(f"{encoding}: bits a value, entropy {expected:.2f}", f"{bits[encoding]:.2f}")
    if kind.bits_over_entropy is not None:
        over, goal = bits["shortest"] - expected, kind.bits_over_entropy
        goals.check("shortest: bits over the entropy", f"{over:+.2f}", over <= goal, f"{goal:.2f}")
    # A tag takes a quarter of a bit, a sign one.
    judge_speed(kind, bits["signed"] - 1.25, series, goals)
    others(kind, bound * kind.scale, goals)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--values", type=int, default=2**24, help="of the random kinds; far more than the caches hold")
    options: Any = parser.parse_args(argv)
    torch.set_num_threads(1)
    goals = Goals()
    print(f"{options.values / 2**20:.1f} Mi values of fp32, {options.rounds} rounds, torch {torch.__version__}")
    for kind in [*random_kinds(options.values), *feature_maps()]:
        for bound in BOUNDS:
            measure(kind, bound, options.rounds, goals)
    left_out = f"; not on this machine: {', '.join(sorted(goals.left_out))}" if goals.left_out else ""
    print(f"goals missed: {goals.missed}, void: {goals.void}{left_out}")
    return 1 if goals.missed else 0


if __name__ == "__main__":
    sys.exit(main())
