"""Training on the GPU beyond the budget gives, bit for bit, what plain PyTorch gives on the GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, ViTConfig, ViTModel

from support.gpu import assert_same, jitter, mean_of_squares, offloaded, sleepy, train, train_plain

MIB = 2**20
# The allocator works in pieces of 20 MiB: budgets far below a hundred of them measure its rounding only.
BUDGET = 256 * MIB


def mlp() -> nn.Module:
    # Odd sizes: biases before weights leave weights at odd offsets, were they packed.
    layers: list[nn.Module] = []
    for _ in range(12):
        layers += [nn.Linear(1023, 1025), nn.Tanh(), nn.Linear(1025, 1023)]
    return nn.Sequential(*layers)


def wide() -> nn.Module:
    return nn.Sequential(*[nn.Linear(2560, 2560) for _ in range(16)])  # 400 MiB: more than the budget


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2048, 2048) for _ in range(12)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False).tanh()
        return x


def batches(width: int, count: int = 5) -> list[torch.Tensor]:
    return [torch.randn(8, width) for _ in range(count)]


@pytest.mark.parametrize(
    ("make", "width"), [(mlp, 1023), (wide, 2560), (Checkpointed, 2048)], ids=["odd_sizes", "beyond", "checkpointed"]
)
@pytest.mark.parametrize("seed", [None, 1, 2], ids=["plain", "jitter_1", "jitter_2"])
@pytest.mark.parametrize("poison", [True, False], ids=["poisoned", "as_it_is"])
def test_training_gives_what_plain_pytorch_gives(
    make: type[nn.Module], width: int, seed: int | None, poison: bool
) -> None:
    model = make()
    data = batches(width)
    expected = train_plain(model, data, mean_of_squares)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with offloaded(model, optimizer, budget=BUDGET, poison=poison) as run:
        if seed is None:
            found = train(model, optimizer, data, mean_of_squares)
        else:
            with jitter(run, seed):
                sleepy(model, seed)
                found = train(model, optimizer, data, mean_of_squares)
        report = run.report()
        assert report.peak_bytes <= BUDGET
    assert_same(found, expected)


def language() -> tuple[nn.Module, torch.Tensor]:
    config = GPT2Config(vocab_size=500, n_positions=64, n_embd=256, n_layer=4, n_head=4)
    return GPT2LMHeadModel(config).eval(), torch.randint(0, 500, (4, 64))


def encoder() -> tuple[nn.Module, torch.Tensor]:
    config = BertConfig(vocab_size=500, hidden_size=256, num_hidden_layers=4, num_attention_heads=4)
    return BertModel(config).eval(), torch.randint(0, 500, (4, 64))


def vision() -> tuple[nn.Module, torch.Tensor]:
    config = ViTConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, image_size=32, patch_size=8)
    return ViTModel(config).eval(), torch.randn(4, 3, 32, 32)


@pytest.mark.parametrize("make", [language, encoder, vision], ids=["gpt2", "bert", "vit"])
def test_model_families_train_equal(make: object) -> None:
    model, batch = make()  # type: ignore[operator]

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch)[0].float().pow(2).mean()

    expected = train_plain(model, [batch] * 3, loss_of, lr=1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with offloaded(model, optimizer, budget=BUDGET):
        found = train(model, optimizer, [batch] * 3, loss_of)
    assert_same(found, expected)


def test_generate_gives_the_same_tokens() -> None:
    model, batch = language()
    prompt = batch[:1, :8]
    plain = model.cuda().generate(prompt.cuda(), max_new_tokens=16, do_sample=False, pad_token_id=0).cpu()
    model.cpu()
    with offloaded(model, None, budget=BUDGET):
        found = model.generate(prompt.to(model.device), max_new_tokens=16, do_sample=False, pad_token_id=0)
    assert torch.equal(found.cpu(), plain)
