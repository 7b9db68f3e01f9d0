"""Every name of torch's that torch does not promise to keep, in one place, each with what it is for.

The rest of the library imports these from here, so that a new torch is a change to this file alone. A name that this
torch lacks is replaced by what does the same, or the import fails with a message that says what it is needed for.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType, TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.jit import ScriptFunction

from secateur.errors import TorchError

TESTED = "2.8 to 2.13"


class _needed:  # noqa: N801
    """What is imported or looked up inside is needed for a purpose."""

    def __init__(self, purpose: str) -> None:
        self.purpose = purpose

    def __enter__(self) -> None: ...

    def __exit__(self, _: Any, error: BaseException | None, __: TracebackType | None) -> Literal[False]:
        if isinstance(error, ImportError | AttributeError):
            raise TorchError(
                f"torch {torch.__version__} lacks something that Secateur needs {self.purpose} ({error}); "
                f"it is tested with torch {TESTED}: install one of these, or a newer Secateur"
            ) from error
        return False


with _needed("to run models without computing anything"):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
with _needed("to see the ops of a model"):
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
with _needed("to compute something of its own while ops are watched"):
    from torch.utils._python_dispatch import _disable_current_modes as without_modes

    without_torch_function = torch._C.DisableTorchFunction
with _needed("to look into what models are given and put out"):
    from torch.utils._pytree import tree_leaves, tree_map
with _needed("to tell when memory is given back"):
    from torch.multiprocessing.reductions import StorageWeakRef
with _needed("to see through vmap and grad"):
    from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped
with _needed("to tell ops from other functions"):
    from torch._ops import OpOverload, OpOverloadPacket
with _needed("to know what an op takes and gives"):
    torch.ops.aten.view.default._schema.arguments[1].real_type  # noqa: B018
with _needed("to tell which tensors share memory"):
    torch.UntypedStorage._cdata  # noqa: B018
with _needed("to tell layers by their kind"):
    from torch.nn.modules.batchnorm import _NormBase as BatchNorm
    from torch.nn.modules.conv import _ConvNd as Convolution
    from torch.nn.modules.conv import _ConvTransposeNd as TransposedConvolution
    from torch.nn.modules.linear import NonDynamicallyQuantizableLinear as AttentionOutput  # its `forward` is not run
with _needed("to tell parameters that have no shape yet"):
    from torch.nn.parameter import is_lazy

FAKE_LOGGER = "torch._subclasses.fake_tensor"  # logs a traceback of what is raised anyway
in_fake_kernel: Any = getattr(torch._subclasses.fake_tensor, "in_kernel_invocation_manager", None)  # runs kernels
as_subclass: Any = getattr(Tensor, "_make_subclass", None)  # makes fake tensors, for one
_GUARDS = [getattr(torch._C, f"_set_{how}_on_mutable_data_ptr", None) for how in ("throw", "warn_deprecated")]

# Where torch keeps the functions that `torch.*`, `Tensor.*` and `torch.nn.functional.*` lead to.
_HIDDEN_HOMES = (getattr(torch._C, name, None) for name in ("TensorBase", "_VariableFunctions", "_nn"))
FUNCTION_HOMES: tuple[Any, ...] = (torch.Tensor, torch, *(home for home in _HIDDEN_HOMES if home is not None))


# Ops ---------------------------------------------------------------------------------------------------------------


class Missing:
    """An op that this torch does not have: false, like no other, and so is everything that hangs on it.

    >>> bool(aten.no_such_op.default), aten.no_such_op.default is aten.no_such_op, aten.no_such_op == aten.mm.default
    (False, True, False)
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):  # Python's own questions
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise TorchError(f"torch {torch.__version__} has no op {self._name}; Secateur is tested with torch {TESTED}")

    def overloads(self) -> list[str]:
        """None."""
        return []

    def __repr__(self) -> str:
        return f"<no {self._name} in torch {torch.__version__}>"


missing: dict[str, Missing] = {}  # what was asked for and is not there


def _missing(name: str) -> Missing:
    return missing.setdefault(name, Missing(name))


class _Packet(OpOverloadPacket):
    """The overloads of an op, torch's own; one that this torch does not have is `Missing`."""

    def __init__(self, packet: Any) -> None:
        self.__dict__ = packet.__dict__  # where torch puts overloads that were asked for

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return _missing(f"{self}.{name}")


# Ops that were something else under the same name in an older torch, and an argument by which to tell.
_TOLD_BY = {"_fused_rms_norm": "normalized_shape"}


