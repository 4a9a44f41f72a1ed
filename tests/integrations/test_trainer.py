"""HydraTrainer beside transformers' Trainer: the same arguments give the same losses, weights and optimizer states."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback

import hydra_ext
from hydra_ext.errors import InvalidArgument
from hydra_ext.integrations.transformers import HydraArguments, HydraMixin, HydraTrainer
from support.benches import assert_same, tight_budget
from support.ranks import run_ranks
from support.runtime.outcomes import POISONED
from support.trainers import STEPS, arguments, hydra, outcome, samples, train_on_ranks, without_dropout
from support.windows.window_subjects import language_loss, tiny_gpt2


def both(
    tmp_path: Path,
    use: Callable[[Any], Any] = lambda trainer: trainer.train(),
    *,
    make: Callable[[], Any] = tiny_gpt2,
    given: Callable[[], dict[str, Any]] = dict,
    **options: Any,
) -> HydraTrainer:
    """Uses a Trainer and a HydraTrainer alike. Returns the second."""
    outcomes, made = [], []
    for name in ("plain", "hydra"):
        more = given()
        trainer_of: Any = Trainer if name == "plain" else HydraTrainer
        if name == "hydra":
            more = {"hydra": hydra(), **more}
        else:
            more.pop("hydra", None)
        trainer = trainer_of(
            make(),
            arguments(tmp_path / name, **options),
            train_dataset=samples(0, STEPS),
            eval_dataset=samples(50, 2),
            **more,
        )
        found = use(trainer)
        outcomes.append([*([found] if isinstance(found, torch.Tensor) else []), *outcome(trainer)])
        made.append(trainer)
    assert_same(*outcomes)
    assert type(made[1].model) is GPT2LMHeadModel  # a plain model again
    report = made[1].run.report()
    assert report.windows > 0
    assert report.evictions > 0
    return made[1]


# torch.compile looks at `.grad` of what it traces and hides the warning where warnings are no errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

FEATURES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "bf16": {"bf16": True},
    "accumulation": {"gradient_accumulation_steps": 2, "max_steps": 2},
    "no clipping": {"max_grad_norm": 0.0},
    "clipping": {"max_grad_norm": 0.1},
    "schedule": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
    "weight decay": {"weight_decay": 0.1},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 1},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "adafactor": {"optim": "adafactor"},
    "sgd": {"optim": "sgd", "learning_rate": 0.1},
    "neftune": {"neftune_noise_alpha": 5.0},
    "activation checkpointing": {"gradient_checkpointing": True},
    "groups by length": {"train_sampling_strategy": "group_by_length"},
    "epochs": {"max_steps": -1, "num_train_epochs": 2.0},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "tokens seen": {"include_num_input_tokens_seen": "all"},
    "best model": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
    },
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_has_the_bits_of_the_plain_trainer(feature: str, tmp_path: Path) -> None:
    trainer = both(tmp_path, **FEATURES[feature])
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["hydra/seconds"] > 0 for entry in logged)
    assert logged[-1]["hydra/peak_bytes"] <= trainer.hydra.budget


def test_evaluation_before_and_after_training(tmp_path: Path) -> None:
    def use(trainer: Any) -> torch.Tensor:
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        return torch.tensor([before, trainer.evaluate()["eval_loss"]], dtype=torch.float64)

    both(tmp_path, use)


def test_predictions(tmp_path: Path) -> None:
    def use(trainer: Any) -> torch.Tensor:
        trainer.train()
        return torch.from_numpy(trainer.predict(samples(60, 2)).predictions)

    both(tmp_path, use)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_microbatches_that_draw_nothing_run_in_rounds_from_the_second_step_on(
    native: bool, bf16: bool, tmp_path: Path
) -> None:
    def given() -> dict[str, Any]:
        return {"optimizer_cls_and_kwargs": (hydra_ext.optim.AdamW, {"lr": 1e-3})} if native else {}

    trainer = both(
        tmp_path,
        make=without_dropout,
        given=given,
        bf16=bf16,
        gradient_accumulation_steps=3,
        per_device_train_batch_size=1,
        max_steps=5,  # the last step of an epoch has two microbatches
        max_grad_norm=0.1,
    )
    report = trainer.run.report()
    assert report.rounds > 0
    assert report.fallbacks == 0
    assert trainer.run.steps == 5
    passes = 2 * (3 + report.rounds)  # forwards and backwards of the first step, one by one, and of rounds
    assert report.windows == passes


def test_microbatches_that_draw_run_one_by_one_unless_rounds_are_asked_for(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "max_steps": 4, "per_device_train_batch_size": 1}
    assert both(tmp_path, **options).run.report().rounds == 0
    trainer = HydraTrainer(
        tiny_gpt2(), arguments(tmp_path, **options), train_dataset=samples(0, STEPS), hydra=hydra(rounds=True)
    )
    trainer.train()
    assert trainer.run.report().rounds > 0


def test_rounds_leave_random_numbers_to_what_is_around_them(tmp_path: Path) -> None:
    """Collators and samplers draw from the global generator, and checkpoints hold its state."""
    states = []

    def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        tokens = torch.stack([row["input_ids"] for row in rows])
        masked = torch.where(torch.rand(tokens.shape) < 0.3, torch.zeros_like(tokens), tokens)
        return {"input_ids": masked, "labels": tokens}

    def use(trainer: Any) -> None:
        trainer.train()
        states.append(torch.get_rng_state())

    trainer = both(
        tmp_path,
        use,
        make=without_dropout,
        given=lambda: {"data_collator": collate},
        gradient_accumulation_steps=3,
        per_device_train_batch_size=1,
        max_steps=-1,
        num_train_epochs=2.0,
    )
    assert trainer.run.report().rounds > 0
    assert torch.equal(*states)


def own_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Trains on other labels."""
    inputs = {**inputs, "labels": torch.zeros_like(inputs["labels"])}
    return super(type(self), self).training_step(model, inputs, *args, **kwargs)


