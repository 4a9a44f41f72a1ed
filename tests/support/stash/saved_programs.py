"""Random programs of operations whose backwards need saved tensors: views, expanded, overlapping, complex, 0-d, empty
and written ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import hydra_ext

SIDE = 24  # tensors of 24 * 24 floats are large enough for the stash

Operation = Callable[[Tensor], Tensor]

# Each takes and returns a matrix of SIDE by SIDE that requires a gradient.
PLAIN: dict[str, Operation] = {
    "sin": torch.sin,
    "exp": lambda x: (x * 0.1).exp(),
    "tanh": torch.tanh,
    "relu": torch.relu,
    "matmul": lambda x: x @ x.t() / SIDE,
    "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, (SIDE,)),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.3),
    "product of all": lambda x: x * (x.abs() + 0.5).log().mean().exp(),
}
VIEWS: dict[str, Operation] = {
    "transposed": lambda x: x.t().sin(),
    "halves": lambda x: torch.cat([half.sin() * half for half in x.chunk(2)]),
    "a row over all": lambda x: x * x[3].expand(SIDE, SIDE).tanh(),
    "overlapping": lambda x: x + x.reshape(-1).as_strided((SIDE, SIDE), (1, 2), 5).exp() * 0.1,
    "shifted": lambda x: x.reshape(-1)[1:].sin().mean() * x,
    "narrow": lambda x: x * x[:, 2:3].tanh(),
    "0-d": lambda x: x * x[0, 0].sin(),
    "empty": lambda x: x + x[:0].sin().sum() + x[:, :0].exp().prod(),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(-1, 2)).exp() * 0.1).reshape(SIDE, SIDE),
    "conjugated": lambda x: (torch.complex(x, x.t()).conj() * torch.complex(x, x)).real * 0.1,
}
WRITES: dict[str, Operation] = {
    "added in place": lambda x: (x * 1).add_(1).sin(),
    "relu in place": lambda x: torch.relu_(x * 1.5),
    "written before it is saved": lambda x: (x * 2).mul_(x).cos(),
    "a part written": lambda x: _written_part(x),
    "written after its last use": lambda x: _written_after(x),
}
# Their saved tensors may come back changed, except for signs and positions. Only weights' gradients may show it.
_WEIGHT = nn.Parameter(torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(1)) / SIDE**0.5)
_KERNEL = nn.Parameter(torch.randn(1, 1, 3, 3, generator=torch.Generator().manual_seed(2)) / 3)
INEXACT: dict[str, Operation] = {
    "linear": lambda x: x @ _WEIGHT,
    "linear from the left": lambda x: _WEIGHT @ x,
    "convolution": lambda x: F.conv2d(x[None, None], _KERNEL, padding=1)[0, 0],
    "convolution of what a ReLU gave": lambda x: F.conv2d(torch.relu(x)[None, None], _KERNEL, padding=1)[0, 0],
    "transposed convolution": lambda x: F.conv_transpose2d(x[None, None], _KERNEL, padding=1)[0, 0],
    "leaky ReLU": lambda x: F.leaky_relu(x, 0.1),
    "maxima": lambda x: F.max_pool2d(x[None], 3, stride=1, padding=1)[0],
    "means": lambda x: F.avg_pool2d(x[None], 3, stride=1, padding=1)[0],
    "linear and something else": lambda x: (x @ _WEIGHT) * x,
}
OPERATIONS = PLAIN | VIEWS | WRITES | INEXACT
POLICIES = (hydra_ext.Offload(), hydra_ext.Offload("conv"), hydra_ext.Compress(error=1e3))


def _written_part(x: Tensor) -> Tensor:
    y = x * 1
    y[2:5] = y[5:8].sin()
    return y.tanh()


def _written_after(x: Tensor) -> Tensor:
    y = x.sin()
    z = y + x
    y.add_(1)
    return z * 0.5


@dataclass(frozen=True)
class Step:
    """One operation on an earlier value; ``source`` counts back from the latest."""

    operation: str
    source: int
    added: bool  # whether the source is added to the result


@dataclass(frozen=True)
class SavedProgram:
    steps: tuple[Step, ...]
    budget: int | None
    seed: int
    policy: hydra_ext.Offload | hydra_ext.Compress = POLICIES[0]

    def run(self, x: Tensor) -> Tensor:
        torch.manual_seed(self.seed)
        values = [x]
        for step in self.steps:
            source = values[-1 - min(step.source, len(values) - 1)]
            result = OPERATIONS[step.operation](source)
            values.append(result + source if step.added else result)
        return torch.stack([value.sum() for value in values]).mean()


def saved_programs() -> st.SearchStrategy[SavedProgram]:
    step = st.builds(Step, operation=st.sampled_from(sorted(OPERATIONS)), source=st.integers(0, 3), added=st.booleans())
    return st.builds(
        SavedProgram,
        steps=st.lists(step, min_size=1, max_size=12).map(tuple),
        budget=st.sampled_from([None, 2000, 10_000, 1_000_000]),
        seed=st.integers(0, 2**16),
        policy=st.sampled_from(POLICIES),
    )
