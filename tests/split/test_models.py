"""Models that know nothing of pipelines, cut into stages, give what they give as a whole and by themselves."""

from __future__ import annotations

import pytest
from torch import nn

from hydra_ext.split import Rehearsal
from support.split.split_models import LIBRARY, Batch, Subject
from support.split.split_models_more import MORE
from support.split.split_models_own import OWN
from support.split.split_stages import Outcome, assert_same, even_cuts, rehearsed, run, run_plainly, shared

SUBJECTS = LIBRARY | OWN | MORE


def whole(subject: Subject, model: nn.Module, batches: list[Batch], rehearsal: Rehearsal) -> Outcome:
    """As one stage; without random numbers that is what a plain loop gives."""
    found = run(model, subject.fn, batches, [], rehearsal)
    if not subject.random:
        assert_same(found, run_plainly(model, subject.fn, batches))
    return found


def check(subject: Subject, all_cuts: list[list[int]] | None = None, counts: tuple[int, ...] = ()) -> None:
    model = subject.make()
    batches = subject.batches(2)
    rehearsal = rehearsed(model, subject.fn, batches[0])
    expected = whole(subject, model, batches, rehearsal)
    assert len(rehearsal.possible_cuts) == len(rehearsal.events) - 1, "every cut is possible"
    wanted = all_cuts or [even_cuts(rehearsal, count) for count in counts]
    for cuts in wanted or [[boundary] for boundary in rehearsal.possible_cuts]:
        assert_same(run(model, subject.fn, batches, cuts, rehearsal), expected, shared(model, rehearsal, cuts))


@pytest.mark.cases(6)
@pytest.mark.parametrize(("name", "count"), [(name, 2 + number % 3) for number, name in enumerate(SUBJECTS)])
def test_stages_give_what_the_model_gives(name: str, count: int) -> None:
    check(SUBJECTS[name], counts=(count,))


@pytest.mark.full
@pytest.mark.parametrize("name", SUBJECTS)
def test_two_three_and_four_stages_give_what_the_model_gives(name: str) -> None:
    check(SUBJECTS[name], counts=(2, 3, 4))


@pytest.mark.full
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_cut_gives_what_the_model_gives(name: str) -> None:
    check(SUBJECTS[name])


@pytest.mark.parametrize("name", ["llama", "t5_dropout", "unet", "outside_residual", "recurrent"])
def test_one_event_for_each_stage_gives_what_the_model_gives(name: str) -> None:
    subject = SUBJECTS[name]
    rehearsal = rehearsed(subject.make(), subject.fn, subject.batches(1)[0])
    check(subject, [rehearsal.possible_cuts])
