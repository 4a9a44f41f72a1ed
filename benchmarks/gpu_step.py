"""One cell of the table of training steps on a GPU: python benchmarks/gpu_step.py --model 4b --tokens 8192

    --subject hydra   bf16 weights, exact fp32 master, run.step and its clipping, within --budget
    --subject plain   fp32 weights on the GPU, autocast to bf16, checkpointed layers, fused AdamW; --budget caps torch
    --subject fsdp2   fully_shard with CPUOffloadPolicy, fp32 weights on the host, bf16 on the GPU, checkpointed layers

Prints tokens a second (median of --steps), peak memory of torch's allocator, and for hydra the share of the bound

    max(compute, to device, to host, optimizer) + max(0, optimizer - forward)

where compute is 6 operations a weight and token (8 where it recomputes) at the rate of a large bf16 product here, the
link's parts are the bytes counted over the rate of one large pinned copy, and the optimizer's is what its bytes take at
the rate of a large copy in host memory. Weights are random. One cell a command: each is to end within ten minutes.
``--model tiny --device simulated`` shows on any machine that it runs.

    --emulated h100-pcie5     on any machine: the real CUDA path on an emulated card, with a virtual clock

Under the clock nothing is computed: kernels, copies and the host's optimizer take what published figures say, named in
emulation.py, and the host's program what it really takes here. The share of the bound has the same formula, once with
compute as above, and once with compute as the sum of the kernels' times, attention and all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import emulation  # before torch: with --emulated it brings a CUDA machine of its own
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hydra_ext
from hydra_ext.errors import StateError

SEQUENCE = 4096
MAX_NORM = 1.0
_HEAD_OF_PLAN = 6  # lines
WARM_UP, EMULATED_WARM_UP = 3, 18  # steps; in those of an emulation the run has also tried its first plans


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int = SEQUENCE


SIZES = {
    "tiny": Size(width=64, layers=4, hidden=128, heads=4, vocabulary=256, sequence=64),
    "4b": Size(width=2560, layers=36, hidden=9728, heads=32, vocabulary=151936),
    "8b": Size(width=4096, layers=36, hidden=12288, heads=32, vocabulary=151936),
}


def make_model(size: Size, dtype: torch.dtype, *, filled: bool = True) -> nn.Module:
    """Random weights, drawn once and repeated, as drawing billions takes minutes; or unfilled, with no page touched."""
    config = LlamaConfig(
        hidden_size=size.width, num_hidden_layers=size.layers, intermediate_size=size.hidden,
        num_attention_heads=size.heads, num_key_value_heads=max(1, size.heads // 4), vocab_size=size.vocabulary,
        max_position_embeddings=size.sequence, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    torch.set_default_dtype(dtype)
    try:
        return _without_drawing(config, filled=filled)
    finally:
        torch.set_default_dtype(torch.float32)


def _without_drawing(config: LlamaConfig, *, filled: bool) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
    rotary = [module for module in model.modules() if hasattr(module, "inv_freq")]
    kinds = {id(module): type(module) for module in rotary}
    model.to_empty(device="cpu")
    for module in rotary:
        fresh = kinds[id(module)](config)
        module.inv_freq.copy_(fresh.inv_freq)
    if filled:
        _fill(model)
    model.tie_weights()
    return model


def _fill(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2**20, generator=generator).mul_(0.02).to(torch.get_default_dtype())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            flat = parameter.view(-1)
            for begin in range(0, flat.numel(), drawn.numel()):
                part = flat[begin : begin + drawn.numel()]
                part.copy_(drawn[: part.numel()])


def batches(size: Size, tokens: int) -> list[torch.Tensor]:
    count = max(1, tokens // size.sequence)
    return list(
        torch.randint(0, size.vocabulary, (count, 1, size.sequence), generator=torch.Generator().manual_seed(1))
    )


@dataclass
class Cell:
    """A step that was measured: seconds of each, and what is to be said of it."""

    seconds: list[float]
    peak_bytes: int
    remarks: str = ""


def measured(step: Callable[[], None], steps: int, *, warm_up: int = WARM_UP) -> list[float]:
    for _ in range(warm_up):
        step()
    seconds = []
    for _ in range(steps):
        start = emulation.seconds()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(emulation.seconds() - start)
    return seconds


# ---- subjects -------------------------------------------------------------------------------------------------------


def run_hydra(
    size: Size,
    tokens: int,
    budget: str | None,
    device: str,
    steps: int,
    machine: emulation.Machine | None = None,
    warm_up: int = WARM_UP,
) -> Cell:
    model = make_model(size, torch.bfloat16, filled=machine is None)
    optimizer = hydra_ext.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01)
    if machine is not None:
        emulation.give_state(optimizer)
    data = batches(size, tokens)
    limit = budget or f"{_all_memory()}B"
    with hydra_ext.offload(model, optimizer, budget=limit, device=device) as run:

        def loss(ids: torch.Tensor) -> torch.Tensor:
            ids = ids.to(run.device)
            value: torch.Tensor = model(input_ids=ids, labels=ids).loss
            return value

        def step() -> None:
            run.step(data, loss, max_norm=MAX_NORM)

        measured(step, 0, warm_up=warm_up)
        run.sync()  # else the update of the step before counts, too
        before = run.report()
        watch = None if machine is None else emulation.Watch()
        seconds = measured(step, steps, warm_up=0)
        interval = None if watch is None else watch.since(steps)
        run.sync()
        after = run.report()
        amounts = Amounts.of(model, tokens, before, after, steps)
        if machine is not None and interval is not None:
            foreseen = _foreseen(run)
            bound = _emulated_bound(amounts, tokens, machine, interval, statistics.median(seconds))
            remarks = "\n".join([bound, "the plan:", *foreseen, str(after)])
        else:
            remarks = f"{_bound(amounts, statistics.median(seconds), device)}\n{after}"
        if after.refusals or after.fallbacks:
            sys.exit(f"the microbatches were not run in rounds:\n{after}")
        return Cell(seconds, after.peak_bytes, remarks)


def _foreseen(run: hydra_ext.Run) -> list[str]:
    try:
        return str(run.plan()).splitlines()[:_HEAD_OF_PLAN]
    except StateError as error:  # no plan has fitted, or those that did have failed
        return [str(error)]


def run_plain(size: Size, tokens: int, budget: str | None, _device: str, steps: int) -> Cell:
    _cap(budget)
    model = make_model(size, torch.float32).cuda()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01, fused=True)
    seconds = measured(_loop(model, optimizer, batches(size, tokens)), steps)
    return Cell(seconds, torch.cuda.max_memory_reserved())


def run_fsdp2(size: Size, tokens: int, budget: str | None, _device: str, steps: int) -> Cell:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    _cap(budget)
    model = make_model(size, torch.float32)
    model.gradient_checkpointing_enable()
    policy: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
    }
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01, fused=True)
    try:
        seconds = measured(_loop(model, optimizer, batches(size, tokens)), steps)
    finally:
        torch.distributed.destroy_process_group()
    return Cell(seconds, torch.cuda.max_memory_reserved())


SUBJECTS = {"hydra": run_hydra, "plain": run_plain, "fsdp2": run_fsdp2}


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> Callable[[], None]:
    def step() -> None:
        for ids in data:
            there = ids.cuda(non_blocking=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=there, labels=there).loss / len(data)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    return step


def _cap(budget: str | None) -> None:
    if budget is not None:
        torch.cuda.set_per_process_memory_fraction(hydra_ext.policy.parse_bytes(budget) / _all_memory())


def _all_memory() -> int:
    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 2**33


# ---- the bound ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Amounts:
    """What one step computes and moves.

    Attributes:
        products: Operations in products with weights: 8 a weight and token, where it recomputes.
        to_device: Bytes.
        to_host: Bytes.
        optimizer: Bytes that the update reads and writes.
    """

    products: float
    to_device: float
    to_host: float
    optimizer: float

    @classmethod
    def of(
        cls, model: nn.Module, tokens: int, before: hydra_ext.Report, after: hydra_ext.Report, steps: int
    ) -> Amounts:
        weights = sum(parameter.numel() for parameter in model.parameters())
        return cls(
            products=8.0 * weights * tokens,
            to_device=(after.weights_moved_bytes - before.weights_moved_bytes) / steps,
            to_host=(after.gradients_moved_bytes - before.gradients_moved_bytes) / steps,
            optimizer=(after.update_bytes - before.update_bytes) / steps,
        )


@dataclass(frozen=True)
class Bound:
    """Seconds of what a step does, each by itself."""

    compute: float
    to_device: float
    to_host: float
    optimizer: float

    @property
    def seconds(self) -> float:
        exposed = max(0.0, self.optimizer - self.compute / 4)
        return max(self.compute, self.to_device, self.to_host, self.optimizer) + exposed

    def describe(self) -> str:
        return (
            f"bound {self.seconds:.3f} s: compute {self.compute:.3f} s, to device {self.to_device:.3f} s, to host "
            f"{self.to_host:.3f} s, optimizer {self.optimizer:.3f} s"
        )


def _bound(amounts: Amounts, seconds: float, device: str) -> str:
    if device != "cuda":
        return "no bound: the device is simulated"
    link, memory, products = _link_rate(), _memory_rate(), _product_rate()
    bound = Bound(
        compute=amounts.products / products,
        to_device=amounts.to_device / link,
        to_host=amounts.to_host / link,
        optimizer=amounts.optimizer / memory,
    )
    return (
        f"{bound.describe()}; products at {products / 1e12:.0f} TFLOP/s, link {link / 1e9:.1f} GB/s, host memory "
        f"{memory / 1e9:.0f} GB/s; {bound.seconds / seconds:.1%} of it"
    )


def _emulated_bound(
    amounts: Amounts, tokens: int, machine: emulation.Machine, interval: emulation.Interval, seconds: float
) -> str:
    by_formula = Bound(
        compute=amounts.products / machine.products,
        to_device=amounts.to_device / machine.link,
        to_host=amounts.to_host / machine.link,
        optimizer=amounts.optimizer / machine.host_memory,
    )
    by_kernels = replace(by_formula, compute=interval.busy["processors"])
    others = max(by_formula.to_device, by_formula.to_host, by_formula.optimizer)
    return (
        f"{machine.describe()}\n"
        f"share with compute = 8 x weights x tokens / products: {by_formula.seconds / seconds:.1%}; "
        f"{by_formula.describe()}\n"
        f"share with compute = the sum of the kernels' times: {by_kernels.seconds / seconds:.1%}; "
        f"{by_kernels.describe()}\n"
        f"critical tokens = tokens x max(to device, to host, optimizer) / compute: "
        f"{tokens * others / by_formula.compute:,.0f} by the formula, {tokens * others / by_kernels.compute:,.0f} by "
        f"the kernels\n"
        f"{interval.describe()}"
    )


def _link_rate() -> float:
    host = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    return host.nbytes / _fastest(lambda: there.copy_(host, non_blocking=True))


def _memory_rate() -> float:
    """Bytes read and written per second by one large copy."""
    source = torch.ones(2**28)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _fastest(lambda: target.copy_(source))


def _product_rate() -> float:
    side = 8192
    factor = torch.randn(side, side, dtype=torch.bfloat16, device="cuda")
    return 2 * side**3 / _fastest(lambda: factor @ factor)


def _fastest(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def _cell(size: Size, options: Any) -> Cell:
    if not options.emulated:
        return SUBJECTS[options.subject](size, options.tokens, options.budget, options.device, options.steps)
    machine = emulation.Machine.named(options.emulated)
    machine.start()
    try:
        return run_hydra(size, options.tokens, options.budget, options.device, options.steps, machine, options.warm_up)
    finally:
        machine.stop()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subject", choices=SUBJECTS, default="hydra")
    parser.add_argument("--model", choices=SIZES, default="4b")
    parser.add_argument("--layers", type=int, help="fewer than the model has, for a cell that would take too long")
    parser.add_argument("--tokens", type=int, default=8192, help="in one step")
    parser.add_argument("--budget", help="device memory, such as 24GiB; all of it unless given")
    parser.add_argument("--device", choices=("cuda", "simulated"), default="cuda")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--emulated", choices=emulation.MACHINES, help="a virtual machine in place of a GPU")
    parser.add_argument("--warm-up", type=int, default=EMULATED_WARM_UP, help="steps of an emulation before the timed")
    options: Any = parser.parse_args(argv)
    if options.emulated and (options.subject != "hydra" or options.device != "cuda"):
        sys.exit("only --subject hydra --device cuda runs on an emulated machine")
    if not torch.cuda.is_available() and (options.device == "cuda" or options.subject != "hydra"):
        sys.exit(
            "this cell needs a GPU, and torch finds none; --subject hydra --device simulated --model tiny needs none"
        )
    size = SIZES[options.model]
    size = replace(size, layers=options.layers or size.layers)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    where = f"EMULATION of {options.emulated}" if options.emulated else where
    print(f"{' '.join(sys.argv)}\n{where}, torch {torch.__version__}, hydra_ext {hydra_ext.__version__}")
    try:
        cell = _cell(size, options)
    except torch.OutOfMemoryError as error:
        print(f"out of memory: {str(error).splitlines()[0]}")
        return 0
    seconds = statistics.median(cell.seconds)
    tokens = len(batches(size, options.tokens)) * size.sequence
    print(
        f"{tokens / seconds:,.0f} tokens/s, {seconds:.3f} s a step ({min(cell.seconds):.3f} to "
        f"{max(cell.seconds):.3f}), peak {cell.peak_bytes / 2**30:.2f} GiB\n{cell.remarks}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
