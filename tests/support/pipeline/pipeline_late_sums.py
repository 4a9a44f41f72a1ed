"""Models that train a weight on several ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from hydra_ext.errors import HydraError
from hydra_ext.pipeline import Pipeline
from support.pipeline import pipelines


def errors(rank: int, kinds: list[str]) -> list[str]:
    """Returns each schedule's error in its first step, if the first and the last stage share a weight."""
    found = []
    for kind in kinds:
        for plain in (False, True):
            stages = pipelines.make_stages(3)
            stages[2][-1].head = nn.Linear(pipelines.WIDTH, pipelines.CLASSES, bias=False)  # type: ignore[index]
            stages[2][-1].head.weight = stages[0][0].embedding.weight  # type: ignore[index]
            found.append(_first_step(kind, stages, plain=plain))
    return found


def _first_step(kind: str, stages: list[nn.Module], *, plain: bool) -> str:
    model = nn.Sequential(*stages) if plain else None
    options: dict[str, Any] = {"cuts": ["1", "2"]} if plain else {"stages": stages}
    fn = (lambda data: pipelines.loss_of(model(data), data)) if model is not None else pipelines.loss_of
    count = 1 if kind == "pipedream" else 3
    try:
        with Pipeline(model, pipelines.sgd, schedule=kind, microbatches=count, **options) as pipe:
            for step in range(4):
                data = [pipelines.make_microbatch(step, index) for index in range(count)]
                pipe.step(data, fn).loss.item()
    except HydraError as error:
        return f"{type(error).__name__}: {error}"
    return ""
