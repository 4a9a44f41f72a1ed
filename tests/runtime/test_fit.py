"""Activations that are fitted into the budget, under programs that users write: equal bits, nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

import hydra_ext
from hydra_ext import Checks, SimulatedDevice
from hydra_ext.profile import Amount, ModuleFigures, Profile
from hydra_ext.profile.dry_run import dry_run
from hydra_ext.runtime.step_planner import StepPlanner
from support.models.zoo import FAMILIES
from support.runtime.fitted import Found, Program, both, noted, optimizer_of
from support.runtime.layered import ROWS, WIDTH, Layered, data, loss_of

LAYERS = 4
TIGHT, AMPLE = 450_000, 1_200_000  # all weights take 0.55 MiB, and all that one forward saves takes 2


class Layer(nn.Module):
    """Its inner part saves much more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(self.act(self.up(x))).sigmoid())


class Net(Layered):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(layers or [Layer() for _ in range(LAYERS)])


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Four steps."""
    for x in data(4):
        loss = loss_of(model, x)
        loss.backward()
        update(optimizer)
        yield loss.detach()


# ---- programs -------------------------------------------------------------------------------------------------------


def simply(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return list(plainly(model, optimizer))


def in_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Four steps of one microbatch, by ``run.step`` where the model is offloaded."""
    run, left = model.__dict__.get("_hydra_ext_context"), []
    for seed, x in enumerate(data(4)):
        if run is None:
            torch.manual_seed(seed)
            loss = loss_of(model, x)
            loss.backward()
            update(optimizer)
            left.append(loss.detach())
        else:
            left += run.step([x], lambda given: loss_of(model, given), seeds=[seed]).losses
    return left


