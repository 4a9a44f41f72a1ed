"""Gives a device parameter the class and the attributes of its host parameter.

Users set attributes on parameters (``weight.infshape``, ``weight.gain``), and libraries give them classes with methods
of their own. Both faces share one dictionary of attributes, so those that a forward sets exist afterwards. The faces of
composites (:mod:`hydra_ext.state.composites`) have attributes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hydra_ext import _C
from hydra_ext.blocks import Layout
from hydra_ext.errors import ModelChanged
from hydra_ext.state.composites import Composite


def dress(face: torch.Tensor, host: torch.Tensor) -> None:
    # Bypasses a __setattr__ of the class's own.
    object.__setattr__(face, "__dict__", host.__dict__)
    object.__setattr__(face, "__class__", type(host))


def can_dress(host: torch.Tensor) -> bool:
    """Whether :func:`dress` works. It does not for a class with ``__slots__``, whose values are in no dictionary."""
    try:
        dress(torch.empty(0, device="cpu"), host)
    except TypeError:
        return False
    return True


def refuse_changed(composites: Sequence[Composite]) -> None:
    """Raises ModelChanged if composites have other tensors or attributes than on entering, or would lose a gradient."""
    for composite in composites:
        if composite.parameter.requires_grad and "" not in composite.inner:
            raise ModelChanged(
                f"the quantised parameter '{composite.name}' was frozen when the context was entered, and requires a "
                "gradient now: leave it frozen"
            )
        if composite.has_changed():
            raise ModelChanged(
                f"the quantised parameter '{composite.name}' was given other tensors or attributes inside its offload "
                "context: write into those that it has, or change it before the context"
            )


def show_faces(core: _C.PagedModel, layout: Layout, device: torch.device) -> dict[int, torch.Tensor]:
    """Gives windows the device parameters that they show; returns all by the identity of their hosts."""
    hosts = [host for block in layout.blocks for _, host in block.parameters]
    faces = {id(host): face for host, face in zip(hosts, core.blocks.faces(), strict=True)}
    inside = faces | {id(host): host.to(device) for host in layout.stay}
    composed = {id(each.parameter) for each in layout.composites}
    for host in hosts:
        if id(host) not in composed:
            dress(faces[id(host)], host)
            core.gate.show(host, faces[id(host)])
    for composite in layout.composites:
        face = composite.around(inside)
        faces[id(composite.parameter)] = face
        core.gate.show(composite.parameter, face)
    return faces
