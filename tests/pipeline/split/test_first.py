"""Models cut into stages give what they give as a whole."""

from __future__ import annotations

import pytest
from torch import nn

from hydra_ext.pipeline.split import shared_parameters
from support.split_stages import assert_same, even_cuts, rehearsed, run, run_plainly
from support.zoo import FAMILIES
from support.zoo_more import MORE_FAMILIES

ALL = FAMILIES | MORE_FAMILIES


def loss(model: nn.Module, batch: dict[str, object]) -> object:
    output = model(**batch)
    return output if not hasattr(output, "loss") else output.loss


@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet", "unet"])
@pytest.mark.parametrize("count", [2, 3])
def test_stages_give_the_same_as_one(name: str, count: int) -> None:
    model = ALL[name].make(0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    batches = ALL[name].batches(1, 2)
    rehearsal = rehearsed(model, loss, batches[0])
    cuts = even_cuts(rehearsal, count)
    whole = run(model, loss, batches, [], rehearsal)
    assert_same(whole, run_plainly(model, loss, batches))
    assert_same(run(model, loss, batches, cuts, rehearsal), whole, set(shared_parameters(rehearsal, cuts, model)))
