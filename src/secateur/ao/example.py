"""What a model is called with, when nobody says: as it was last called, or as its first layer suggests."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from secateur.ao.errors import SparsifierValueError
from secateur.compat import tree_leaves, tree_map
from secateur.planning.example_recipe import made, recipe
from secateur.state.transaction import untouched
from secateur.tracing.examples import Inputs, arguments

_SIDES = (32, 28, 64, 16, 96, 128, 224, 299, 8)
_TRIES = 60


class Recorder:
    """
    >>> layer, recorder = nn.Linear(3, 2), Recorder()
    >>> _ = layer.register_forward_pre_hook(recorder, with_kwargs=True)
    >>> _ = layer(torch.ones(4, 3))
    >>> [tensor.shape for tensor in made(recorder.recipe)[0]]
    [torch.Size([4, 3])]

    A forward pre-hook that remembers of what shapes and dtypes a model's last arguments were, not their values.
    """

    recipe: Any = None

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        with suppress(Exception):  # what cannot be described must not stop the user's forward
            how = recipe((tuple(args), dict(kwargs)))
            self.recipe = how or self.recipe


def record(model: nn.Module) -> None:
    """Remember from now on what the model is called with."""
    if not _recorders(model):
        model.register_forward_pre_hook(Recorder(), with_kwargs=True)


def stop_recording(model: nn.Module) -> None:
    """Take the recorder off the model."""
    for key in _recorders(model):
        del model._forward_pre_hooks[key]
        model._forward_pre_hooks_with_kwargs.pop(key, None)


def _recorders(model: nn.Module) -> dict[int, Recorder]:
    return {key: hook for key, hook in model._forward_pre_hooks.items() if isinstance(hook, Recorder)}


def call_of(model: nn.Module, example: Any = None) -> Inputs:
    """
    >>> args, kwargs = call_of(nn.Sequential(nn.Linear(3, 2)))
    >>> args[0].shape
    torch.Size([2, 3])

    The arguments to run a model with: the example's; or like those of its last call that was recorded; or the
    first that a layer suggests and the model runs on.
    """
    if example is not None:
        return arguments(example)
    recipes = [recorder.recipe for recorder in _recorders(model).values()]
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    for how in recipes:
        if how is not None:
            whole: Inputs = tree_map(lambda item: item.to(device) if isinstance(item, Tensor) else item, made(how))
            return next((small for small in _first_two(whole) if _runs(model, small)), whole)
    for _, tensor in zip(range(_TRIES), _suggestions(model), strict=False):
        call: Inputs = ((tensor.to(device),), {})
        if _runs(model, call):
            return call
    raise SparsifierValueError(
        f"prune: no input is known that {type(model).__name__} runs on; run it once between prepare() and prune(), "
        "or pass an input as prune(example=...): a tensor, a tuple of arguments or a dict of keyword arguments"
    )


def _first_two(call: Inputs) -> Iterator[Inputs]:
    """The call with two samples instead of a whole batch, if its tensors agree on a batch size."""
    tensors = [item for item in tree_leaves(call) if isinstance(item, Tensor)]
    sizes = {tensor.shape[:1] for tensor in tensors}
    if len(sizes) == 1 and max(sizes) > (2,):
        yield tree_map(lambda item: item[:2] if isinstance(item, Tensor) else item, call)


def _runs(model: nn.Module, call: Inputs) -> bool:
    with untouched(model), torch.no_grad():
        for module in model.modules():
            module.__dict__["training"] = False
        try:
            model(*call[0], **call[1])
        except Exception:  # the user's forward
            return False
    return True


def _suggestions(model: nn.Module) -> Iterator[Tensor]:
    """Inputs for the model's layers, in the order in which it has them."""
    seen: set[tuple[int, ...]] = set()
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        for shape in _shapes(module):
            if shape not in seen:
                seen.add(shape)
                if isinstance(module, nn.Embedding):
                    yield torch.randint(0, module.num_embeddings, shape, generator=generator)
                else:
                    yield torch.randn(shape, generator=generator).to(dtype)


def _shapes(module: nn.Module) -> Iterator[tuple[int, ...]]:
    if isinstance(module, nn.Linear):
        yield from ((2, module.in_features), (2, 4, module.in_features))
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        yield from ((2, module.in_channels, *[side] * len(module.kernel_size)) for side in _SIDES)
    elif isinstance(module, nn.RNNBase):
        yield (3, 2, module.input_size)
    elif isinstance(module, nn.Embedding):
        yield (2, 8)