def test_a_step_of_the_users_own_is_made_for_each_microbatch(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    outcomes = []
    for base in (Trainer, HydraTrainer):
        kind: Any = type("Own", (base,), {"training_step": own_step})
        more: dict[str, Any] = {"hydra": hydra()} if base is HydraTrainer else {}
        trainer = kind(without_dropout(), arguments(tmp_path, **options), train_dataset=samples(0, STEPS), **more)
        trainer.train()
        outcomes.append(outcome(trainer))
    assert_same(*outcomes)
    assert trainer.run.report().rounds == 0
    with pytest.raises(InvalidArgument, match=r"Own has a training_step\(\) or get_batch_samples\(\) above"):
        kind(tiny_gpt2(), arguments(tmp_path), train_dataset=samples(0, 1), hydra=hydra(rounds=True))


def test_rounds_can_be_turned_off(tmp_path: Path) -> None:
    trainer = both(
        tmp_path,
        make=without_dropout,
        given=lambda: {"hydra": hydra(rounds=False)},
        gradient_accumulation_steps=2,
        max_steps=4,
        per_device_train_batch_size=1,
    )
    assert trainer.run.report().rounds == 0


def test_a_model_that_begins_to_draw_is_told_and_goes_on_without_rounds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Drops(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                kwargs["model"].transformer.drop.p = 0.5

    trainer = HydraTrainer(
        without_dropout(),
        arguments(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=1),
        train_dataset=samples(0, STEPS),
        hydra=hydra(),
        callbacks=[Drops()],
    )
    trainer.train()
    rounds = trainer.run.report().rounds
    assert rounds > 0
    assert trainer.run.report().windows == 2 * (2 + rounds + 2)  # the first step and the last one ran one by one
    assert [r.message for r in caplog.records if "draw random numbers from now on" in r.message]


def test_an_optimizer_of_hydra_ext_makes_the_steps(tmp_path: Path) -> None:
    """Its own results are those of plain PyTorch: here it makes the steps of both."""
    trainer = both(
        tmp_path,
        given=lambda: {"optimizer_cls_and_kwargs": (hydra_ext.optim.AdamW, {"lr": 1e-3})},
        max_grad_norm=0.1,
    )
    assert trainer.run.updates is not None


@pytest.mark.parametrize("checkpoints", [False, True])
def test_resuming_has_the_bits_of_a_plain_trainer_that_resumes(checkpoints: bool, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}

    def given() -> dict[str, Any]:
        return {"hydra": hydra(checkpoints=checkpoints)}

    def stopped(trainer: Any) -> None:
        trainer.add_callback(StopsAfter(2))
        trainer.train()

    def resumed(trainer: Any) -> None:
        checkpoint = Path(trainer.args.output_dir) / "checkpoint-2"
        assert (checkpoint / "hydra_ext").exists() == (checkpoints and isinstance(trainer, HydraTrainer))
        assert (checkpoint / "optimizer.pt").exists() != (checkpoint / "hydra_ext").exists()
        trainer.train(resume_from_checkpoint=str(checkpoint))

    both(tmp_path, stopped, given=given, **options)
    both(tmp_path, resumed, given=given, **options)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_model_without_memory_resumes_with_the_weights_of_the_checkpoint(checkpoints: bool, tmp_path: Path) -> None:
    def use(trainer: Any) -> None:
        trainer.add_callback(StopsAfter(2))
        trainer.train()
        resumes = type(trainer)(
            make(trainer),
            trainer.args,
            train_dataset=samples(0, STEPS),
            **({"hydra": hydra(checkpoints=checkpoints)} if isinstance(trainer, HydraTrainer) else {}),
        )
        resumes.train(resume_from_checkpoint=True)
        ends.append(outcome(resumes))

    def make(trainer: Any) -> Any:
        return hydra_ext.materialize(tiny_gpt2) if isinstance(trainer, HydraTrainer) else tiny_gpt2()

    ends: list[Any] = []
    given = {"hydra": hydra(checkpoints=checkpoints)}
    both(tmp_path, use, given=lambda: dict(given), save_strategy="steps", save_steps=2)
    assert_same(*ends)


def test_a_checkpoint_has_no_rest_of_an_earlier_one_of_the_other_kind(tmp_path: Path) -> None:
    for kind in (True, False, True):
        args = arguments(tmp_path, save_strategy="steps", save_steps=STEPS, seed=int(kind))
        trainer = HydraTrainer(tiny_gpt2(), args, train_dataset=samples(0, STEPS), hydra=hydra(checkpoints=kind))
        trainer.train()
        checkpoint = tmp_path / f"checkpoint-{STEPS}"
        assert (checkpoint / "hydra_ext").exists() == kind
        assert (checkpoint / "optimizer.pt").exists() != kind


class StopsAfter(TrainerCallback):  # type: ignore[misc]
    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self._steps


def test_the_batch_size_is_found(tmp_path: Path) -> None:
    """The first size does not fit, and the trainer goes on with a smaller one."""
    args = arguments(tmp_path, auto_find_batch_size=True, per_device_train_batch_size=8, max_steps=2)
    tried = []

    class Tried(HydraTrainer):
        def training_step(self, *a: Any, **k: Any) -> Any:
            tried.append(len(a[1]["input_ids"]))
            if tried[-1] > 4:
                raise torch.OutOfMemoryError("the device is out of memory.")
            return super().training_step(*a, **k)

    trainer = Tried(tiny_gpt2(), args, train_dataset=samples(0, 8), hydra=hydra())
    trainer.train()
    assert tried[0] == 8
    assert tried[-1] <= 4
    assert trainer.state.global_step == 2
    assert not trainer.run.core.gate.open


def test_the_model_is_whole_after_an_error(tmp_path: Path) -> None:
    model = tiny_gpt2()

    class Fails(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise ValueError("on purpose")

    trainer = HydraTrainer(
        model, arguments(tmp_path), train_dataset=samples(0, STEPS), hydra=hydra(), callbacks=[Fails()]
    )
    with pytest.raises(ValueError, match="on purpose"):
        trainer.train()
    assert type(model) is GPT2LMHeadModel
    assert trainer.run.closed
    trainer.pop_callback(Fails)
    trainer.train()
    assert trainer.state.global_step == STEPS


def test_offloading_in_a_callback_takes_the_wrapped_optimizer(tmp_path: Path) -> None:
    """The other way round: a plain Trainer, and a context that a callback enters once all is prepared."""
    outcomes = []
    for offloads in (False, True):
        offloading = Offloads()
        trainer = Trainer(tiny_gpt2(), arguments(tmp_path), train_dataset=samples(0, STEPS))
        if offloads:
            trainer.add_callback(offloading)
        trainer.train()
        outcomes.append(outcome(trainer))
    assert_same(*outcomes)
    assert offloading.run.report().evictions > 0
    assert offloading.run.steps == STEPS


class Offloads(TrainerCallback):  # type: ignore[misc]
    run: Any = None

    def __init__(self) -> None:
        self._budget = tight_budget(tiny_gpt2(), language_loss)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._context = hydra_ext.offload(kwargs["model"], kwargs["optimizer"], budget=self._budget, checks=POISONED)
        self.run = self._context.__enter__()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._context.__exit__(None, None, None)


@pytest.mark.cases(2)
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("accumulates", [1, 2])
def test_ranks_have_the_bits_of_the_plain_trainers_ranks(accumulates: int, draws: bool, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": accumulates, "max_grad_norm": 0.1, "per_device_train_batch_size": 1}
    found = run_ranks(train_on_ranks, str(tmp_path), options, draws, folder=tmp_path)
    states = [outcomes[0][-8:] for outcomes in found]
    assert_same(*states)  # the plain ones are trained together, too
    for plain, ours, rounds, averaged, ranks in found:
        assert_same(plain, ours)
        assert averaged > 0
        assert ranks == 2
        assert bool(rounds) == (accumulates > 1 and not draws)


# ---- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optim": "adamw_bnb_8bit"}, "optim='adamw_bnb_8bit' of the TrainingArguments"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True of the TrainingArguments"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=said):
        HydraTrainer(tiny_gpt2(), arguments(tmp_path, **options), train_dataset=samples(0, 1), hydra=hydra())


def test_the_arguments_are_those_of_offload() -> None:
    offloads = set(inspect.signature(hydra_ext.offload).parameters)
    own = {each.name for each in dataclasses.fields(HydraArguments)} - {"checkpoints", "rounds", "others"}
    assert own < offloads
    assert hydra().for_offload()["checks"] is POISONED


def test_the_mixin_makes_a_trainer_of_any_other(tmp_path: Path) -> None:
    class Other(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(model, inputs, *args, **kwargs)

    class HydraOther(HydraMixin, Other):
        pass

    outcomes = []
    for kind, more in ((Other, {}), (HydraOther, {"hydra": hydra()})):
        trainer: Any = kind(tiny_gpt2(), arguments(tmp_path), train_dataset=samples(0, STEPS), **more)
        trainer.train()
        outcomes.append(outcome(trainer))
    assert_same(*outcomes)
