"""What cannot be done is refused with a typed error that says what to do."""

from __future__ import annotations

import copy
import enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hydra_ext.errors import (
    InvalidArgument,
    InvalidSchedule,
    PlanError,
    RankFailed,
    SplitError,
    StateError,
    UnsupportedModel,
)
from hydra_ext.pipeline import Pipeline
from hydra_ext.schedule import make
from hydra_ext.schedule.meaning import norm_comes_in_time
from support.pipeline import pipelines
from support.ranks import run_ranks


def make_pipe(**options: Any) -> Pipeline:
    options = {"schedule": "2bw", "microbatches": 2, "stages": pipelines.make_stages(1), **options}
    return Pipeline(None, pipelines.adamw, **options)


def data(count: int = 2) -> list[dict[str, torch.Tensor]]:
    return [pipelines.make_microbatch(0, index) for index in range(count)]


def test_arguments_are_checked_before_anything_is_changed() -> None:
    with pytest.raises(InvalidArgument, match="nothing to train"):
        Pipeline(None, pipelines.adamw)
    with pytest.raises(InvalidArgument, match="give a function that makes an optimizer"):
        Pipeline(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters()))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"replicas=3 with 1 rank"):
        make_pipe(replicas=3)
    with pytest.raises(InvalidArgument, match="model is a str"):
        Pipeline("model", pipelines.adamw)  # type: ignore[arg-type]
    with pytest.raises(InvalidSchedule):
        make_pipe(schedule="3bw")
    with pytest.raises(InvalidArgument, match=r"stages\[0\] is a str"):
        make_pipe(stages=["a"])


def test_a_step_without_microbatches_is_refused_and_the_next_one_works() -> None:
    with make_pipe() as pipe:
        with pytest.raises(InvalidArgument, match="no microbatches"):
            pipe.step([], pipelines.loss_of)
        with pytest.raises(InvalidArgument, match="3 seeds for 2 microbatches"):
            pipe.step(data(), pipelines.loss_of, seeds=[1, 2, 3])
        with pytest.raises(InvalidArgument, match="microbatches is a int"):
            pipe.step(3, pipelines.loss_of)
        assert pipe.step(data(), pipelines.loss_of).loss.isfinite()


def test_a_whole_batch_is_cut_into_microbatches() -> None:
    whole = {"ids": torch.arange(20).view(5, 4) % 7, "labels": torch.arange(20).view(5, 4) % 7, "scale": 2.0}
    seen = []

    def fn(output: torch.Tensor, microbatch: dict[str, Any]) -> torch.Tensor:
        seen.append(microbatch["ids"].clone())
        return pipelines.loss_of(output, microbatch) * microbatch["scale"]

    with make_pipe(schedule="1f1b", microbatches=2) as pipe:
        assert len(pipe.step(whole, fn).losses) == 2
        assert len(pipe.step({"ids": whole["ids"][:1], "labels": whole["labels"][:1], "scale": 1.0}, fn).losses) == 1
        with pytest.raises(InvalidArgument, match="no rows"):
            pipe.step({"ids": whole["ids"][:0]}, fn)
        with pytest.raises(InvalidArgument, match=r"rows .*same number"):
            pipe.step({"ids": whole["ids"], "labels": whole["labels"][:2]}, fn)
    assert [ids.shape[0] for ids in seen] == [3, 2, 1]
    assert torch.equal(torch.cat(seen[:2]), whole["ids"])


def test_whether_a_norm_comes_in_time_is_known_of_the_schedule() -> None:
    for schedule, refused in (("pipedream", True), ("2bw", False), ("1f1b", False)):
        with make_pipe(schedule=schedule, microbatches=1) as pipe:
            pipe.step(data(1), pipelines.loss_of, max_norm=1.0)  # one stage: no rank to wait for
        found = make(schedule, stages=3, microbatches=1 if refused else 4)
        assert norm_comes_in_time(found) is not refused


def test_a_norm_that_comes_too_late_is_refused_and_the_next_step_works(tmp_path: Path) -> None:
    for error, loss in run_ranks(pipelines.clip_too_soon, folder=tmp_path):
        assert error.startswith("max_norm=1.0: this schedule updates a stage before all stages have the batch's grad")
        assert loss > 0


def test_after_its_end_nothing_works_but_closing_it_again() -> None:
    pipe = make_pipe()
    pipe.close()
    pipe.close()
    with pytest.raises(StateError, match="has ended"):
        pipe.step(data(), pipelines.loss_of)


