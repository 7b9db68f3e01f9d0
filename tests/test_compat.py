"""Torch's private parts: each is probed, and none is used past `secateur.compat`."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur
from secateur import compat
from secateur.errors import TorchError
from secateur.nn import multi_head_attention_forward

ROOT = Path(secateur.__file__).parent

# Where torch keeps what the library cannot do without.
NEEDED = [
    ("torch._subclasses.fake_tensor", "FakeTensor"),
    ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    ("torch.overrides", "TorchFunctionMode"),
    ("torch.utils._python_dispatch", "TorchDispatchMode"),
    ("torch.utils._python_dispatch", "_disable_current_modes"),
    ("torch._C", "DisableTorchFunction"),
    ("torch.utils._pytree", "tree_leaves"),
    ("torch.utils._pytree", "tree_map"),
    ("torch.multiprocessing.reductions", "StorageWeakRef"),
    ("torch._C._functorch", "is_functorch_wrapped_tensor"),
    ("torch._ops", "OpOverload"),
    ("torch._ops", "OpOverloadPacket"),
    ("torch.nn.modules.batchnorm", "_NormBase"),
    ("torch.nn.modules.conv", "_ConvNd"),
    ("torch.nn.modules.conv", "_ConvTransposeNd"),
    ("torch.nn.modules.linear", "NonDynamicallyQuantizableLinear"),
    ("torch.nn.parameter", "is_lazy"),
]
MODULES = sorted({module for module, _ in NEEDED if module.startswith("torch.") and "_C" not in module})

# Files outside of compat.py that may use private names of torch, and why.
EXCEPTED: dict[str, str] = {}


def again() -> ModuleType:
    """`secateur.compat`, imported once more from its file."""
    spec = importlib.util.spec_from_file_location("compat_again", compat.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def says_what_to_do(error: BaseException) -> bool:
    return all(part in str(error) for part in (f"torch {torch.__version__} lacks", compat.TESTED, "install"))


@pytest.mark.parametrize(("home", "name"), NEEDED)
def test_a_missing_name_is_told(monkeypatch: pytest.MonkeyPatch, home: str, name: str) -> None:
    monkeypatch.delattr(sys.modules[home], name)
    with pytest.raises(TorchError, match=f"{name}.*install") as caught:
        again()
    assert says_what_to_do(caught.value)
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("name", MODULES)
def test_a_missing_module_is_told(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TorchError) as caught:
        again()
    assert says_what_to_do(caught.value)


@pytest.mark.parametrize(("home", "name"), [(torch._C, "Argument"), (torch, "UntypedStorage")], ids=str)
def test_what_hangs_on_a_class_is_probed(monkeypatch: pytest.MonkeyPatch, home: Any, name: str) -> None:
    """`real_type` of an argument, `_cdata` of a storage. The latter is fixed in C: another class stands in for it."""
    if name == "Argument":
        monkeypatch.delattr(home.Argument, "real_type")
    else:
        monkeypatch.setattr(home, name, object)
    with pytest.raises(TorchError) as caught:
        again()
    assert says_what_to_do(caught.value)


def test_errors_of_other_kinds_pass() -> None:
    with pytest.raises(ZeroDivisionError), compat._needed("for a test"):
        _ = 1 / 0


# fallbacks ---------------------------------------------------------------------------------------------------------


class Log(compat.TorchFunctionMode):
    """Writes down every torch function, those inside of functions in Python too."""

    def __init__(self, redispatch: Any) -> None:
        super().__init__()
        self.redispatch = redispatch
        self.names: list[str] = []
        self.inside: list[Any] = []

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        if not isinstance(func, types.FunctionType) or func in self.inside:
            return func(*args, **(kwargs or {}))
        self.inside.append(func)
        try:
            with self:
                return self.redispatch(func, kinds, args, kwargs or {})
        finally:
            self.inside.pop()


def seen(redispatch: Any) -> list[str]:
    """The functions that calls of several kinds lead to: with a body in Python, in C, keyword only, closures."""
    x = torch.ones(2, 4, 8, 8)
    attention = nn.MultiheadAttention(4, 2)
    with Log(redispatch) as log:
        F.interpolate(x, scale_factor=2)
        F.max_pool2d(x, 2, return_indices=True)
        x.split(2)
        F.normalize(x)
        torch.einsum("abcd->ab", x)
        torch.meshgrid(torch.arange(3), torch.arange(2), indexing="ij")
        attention(*[x[0, :, :, :4]] * 3)
        _ = 1 - x
        F.cross_entropy(x[:, :, 0, 0], torch.zeros(2, dtype=torch.long))
    return log.names


def test_functions_are_looked_into() -> None:
    names = set(seen(compat.redispatch_function))
    assert {"interpolate", "normalize", "multi_head_attention_forward", "__rsub__", "cross_entropy"} <= names
    assert {"upsample_nearest2d", "linalg_vector_norm", "bmm", "softmax", "rsub", "cross_entropy_loss"} <= names


def test_without_redispatch_functions_are_looked_into_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = seen(compat.redispatch_function)
    monkeypatch.delattr(torch.overrides, "redispatch_function", raising=False)
    module = again()
    assert module.redispatch_function is module._redispatch
    assert seen(module.redispatch_function) == expected


def test_the_stand_in_sees_what_a_module_holds_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "_pad_of_today", lambda x: x + 1, raising=False)
    source = "def f(x, *, by=2):\n    if has_torch_function_unary(x):\n        raise AssertionError\n"
    made: dict[str, Any] = {}
    exec(source + "    return _pad_of_today(x) * by", F.__dict__, made)
    result = compat._redispatch(made["f"], (), (torch.ones(1),), {})
    assert result.item() == 4
    assert compat._redispatch(torch.neg, (), (torch.ones(1),), {}).item() == -1


@pytest.mark.parametrize("name", ["_lazy_clone", "_is_cow_tensor"])
def test_without_copy_on_write_nothing_is_watched(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(torch if name == "_lazy_clone" else torch._C, name)
    module = again()
    assert None in (module.lazy_clone, module.is_lazy_clone)
    from secateur.prune import watch

    monkeypatch.setattr(watch, "lazy_clone", module.lazy_clone)
    monkeypatch.setattr(watch, "is_lazy_clone", module.is_lazy_clone)
    x = torch.ones(2)
    assert watch.watch(x) is None
    assert not watch.unchanged(x, watch.Stamp())


def test_without_levels_masks_are_computed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._functorch, "maybe_current_level")
    from secateur.prune import watch

    monkeypatch.setattr(watch, "transform_level", again().transform_level)
    assert not watch.ordinary(torch.ones(2))
    layer = secateur.prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.5)
    layer.weight_orig.data.fill_(3)
    layer(torch.ones(1, 4))
    assert torch.equal(layer.weight, 3 * layer.weight_mask)


@pytest.mark.parametrize("name", ["TensorBase", "_VariableFunctions", "_nn"])
def test_a_home_of_functions_may_be_gone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(torch._C, name)
    assert set(again().FUNCTION_HOMES) < set(compat.FUNCTION_HOMES)


def test_the_source_of_scripts() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    assert compat.script_source(torch.jit.script(double)) is double


def test_compiled_models_are_told() -> None:
    net = nn.Linear(2, 2)
    assert not compat.is_compiled(net)
    assert compat.uncompiled(net) is net
    compiled = torch.compile(net)
    assert compat.is_compiled(compiled)
    assert compat.uncompiled(compiled) is net


# ops ---------------------------------------------------------------------------------------------------------------


def test_ops_are_torchs_own() -> None:
    aten = compat.aten
    assert aten.mm.default is torch.ops.aten.mm.default
    assert aten.__and__.Tensor is torch.ops.aten.__and__.Tensor
    assert aten.mm is aten.mm
    assert isinstance(aten.clone, compat.OpOverloadPacket)
    assert aten.clone.overloads() == torch.ops.aten.clone.overloads()
    assert torch.equal(aten.neg(torch.ones(1)), -torch.ones(1))
    assert all([aten.mm, aten.mm.default])


def test_an_op_that_is_not_there() -> None:
    none, other, overload = compat.aten.nothing, compat.aten.nought.default, compat.aten.mm.nothing
    assert not any([none, other, overload])
    assert none.default is none
    assert none is compat.aten.nothing.default
    assert compat.aten.mm.nothing is overload
    assert len({none, other, overload, compat.aten.mm.default, torch.ops.aten.add.Tensor}) == 5
    assert none.overloads() == []
    assert isinstance(none, compat.Missing)
    with pytest.raises(TorchError, match=re.escape(f"torch {torch.__version__} has no op aten.nothing")):
        none(1)
    with pytest.raises(AttributeError):
        _ = none.__wrapped__
    with pytest.raises(AttributeError):
        _ = compat.aten.__wrapped__


def test_an_op_that_was_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat._TOLD_BY, "mm", "no_such_argument")
    assert not compat._Aten().mm.default
    monkeypatch.setitem(compat._TOLD_BY, "mm", "mat2")
    assert compat._Aten().mm.default is torch.ops.aten.mm.default


def test_no_op_that_the_library_names_is_missing() -> None:
    """An op that a tested torch lacks has to be named here, so that a slip of the pen is no missing op."""
    known = {"aten._fused_rms_norm"}  # torch 2.8 has another of that name
    code = "import secateur.cli; from secateur.compat import aten, missing; print(len(vars(aten)), *missing)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, *names = done.stdout.split()
    assert int(count) > 200
    assert {*names} - known == set()


def test_elementwise_ops() -> None:
    aten = compat.aten
    assert all(map(compat.is_pointwise, [aten.add.Tensor, aten.relu.default, aten.leaky_relu.default]))
    assert not any(map(compat.is_pointwise, [aten.mm.default, aten.softmax.int, aten.cat.default]))


def test_sizes_among_arguments() -> None:
    aten = compat.aten
    assert all(map(compat.takes_sizes, [aten.view.default, aten.select.int, aten.upsample_nearest2d.vec]))
    assert not any(map(compat.takes_sizes, [aten.mm.default, aten.add.Tensor, aten.sym_size.int, aten.permute.default]))


# the rest of the library -------------------------------------------------------------------------------------------


# Private names of tensors, ops and layers, whatever these are called.
ELSEWHERE = {"_schema", "_cdata", "_orig_mod", "_version", "_flat_weights", "_flat_weights_names", "_init_flat_weights"}


def private(tree: ast.AST) -> Iterator[str]:
    """Private names of torch in a file. The registries of a module (`_parameters`, `_buffers`, `_modules`, its hooks)
    are not among them: torch's own documentation of state dicts and of pruning is written in their terms."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for a in node.names if a.name.startswith("torch") for part in a.name.split(".")]
        elif isinstance(node, ast.Attribute):
            chain = re.fullmatch(r"(?:torch|nn|F|Tensor)(?:\.\w+)+", ast.unparse(node))
            names = chain[0].split(".") if chain else [node.attr] * (node.attr in ELSEWHERE)
        else:
            continue
        if any(re.match(r"_(?!_)", name) for name in names):
            yield ".".join(names)


