"""SIGTERM: the step under way is finished and saved, and what goes on from it is the run that was not ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ext
from hydra_ext.checkpoint.format.files import Files
from hydra_ext.errors import SaveFailed, StateError, UnsupportedState
from support.checkpoint.checkpoints import STEPS, Job, Made, differences, offloaded


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a handler was left"
    signal.signal(signal.SIGTERM, before)


def terminate(*_: Any) -> None:
    signal.raise_signal(signal.SIGTERM)


def at(place: str, made: Made) -> Callable[[], Any]:
    """The signal comes there, once; the result takes it away."""
    module = next(made.model.children())
    if place == "forward":
        return module.register_forward_hook(_once(terminate)).remove
    if place == "backward":
        return made.model.head.weight.register_hook(_once(terminate)).remove  # of the host's parameter
    if place == "step":
        return made.optimizer.register_step_pre_hook(_once(terminate)).remove
    if place == "after the step":
        return made.optimizer.register_step_post_hook(_once(terminate)).remove
    step = made.optimizer.zero_grad
    made.optimizer.zero_grad = lambda *a, **k: [step(*a, **k), _later()]  # type: ignore[method-assign]
    _later = _once(terminate)
    return lambda: None


def train(made: Made, folder: Path, work: Callable[[hydra_ext.Run], Any], **options: Any) -> None:
    with offloaded(made) as run:
        run.save_on_sigterm(folder, **options)
        work(run)


def _once(work: Callable[..., Any]) -> Callable[..., None]:
    left = [work]

    def hook(*_: Any) -> None:
        if left:
            left.pop()()

    return hook


@pytest.mark.parametrize("place", ["forward", "backward", "step", "after the step", "between"])
@pytest.mark.parametrize("optimizer", ["adamw", "split"])
def test_it_saves_between_steps_and_ends(place: str, optimizer: str, tmp_path: Path) -> None:
    job = Job("images", optimizer, "cosine")
    plain = job.make(0)
    losses, expected = plain.steps(STEPS), plain.state()
    made = job.make(0)
    count = [0]
    made.optimizer.register_step_post_hook(lambda *_: count.append(count[-1] + 1))

    def work(_run: hydra_ext.Run) -> None:
        made.steps(2)
        remove = at(place, made)
        try:
            made.steps(3)
        finally:
            remove()

    with pytest.raises(SystemExit) as ended:
        train(made, tmp_path, work, schedule=made.schedule, extra=lambda: {"at": count[-1]})
    assert ended.value.code == 143
    again = job.make(1)
    with offloaded(again) as run:
        loaded = run.load(tmp_path, schedule=again.schedule)
        assert loaded.step == (4 if place in ("after the step", "between") else 3)
        assert loaded.extra == {"at": loaded.step}
        seen = again.steps(STEPS - loaded.step)
        found = again.state()
    assert not differences([*seen, found], [*losses[loaded.step :], expected])


def test_a_whole_step_at_once_is_finished_too(tmp_path: Path) -> None:
    made = Job("images", "split", "none").make(0)
    remove = at("forward", made)
    with pytest.raises(SystemExit):
        train(made, tmp_path, lambda run: [run.step([0, 1], lambda _: made.loss()) for _ in range(4)])
    remove()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_evaluation_behind_the_step_belongs_to_it(tmp_path: Path) -> None:
    """As does what follows that: here the schedule."""
    job = Job("images", "adamw", "cosine")

    def steps(made: Made, count: int) -> list[Any]:
        seen = []
        for _ in range(count):
            loss = made.loss()
            loss.backward()
            made.optimizer.step()
            made.optimizer.zero_grad()
            made.model.eval()
            with torch.no_grad():
                seen += [loss.detach(), made.model(torch.ones(2, 3, 8, 8))]
            made.model.train()
            made.schedule.step()
        return seen

    plain = job.make(0)
    expected = [steps(plain, STEPS), plain.state()]
    made, seen = job.make(0), []

    def work(_run: hydra_ext.Run) -> None:
        seen.extend(steps(made, 2))
        terminate()
        steps(made, 2)

    with pytest.raises(SystemExit):
        train(made, tmp_path, work, schedule=made.schedule)
    again = job.make(1)
    with offloaded(again) as run:
        assert run.load(tmp_path, schedule=again.schedule).step == 3
        found = [steps(again, STEPS - 3), again.state()]
    assert not differences(found, [expected[0][6:], expected[1]])
    assert not differences(seen, expected[0][:4])


def test_with_a_scaler_it_waits_for_its_update(tmp_path: Path) -> None:
    made = Job("images", "adamw", "none").make(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1)

    def work(_run: hydra_ext.Run) -> None:
        terminate()
        for _ in range(3):
            scaler.scale(made.loss()).backward()
            scaler.step(made.optimizer)
            scaler.update()
            made.optimizer.zero_grad()

    with pytest.raises(SystemExit):
        train(made, tmp_path, work, scaler=scaler)
    again = torch.amp.GradScaler("cpu", init_scale=2.0)
    other = Job("images", "adamw", "none").make(0)
    with offloaded(other) as run:
        run.load(tmp_path, scaler=again)
    assert again.get_scale() == 32.0


@pytest.mark.parametrize("when", ["in the last step", "after it", "before any"])
def test_it_saves_as_the_context_ends(when: str, tmp_path: Path) -> None:
    made = Job("images", "adamw", "none").make(0)

    def work(_run: hydra_ext.Run) -> None:
        if when == "before any":
            terminate()
            return
        made.steps(1)
        remove = at("step" if when == "in the last step" else "between", made)
        made.steps(1)
        remove()

    with pytest.raises(SystemExit) as ended:
        train(made, tmp_path, work)
    assert ended.value.code == 143
    assert [path.name for path in tmp_path.iterdir()] == [f"step-0000000{0 if when == 'before any' else 2}"]


def test_a_handler_that_was_there_has_its_say_afterwards_and_training_goes_on(tmp_path: Path) -> None:
    heard: list[int] = []
    made = Job("images", "adamw", "none").make(0)

    def handler(*_: Any) -> None:
        heard.append(run.steps)

    signal.signal(signal.SIGTERM, handler)
    with offloaded(made) as run:
        run.save_on_sigterm(tmp_path)
        terminate()
        assert heard == []
        made.steps(3)
        assert heard == [1]
        assert signal.getsignal(signal.SIGTERM) is handler
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_second_signal_goes_to_that_handler_at_once(tmp_path: Path) -> None:
    made = Job("images", "adamw", "none").make(0)

    class Stop(Exception):
        pass

    def handler(*_: Any) -> None:
        raise Stop

    signal.signal(signal.SIGTERM, handler)
    with pytest.raises(Stop):
        train(made, tmp_path, lambda _: [terminate(), terminate()])
    assert not list(tmp_path.iterdir())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_signal_that_is_ignored_saves_and_nothing_else(tmp_path: Path) -> None:
    made = Job("images", "adamw", "none").make(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with offloaded(made) as run:
        run.save_on_sigterm(tmp_path)
        terminate()
        made.steps(3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_step_that_fails_is_not_saved_and_the_signal_is_not_lost(tmp_path: Path) -> None:
    made = Job("images", "adamw", "none").make(0)
    with pytest.raises(SystemExit) as ended:
        train(made, tmp_path, lambda _: [terminate(), 1 // 0])
    assert ended.value.code == 143
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_says_so(tmp_path: Path) -> None:
    class Full(Files):
        def free_bytes(self, folder: int) -> int:
            return 0

    made = Job("images", "adamw", "none").make(0)
    with pytest.raises(SaveFailed):
        train(made, tmp_path, lambda run: [setattr(run._checkpoint, "files", Full()), terminate(), made.steps(2)])


class Odd:
    """A loader whose state no checkpoint holds."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": {1}}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.every_case
