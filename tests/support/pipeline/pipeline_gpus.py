"""Pipelines and replicas of which every rank has a GPU of its own."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hydra_ext
from hydra_ext.pipeline import Pipeline
from hydra_ext.pipeline.ranks import messages
from hydra_ext.pipeline.ranks.channel import Channel
from hydra_ext.pipeline.ranks.links import Inbox, Links, Outbox
from hydra_ext.pipeline.ranks.messages import Message
from hydra_ext.pipeline.ranks.watch import Watch
from hydra_ext.runtime.replicas import Replicas
from support import gpu
from support.pipeline import pipelines
from support.pipeline.pipeline_failures import leave_record
from support.pipeline.pipelines import Case

PATIENCE = 4.0  # seconds without a sign of life after which a rank has failed
WIDTH = 96


def prepare(rank: int, seed: int | None) -> None:
    """Prepares a rank. With a seed, operations of an emulated GPU are late at random."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    torch.use_deterministic_algorithms(True)
    if seed is not None and "emulated_cuda" in sys.modules:
        import emulated_cuda

        emulated_cuda.set_delays(2e-3, seed + 100 * rank)


# ---- pipelines ------------------------------------------------------------------------------------------------------
def train_beside(rank: int, case: Case, seed: int | None) -> dict[str, Any]:
    """As :func:`train`, on another stream than the default one."""
    torch.cuda.set_device(rank)
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        return train(rank, case, seed)


def train(rank: int, case: Case, seed: int | None) -> dict[str, Any]:
    """Trains one rank; the results are those of ``pipelines.train``, on the host."""
    prepare(rank, seed)
    stages = [stage.cuda() for stage in pipelines.make_stages(case.stages)]
    pipe = pipelines.pipeline_of(case, stages)
    losses, norms = [], []
    for step in range(case.steps):
        data = pipelines.moved(pipelines.data_of(case, step, pipe.replica), "cuda")
        output = pipe.step(data, pipelines.loss_of, max_norm=case.max_norm)
        losses.append([loss.cpu() for loss in output.losses])
        norms.append(None if output.grad_norm is None else output.grad_norm.item())
    pipe.close()
    weights = {stage: _values(stages[stage]) for stage in pipe.schedule.stages_of(pipe.place)}
    return {"losses": losses, "norms": norms, "evaluations": [], "weights": weights}


def _values(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().cpu().clone() for parameter in module.parameters()]


def die(rank: int, where: str, folder: Path) -> None:
    """Rank 1 is killed in the second step, and rank 0 learns of it.

    Args:
        where: "sends" or "receives": what rank 1 would have begun on its GPU, for which rank 0's GPU waits. "waits":
            rank 0 waits for its whole GPU then, in the middle of a step, and not for a message.
    """
    prepare(rank, None)
    stages = pipelines.make_stages(2)
    own, other = ("send", "post") if where == "sends" else ("post", "send")
    if rank == 1 and where == "sends":
        # It announces what it sends only once it has begun: it dies in between, and rank 0 has heard of it already.
        _at_the_fifth(own, before=lambda: Thread(target=_die, args=(folder,), daemon=True).start(), omitted=True)
    elif rank == 1:
        _at_the_fifth(own, before=lambda: _die(folder))
    else:
        _at_the_fifth(other, after=lambda: _store().set("begun", ""))
        if where == "waits":
            _wait_in_the_sixth_forward(stages[0])

    def body(record: dict[str, Any]) -> None:
        pipe = Pipeline(
            None,
            pipelines.native_adamw,
            stages=stages,
            schedule="1f1b",
            microbatches=4,
            budget="64MiB",
            device="cuda",
            seed=5,
            patience=PATIENCE,
        )
        with pipe:
            for step in range(4):
                data = pipelines.moved([pipelines.make_microbatch(step, index) for index in range(4)], "cuda")
                record["loss"] = pipe.step(data, pipelines.loss_of).loss.item()

    leave_record(rank, folder, body)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    (folder / "synchronized").write_text("")
    os._exit(0)


def _die(folder: Path) -> None:
    """Ends this process, once the other rank's GPU waits for it."""
    _store().wait(["begun"], timedelta(seconds=60))
    (folder / "failed").write_text("")
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_in_the_sixth_forward(stage: nn.Module) -> None:
    calls = []

    def hook(*_: object) -> None:
        calls.append(None)
        if len(calls) == 6:
            _store().wait(["begun"], timedelta(seconds=60))
            torch.cuda.synchronize()

    stage.register_forward_pre_hook(hook)


def _at_the_fifth(
    name: str, *, before: Callable[[], object] = int, after: Callable[[], object] = int, omitted: bool = False
) -> None:
    """Calls functions around the fifth begin of a send or receive of a channel, which is in the second step.

    Args:
        omitted: Whether that one is not begun, and no later one either.
    """
    begin = getattr(Channel, name)
    calls: Counter[int] = Counter()

    def begun(self: Channel, *arguments: Any) -> Any:
        calls[id(self)] += 1
        fifth = calls[id(self)] == 5
        if omitted and calls[id(self)] > 5:
            Event().wait()
        if fifth:
            before()
        works = [] if fifth and omitted else begin(self, *arguments)
        if fifth:
            after()
        return works

    setattr(Channel, name, begun)


