"""Trains a GPT-2 on texts that workers tokenise while it trains, under a budget smaller than its weights.

How many workers there are follows from the pace of the training. The texts are Python's own help and scikit-learn's
descriptions of its datasets. Needs ``pip install 'hydra-ext[data,demo]'``.
"""

import pydoc_data.topics as topics
from importlib.resources import files

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torchdata.nodes import IterableWrapper
from transformers import GPT2Config, GPT2LMHeadModel

import hydra_ext
from hydra_ext import data

LENGTH, WORDS = 64, 2048
PADDING = 0


def texts() -> list[str]:
    """Pieces of about 600 characters."""
    folder = files("sklearn.datasets.descr")
    whole = [*topics.topics.values(), *(each.read_text() for each in folder.iterdir() if each.name.endswith(".rst"))]
    return [text[start : start + 600] for text in whole for start in range(0, len(text), 600)]


def trained_tokenizer(pieces: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=WORDS, special_tokens=["<padding>"], show_progress=False)
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


class Tokenise:
    """From a text to token ids, in a worker."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids[:LENGTH]


def padded(samples: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, each (samples, LENGTH)."""
    ids = torch.tensor([each + [PADDING] * (LENGTH - len(each)) for each in samples])
    return ids, ids.masked_fill(ids == PADDING, -100)


def main() -> None:
    pieces = texts()
    node = IterableWrapper(pieces)
    node = data.Shuffle(node, 512, seed=0)
    node = data.Map(node, Tokenise(trained_tokenizer(pieces)), name="tokenise")
    node = data.Batch(node, 4, drop_last=True)
    node = data.Map(node, padded, name="pad")

    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": WORDS, "n_positions": LENGTH}
    config = GPT2Config(**sizes, bos_token_id=PADDING, eos_token_id=PADDING)
    model = GPT2LMHeadModel(config)
    optimizer = hydra_ext.optim.AdamW(model.parameters(), lr=1e-3)

    with data.tuned(node, memory="1GiB") as loader, hydra_ext.offload(model, optimizer, budget="13MiB") as run:
        for step, (ids, labels) in enumerate(loader, start=1):
            out = run.step([(ids, labels)], lambda batch: model(input_ids=batch[0], labels=batch[1]).loss)
            if step % 15 == 0:
                print(f"step {step}: loss {out.loss.item():.3f}", flush=True)
            if step == 60:
                break
        print(loader.report())


if __name__ == "__main__":
    main()
