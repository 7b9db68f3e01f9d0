"""However a function is called, the same is learned: by position, by keyword, and as the op that it leads to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from commutation import Seen, SizeOf, leaves
from sampling import SAMPLES, Draw, Maker
from test_commutation import FILES
from torch import Tensor, nn

import secateur as sec
from secateur.axes import Atom, atoms
from secateur.compat import FUNCTION_HOMES, OpOverload, takes_sizes
from secateur.nn import multi_head_attention_forward
from secateur.ops.arguments import bound
from secateur.ops.record import _SIZES, function_record, is_op
from secateur.ops.value import Value, bind, value_of
from secateur.tracing.equations import Equations
from secateur.tracing.recorders import FunctionRecorder, OpRecorder
from secateur.tracing.tracer import Tracer

assert FILES  # their samples are registered


def numbers(item: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(item, Tensor):
        return next(tensors)
    if isinstance(item, SizeOf):
        return item.value
    if isinstance(item, dict):
        return {key: numbers(value, tensors) for key, value in item.items()}
    return type(item)(numbers(part, tensors) for part in item) if isinstance(item, tuple | list) else item


def run(call: Callable[[Any, Any], Any], given: Any) -> Seen:
    """What is learned of arguments when they are used in a call."""
    tracer = Tracer()
    recorder = OpRecorder(tracer, [])
    tensors = [tensor.clone() for tensor in leaves(given, Tensor)]
    values = tuple(bind(tensor, Value([Atom(n) for n in tensor.shape])) for tensor in tensors)
    args, kwargs = numbers(given, iter(tensors))
    with torch.no_grad(), recorder, FunctionRecorder(tracer, recorder):
        out = call(args, kwargs)
    return Seen(tracer, values, tuple(value_of(tensor) for tensor in leaves(out, Tensor)))


def told(seen: Seen) -> Any:
    """As something that can be compared."""
    number: dict[Any, int] = {}

    def name(value: Value) -> Any:
        return [[(number.setdefault(atom, len(number)), atom.fixed is None) for atom in atoms(d)] for d in value.dims]

    layouts = [name(value) for value in (*seen.inputs, *seen.outputs)]
    sizes = [(str(eq.expr), [number.get(atom) for atom in atoms(eq.layout)]) for eq in seen.tracer.sizes.equations]
    return layouts, sizes, [(c.symbol, str(c.right)) for c in seen.tracer.sizes.comparisons]


def by_name(op: Any, function: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by the names of the op's schema; those of a method but the tensor itself."""
    named = dict(zip((arg.name for arg in op._schema.arguments), args, strict=False)) | kwargs
    if hasattr(function, "__objclass__"):
        return (named.pop("self"),), named
    return (), {"input" if name == "self" else name: value for name, value in named.items()}


def functions() -> Iterator[Any]:
    """Functions and methods that C++ carries out, with the op of their name and its samples."""
    for op, makers in SAMPLES.items():
        if is_op(op):
            found = (getattr(home, op._schema.name.partition("::")[2], None) for home in (*FUNCTION_HOMES, F))
            for function in dict.fromkeys(f for f in found if type(f).__name__.startswith(("builtin", "method"))):
                for maker in makers:
                    yield op, function, maker


def tried(op: Any, function: Any, maker: Maker) -> bool:
    """Whether a function can be called both ways; it is then learned the same."""
    sample = maker(Draw(1))
    given = (list(sample.args), dict(sample.kwargs))

    def keyword(args: Any, kwargs: Any) -> Any:
        placed, named = by_name(op, function, args, kwargs)
        return function(*placed, **named)

    try:
        first = run(lambda args, kwargs: function(*args, **kwargs), given)
        second = run(keyword, given)
    except (TypeError, RuntimeError) as error:
        if str(error).startswith(("_(", "shape_given", "tensor_split(")):  # of ours
            raise
        return False
    assert told(first) == told(second), (function, maker.__name__)
    return True


def test_by_keyword_the_same_is_learned() -> None:
    done = {(op, function) for op, function, maker in functions() if tried(op, function, maker)}
    said = {function for _, function in done if function in _SIZES}
    assert len(done) > 350
    assert len(said) > 150


def direct() -> Iterator[Any]:
    for op, makers in SAMPLES.items():
        for maker in makers:
            if is_op(op) and takes_sizes(op) and maker(Draw(1)).run is None:
                yield pytest.param(op, maker, id=f"{op}-{maker.__name__}")


@pytest.mark.parametrize(("op", "maker"), list(direct()))
def test_numbers_in_a_direct_call_of_an_op_are_literals(op: Any, maker: Maker) -> None:
    sample = maker(Draw(1))
    given = (list(sample.args), dict(sample.kwargs))
    for call in (op, op.overloadpacket):
        seen = run(lambda args, kwargs, call=call: call(*args, **kwargs), given)
        Equations.of(seen.tracer, lambda _: 0, dict)
        tied = {atom for equation in seen.tracer.sizes.equations for atom in atoms(equation.layout)}
        for size in leaves(given, SizeOf):
            found = size.of(seen)
            layouts = found if isinstance(found, list | tuple) else (found,)
            free = {atom for layout in layouts for atom in atoms(layout) if atom.fixed is None and atom.size > 1}
            assert free <= tied or size.value < 0, f"{size.value} is not seen"


