"""Models x ways to train x seeds of delays on a GPU below the weights' size: the bits of plain PyTorch on that GPU."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import hydra_ext
from hydra_ext import Checks, Run, optim
from support.gpu import late

MIB = 2**20
VOCABULARY = 512
MICROBATCHES = 3
STEPS = 3
MAX_NORM = 0.5
Batch = dict[str, torch.Tensor]


# Dropout as each library has it: random numbers of the GPU are part of what has to be equal. About 60 MiB of weights.
def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=512, n_layer=5, n_head=8))


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=4,
    )
    return MixtralForCausalLM(config)


def t5() -> nn.Module:
    config = T5Config(
        vocab_size=VOCABULARY, d_model=384, d_ff=1536, d_kv=48, num_layers=4, num_heads=8, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=512, num_hidden_layers=5, num_attention_heads=8, intermediate_size=2048
    )
    return BertForMaskedLM(config)


def vit() -> nn.Module:
    config = ViTConfig(
        hidden_size=512,
        num_hidden_layers=5,
        num_attention_heads=8,
        intermediate_size=2048,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    return ViTForImageClassification(config)


def text(generator: torch.Generator) -> Batch:
    ids = torch.randint(VOCABULARY, (2, 16), generator=generator)
    return {"input_ids": ids, "labels": ids}


def picture(generator: torch.Generator) -> Batch:
    pictures = torch.randn(2, 3, 32, 32, generator=generator)
    return {"pixel_values": pictures, "labels": torch.randint(10, (2,), generator=generator)}


@dataclass(frozen=True)
class Model:
    """A model, its batches, and a host budget that is little more than the working memory of its layers."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch] = text
    host_budget: int = 104 * MIB


@dataclass(frozen=True)
class Mode:
    """A way to train.

    Attributes:
        options: Of :func:`hydra_ext.offload`.
        native: Whether the optimizer is ours, which the disk and homes need.
        rounds: Whether steps are ``run.step``.
        room: Bytes of the budget for blocks, as a part of the weights.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    native: bool = False
    rounds: bool = False
    room: float = 0.5


MODELS = {
    "gpt2": Model(gpt2),
    "llama": Model(llama),
    "mixtral": Model(mixtral, host_budget=208 * MIB),
    "t5": Model(t5),
    "bert": Model(bert),
    "vit": Model(vit, picture),
}
MODES = {
    "loop": Mode(),
    "rounds": Mode(rounds=True),
    "rounds, ours": Mode(rounds=True, native=True),
    "moved": Mode({"activations": hydra_ext.Offload()}),
    "recomputed": Mode(),
    "homes": Mode(native=True, room=6),
    "disk": Mode(native=True),
}


def make_optimizer(model: nn.Module, mode: Mode) -> torch.optim.Optimizer:
    parameters = model.parameters()
    return optim.AdamW(parameters, lr=1e-3) if mode.native else torch.optim.AdamW(parameters, lr=1e-3)


def layers_of(model: nn.Module) -> list[str]:
    """The names of modules in lists that are in no other list."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return [f"{name}.{index}" for name in outer for index in range(len(model.get_submodule(name)))]


def seeds_of(step: int) -> list[int]:
    return [100 * step + index for index in range(MICROBATCHES)]


@dataclass
class Seen:
    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, seen: Seen) -> None:
    clip = optim.clip_grad_norm_ if isinstance(optimizer, optim.AdamW) else nn.utils.clip_grad_norm_
    seen.norms.append(clip(model.parameters(), MAX_NORM).clone())
    optimizer.step()
    optimizer.zero_grad()