def test_private_names_are_found() -> None:
    code = "import torch._dynamo\nfrom torch.utils._pytree import tree_map\nnn._x(m._parameters)\nop._schema.name"
    assert {*private(ast.parse(code))} == {"torch._dynamo", "torch.utils._pytree.tree_map", "nn._x", "_schema"}


def test_private_names_are_in_one_file() -> None:
    found = {
        str(file.relative_to(ROOT)): {*private(ast.parse(file.read_text()))}
        for file in ROOT.rglob("*.py")
        if file.name != "compat.py"
    }
    outside = {name: names for name, names in found.items() if names and not name.startswith(tuple(EXCEPTED))}
    assert outside == {}


def test_attention_takes_what_torchs_takes() -> None:
    """The library's own stands in for torch's while a model is traced, so it is called as torch's is."""
    theirs = inspect.signature(F.multi_head_attention_forward).parameters
    ours = inspect.signature(multi_head_attention_forward).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(p.default is not inspect.Parameter.empty for p in list(ours.values())[len(theirs) :])


class Uncounted(Tensor):
    """A tensor of a torch that does not count."""

    @property
    def _version(self) -> int:
        raise AttributeError("_version")


def test_writes_are_counted() -> None:
    x = torch.ones(2)
    assert compat.version(x.add_(1)) == compat.version(x) == 1
    with torch.inference_mode():
        assert compat.version(torch.ones(2)) == 0
    assert compat.version(x.as_subclass(Uncounted)) == 0


def test_storage_ids() -> None:
    x = torch.ones(4)
    assert compat.storage_id(x) == compat.storage_id(x.view(2, 2)) != compat.storage_id(Tensor.clone(x))