def test_an_error_in_fn_ends_the_pipeline() -> None:
    pipe = make_pipe()
    with pytest.raises(ValueError, match="scalar"):
        pipe.step(data(), lambda output, microbatch: output)
    with pytest.raises(RankFailed, match="The pipeline has ended"):
        pipe.step(data(), pipelines.loss_of)
    pipe.close()


def test_writing_to_weights_that_are_under_way_is_refused() -> None:
    stages = pipelines.make_stages(1)
    pipe = make_pipe(stages=stages)
    pipe.step(data(), pipelines.loss_of)
    with torch.no_grad():
        next(stages[0].parameters()).mul_(2)
    with pytest.raises(StateError, match="written to between two steps"):
        pipe.step(data(), pipelines.loss_of)
    pipe.close()


def test_a_forward_that_writes_to_its_weights_is_refused() -> None:
    class Writes(pipelines.Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
            return super().forward(x)

    stages = [nn.Sequential(pipelines.First(), Writes(), pipelines.Last())]
    pipe = make_pipe(stages=stages)
    with pytest.raises(StateError, match=r"linear\.weight' that the pipeline keeps was written to in place"):
        pipe.step(data(), pipelines.loss_of)
    pipe.close()


def test_refreshed_weights_count_from_then_on() -> None:
    stages = pipelines.make_stages(1)
    pipe = make_pipe(stages=stages)
    pipe.step(data(), pipelines.loss_of)
    pipe.drain()
    with torch.no_grad():
        for parameter in stages[0].parameters():
            parameter.mul_(0.5)
    pipe.refresh()
    expected = pipelines.forward(stages, data()[0], 1).detach()
    assert torch.equal(pipe.step(data(), pipelines.loss_of).losses[0], expected)
    pipe.close()


def test_hooks_on_weights_with_versions_are_refused() -> None:
    stages = pipelines.make_stages(1)
    next(stages[0].parameters()).register_hook(lambda gradient: gradient)
    with pytest.raises(UnsupportedModel, match="hooks"):
        make_pipe(stages=stages)
    make_pipe(stages=stages, schedule="1f1b").close()


def test_what_two_stages_may_not_have_in_common_is_refused() -> None:
    first, *middle, last = pipelines.make_stages(4)
    last[-1].head = nn.Linear(pipelines.WIDTH, pipelines.CLASSES, bias=False)  # type: ignore[index,operator]
    last[-1].head.weight = first[0].embedding.weight  # type: ignore[index]
    norm = nn.BatchNorm1d(pipelines.WIDTH, affine=False)
    normed = [nn.Sequential(each, nn.Flatten(0, 1), norm) for each in middle]
    for stages, reason in (
        ([first, *middle, last], r"'0\.0\.embedding\.weight' and '3\.2\.head\.weight' are one weight, .*\[0, 3\]"),
        ([middle[0], middle[0]], r"are one weight"),
        ([lambda: middle[0], lambda: middle[0]], r"are one weight"),
        (normed, r"'0\.2' and '1\.2' are one BatchNorm1d in two stages"),
    ):
        for schedule in ("2bw", "gpipe"):
            with pytest.raises(UnsupportedModel, match=reason):
                make_pipe(stages=stages, schedule=schedule)


def test_stages_of_one_rank_may_have_in_common_what_is_not_written_to() -> None:
    head, *_, tail = pipelines.make_stages(3)
    frozen = nn.Sequential(nn.Tanh(), nn.Linear(pipelines.WIDTH, pipelines.WIDTH)).requires_grad_(False)
    stages = [nn.Sequential(head, frozen), nn.Sequential(frozen, tail)]
    with make_pipe(stages=stages) as pipe:
        expected = pipelines.forward(stages, data()[0], 1).detach()
        assert torch.equal(pipe.step(data(), pipelines.loss_of).losses[0], expected)


class Hands(nn.Linear):
    """A stage that hands on something beside its result, or under another name."""

    def __init__(self, hand: Any) -> None:
        super().__init__(4, 4)
        self.hand = hand

    def forward(self, x: torch.Tensor) -> Any:
        return self.hand(super().forward(x))


class Takes(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.found: Any = None

    def forward(self, arrived: Any) -> torch.Tensor:
        x, self.found = arrived
        return super().forward(x)


class Number(enum.IntEnum):
    ONE = 1


class Name(str):
    __slots__ = ()


def hand_on(hand: Any) -> Any:
    """What the next stage gets beside the tensor."""
    last = Takes()
    with make_pipe(stages=[Hands(hand), last], schedule="interleaved") as pipe:
        pipe.step([torch.ones(2, 4)] * 2, lambda value, _: value.square().mean())
    return last.found


def test_what_would_arrive_as_something_else_is_refused() -> None:
    for hand, reason in (
        (lambda x: (x, Number.ONE), "stage 0: a Number cannot go to another rank: only tensors, None, bool, int"),
        (lambda x: (x, [Name("one")]), "stage 0: a Name cannot go"),
        (lambda x: (x, {("h", 0): x}), "would arrive as another one.* whose keys are texts or numbers"),
        (lambda x: (x, {frozenset("h"): x}), "whose keys are texts or numbers"),
    ):
        with pytest.raises(UnsupportedModel, match=reason):
            hand_on(hand)


def test_numbers_and_texts_arrive_as_what_they_are() -> None:
    for value in (True, 7, -0.0, "one", None, {2: 1, "b": [(), 1.5]}, np.float64(0.1), {"mean": np.float64("inf")}):
        found = hand_on(lambda x, value=value: (x, value))
        assert repr(found) == repr(value)


def plain_model() -> tuple[nn.Module, Any]:
    model = nn.Sequential(pipelines.First(), *(pipelines.Layer() for _ in range(3)), pipelines.Last())
    return model, lambda microbatch: pipelines.loss_of(model(microbatch), microbatch)


@pytest.mark.parametrize("budget", [None, 80_000])
def test_a_model_that_is_all_here_has_its_state_when_nothing_is_under_way(budget: int | None) -> None:
    model, fn = plain_model()
    names = list(model.state_dict())
    pipe = Pipeline(model, pipelines.native_adamw, stages=2, microbatches=2, budget=budget)
    with pytest.raises(StateError, match="before the first step"):
        pipe.state_dict()
    pipe.step(data(), fn)
    with pytest.raises(StateError, match=r"model\.state_dict\(\) while batch 0 is under way: call drain\(\) before"):
        model.state_dict()
    copied = copy.deepcopy(model).state_dict()  # of before the update that is under way
    state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    assert list(model.state_dict()) == names
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(not torch.equal(copied[name], state[name]) for name in names if name.endswith("weight"))
    pipe.step(data(), fn)
    pipe.close()
    assert all(not torch.equal(model.state_dict()[name], state[name]) for name in names if name.endswith("weight"))


def test_cuts_are_checked_against_the_blocks() -> None:
    for cuts, error, reason in (
        (["9"], InvalidArgument, "no block"),
        (["1", "2"], InvalidArgument, "2 stages have 1 cuts"),
        ([0], InvalidArgument, "in the forward's order"),
    ):
        model, fn = plain_model()
        pipe = Pipeline(model, pipelines.adamw, stages=2, microbatches=2, cuts=cuts)  # type: ignore[arg-type]
        with pytest.raises(error, match=reason):
            pipe.step(data(), fn)
        pipe.close()


def test_more_stages_than_blocks_are_refused() -> None:
    model, fn = plain_model()
    pipe = Pipeline(model, pipelines.adamw, stages=9, microbatches=2)
    with pytest.raises(PlanError):
        pipe.step(data(), fn)
    pipe.close()


def test_what_does_not_call_the_model_cannot_be_split() -> None:
    model, _ = plain_model()
    pipe = Pipeline(model, pipelines.adamw, stages=2, microbatches=2)
    with pytest.raises(SplitError, match="called no block"):
        pipe.step(data(), lambda microbatch: torch.zeros((), requires_grad=True))
    pipe.close()


def test_ranks_that_do_not_make_the_same_steps_are_told(tmp_path: Path) -> None:
    for uneven, *norms in run_ranks(pipelines.train_unevenly, folder=tmp_path):
        assert "the ranks do not make the same steps: stage 1 is at microbatch 0 of 3" in uneven
        for stages, replicas, other in zip(norms[:2], norms[2:], ("2.0", "None"), strict=True):
            assert f"was given max_norm={other} for batch 0, and a stage beside it max_norm=1.0" in stages
            assert "the replicas do not make the same steps: this one was given max_norm=" in replicas
