"""Operations that read parameters, one expression each, for the fault path.

Each case is a function of the parameters; its result is summed and sent backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

SHAPES = {
    "w": (16, 16),
    "v": (16, 16),
    "table": (50, 16),
    "b": (16,),
    "g": (16,),
    "kernel": (16, 4, 3, 3),
    "w_in": (64, 16),
    "w_hidden": (64, 16),
    "b_gates": (64,),
}
Case = Callable[["Parameters"], torch.Tensor]


class Parameters:
    """The parameters by name, looked up at every use."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        self._read = read

    def __getattr__(self, name: str) -> torch.Tensor:
        return self._read(name)


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(*shape, generator=generator) for name, shape in SHAPES.items()}


X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(4))
CHANNELS = X.transpose(1, 2)
IDS = torch.tensor([[1, 2, 3, 4, 7]] * 2)


class MatMul(torch.autograd.Function):
    """An autograd function of a user that saves a parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.reshape(-1, 16).t() @ gradient.reshape(-1, 16)


def attention(p: Parameters) -> torch.Tensor:
    return F.multi_head_attention_forward(
        X, X, X, 16, 4, torch.cat([p.w, p.v, p.w]), torch.cat([p.b, p.b, p.b]), None, None, False, 0.0, p.v, p.b
    )[0]


def recurrent(p: Parameters) -> torch.Tensor:
    zeros = torch.zeros(1, 2, 16)
    weights = [p.w_in, p.w_hidden, p.b_gates, p.b_gates]
    return torch.lstm(X, (zeros, zeros), weights, True, 1, 0.0, True, False, True)[0]


def in_bfloat16(p: Parameters) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(X, p.w, p.b).float()


def gradient_of_gradient(p: Parameters) -> torch.Tensor:
    return torch.autograd.grad((X @ p.w).sin().sum(), p.w, create_graph=True)[0].pow(2)


def tangents(p: Parameters) -> torch.Tensor:
    return jvp(lambda w: (X @ w).sin(), (p.w,), (torch.ones(16, 16),))[1] + 0 * p.w.sum()


def checkpointed(p: Parameters, *, reentrant: bool) -> torch.Tensor:
    x = X.clone().requires_grad_() if reentrant else X
    return checkpoint(lambda y: F.linear(y, p.w, p.b).tanh(), x, use_reentrant=reentrant)


def batch_norm(p: Parameters) -> torch.Tensor:
    return F.batch_norm(CHANNELS, torch.zeros(16), torch.ones(16), p.g, p.b, training=True)


LINEAR: dict[str, Case] = {
    "linear": lambda p: F.linear(X, p.w, p.b),
    "transposed": lambda p: X @ p.w.t(),
    "addmm": lambda p: torch.addmm(p.b, X.view(-1, 16), p.w),
    "slice": lambda p: X @ p.w[2:10].t(),
    "chunk": lambda p: torch.cat([F.linear(X, part) for part in p.w.chunk(4)], -1),
    "split": lambda p: sum((X[..., :8] @ part.reshape(8, -1)).sum() for part in p.w.split(8)),
    "einsum": lambda p: torch.einsum("bti,oi->bto", X, p.w),
    "bilinear": lambda p: F.bilinear(X, X, torch.stack([p.w, p.v])),
    "tensordot": lambda p: torch.tensordot(X, p.w, 1),
    "matmul_and_broadcast": lambda p: torch.matmul(X, p.w) + p.b * p.g,
    "times_its_transpose": lambda p: (p.w * p.w.t()).sum(),
    "baddbmm": lambda p: torch.baddbmm(p.w[None].expand(2, -1, -1)[:, :5], X, p.w[None].expand(2, -1, -1)),
    "unflattened": lambda p: F.linear(X, p.w).unflatten(-1, (4, 4)),
    "residual_gelu": lambda p: X + F.gelu(F.linear(X, p.w, p.b)),
    "cross_entropy": lambda p: F.cross_entropy(X.view(-1, 16) @ p.w, torch.zeros(10, dtype=torch.long)),
}

LAYERS: dict[str, Case] = {
    "embedding": lambda p: F.embedding(IDS, p.table),
    "embedding_with_padding": lambda p: F.embedding(IDS, p.table, padding_idx=0),
    "embedding_bag": lambda p: F.embedding_bag(IDS, p.table, mode="mean"),
    "layer_norm": lambda p: F.layer_norm(X, (16,), p.g, p.b),
    "rms_norm": lambda p: F.rms_norm(X, (16,), p.g),
    "group_norm": lambda p: F.group_norm(CHANNELS, 4, p.g, p.b),
    "batch_norm": batch_norm,
    "instance_norm": lambda p: F.instance_norm(CHANNELS, None, None, p.g, p.b),
    "conv2d": lambda p: F.conv2d(torch.ones(1, 4, 6, 6), p.kernel, p.b),
    "conv_transpose2d": lambda p: F.conv_transpose2d(torch.ones(1, 16, 6, 6), p.kernel),
    "attention_of_projections": lambda p: F.scaled_dot_product_attention(
        *(F.linear(X, weight)[:, None] for weight in (p.w, p.v, p.w))
    ),
    "attention_of_parameters": lambda p: F.scaled_dot_product_attention(
        p.w[None, None], p.v[None, None], p.w[None, None], is_causal=True
    ),
    "multi_head_attention": attention,
    "lstm": recurrent,
    "weight_norm": lambda p: F.linear(X, torch._weight_norm(p.w, p.g[:, None], 0)),
    "prelu": lambda p: F.prelu(CHANNELS, p.g),
}

SHAPING: dict[str, Case] = {
    "cat": lambda p: torch.cat([p.w, p.v]).sin(),
    "stack": lambda p: torch.stack([p.w, p.v]).sin(),
    "where_and_expand": lambda p: torch.where(X > 0, p.b.expand_as(X), p.g),
    "index": lambda p: p.w[torch.tensor([1, 3])],
    "index_put": lambda p: torch.zeros(4, 16).index_put((torch.tensor([1]),), p.w[:1]),
    "gather": lambda p: p.w.gather(0, torch.zeros(2, 16, dtype=torch.long)),
    "foreach_mul": lambda p: sum(part.sum() for part in torch._foreach_mul([p.w, p.v, p.b], 2.0)),
    "foreach_norm": lambda p: sum(torch._foreach_norm([p.w, p.v])),
    "addcmul_and_lerp": lambda p: torch.addcmul(p.w, p.v, p.w) + torch.lerp(p.w, p.v, 0.3),
    "clone_changed_in_place": lambda p: p.w.clone().mul_(p.v).add_(p.b),
    "contiguous": lambda p: p.w.t().contiguous(),
    "unbind": lambda p: torch.stack(list(p.w.unbind(0))).sum(),
    "view_as_integers": lambda p: p.w.detach().view(torch.int32).float() * 0 + p.w,
    "as_strided": lambda p: p.w.as_strided((4, 4), (16, 1)).sin(),
}

NUMERICS: dict[str, Case] = {
    "norms": lambda p: p.w.norm() + torch.linalg.vector_norm(p.v),
    "singular_values": lambda p: torch.linalg.svdvals(p.w).sum(),
    "solve": lambda p: torch.linalg.solve(p.w + 5 * torch.eye(16), p.b),
    "fft": lambda p: torch.fft.rfft(p.w).abs(),
    "autocast": in_bfloat16,
    "cast": lambda p: F.linear(X.bfloat16(), p.w.to(torch.bfloat16)).float(),
    "users_function": lambda p: MatMul.apply(X, p.w),
    "functional_gradient": lambda p: grad(lambda w: (X @ w).sin().sum())(p.w) + p.w * 0,
    "vmap": lambda p: vmap(lambda x: F.linear(x, p.w, p.b))(X),
    "jvp": tangents,
    "double_backward": gradient_of_gradient,
    "checkpoint": lambda p: checkpointed(p, reentrant=False),
    "reentrant_checkpoint": lambda p: checkpointed(p, reentrant=True),
}


def all_cases() -> Iterator[tuple[str, Case]]:
    for group in (LINEAR, LAYERS, SHAPING, NUMERICS):
        yield from group.items()