def test_arguments_are_bound_by_the_signature_of_what_is_called() -> None:
    assert bound(torch.chunk, ("x", 2), {"axis": 1}) == (("x", 2, 1), {})
    assert bound(torch.zeros, (2, 3), {"dtype": torch.half}) == (([2, 3],), {"dtype": torch.half})
    assert bound(torch.Tensor.new_full, ("x", [2], 1.0), {}) == (("x", [2], 1.0), {})
    assert bound(torch.tensor_split, (), {"input": "x", "indices": [1], "dim": 2}) == (("x", [1], 2), {})
    assert bound(torch.split, (), {"tensor": "x", "split_size_or_sections": 3, "dim": 2}) == (("x", 3, 2), {})
    assert bound(torch.Tensor.__getitem__, ("x", 0), {}) == (("x", 0), {})
    attention = {"query": "q", "key": "k", "value": "v", "is_causal": True, "scale": 2.0}
    assert bound(F.scaled_dot_product_attention, (), attention)[0] == ("q", "k", "v", None, 0.0, True)
    assert bound(torch.ops.aten.narrow.default, ("x",), {"dim": 0, "length": 2, "start": 1}) == (("x", 0, 1, 2), {})


# models -----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Something done to hidden positions, between two layers."""

    def __init__(self, do: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.width, self.heads = 12, 2
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 4)
        if do is multi_head:
            self.packed, self.mix = nn.Parameter(torch.randn(36, 12)), nn.Parameter(torch.randn(12, 12))
        self.do = do

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.do(self, self.first(x).tanh()))


def attended(net: Net, x: Tensor) -> Tensor:
    heads = x.unflatten(dim=-1, sizes=(net.heads, -1)).transpose(dim0=1, dim1=2)
    options: Mapping[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False}
    mixed = F.scaled_dot_product_attention(query=heads, key=heads, value=heads, scale=None, **options)
    return mixed.transpose(1, 2).flatten(start_dim=-2)


def multi_head(net: Net, x: Tensor) -> Tensor:
    out, _ = F.multi_head_attention_forward(
        query=x, key=x, value=x, embed_dim_to_check=net.width, num_heads=net.heads, in_proj_weight=net.packed,
        in_proj_bias=None, bias_k=None, bias_v=None, add_zero_attn=False, dropout_p=0.0, out_proj_weight=net.mix,
        out_proj_bias=None, training=False, need_weights=False,
    )  # fmt: skip
    return out


WAYS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "attention": attended,
    "multi head attention": multi_head,
    "axis": lambda _, x: torch.cat(torch.chunk(x, 2, axis=-1), axis=-1),
    "input": lambda net, x: torch.reshape(input=x, shape=(5, 2, net.width)).narrow(dim=0, start=1, length=2),
    "out": lambda net, x: x + torch.full((5, 2, net.width), 0.5, out=torch.empty(5, 2, net.width)),
    "numel": lambda net, x: torch.reshape(x, (torch.numel(input=x) // net.width, net.width)),
    "an op": lambda _, x: torch.ops.aten.view.default(x, [10, torch.ops.aten.sym_size.int(x, 2)]),
    "an op by keyword": lambda net, x: torch.ops.aten.reshape(self=x, shape=[10, net.width]),
}


@pytest.mark.parametrize("way", WAYS)
def test_models_that_call_by_keyword_are_cut(way: str) -> None:
    torch.manual_seed(0)
    net, x = Net(WAYS[way]), torch.randn(5, 2, 6)
    plan = sec.plan(sec.trace(net, x), sec.Ratio(0.5))
    assert "first.weight" in plan.kept_everywhere()
    sec.apply(net, plan)


def test_literals_in_a_direct_call_name_their_line() -> None:
    graph = sec.trace(Net(lambda _, x: torch.ops.aten.view.default(x, [10, 12])), torch.randn(5, 2, 6))
    reason = next(b.reason for b in graph.blocked if b.tensor == "first.weight")
    assert reason.startswith("12 is a literal at test_calls.py:")


def test_exported_modules_are_cut_where_no_literal_forbids() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(6, 12), nn.Linear(12, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).unflatten(-1, (3, 4)).transpose(1, 2).tanh().transpose(1, 2).flatten(-2)
            return self.last(self.second(x).relu())

    x = torch.randn(5, 2, 6)
    net = torch.export.export(Heads(), (x,)).module()
    graph = sec.trace(net, x)
    assert [axis.size for axis in graph.axes] == [8]
    reason = next(b.reason for b in graph.blocked if b.tensor == "first.weight")
    assert " is a literal at <eval_with_key>" in reason
    want = net(x).shape
    sec.apply(net, sec.plan(graph, sec.Ratio(0.5)))
    assert net(x).shape == want
    assert net.second.weight.shape == (4, 12)


def test_our_attention_takes_what_torch_takes() -> None:
    x, weight = torch.randn(5, 2, 8), torch.randn(8, 8)
    given = {
        "query": x, "key": x, "value": x, "embed_dim_to_check": 8, "num_heads": 2, "in_proj_weight": torch.randn(24, 8),
        "in_proj_bias": None, "bias_k": None, "bias_v": None, "add_zero_attn": False, "dropout_p": 0.0,
        "out_proj_weight": weight, "out_proj_bias": None, "need_weights": False,
    }  # fmt: skip
    ours, theirs = multi_head_attention_forward(**given), F.multi_head_attention_forward(**given)
    assert torch.allclose(ours[0], theirs[0], atol=1e-5)
    assert math.isfinite(float(ours[0].sum()))
    assert function_record(F.scaled_dot_product_attention) is not None
    assert isinstance(torch.ops.aten.mm.default, OpOverload)
