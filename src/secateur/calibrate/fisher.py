"""How much a change of each layer's outputs would change what the model puts out."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from secateur.calibrate.blame import blamed_on_batch
from secateur.calibrate.data import is_dealt, own
from secateur.calibrate.observe import calibrating, call
from secateur.calibrate.products import Parameters, Part, part_of
from secateur.calibrate.sums import added
from secateur.compat import TorchDispatchMode
from secateur.distributed import pooled, totals
from secateur.errors import CalibrationError
from secateur.ops.product import Sample
from secateur.ops.record import backward_of, part
from secateur.tracing.examples import tensors_in

_LOOK_UP = "EmbeddingBackward0"
_VIEWS = frozenset(
    f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "Expand", "Unsqueeze", "ToCopy")
)


class _Backward(TorchDispatchMode):
    """Sees the gradient of every product with a parameter on its way back."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__()
        self._parameters = parameters
        self.squares: dict[Part, Tensor] = {}
        self.rows: dict[Part, int] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        backward, forward = backward_of(func), part(func, "product")
        if backward is not None:
            self._note(*backward(*args))
        elif forward is not None:  # going back through a matrix product is one, too: gradients times the weight
            of = forward(*args)
            for rows in of.rows(Sample(len(of.data))) if not of.weight.is_complex() else ():
                self._note(of.weight.mT, rows)  # as it was on the way there
        return func(*args, **(kwargs or {}))

    def _note(self, weight: Tensor, gradient: Tensor) -> None:
        """Take in the gradient of what a weight made, as (groups, rows, outputs)."""
        name = self._parameters.name(weight)
        if name is not None:
            squares = gradient.square().sum(1)
            at = part_of(name, weight)
            known = self.squares.get(at)
            if known is None or known.shape == squares.shape:
                self.squares[at] = squares.double() if known is None else added(known, squares)
                self.rows[at] = self.rows.get(at, 0) + gradient.shape[1]


FisherSums = dict[Part, tuple[Tensor, int]]  # of squares, (groups, outputs), and how many rows these are of


def fisher_weights(model: nn.Module, batches: Sequence[Any], seed: int = 0) -> dict[Part, Tensor]:
    """For each product with a parameter, the mean squared effect of each of its outputs, as (groups, outputs).

    >>> net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, bias=False))
    >>> {part: tuple(square.shape) for part, square in fisher_weights(net, [torch.ones(4, 3)]).items()}
    {('1.weight', 0, (1, 2)): (1, 1)}

    The derivative of a random projection of the model's output has, on average, the square of the output's own.
    Outputs that look like logits (a table of samples and classes, or one for each entry of a vocabulary that the model
    reads) are projected so that it is the square of a change of their probabilities.
    """
    return {part: squares.cpu() / rows for part, (squares, rows) in fisher_sums(model, batches, seed).items()}


def fisher_sums(model: nn.Module, batches: Sequence[Any], seed: int = 0) -> FisherSums:
    """What `fisher_weights` are the means of, over the batches of this rank.

    What is random is the same for a batch of the same number, whoever runs it.
    """
    known = vocabularies(model)
    watch = _Backward(Parameters.of(model))
    wanted = [p for p in model.parameters() if p.is_floating_point()]
    frozen = [p for p in wanted if not p.requires_grad]
    hooks = []
    try:
        with calibrating(model), torch.enable_grad():
            for parameter in frozen:
                parameter.requires_grad_(True)
            hooks = [parameter.register_hook(_let_go) for parameter in wanted]
            for number in own(batches):
                generator = torch.Generator().manual_seed(100_003 * seed + number)
                with blamed_on_batch(number, "Fisher weights"):
                    output = call(model, batches[number])
                total = _projected(output, known, generator)
                del output
                with watch:  # the graph is retained: a model may cache a part of it for its next run
                    torch.autograd.grad(total, _ends(total), allow_unused=True, retain_graph=True)
                del total  # and with it all activations
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in frozen:
            parameter.requires_grad_(False)
    return {part: (squares, watch.rows[part]) for part, squares in watch.squares.items()}


