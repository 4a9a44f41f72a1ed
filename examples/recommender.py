"""Trains a DLRM-like recommender on Parquet files of Criteo's shape, whose embedding tables are far above the budget.

Workers read and prepare the files while training runs; how many there are follows from its pace. Of the tables only the
rows of a batch move. The first run writes the files, with ids as skewed as clicks are, into --folder. Needs pyarrow and
``pip install 'hydra-ext[data]'``.
"""

import argparse
import tempfile
from pathlib import Path

import numpy
import pyarrow
import pyarrow.parquet
import torch
from torch import nn
from torchdata.nodes import IterableWrapper

import hydra_ext
from hydra_ext import data

NUMBERS, TABLES, WIDTH, BATCH = 13, 26, 16, 512
SIZES = [round(10 ** (2 + 3.3 * index / (TABLES - 1))) for index in range(TABLES)]  # rows: 100 to 200,000


def write_files(folder: Path, *, files: int, batches: int) -> None:
    """Each row group is a batch: a label, 13 counts, some of them missing, and 26 ids."""
    draws = numpy.random.default_rng(0)
    weights = draws.normal(size=TABLES)
    for number in range(files):
        rows = BATCH * batches
        columns = {f"I{index}": draws.poisson(draws.uniform(1, 50), rows) for index in range(NUMBERS)}
        columns["I0"] = pyarrow.array(columns["I0"], mask=draws.random(rows) < 0.2)
        ids = {f"C{index}": draws.zipf(1.3, rows) % 2**31 for index in range(TABLES)}
        score = sum(weights[index] * numpy.cos(ids[f"C{index}"]) for index in range(TABLES))
        label = (score + draws.normal(size=rows) > 0).astype("int8")
        table = pyarrow.table({"label": label, **columns, **ids})
        pyarrow.parquet.write_table(table, folder / f"{number:03d}.parquet", row_group_size=BATCH)


def read(place: tuple[str, int]) -> dict[str, numpy.ndarray]:
    """The columns of a row group, in a worker."""
    path, group = place
    table = pyarrow.parquet.ParquetFile(path).read_row_group(group)
    return {name: table[name].to_numpy() for name in table.column_names}


def prepared(columns: dict[str, numpy.ndarray]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers (batch, 13), ids (batch, 26) and labels (batch,), in a worker."""
    numbers = [numpy.log1p(numpy.nan_to_num(columns[f"I{index}"].astype("float32"))) for index in range(NUMBERS)]
    ids = [columns[f"C{index}"] % SIZES[index] for index in range(TABLES)]
    label = torch.from_numpy(columns["label"].astype("float32"))
    return torch.from_numpy(numpy.stack(numbers, 1)), torch.from_numpy(numpy.stack(ids, 1)), label


class Recommender(nn.Module):
    """Products of all pairs of embeddings, as in Naumov et al., Deep Learning Recommendation Model, 2019."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, WIDTH, sparse=True) for size in SIZES)
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 64), nn.ReLU(), nn.Linear(64, WIDTH), nn.ReLU())
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(nn.Linear(WIDTH + pairs, 128), nn.ReLU(), nn.Linear(128, 1))
        self.register_buffer("first", torch.triu_indices(TABLES + 1, TABLES + 1, 1)[0])
        self.register_buffer("second", torch.triu_indices(TABLES + 1, TABLES + 1, 1)[1])

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, *(table(ids[:, index]) for index, table in enumerate(self.tables))], 1)
        products = (vectors @ vectors.transpose(1, 2))[:, self.first, self.second]
        return self.top(torch.cat([dense, products], 1)).squeeze(1)


def train(folder: Path, *, steps: int) -> None:
    paths = sorted(map(str, folder.glob("*.parquet")))
    places = [(path, group) for path in paths for group in range(pyarrow.parquet.ParquetFile(path).num_row_groups)]
    node = IterableWrapper(places)
    node = data.Shuffle(node, len(places), seed=0)
    node = data.Map(node, read, name="read")
    node = data.Map(node, prepared, name="prepare")

    torch.manual_seed(0)
    model = Recommender()
    tables = torch.optim.SparseAdam(list(model.tables.parameters()), lr=0.01)
    network = hydra_ext.optim.Adam([*model.bottom.parameters(), *model.top.parameters()], lr=0.002)
    nbytes = sum(table.weight.nbytes for table in model.tables)
    with data.tuned(node, memory="1GiB") as loader, hydra_ext.offload(model, network, budget=nbytes // 5) as run:
        losses = []
        for step, (numbers, ids, label) in enumerate(loader, start=1):
            loss = nn.functional.binary_cross_entropy_with_logits(model(numbers, ids), label)
            loss.backward()
            for optimizer in (tables, network):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if step % 20 == 0:
                print(f"step {step}: loss {sum(losses[-20:]) / 20:.3f}", flush=True)
            if step == steps:
                break
        print(f"tables {nbytes / 2**20:.1f} MiB, budget {nbytes / 5 / 2**20:.1f} MiB")
        print(loader.report())
        print(run.report())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="of the files; without it they are gone at the end")
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = asked.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        if not list(folder.glob("*.parquet")):
            write_files(folder, files=asked.files, batches=32)
        train(folder, steps=asked.steps)


if __name__ == "__main__":
    main()
