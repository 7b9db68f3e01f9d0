"""What the tests of `secateur.ao` share."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn


def fingerprint(model: nn.Module) -> list[Any]:
    """Everything about a model that a failed call must not touch: structure, order, identity and bits."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        [(name, id(module), type(module), sorted(vars(module))) for name, module in model.named_modules()],
        [(name, id(tensor), tensor.detach().numpy().tobytes()) for name, tensor in tensors],
        [list(module._forward_hooks.values()) for module in model.modules()],
    ]


@pytest.fixture
def unchanged() -> Callable[[nn.Module], AbstractContextManager[None]]:
    """A context that fails if the model has changed when it ends."""

    @contextmanager
    def watch(model: nn.Module) -> Iterator[None]:
        before = fingerprint(model)
        yield
        assert fingerprint(model) == before

    return watch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