@pytest.mark.parametrize("given", ["loader", "extra"])
def test_state_that_cannot_be_captured_says_so(given: str, tmp_path: Path) -> None:
    made = Job("images", "adamw", "none").make(0)
    options: Any = {"loader": {"loader": Odd()}, "extra": {"extra": lambda: 1 // 0}}[given]
    with pytest.raises(UnsupportedState if given == "loader" else ZeroDivisionError):
        train(made, tmp_path, lambda _: [terminate(), made.steps(2)], **options)
    assert not list(tmp_path.iterdir())


def test_without_a_signal_nothing_happens(tmp_path: Path) -> None:
    made = Job("images", "adamw", "none").make(0)
    with offloaded(made) as run:
        run.save_on_sigterm(tmp_path)
        made.steps(2)
        with pytest.raises(StateError, match="was called before"):
            run.save_on_sigterm(tmp_path)
    assert not list(tmp_path.iterdir())
    with offloaded(made) as run:
        pass
    with pytest.raises(StateError, match="has ended"):
        run.save_on_sigterm(tmp_path)


def test_a_relative_folder_is_that_of_the_time_when_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Job("images", "adamw", "none").make(0)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        train(made, Path("ckpt"), lambda _: [monkeypatch.chdir("other"), terminate(), made.steps(2)])
    assert [path.name for path in (tmp_path / "ckpt").iterdir()] == ["step-00000001"]


def test_only_the_main_thread_can_ask_for_it(tmp_path: Path) -> None:
    made = Job("images", "adamw", "none").make(0)
    caught: list[BaseException] = []

    def ask() -> None:
        with pytest.raises(StateError, match="main thread") as error:
            run.save_on_sigterm(tmp_path)
        caught.append(error.value)

    with offloaded(made) as run:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert caught