class _Aten:
    """`torch.ops.aten`, where an op that this torch does not have is `Missing` instead of an error."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch.ops.aten, name, None)
        if found is None and name.startswith("__"):
            raise AttributeError(name)
        if found is not None and name in _TOLD_BY:
            arguments = {argument.name for argument in schema(found.default).arguments}
            found = found if _TOLD_BY[name] in arguments else None
        packet = _missing(f"aten.{name}") if found is None else _Packet(found)
        setattr(self, name, packet)  # found at once from here on
        return packet


aten: Any = _Aten()
prims: Any = torch.ops.prims


def schema(op: Any) -> Any:
    """What an ATen op takes and gives."""
    return op._schema


# Elementwise ops that some torches forget to tag as such.
_UNTAGGED = {
    *(aten.leaky_relu.default, aten.leaky_relu_.default, aten.elu_.default, aten.selu_.default, aten.celu_.default),
    *(aten.hardtanh_.default, aten.hardsigmoid_.default, aten._conj_physical.default, aten.ldexp.Tensor),
}


def is_pointwise(op: Any) -> bool:
    """Whether each element of an op's result is made of the elements at its own place."""
    return torch.Tag.pointwise in op.tags or op in _UNTAGGED


@cache
def shared(op: Any) -> frozenset[int | str]:
    """The arguments, by place and by name, whose memory an op writes into or gives another view of.

    >>> sorted(shared(aten.index_put_.default), key=str), shared(aten.add.Tensor)
    ([0, 'self'], frozenset())
    """
    given = [(i, a.name) for i, a in enumerate(schema(op).arguments) if a.alias_info is not None]
    return frozenset(part for pair in given for part in pair)


def draws(op: Any) -> bool:
    """Whether an op draws numbers, as `rand` does and `relu` does not."""
    return torch.Tag.nondeterministic_seeded in op.tags


def reads_out(op: Any) -> bool:
    """Whether an op turns elements of tensors into numbers of Python's, as `equal` does and `sym_size` does not."""
    return torch.Tag.data_dependent_output in op.tags


@cache
def takes_sizes(op: Any) -> bool:
    """Whether an argument of an op is a size, a position or a count.

    >>> takes_sizes(aten.view.default), takes_sizes(aten.mm.default)
    (True, False)
    """
    return any(_holds_size(argument.real_type) for argument in schema(op).arguments)  # `type` says int for all


def _holds_size(kind: Any) -> bool:
    return kind.kind() == "SymIntType" or any(map(_holds_size, kind.containedTypes()))


# Functions ---------------------------------------------------------------------------------------------------------


def _redispatch(func: Any, _kinds: Any, args: Any, kwargs: Any) -> Any:
    """Run the body of a torch function that is written in Python, past its question whether something overrides it;
    what the body calls is seen again. The body runs in a copy of its module's names where that question is answered."""
    if not isinstance(func, FunctionType):
        return func(*args, **kwargs)
    names = {**func.__globals__, **_NOTHING_OVERRIDES}
    body = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body(*args, **kwargs)


_NOTHING_OVERRIDES: dict[str, Callable[..., bool]] = dict.fromkeys(
    ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), lambda *_: False
)

# Runs a torch function without asking the innermost mode again: `(func, types, args, kwargs)`.
redispatch_function: Callable[..., Any] = getattr(torch.overrides, "redispatch_function", _redispatch)


def script_source(function: ScriptFunction) -> Callable[..., Any] | None:
    """The Python function that a scripted one was made from, where torch keeps it."""
    return getattr(function, "_torchdynamo_inline", None)


# Tensors -----------------------------------------------------------------------------------------------------------

# Copy-on-write tells whether a tensor was written to; None where this torch cannot.
lazy_clone: Callable[[torch.Tensor], torch.Tensor] | None = getattr(torch, "_lazy_clone", None)
is_lazy_clone: Callable[[torch.Tensor], bool] | None = getattr(torch._C, "_is_cow_tensor", None)

# How deep inside of vmap, grad and the like the code runs; None is outside, and a torch that does not tell is inside.
transform_level: Callable[[], int | None] = getattr(torch._C._functorch, "maybe_current_level", lambda: 0)


def strong_storage(reference: StorageWeakRef | None) -> torch.UntypedStorage | None:
    """The memory that is referred to; None if it was given back."""
    if reference is None or reference.expired():
        return None
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def storage_id(tensor: torch.Tensor) -> int:
    """The same for tensors that share memory, as long as one of them lives."""
    return tensor.untyped_storage()._cdata


def data_guard(mode: FakeTensorMode) -> Any:
    """What is done to a mode's fake tensors lest their data is read, if anything is known to be done."""
    return _GUARDS[mode._allow_unsafe_data_ptr_access] if hasattr(mode, "_allow_unsafe_data_ptr_access") else None


def version(value: Any) -> int:
    """How often a tensor was written to; 0 for anything else, and where torch does not count.

    >>> x = torch.zeros(2)
    >>> version(x.add_(1)), version("x")
    (1, 0)
    """
    return getattr(value, "_version", 0) if isinstance(value, torch.Tensor) and not value.is_inference() else 0


