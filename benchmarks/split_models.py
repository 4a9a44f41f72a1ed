"""Which models can be cut into stages as they are: by hydra_ext, and by torch.distributed.pipelining.pipeline().

    PYTHONPATH=tests python benchmarks/split_models.py [name ...]

The models are those of the tests: unmodified, tiny, with random weights, on the CPU. Of ours: how many of the cuts are
possible, and whether two, three and four stages give the loss of the whole model to the bit, and its gradients to the
bit but for those of weights that several stages hold. Of the other: whether the model is traced when cut at the middle
one of our cuts, whether the parts run, whether their output is that of the model to the bit, and whether they run on
a batch of another size. Its gradients are not compared: it runs no backward outside of a process group.
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from hydra_ext.errors import SplitError
from hydra_ext.split import Rehearsal
from support.split.split_models import LIBRARY, Batch, Subject
from support.split.split_models_more import MORE
from support.split.split_models_own import OWN
from support.split.split_stages import assert_same, even_cuts, rehearsed, run, shared

SUBJECTS = LIBRARY | OWN | MORE


def ours(subject: Subject, model: nn.Module, rehearsal: Rehearsal) -> str:
    batches = subject.batches(2)
    whole = run(model, subject.fn, batches, [], rehearsal)
    differing = []
    for count in (2, 3, 4):
        try:
            cuts = even_cuts(rehearsal, count)
            assert_same(run(model, subject.fn, batches, cuts, rehearsal), whole, shared(model, rehearsal, cuts))
        except (AssertionError, SplitError, ValueError):
            differing.append(str(count))
    possible = f"{len(rehearsal.possible_cuts)} of {len(rehearsal.events) - 1} cuts"
    return f"{possible}, {'equal' if not differing else 'not equal in ' + ' and '.join(differing)}"


def theirs(subject: Subject, model: nn.Module, rehearsal: Rehearsal) -> str:
    if subject.random:
        model = model.eval()  # its stages draw other random numbers
    (batch,) = subject.batches(1)
    args, kwargs = call(subject, batch)
    expected = first(copy.deepcopy(model)(*args, **kwargs))
    middle = rehearsal.possible_cuts[len(rehearsal.possible_cuts) // 2]
    try:
        pipe = pipeline(
            copy.deepcopy(model),
            mb_args=args,
            mb_kwargs=kwargs,
            split_spec={rehearsal.events[middle].name: SplitPoint.BEGINNING},
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        return f"not traced: {shown(error)}"
    try:
        found = first(pipe(*args, **kwargs))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        return f"traced, does not run: {shown(error)}"
    equal = "equal" if torch.equal(found, expected) else "not equal"
    smaller = {name: value[:1] if isinstance(value, Tensor) else value for name, value in kwargs.items()}
    try:
        pipe(*(value[:1] for value in args), **smaller)
    except Exception:  # noqa: BLE001
        return f"{pipe.num_stages} stages, {equal}, no other batch size"
    return f"{pipe.num_stages} stages, {equal}"


def call(subject: Subject, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model itself is called with."""
    if subject.name in LIBRARY:
        return (), batch
    return tuple(batch[name] for name in ("x", "time") if name in batch), {}


def first(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        return first(output["loss"] if output.get("loss") is not None else next(iter(output.values())))
    return first(output[0])


def shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:70]}"


def main(names: list[str]) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    counts = {"ours": 0, "theirs": 0}
    chosen = {name: SUBJECTS[name] for name in names or SUBJECTS}
    print(f"{'model':20} {'hydra_ext':28} torch.distributed.pipelining.pipeline()")
    for name, subject in chosen.items():
        model = subject.make()
        rehearsal = rehearsed(model, subject.fn, subject.batches(1)[0])
        mine = ours(subject, model, rehearsal)
        other = theirs(subject, model, rehearsal)
        counts["ours"] += mine.endswith(", equal")
        counts["theirs"] += ", equal" in other
        print(f"{name:20} {mine:28} {other}", flush=True)
    print(f"{'equal, of ' + str(len(chosen)):20} {counts['ours']:<28} {counts['theirs']}")


if __name__ == "__main__":
    main(sys.argv[1:])
