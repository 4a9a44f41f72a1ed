"""Small models for the window's cases; their weights outweigh their activations several times."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from support.benches import Subject

VOCABULARY = 61
WIDTH = 96
LAYERS = 3


def batch(index: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 4), generator=torch.Generator().manual_seed(100 + index))


def hidden(index: int, *, tokens: int = 4) -> torch.Tensor:
    return torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(200 + index))


def tiny_gpt2(layers: int = LAYERS) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=WIDTH, n_head=4, n_positions=16, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0
    )
    config.loss_type = "ForCausalLM"
    return GPT2LMHeadModel(config).train()


def language_loss(model: nn.Module, index: int) -> torch.Tensor:
    tokens = batch(index)
    return model(tokens, labels=tokens, use_cache=False).loss


class Recurrent(nn.Module):
    """A model of an embedding, recurrent layers and a head."""

    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(cell(32, 32, batch_first=True) for _ in range(6))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


class Encoder(nn.Module):
    """A model like BERT: embeddings, torch's own encoder layers, one more attention on top, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(4, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.tokens(tokens) + self.positions)
        attended, _ = self.attention(x, x, x, need_weights=False)
        return self.head(self.norm(x + attended))


class Borrower(nn.Module):
    """Reads weights of other modules at its end, without calling these modules."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        x = F.linear(self.norm(x), self.layers[0].weight)
        return F.linear(x, self.wte.weight)


class Shuffled(nn.Module):
    """Runs its layers in the order that the caller sets."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.order = list(range(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in self.order:
            x = x + torch.tanh(self.layers[index](x))
        return self.head(x)


class Clamped(nn.Module):
    """Its forward writes to a parameter, the way spectral or weight-clipping layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.rest = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.second.weight.clamp_(-0.05, 0.05)
        x = F.one_hot(tokens, WIDTH).float()
        for layer in (self.first, self.second, *self.rest):
            x = torch.tanh(layer(x))
        return self.head(x)


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def token_loss(model: nn.Module, index: int) -> torch.Tensor:
    tokens = batch(index)
    return F.cross_entropy(model(tokens).reshape(-1, VOCABULARY), tokens.reshape(-1))


def built(make: Callable[[], nn.Module]) -> Callable[[], list[nn.Module]]:
    def build() -> list[nn.Module]:
        torch.manual_seed(0)
        return [make()]

    return build


GPT2 = Subject(built(tiny_gpt2), language_loss)
TWO_GPT2 = Subject(lambda: [tiny_gpt2(LAYERS), tiny_gpt2(2)], language_loss)
LSTM = Subject(built(lambda: Recurrent(nn.LSTM)), token_loss)
GRU = Subject(built(lambda: Recurrent(nn.GRU)), token_loss)
ENCODER = Subject(built(Encoder), token_loss)
BORROWER = Subject(built(Borrower), token_loss)
SHUFFLED = Subject(built(Shuffled), token_loss)
CLAMPED = Subject(built(Clamped), token_loss)
SPARSE = Subject(built(SparseEmbedding), token_loss)