# Models ------------------------------------------------------------------------------------------------------------


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` wrapped a model; its package, which takes seconds to import, is there if it did."""
    return (
        "torch._dynamo" in sys.modules
        and "_orig_mod" in model._modules
        and not isinstance(model, torch.jit.ScriptModule)
    )


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that `torch.compile` wrapped, or the model itself."""
    while is_compiled(model):
        model = model._modules["_orig_mod"]  # type: ignore[assignment]
    return model


def global_hooks() -> list[dict[Any, Any]]:
    """Where torch keeps the hooks that are called for every module there is; none where it keeps them otherwise."""
    return [each for name, each in vars(nn.modules.module).items() if name[:8] == "_global_" and isinstance(each, dict)]


def default_store() -> Any:
    """The store that the process group of this process was made with."""
    with _needed("to let ranks tell each other what went wrong"):
        from torch.distributed.distributed_c10d import _get_default_store
    return _get_default_store()


def write_parts(tensors: dict[str, Tensor], folder: str, *, alone: bool) -> str:
    """Have each rank write its part of some tensors in safetensors, or one by itself; why it failed, on every rank."""
    with _needed("to write distributed checkpoints without pickle"):
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        old = "save_sharded" in inspect.signature(HuggingFaceStorageWriter).parameters  # as torch 2.8 calls it
        by_part: Any = {"save_sharded" if old else "save_distributed": True}
        writer = HuggingFaceStorageWriter(folder, **by_part)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            save(tensors, storage_writer=writer, no_dist=alone)
    except CheckpointException as error:
        return next((f"{type(each[0]).__name__}: {each[0]}" for each in error.failures.values()), str(error))
    return ""


def own_box(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Where this rank's part of a tensor that is spread over ranks begins, and its shape; None if it has several."""
    with _needed("to tell which part of a tensor a rank has"):
        found = [(tuple(one.offsets), tuple(one.sizes)) for one in tensor.__create_chunk_list__()]
    return found[0] if len(found) == 1 else None


def dtensor() -> Any:
    """The class of tensors that are spread over ranks; None as long as nobody has imported it, so that none exist."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def fsdp_module() -> Any:
    """What modules that `fully_shard` was applied to are; None as long as nobody has imported that."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def fsdp1() -> Any:
    """The wrapper that flattens parameters; None as long as nobody has imported it."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)


def sharding_states() -> Any:
    """{module: what `fully_shard` remembers of it}."""
    with _needed("to take off what fully_shard adds to a model"):
        from torch.distributed._composable_state import _module_state_mapping
    return _module_state_mapping


def bound_to_shapes(wrapper: nn.parallel.DistributedDataParallel) -> str | None:
    """What `DistributedDataParallel` has beside its buckets that goes by shapes of parameters; None if nothing."""
    held, group = vars(wrapper), torch.distributed.group.WORLD
    stateful = [state for _, state in held.get("_comm_hooks", ()) if state is not None and state is not group]
    told = {
        "a process group of its own": held.get("process_group") is not group,
        "mixed_precision=": held.get("mixed_precision") is not None,
        "delay_all_reduce_named_params=": bool(held.get("_delay_all_reduce_params")),
        "the reducer of compiled autograd": bool(held.get("_accum_grad_hooks")),
        "a communication hook with a state": bool(stateful),
    }
    return next((what for what, there in told.items() if there), None)


def lay_out_anew(wrapper: nn.parallel.DistributedDataParallel) -> None:
    """Let `DistributedDataParallel` make its buckets for the parameters as they are now: as if it had been pickled."""
    with _needed("to share gradients of a model that was cut"):
        state = {**wrapper.__getstate__(), "_comm_hooks": [], "_has_rebuilt_buckets": False}
        state["_static_graph_delay_allreduce_enqueued"] = False
        hooks = wrapper._comm_hooks
        del wrapper.logger, wrapper.reducer  # with the hooks that it has on the parameters
        wrapper.__setstate__(state)
        for hook, its in hooks:
            wrapper.register_comm_hook(its, hook)


def sharded_places() -> Iterator[tuple[nn.Module, Any]]:
    """Modules that `fully_shard` was applied to, with `module` and `param_name` of each parameter that it manages."""
    if fsdp_module() is None:
        return
    with _needed("to find the parameters that fully_shard manages"):
        for module, reference in list(sharding_states().items()):
            state = reference()
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            yield from ((module, param._module_info) for group in groups if group for param in group.fsdp_params)


__all__ = ["AttentionOutput", "BatchNorm", "Convolution", "FAKE_LOGGER", "FUNCTION_HOMES", "FakeTensor"]
__all__ += ["FakeTensorMode", "Missing", "OpOverload", "OpOverloadPacket", "ScriptFunction", "StorageWeakRef"]
__all__ += ["TESTED", "TorchDispatchMode", "TorchFunctionMode", "TransposedConvolution", "aten", "draws"]
__all__ += ["is_compiled", "is_functorch_wrapped", "is_lazy", "is_lazy_clone", "is_pointwise", "lazy_clone"]
__all__ += ["missing", "prims", "reads_out", "redispatch_function", "schema", "script_source", "shared", "storage_id"]
__all__ += ["strong_storage", "takes_sizes", "transform_level", "tree_leaves", "tree_map", "uncompiled", "version"]
__all__ += ["as_subclass", "data_guard", "without_modes", "without_torch_function"]
__all__ += ["bound_to_shapes", "default_store", "dtensor", "fsdp1", "fsdp_module", "global_hooks", "lay_out_anew"]
__all__ += ["own_box", "sharded_places", "sharding_states", "write_parts"]
