"""Lightning and Fabric around an offloaded module, beside both around a plain one."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hydra_ext
from hydra_ext.errors import InvalidArgument
from hydra_ext.integrations.lightning import OffloadStrategy
from support.benches import assert_same
from support.runtime.outcomes import POISONED
from support.trainers import states_of

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("_quiet")]
BUDGET = 6 * 2**14


@pytest.fixture
def _quiet() -> None:
    logging.getLogger("lightning").setLevel(logging.ERROR)


def rows() -> Any:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), batch_size=4)


class Module(lightning.LightningModule):
    def __init__(self, *, native: bool = False, schedules: bool = False, optimizers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6)))
        self._native, self._schedules, self._count = native, schedules, optimizers
        self.automatic_optimization = optimizers == 1
        self.found: list[torch.Tensor] = []

    def _loss(self, rows: Any) -> torch.Tensor:
        loss: torch.Tensor = self.net(rows[0]).square().mean()
        self.found.append(loss.detach().clone())
        return loss

    def training_step(self, rows: Any, index: int) -> torch.Tensor:
        return self._loss(rows)

    def validation_step(self, rows: Any, index: int) -> None:
        self._loss(rows)

    def test_step(self, rows: Any, index: int) -> None:
        self._loss(rows)

    def predict_step(self, rows: Any, index: int) -> torch.Tensor:
        return self.net(rows[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        make = hydra_ext.optim.AdamW if self._native else torch.optim.AdamW
        found = [make(self.parameters(), lr=1e-2) for _ in range(self._count)]
        schedules = [torch.optim.lr_scheduler.LinearLR(found[0], total_iters=8)] if self._schedules else []
        return found, schedules


def trainer(tmp_path: Path, strategy: Any = None, **options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        **{
            "max_epochs": 2,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(tmp_path),
            "strategy": strategy or "auto",
            **options,
        }
    )


def fitted(tmp_path: Path, *, offloads: bool, resumes: bool = False, make: Any = Module, **options: Any) -> list[Any]:
    """Losses, weights and states; also of a test and predictions."""
    strategy = OffloadStrategy(budget=BUDGET, checks=POISONED) if offloads else None
    module = make()
    one = trainer(tmp_path, strategy, **options)
    torch.manual_seed(3)
    one.fit(module, rows(), rows())
    if offloads:
        assert strategy.run.report().evictions > 0
        assert strategy.run.closed
    if resumes:
        file = tmp_path / "saved.ckpt"
        one.save_checkpoint(file)
        module = make()
        strategy = OffloadStrategy(budget=BUDGET, checks=POISONED) if offloads else None
        one = trainer(tmp_path, strategy, **{**options, "max_epochs": 3})
        torch.manual_seed(4)
        one.fit(module, rows(), rows(), ckpt_path=file)
    states = states_of(module, one.optimizers[0])
    one.test(module, rows(), verbose=False)
    predicted = one.predict(module, rows())
    return [*module.found, *(each.detach().clone() for each in module.parameters()), *states, *predicted]


CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "accumulation and clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "clipping by value": {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    "bf16": {"precision": "bf16-mixed"},
    "schedule": {"make": lambda: Module(schedules=True)},
    "optimizer of hydra_ext": {"make": lambda: Module(native=True), "gradient_clip_val": 0.1},
    "resume": {"resumes": True, "make": lambda: Module(schedules=True)},
    "validation in the middle": {"val_check_interval": 2},
    "few batches": {"limit_train_batches": 3, "limit_val_batches": 1},
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("case", CASES)
def test_a_strategy_has_the_bits_of_one_device(case: str, tmp_path: Path) -> None:
    assert_same(*(fitted(tmp_path, offloads=offloads, **CASES[case]) for offloads in (False, True)))


def test_loggers_get_figures(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    strategy = OffloadStrategy(budget=BUDGET)
    trainer(tmp_path, strategy, logger=logger, log_every_n_steps=1).fit(Module(), rows())
    logger.save()
    assert "hydra/seconds" in Path(logger.experiment.metrics_file_path).read_text()


def test_an_error_leaves_a_plain_module(tmp_path: Path) -> None:
    class Fails(Module):
        def training_step(self, rows: Any, index: int) -> torch.Tensor:
            if index == 1:
                raise ValueError("on purpose")
            return super().training_step(rows, index)

    module, strategy = Fails(), OffloadStrategy(budget=BUDGET)
    with pytest.raises(ValueError, match="on purpose"):
        trainer(tmp_path, strategy).fit(module, rows())
    assert type(module) is Fails
    assert strategy.run is not None
    assert strategy.run.closed


def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"Module\.configure_optimizers\(\) makes 2 optimizers"):
        trainer(tmp_path, OffloadStrategy(budget=BUDGET)).fit(Module(optimizers=2), rows())


@pytest.mark.cases(2)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_fabric_has_the_bits_of_fabric(when: str, precision: Any, native: bool) -> None:
    outcomes = []
    for offloads in (False, True):
        net = Module().net
        optimizer: Any = (hydra_ext.optim.AdamW if native else torch.optim.AdamW)(net.parameters(), lr=1e-2)
        fabric = Fabric(accelerator="cpu", precision=precision)
        torch.manual_seed(3)
        loader = fabric.setup_dataloaders(rows())

        def entered(module: Any, optimizer: Any, at: str, offloads: bool = offloads) -> Any:
            if not offloads or at != when:
                return nullcontext()
            return hydra_ext.offload(module, optimizer, budget=BUDGET, checks=POISONED)

        found = []
        with entered(net, optimizer, "before") as early:
            module, wrapped = fabric.setup(net, optimizer, move_to_device=False)
            with entered(module, wrapped, "after") as late:
                for (x,) in loader:
                    loss = module(x).square().mean()
                    fabric.backward(loss)
                    found.append(fabric.clip_gradients(module, wrapped, max_norm=0.1))
                    wrapped.step()
                    wrapped.zero_grad()
                    found.append(loss.detach().clone())
        if offloads:
            run = early or late
            assert run.report().evictions > 0
            assert run.steps == len(rows())
        outcomes.append([*found, *(each.detach().clone() for each in net.parameters()), *states_of(net, optimizer)])
    assert_same(*outcomes)