def over_ranks(found: FisherSums, batches: Sequence[Any]) -> FisherSums:
    """The sums over the batches of all ranks."""
    if not is_dealt(batches):
        return found
    every = list(pooled("Fisher weights", dict.fromkeys(found, 0)))
    nothing = torch.zeros(1, 1, dtype=torch.float64), 0
    parts = [(squares, torch.tensor(rows)) for squares, rows in (found.get(part, nothing) for part in every)]
    added_up = iter(totals("Fisher weights", [tensor for part in parts for tensor in part]))
    return {part: (next(added_up), int(next(added_up))) for part in every}


def _ends(total: Tensor) -> list[Any]:
    """How far gradients have to go back to pass every product: not to its weight, which would take another product."""
    assert total.grad_fn is not None
    stack, seen, ends = [total.grad_fn], {total.grad_fn}, dict[int, Any]()
    while stack:
        node = stack.pop()
        below = [_behind_views(child) for child, _ in node.next_functions if child is not None]
        inner = [child for child in below if not hasattr(child, "variable")]
        if not inner and node.name() == _LOOK_UP:  # nothing is multiplied in it, and its table may be large
            ends[id(node)] = GradientEdge(node, 0)
        elif not inner:
            ends |= {id(child.variable): child.variable for child in below}
        stack += [child for child in inner if child not in seen]
        seen.update(inner)
    return list(ends.values())


def _behind_views(node: Any) -> Any:
    """The parameter that a node is a view of, as its node; else the node itself."""
    last = node
    while last.name() in _VIEWS and last.next_functions[0][0] is not None:
        last = last.next_functions[0][0]
    return last if hasattr(last, "variable") else node


def _let_go(gradient: Tensor) -> Tensor:
    """In the place of a parameter's gradient, which nobody reads: together they are as large as the model."""
    return gradient.new_zeros(()).expand_as(gradient)


def vocabularies(model: nn.Module) -> frozenset[int]:
    """How many entries the tables have that a model reads.

    >>> vocabularies(nn.Sequential(nn.Embedding(99, 4), nn.Linear(4, 99)))
    frozenset({99})
    """
    return frozenset(module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))


def of_words(tensors: Iterable[Tensor], known: Set[int]) -> list[Tensor]:
    """The tensors that have one number for each entry of a vocabulary, at each place of a text."""
    return [tensor for tensor in tensors if tensor.ndim > 2 and tensor.shape[-1] in known]


def answers(output: Any, known: Set[int]) -> tuple[list[Tensor], bool]:
    """What counts of a model's output, and whether these are logits: a table of samples and classes, or one for each
    entry of a vocabulary.

    >>> answers({"logits": torch.zeros(2, 3, 5), "cache": torch.zeros(9)}, set())[1]
    True
    """
    named = getattr(output, "logits", output.get("logits") if isinstance(output, Mapping) else None)
    found = [named] if isinstance(named, Tensor) else list(tensors_in(output))
    words = of_words(found, known)
    found = [tensor for tensor in words or found if tensor.is_floating_point()]
    found = [tensor for tensor in found if tensor.requires_grad] or found
    table = len(found) == 1 and found[0].ndim == 2 and found[0].shape[1] > 1
    return found, bool(words) or isinstance(named, Tensor) or table


def _projected(output: Any, known: Set[int], generator: torch.Generator) -> Tensor:
    """A random projection of everything that a model puts out."""
    found, classes = answers(output, known)
    if not found or not found[0].requires_grad:
        raise CalibrationError("the model's output does not depend on its parameters in a way that has a derivative")
    parts = []
    for tensor in found:
        values = tensor.detach().float().cpu()
        if classes:  # by a class drawn from what the model itself believes: the Fisher information of its answer
            chances = values.softmax(-1).reshape(-1, values.shape[-1])
            drawn = _drawn(chances, generator)
            along = chances.neg_().scatter_add_(1, drawn, torch.ones(drawn.shape)).reshape(values.shape)
        else:
            along = torch.randn(values.shape, generator=generator)
        parts.append((tensor * along.to(tensor)).sum())
    return torch.stack([part.float() for part in parts]).sum()


def _drawn(chances: Tensor, generator: torch.Generator) -> Tensor:
    """A class for each row, with a single random number for it: of a vocabulary, there are many classes."""
    up_to = chances.cumsum(1)
    at = torch.rand(len(chances), 1, generator=generator) * up_to[:, -1:]
    return torch.searchsorted(up_to, at, right=True).clamp_max(chances.shape[1] - 1)