# ---- replicas -------------------------------------------------------------------------------------------------------
def make_replica() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)])


def batches_of(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(4)]


def train_replica(rank: int, seed: int | None) -> dict[str, Any]:
    """Trains one replica, offloaded."""
    prepare(rank, seed)
    model = make_replica()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with hydra_ext.offload(model, optimizer, budget="64MiB", device="cuda"):
        trace = gpu.train(model, optimizer, batches_of(rank), _loss_on_gpu)
    return {"losses": trace.losses, "state": trace.state}


def sum_together(rank: int) -> tuple[list[int], list[list[float]]]:
    """Sums gradients of three runs of a dtype over the ranks.

    Returns:
        The number of gradients that each operation took, and the sums.
    """
    prepare(rank, None)
    replicas = Replicas(dist.group.WORLD, torch.device("cuda", rank))
    dtypes = [torch.float32] * 3 + [torch.bfloat16] * 2 + [torch.float32]
    gradients = [torch.full((2,), 1.0 + rank + 4 * index, dtype=dtype) for index, dtype in enumerate(dtypes)]
    taken: list[int] = []
    sums: list[list[float]] = []
    while len(sums) < len(gradients):
        begun = replicas.start_sums(gradients[len(sums) :])
        taken.append(len(begun))
        sums += [replicas.wait(each).tolist() for each in begun]
    assert replicas.reduced_bytes == sum(gradient.nbytes for gradient in gradients)
    return taken, sums


def _loss_on_gpu(model: nn.Module, batch: Tensor) -> Tensor:
    return gpu.mean_of_squares(model, batch.cuda())


def train_together(size: int) -> list[dict[str, Any]]:
    """Plain PyTorch: forward and backward of each replica on the GPU, their mean, and the update on the host."""
    host = make_replica()
    optimizer = torch.optim.SGD(host.parameters(), lr=0.05, momentum=0.9)
    losses: list[list[Tensor]] = [[] for _ in range(size)]
    for step in range(4):
        sums: list[Tensor] = []
        for rank in range(size):
            model = make_replica().cuda()
            model.load_state_dict(host.state_dict())
            loss = _loss_on_gpu(model, batches_of(rank)[step])
            loss.backward()
            losses[rank].append(loss.detach().cpu())
            own = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
            sums = [total + each for total, each in zip(sums, own, strict=True)] if sums else own
        for parameter, total in zip(host.parameters(), sums, strict=True):
            parameter.grad = total / size
        optimizer.step()
    state = {name: value.detach().clone() for name, value in host.state_dict().items()}
    return [{"losses": each, "state": state} for each in losses]


# ---- links ----------------------------------------------------------------------------------------------------------
def late_receiver(rank: int) -> list[list[float]]:
    """Rank 0 sends to rank 1, then to rank 2. Rank 1 makes room for its message only when rank 2 has got the other."""
    prepare(rank, None)
    device = torch.device("cuda", rank)
    watch = Watch(rank, 3, "a late receiver", patience=PATIENCE, describe=lambda: "")
    links = Links(rank, device, watch)
    ends = [links.connect(0, target, f"to {target}") for target in (1, 2)]
    got: list[list[float]] = []
    for target, end in enumerate(ends, 1):
        if isinstance(end, Outbox):
            values = tuple(torch.full((2,), float(10 * target + index), device=device) for index in range(3))
            end.put(Message(0, 0, 1, values))
        elif isinstance(end, Inbox):
            if target == 1:
                _store().wait(["got"], timedelta(seconds=60))
            end.expect()
            got = [tensor.cpu().tolist() for tensor in end.take().tensors if tensor is not None]
            if target == 2:
                _store().set("got", "")
    if rank == 0:
        _store().wait(["got"], timedelta(seconds=60))
        links.flush()
    links.close(60.0)
    watch.end()
    return got


def carry(rank: int, rows: Sequence[int]) -> list[list[float]]:
    """Sends a tensor with gaps for each number of rows, when rank 1 expects it. Rank 1 lays it out late, and reads it.

    Returns:
        On rank 1 the numbers of each tensor.
    """
    prepare(rank, None)
    device = torch.device("cuda", rank)
    watch = Watch(rank, 2, "late layouts", patience=PATIENCE, describe=lambda: "")
    links = Links(rank, device, watch)
    end = links.connect(0, 1, "to 1")
    laid_out = messages.laid_out

    def late(*arguments: Any) -> Tensor:
        torch.cuda._sleep(100_000_000)
        return laid_out(*arguments)

    messages.laid_out = late  # type: ignore[assignment]
    got: list[list[float]] = []
    for index, count in enumerate(rows):
        if isinstance(end, Outbox):
            _store().wait([f"expected {index}"], timedelta(seconds=60))
            end.put(Message(0, 0, 1, (torch.arange(3.0 * count, device=device).view(count, 3)[:, :2],)))
        elif isinstance(end, Inbox):
            end.expect()
            _store().set(f"expected {index}", "")
            got += [tensor.cpu().flatten().tolist() for tensor in end.take().tensors if tensor is not None]
    links.flush()
    links.close(60.0)
    watch.end()
    return got


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