def twice_in_a_microbatch(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    left = []
    for x in data(4):
        loss = loss_of(model, x) + 0.5 * loss_of(model, x.flip(0))
        loss.backward()
        update(optimizer)
        left.append(loss.detach())
    return left


def forwards_without_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    left = []
    for x in data(4):
        left.append(loss_of(model, x).detach())
        left += simply(model, optimizer)[:1]
        left.append(loss_of(model, x).detach())
    return left


def evaluation_between(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    left = []
    for x in data(4):
        with torch.no_grad():
            model.eval()
            left.append(loss_of(model, x))
            model.train()
        loss = loss_of(model, x)
        with torch.no_grad():
            left.append(loss_of(model, x))
        loss.backward()
        update(optimizer)
        left.append(loss.detach())
    return left


def two_forwards_before_a_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    left = []
    for x in data(4):
        first, second = loss_of(model, x), loss_of(model, x * 0.5)
        (first + second).backward()
        third, fourth = loss_of(model, x), loss_of(model, x * 2)
        third.backward()
        fourth.backward()
        update(optimizer)
        left += [first.detach(), second.detach(), third.detach(), fourth.detach()]
    return left


def gradients_that_are_asked_for(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    left = []
    for x in data(4):
        found = torch.autograd.grad(loss_of(model, x), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient
        left += [gradient.clone() for gradient in found]
        update(optimizer)
    return left


def penalty_of_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """A backward of a backward."""
    left = []
    for x in data(3):
        x.requires_grad_()
        loss = loss_of(model, x)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()
        update(optimizer)
        left.append(loss.detach())
    return left


def retained_graph(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    left = []
    for x in data(4):
        loss = loss_of(model, x)
        loss.backward(retain_graph=True)
        loss.backward()
        update(optimizer)
        left.append(loss.detach())
    return left


def a_forward_that_raises(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The first one, which is measured, and one after it."""
    left = []
    for step, x in enumerate(data(4)):
        if step in (0, 2):
            state = torch.get_rng_state()
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                loss_of(model, x[:, :7])
            torch.set_rng_state(state)
        loss = loss_of(model, x)
        loss.backward()
        update(optimizer)
        left.append(loss.detach())
    return left


def a_backward_that_raises(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    left = []
    for step, x in enumerate(data(4)):
        if step in (0, 2):
            loss = loss_of(model, x)
            loss.register_hook(_raises)
            with pytest.raises(KeyError, match="of the user"):
                loss.backward()
            optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        update(optimizer)
        left.append(loss.detach())
    return left


def _raises(_gradient: Tensor) -> Tensor:
    raise KeyError("of the user")


def shapes_that_change(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    left = []
    for step, x in enumerate(data(6)):
        loss = loss_of(model, x[: (5, 96, 31, 60, 2, 96)[step]])
        loss.backward()
        update(optimizer)
        left.append(loss.detach())
    return left


# Programs, and the smallest budget of each: gradients that are asked for stay on the device until all are there.
PROGRAMS: dict[Program, int] = {
    simply: TIGHT,
    twice_in_a_microbatch: 5 * TIGHT // 2,
    forwards_without_backward: TIGHT,
    evaluation_between: TIGHT,
    two_forwards_before_a_backward: 5 * TIGHT // 2,
    gradients_that_are_asked_for: 2 * TIGHT,
    penalty_of_gradients: 8 * TIGHT,
    retained_graph: TIGHT,
    a_forward_that_raises: TIGHT,
    a_backward_that_raises: TIGHT,
    shapes_that_change: TIGHT,
}
CASES = [
    pytest.param(
        program, factor * least, id=f"{program.__name__}-{factor}", marks=[] if factor == 1 else pytest.mark.full
    )
    for program, least in PROGRAMS.items()
    for factor in (1, 2, 8)
]


@pytest.mark.parametrize(("program", "budget"), CASES)
def test_a_loop_of_any_form_is_equal(program: Program, budget: int) -> None:
    found = both(Net, program, budget=budget)
    assert found.equal
    assert found.profile is not None


# ---- modules that are not to be called again ------------------------------------------------------------------------

# On such a link it is faster to call a layer again than to move what it saves.
CRAWLING = SimulatedDevice(to_device_bytes_per_second=5e6, to_host_bytes_per_second=5e6)


def modules(found: Found) -> Mapping[str, ModuleFigures]:
    assert found.profile is not None
    return found.profile.modules


def test_layers_are_called_again_where_that_is_faster() -> None:
    found = both(Net, in_steps, budget=AMPLE, device=CRAWLING)
    assert found.equal
    assert found.recomputed
    assert found.second_calls > 2 * len(found.recomputed)


def test_in_a_loop_of_the_user_nothing_is_called_again() -> None:
    """What a second call changes outside of the model could not be undone there."""
    CALLS.clear()
    found = both(lambda: Net(*[CachingElsewhere() for _ in range(LAYERS)]), simply, budget=AMPLE, device=CRAWLING)
    assert found.equal
    assert not found.recomputed
    assert found.second_calls == 0
    assert len(CALLS) == 2 * 4 * LAYERS


class Hooked(Net):
    """Two layers have hooks of the user, or modules inside them do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.layers[0].register_forward_hook(lambda *_: self.calls.append(0))
        self.layers[1].act.register_forward_pre_hook(lambda *_: self.calls.append(1))
        self.layers[2].register_full_backward_hook(lambda *_: self.calls.append(2))


@pytest.mark.cases(1)
@pytest.mark.parametrize("budget", [2 * TIGHT, AMPLE])
def test_modules_with_hooks_of_the_user_are_not_called_again(budget: int) -> None:
    found = both(Hooked, simply, budget=budget, device=CRAWLING)
    assert found.equal
    for name in ("", "layers.0", "layers.1", "layers.1.act", "layers.2"):
        assert not modules(found)[name].is_repeatable
        assert name not in found.recomputed
    assert modules(found)["layers.3"].is_repeatable
    assert [found.model.calls.count(layer) for layer in range(3)] == [4, 4, 4]


CALLS: list[int] = []


class CachingElsewhere(Layer):
    """Gives the same numbers in each call, and saves other tensors in every second one."""

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(0)
        y = super().forward(x)
        return y if len(CALLS) % 2 else y.abs() * y.sign()


class Writing(nn.Module):
    """Writes to what it is given, and saves more than that."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return x.sin() * x.cos() * x.exp()


class DrawingFromPython(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + random.random())


class Averaging(Layer):
    """Has statistics, and a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(self.seen))
        return super().forward(self.norm(x)) * (1 + len(self.seen) / 10)


def test_a_module_that_depends_on_what_is_outside_is_found_by_a_trial_and_not_called_again() -> None:
    CALLS.clear()
    found = both(lambda: Net(*[CachingElsewhere() for _ in range(LAYERS)]), in_steps, budget=AMPLE, device=CRAWLING)
    assert found.equal
    assert found.second_calls > 0  # which were trials
    assert len(CALLS) == 2 * 4 * LAYERS + found.second_calls
    assert not found.recomputed  # the plans after them have others
    assert not all(figures.is_repeatable for name, figures in modules(found).items() if name.count(".") == 1)


@pytest.mark.cases(1)
@pytest.mark.parametrize("budget", [TIGHT, AMPLE])
def test_a_module_that_writes_to_its_inputs_is_not_called_again(budget: int) -> None:
    make = lambda: Net(Layer(), Writing(), Layer(), Writing(), Layer())  # noqa: E731
    found = both(make, simply, budget=budget, device=CRAWLING)
    assert found.equal
    assert not modules(found)["layers.1"].is_repeatable
    assert not {"layers.1", "layers.3"} & {*found.recomputed}


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", [DrawingFromPython, Averaging])
def test_state_of_modules_and_of_generators_is_as_without_a_second_call(kind: type[Layer]) -> None:
    def program(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        random.seed(3)
        left = in_steps(model, optimizer)
        return [*left, torch.tensor([len(getattr(layer, "seen", "")) for layer in model.layers])]

    found = both(lambda: Net(*[kind() for _ in range(LAYERS)]), program, budget=AMPLE, device=CRAWLING)
    assert found.equal
    assert found.second_calls > 0


def test_microbatches_of_a_round_that_wait_for_a_trial_heed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = StepPlanner.plan
    monkeypatch.setattr(StepPlanner, "plan", lambda self, count, _, **options: plan(self, count, [3], **options))

    def together(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        CALLS.clear()
        run, left = model.__dict__.get("_hydra_ext_context"), []
        for _ in range(3):
            if run is not None:
                left += run.step(data(6), lambda x: loss_of(model, x), seeds=[*range(6)]).losses
                continue
            for seed, x in enumerate(data(6)):
                torch.manual_seed(seed)
                loss = loss_of(model, x)
                (loss / 6).backward()
                left.append(loss.detach())
            update(optimizer)
        return left

    make = lambda: Net(*[CachingElsewhere() for _ in range(LAYERS)])  # noqa: E731
    found = both(make, together, budget=2 * AMPLE, device=CRAWLING)
    assert found.second_calls > 0
    assert found.retries == 0
    assert found.equal


def test_a_trial_that_raises_is_made_again() -> None:
    CALLS.clear()

    class Raising(CachingElsewhere):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            again = [] if run.fit is None or run.fit.applied is None else run.fit.applied.recomputed
            if not raised and any(model.get_submodule(name) is self for name in again):
                raised.append(self)
                raise KeyError("of the user")
            return y

    raised: list[nn.Module] = []
    torch.manual_seed(0)
    model = Net(*[Raising() for _ in range(LAYERS)])
    with hydra_ext.offload(model, optimizer_of(model), budget=AMPLE, device=CRAWLING) as run:
        for step in range(6):
            with suppress(KeyError):
                run.step([data(1)[0]], lambda x: loss_of(model, x), seeds=[step])
        assert raised
        assert run.report().retries == 0


# ---- hooks on saved tensors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [AMPLE, 2**23])
def test_hooks_of_the_user_on_saved_tensors_see_all_of_them(budget: int) -> None:
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed[-1] += 1
        return tensor

    def hooked(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """In the second step of each two."""
        left = []
        for step, x in enumerate(data(4)):
            packed.append(0)
            if step % 2:
                with saved_tensors_hooks(pack, lambda tensor: tensor):
                    loss = loss_of(model, x)
            else:
                loss = loss_of(model, x)
            loss.backward()
            update(optimizer)
            left.append(loss.detach())
        return left

    found = both(Net, hooked, budget=2**23 if budget == 2**23 else 4 * TIGHT)
    assert found.equal
    assert packed[:4] == packed[4:]
    assert packed[1] > 4 * LAYERS


# ---- kinds of models ------------------------------------------------------------------------------------------------


class Bare(nn.Module):
    """A root without modules."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(WIDTH, 8) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.up).tanh() @ self.down


class Compiled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = torch.compile(self.layers[1], backend="aot_eager")  # type: ignore[assignment]
        self.layers[2].compile(backend="aot_eager")


class Scripted(Net):
    def __init__(self) -> None:
        super().__init__()
        scripted = torch.jit.script(nn.Sequential(nn.Sigmoid(), nn.Tanh()))
        for _ in range(4):  # its first calls run another program, which rounds otherwise
            scripted(torch.randn(ROWS, WIDTH, requires_grad=True)).sum().backward()
        self.layers.insert(1, scripted)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("make", "budget"), [(Bare, 120_000), (Bare, 2**20), (Compiled, AMPLE), (Scripted, TIGHT), (Scripted, AMPLE)]
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which Dynamo reads
def test_models_of_any_kind_are_equal(make: Callable[[], nn.Module], budget: int) -> None:
    found = both(make, simply, budget=budget, device=CRAWLING)
    assert found.equal


@pytest.mark.parametrize("budget", [AMPLE, 2**23])
def test_two_models_in_one_loop(budget: int) -> None:
    left = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        first, second = Net(), nn.Sequential(nn.Linear(8, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 8))
        optimizers = [optimizer_of(first), optimizer_of(second)]
        with ExitStack() as stack:
            if offloaded:
                for model, optimizer in zip((first, second), optimizers, strict=True):
                    checks = Checks(poison_hosts=True)
                    stack.enter_context(hydra_ext.offload(model, optimizer, budget=budget, checks=checks))
            torch.manual_seed(1)
            losses = []
            for x in data(4):
                y = second(first(x))
                loss = functional.cross_entropy(y, torch.arange(len(y)) % 8) + first(x).square().mean()
                loss.backward()
                for optimizer in optimizers:
                    update(optimizer)
                losses.append(loss.detach())
        left.append([*losses, *noted(first).values(), *noted(second).values()])
    assert all(map(torch.equal, *left))


# ---- figures --------------------------------------------------------------------------------------------------------


def profile_of(make: Callable[[], nn.Module], given: Any, loss: Callable[[nn.Module, Any], Tensor]) -> Profile:
    torch.manual_seed(0)
    model = make().train()
    with hydra_ext.offload(model, optimizer_of(model), budget=2**26, device=SimulatedDevice()) as run:
        loss(model, given).backward()
        assert run.fit is not None
        profile = run.fit.planner.profile
    assert profile is not None
    return profile


def test_a_step_of_more_microbatches_than_the_planner_takes_has_no_plan_and_raises_nothing() -> None:
    model = Net()
    with hydra_ext.offload(model, optimizer_of(model), budget=AMPLE, device=SimulatedDevice()) as run:
        run.step(data(1), lambda x: loss_of(model, x))
        assert run.fit is not None
        planner = run.fit.planner
        assert planner.plan(1023, [1], recompute=False) is not None
        assert planner.plan(1024, [1], recompute=False) is None


def test_the_figures_of_a_small_model_are_those_that_are_counted_by_hand() -> None:
    profile = profile_of(Net, data(1)[0], loss_of)
    row, wide = 4 * ROWS * WIDTH, 16 * ROWS * WIDTH  # bytes of what layers take, and of what is inside
    called = sorted((figures.order, name) for name, figures in profile.modules.items() if figures.calls)
    inside = ("", ".up", ".act", ".drop", ".down")
    names = ["", *(f"layers.{layer}{name}" for layer in range(LAYERS) for name in inside), "head"]
    assert called == list(enumerate(names, 1))
    for layer in range(LAYERS):
        of = {name: profile.modules[f"layers.{layer}{name}"] for name in inside}
        assert [figures.calls for figures in of.values()] == [1] * 5
        assert of[".up"].saved == of[".up"].inputs == Amount(fresh=row, all=row)
        assert of[".act"].saved == of[".act"].inputs == Amount(fresh=wide, all=wide)
        assert of[".drop"].inputs == Amount(fresh=wide, all=wide)  # GELU's output, which nothing saves
        assert of[".drop"].saved == Amount(fresh=wide, all=wide)  # factors
        assert of[".down"].saved == of[".down"].inputs == Amount(fresh=0, all=wide)  # the sigmoid's output is saved
        assert of[""].inputs == Amount(fresh=row, all=row)
        assert of[""].saved.fresh == row + 3 * wide
    assert profile.modules["layers"].calls == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["gpt2", "t5", "llama", "unet", "whisper"])
def test_the_figures_are_those_of_a_dry_run(name: str) -> None:
    family = FAMILIES[name]
    batch = family.batches(1, 1)[0]
    measured = profile_of(family.build, batch, family.loss)
    torch.manual_seed(0)
    model = family.build().train()
    foreseen = dry_run(model, batch, lambda given: family.loss(model, given))
    for module, figures in foreseen.modules.items():
        real = measured.modules[module]
        assert (real.calls, real.order) == (figures.calls, figures.order), module
        if module:
            assert real.saved == figures.saved, module
            assert real.inputs == figures.inputs, module
    whole = measured.modules[""], foreseen.modules[""]
    assert whole[0].forward_bytes == pytest.approx(whole[1].forward_bytes, rel=0.05)


def test_convolutions_train_within_the_least_bytes_of_a_dry_run_and_in_no_fewer() -> None:
    def made() -> nn.Module:
        layers = [nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1, bias=False)]
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def loss(model: nn.Module, images: Tensor) -> Tensor:
        made: Tensor = model(images)
        return made.square().mean()

    images = torch.randn(2, 64, 12, 12).contiguous(memory_format=torch.channels_last)
    model = made()
    least = dry_run(model, images, lambda given: loss(model, given)).least_bytes()

    def step(budget: int) -> None:
        model = made()
        with hydra_ext.offload(model, optimizer_of(model), budget=budget, device=SimulatedDevice()) as run:
            run.step([images], lambda given: loss(model, given))

    step(int(1.03 * least))
    with pytest.raises(torch.OutOfMemoryError):
        step(int(0.97 * least))