def train_plain(model: nn.Module, mode: Mode, batches: list[list[Batch]]) -> Seen:
    """Forward and backward on the GPU; sums of gradients, norms and updates on the host, as in the offloaded run."""
    seen, optimizer = Seen(), make_optimizer(model, mode)
    for step, microbatches in enumerate(batches):
        on_gpu = copy.deepcopy(model).cuda()
        for seed, microbatch in zip(seeds_of(step), microbatches, strict=True):
            torch.manual_seed(seed)
            loss = on_gpu(**{name: value.cuda() for name, value in microbatch.items()}).loss / MICROBATCHES
            loss.backward()
            for host, device in zip(model.parameters(), on_gpu.parameters(), strict=True):
                if device.grad is not None:
                    gradient = device.grad.cpu()
                    host.grad = gradient if host.grad is None else host.grad + gradient
                    device.grad = None
            seen.losses.append(loss.detach().cpu())
        update(model, optimizer, seen)
    seen.parameters = [parameter.detach().clone() for parameter in model.parameters()]
    return seen


def train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, mode: Mode, batches: list[list[Batch]]) -> Seen:
    seen = Seen()
    for step, microbatches in enumerate(batches):
        if mode.rounds:
            output = run.step(microbatches, lambda mb: model(**mb).loss, max_norm=MAX_NORM, seeds=seeds_of(step))
            seen.losses += [(loss / MICROBATCHES).detach().cpu() for loss in output.losses]
            seen.norms.append(output.grad_norm.cpu())
            continue
        for seed, microbatch in zip(seeds_of(step), microbatches, strict=True):
            torch.manual_seed(seed)
            loss = model(**microbatch).loss / MICROBATCHES
            loss.backward()
            seen.losses.append(loss.detach().cpu())
        update(model, optimizer, seen)
    return seen


@pytest.mark.parametrize("seed", [None, 1, 2], ids=["plain", "late_1", "late_2"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)
@pytest.mark.cases(7)
def test_training_equals_plain_training(kind: Model, mode: Mode, seed: int | None, tmp_path: Path) -> None:
    check_training(kind, mode, seed, tmp_path)


@pytest.mark.parametrize("room", [0.2, 0.35])
@pytest.mark.parametrize("mode", ["loop", "rounds", "rounds, ours"])
@pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)
@pytest.mark.cases(2)
def test_training_under_other_caps_of_the_allocator_equals_plain_training(
    kind: Model, mode: str, room: float, tmp_path: Path
) -> None:
    check_training(kind, replace(MODES[mode], room=room), 3, tmp_path)


def check_training(kind: Model, mode: Mode, seed: int | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, model = kind.make().train(), kind.make().train()
    model.load_state_dict(plain.state_dict())
    weights = sum(parameter.nbytes for parameter in model.parameters())
    generator = torch.Generator().manual_seed(1)
    batches = [[kind.batch(generator) for _ in range(MICROBATCHES)] for _ in range(STEPS)]
    expected = train_plain(plain, mode, batches)
    gc.collect()  # what reentrant graphs and caches of the plain run hold counts as reserved
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()

    optimizer = make_optimizer(model, mode)
    options = dict(mode.options)
    if mode is MODES["disk"]:
        options |= {"host_budget": kind.host_budget, "spill_dir": tmp_path}
    if mode is MODES["recomputed"]:
        options["activations"] = {name: hydra_ext.Recompute() for name in layers_of(model)}
    budget = int(mode.room * weights) + 24 * MIB
    with (
        hydra_ext.offload(
            model, optimizer, budget=budget, device="cuda", checks=Checks(poison_hosts=seed is not None), **options
        ) as run,
        late(run, model, seed),
    ):
        seen = train(run, model, optimizer, mode, batches)
        report = run.report()
    seen.parameters = [parameter.detach() for parameter in model.parameters()]
    assert torch.cuda.max_memory_reserved() <= budget
    check_what_happened(mode, report)
    for name in ("losses", "norms", "parameters"):
        for index, (a, b) in enumerate(zip(getattr(seen, name), getattr(expected, name), strict=True)):
            assert torch.equal(a, b), f"{name} {index}"


def check_what_happened(mode: Mode, report: Any) -> None:
    assert report.windows > 0
    assert report.refusals == 0
    if mode is MODES["homes"]:
        assert len(report.homes) == report.blocks
    else:
        assert report.evictions > 0
    if mode.rounds:
        assert report.rounds > 0
        assert report.fallbacks == 0
    if mode is MODES["disk"]:
        assert report.disk_bytes > 0
