"""A model's modules as they were: attributes, and the containers they hold."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_CONTAINERS = (dict, OrderedDict, list, set, deque)


@contextmanager
def unchanged_modules(model: nn.Module) -> Iterator[None]:
    """Puts back afterwards what is set, replaced or added in any module, one level deep into its containers."""
    before = [(module, dict(module.__dict__), _contents(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, contents in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for container, content in contents:
                container.clear()
                if isinstance(container, (dict, set)):
                    container.update(content)
                else:
                    container.extend(content)


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    return [(value, value.copy()) for value in module.__dict__.values() if type(value) in _CONTAINERS]
