"""``Pipeline(plan="auto")`` against all choices by hand: python benchmarks/pipeline_plan.py [--rounds 9] [--ranks 2]

On ranks of one thread each, four models train a batch by 2bw. The plan's choice is compared with every other of lines
of ranks, size of microbatches and recomputation that the plan has judged, each with its own best cuts. All run by
turns, the plan's choice twice a round. A choice's seconds are the median over the rounds of a step's, on the slowest
rank, when the pipeline is in its rhythm: it is neither filled nor drained meanwhile. The spread is half the
interquartile range of the ratio of the two identical runs. Those that take 1.5 times as long as the fastest in the
first round are not run again.

Goal: the plan's choice takes at most 1.05 times as long as the fastest. Void where the spread exceeds half of that.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from measure import verdict
from models import Size, make_model, make_vgg
from ranks import run_ranks
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from hydra_ext.pipeline import Pipeline

GOAL = 0.05
WARM_UP, STEPS = 3, 4  # steps that are not timed, and that are
MUCH_SLOWER = 1.5  # than the fastest: not measured again

Way = dict[str, Any]


def gpt2() -> tuple[nn.Module, Tensor, Callable[[nn.Module, Tensor], Tensor]]:
    model = make_model(Size(layers=6, width=192, tokens=64))
    batch = torch.randint(256, (16, 64), generator=torch.Generator().manual_seed(1))
    return model, batch, lambda model, tokens: model(input_ids=tokens, labels=tokens).loss


def convolutions() -> tuple[nn.Module, Tensor, Callable[[nn.Module, Tensor], Tensor]]:
    torch.manual_seed(0)
    widths = (3, 32, 32, 64, 64, 96, 96)
    layers = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1, stride=1 + (b > a > 3)), nn.GroupNorm(8, b), nn.ReLU())
        for a, b in pairwise(widths)
    ]
    model = nn.Sequential(*layers, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)))
    batch = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return model, batch, lambda model, images: model(images).square().mean()


def bert() -> tuple[nn.Module, Tensor, Callable[[nn.Module, Tensor], Tensor]]:
    torch.manual_seed(0)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=256, hidden_size=128, num_hidden_layers=8, num_attention_heads=4, intermediate_size=512,
            max_position_embeddings=64,
        )
    )  # fmt: skip
    batch = torch.randint(256, (16, 64), generator=torch.Generator().manual_seed(1))
    return model, batch, lambda model, tokens: model(input_ids=tokens, labels=tokens).loss


def vgg() -> tuple[nn.Module, Tensor, Callable[[nn.Module, Tensor], Tensor]]:
    batch = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return make_vgg(16), batch.contiguous(memory_format=torch.channels_last), lambda model, x: model(x).square().mean()


MODELS = {"GPT-2, 6 layers of 192": gpt2, "7 convolutions": convolutions, "BERT, 8 layers of 128": bert, "VGG-16": vgg}


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def seconds_of(name: str, way: Way) -> float:
    """Of a step, on this rank."""
    model, batch, loss = MODELS[name]()
    with Pipeline(model, sgd, schedule="2bw", seed=0, **way) as pipe:
        own = batch.chunk(way["replicas"])[pipe.replica]

        def fn(rows: Tensor) -> Tensor:
            return loss(model, rows)

        for _ in range(WARM_UP):
            pipe.step(own, fn)
        begin = time.perf_counter()
        for _ in range(STEPS):
            pipe.step(own, fn)
        return (time.perf_counter() - begin) / STEPS


def planned(name: str) -> tuple[list[Way], list[float], float, str]:
    """The ways of all choices, the plan's first, their foreseen seconds, the seconds of planning, and the plan."""
    model, batch, loss = MODELS[name]()
    with Pipeline(model, sgd, schedule="2bw", plan="auto", seed=0) as pipe:
        begin = time.perf_counter()
        pipe.prepare(batch, lambda rows: loss(model, rows))
        took = time.perf_counter() - begin
        plan = pipe.plan
    if plan is None:
        raise RuntimeError("the pipeline has no plan")
    ways = [
        {
            "replicas": each.choice.width,
            "stages": each.choice.stages,
            "microbatches": each.choice.microbatches,
            "recompute": each.choice.recompute,
            "cuts": list(each.cuts),
        }
        for each in plan.alternatives
    ]
    return ways, [each.seconds for each in plan.alternatives], took, str(plan)


def measured(rank: int, name: str, rounds: int) -> dict[str, Any]:
    ways, foreseen, took, text = planned(name)
    found: list[list[float]] = [[] for _ in ways]
    twin: list[float] = []
    for turn in range(rounds):
        for number, way in enumerate(ways):
            fastest = min(statistics.median(each) for each in found if each) if turn else 0.0
            slow = turn > 0 and found[number][0] > MUCH_SLOWER * fastest
            if not slow or number == 0:
                found[number].append(_slowest(seconds_of(name, way)))
        twin.append(_slowest(seconds_of(name, ways[0])))
    return {"ways": ways, "foreseen": foreseen, "found": found, "twin": twin, "took": took, "plan": text}


def _slowest(seconds: float) -> float:
    """Of all ranks, so that all of them go on alike."""
    value = torch.tensor(seconds)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def report(name: str, result: dict[str, Any]) -> None:
    ratios = [b / a for a, b in zip(result["found"][0], result["twin"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    spread = (high - low) / 2
    medians = [statistics.median(each) for each in result["found"]]
    best = min(range(len(medians)), key=medians.__getitem__)
    print(f"\n## {name}\n\nPlanned in {result['took']:.2f} s.\n")
    print("| lines x ranks | microbatches | recompute | foreseen | measured |")
    print("| --- | --- | --- | --- | --- |")
    for number in sorted(range(len(medians)), key=medians.__getitem__):
        way = result["ways"][number]
        mark = " (the plan)" if number == 0 else ""
        print(
            f"| {way['replicas']} x {way['stages']}{mark} | {way['microbatches']} | {way['recompute']} | "
            f"{1000 * result['foreseen'][number]:.1f} ms | {1000 * medians[number]:.1f} ms |"
        )
    ratio = medians[0] / medians[best]
    print(f"\nThe plan takes {ratio:.3f} times the best; identical runs differ by {spread:.2%}.")
    print(f"At most {1 + GOAL:.2f}: {verdict(spread, margin=GOAL, holds=ratio <= 1 + GOAL)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    for name in arguments.models:
        report(name, run_ranks(measured, name, arguments.rounds, size=arguments.ranks)[0])


if __name__ == "__main__":
    main()
