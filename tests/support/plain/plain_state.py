"""A pipeline of several processes over a model that replaces its buffer in every forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hydra_ext.errors import StateError
from hydra_ext.pipeline import Pipeline
from support.pipeline.pipelines import sgd
from support.split.split_models_own import text, text_loss
from support.split.split_models_state import AssignsAtTheEnd

BATCHES = [text(torch.Generator().manual_seed(seed)) for seed in (1, 2, 3)]


def model() -> AssignsAtTheEnd:
    torch.manual_seed(0)
    return AssignsAtTheEnd()


def state_after_a_step(_rank: int) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the rank's part of the state, and the errors of the model's state_dict() in the pipeline and after it."""
    cut = model()
    with Pipeline(cut, sgd, schedule="1f1b", microbatches=len(BATCHES)) as pipe:
        pipe.step(BATCHES, lambda batch: text_loss(cut, batch))
        state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        errors = [_error_of_state_dict(cut)]
    return state, [*errors, _error_of_state_dict(cut)]


def _error_of_state_dict(cut: nn.Module) -> str:
    try:
        cut.state_dict()
    except StateError as error:
        return str(error)
    return ""
