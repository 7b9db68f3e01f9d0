"""Sparsity levels that change with the epoch."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from secateur.ao.errors import (
    SparsifierKeyError,
    SparsifierNotImplementedError,
    SparsifierRuntimeError,
    SparsifierTypeError,
    SparsifierValueError,
)
from secateur.ao.sparsifier import BaseSparsifier
from secateur.state.transaction import transaction


class BaseScheduler:
    """
    >>> from torch import nn
    >>> from secateur.ao import WeightNormSparsifier
    >>> class Halve(BaseScheduler):
    ...     def get_sl(self):
    ...         return [level / 2**self.last_epoch for level in self.base_sl]
    >>> sparsifier = WeightNormSparsifier(sparsity_level=0.8)
    >>> sparsifier.prepare(nn.Sequential(nn.Linear(4, 4)), None)
    >>> scheduler = Halve(sparsifier)
    >>> sparsifier.step()
    >>> scheduler.step()
    >>> scheduler.get_last_sl()
    [0.4]

    Sets the "sparsity_level" of each of a sparsifier's groups when it is made and at every `step`. A subclass
    writes `get_sl`, which returns one level for each group, from `last_epoch` and `base_sl`, the levels that
    the groups had. Call `sparsifier.step()` before `scheduler.step()`.
    """

    def __init__(self, sparsifier: BaseSparsifier, last_epoch: int = -1, verbose: bool = False) -> None:
        self.sparsifier = _checked(sparsifier)
        self.base_sl: list[float] = [_level(group) for group in sparsifier.groups]
        self.last_epoch = last_epoch
        self.verbose = verbose
        self.sparsifier._step_count = 0
        self._step_count = 0
        self._last_sl: list[float] = []
        self._get_sl_called_within_step = False
        self.step()

    def get_sl(self) -> list[float]:
        """The level of each group at `last_epoch`. For `step`; elsewhere use `get_last_sl`."""
        self._warn_outside_step()
        raise SparsifierNotImplementedError(f"{type(self).__name__}: write get_sl(), one level for each group")

    def get_last_sl(self) -> list[float]:
        """The levels set by the last step."""
        return self._last_sl

    def step(self, epoch: int | None = None) -> None:
        """Go on by one epoch and set the levels. `epoch` is only printed, if `verbose`."""
        self._warn_of_order()
        with transaction(self):
            self._step_count += 1
            self.last_epoch += 1
            self._get_sl_called_within_step = True
            levels = list(self.get_sl())
            self._get_sl_called_within_step = False
            groups = self.sparsifier.groups
            if len(levels) != len(groups):
                raise SparsifierRuntimeError(
                    f"{type(self).__name__}: {len(levels)} levels for {len(groups)} groups; "
                    "make the scheduler after prepare(), and anew when groups are added"
                )
        for index, (group, level) in enumerate(zip(groups, levels, strict=True)):
            group["sparsity_level"] = level
            self.print_sl(self.verbose, index, level, epoch)
        self._last_sl = levels
        self.sparsifier.enable_mask_update = True

    def print_sl(self, is_verbose: bool, group: int, sl: float, epoch: int | None = None) -> None:
        """Print the level of a group, if asked to."""
        if is_verbose:
            when = "Adjusting" if epoch is None else f"Epoch {epoch:5d}: adjusting"
            print(f"{when} sparsity level of group {group} to {sl:.4e}.")

    def state_dict(self) -> dict[str, Any]:
        """Every attribute but the sparsifier."""
        return {key: value for key, value in self.__dict__.items() if key != "sparsifier"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned. The sparsifier's levels change at the next step."""
        if not isinstance(state_dict, Mapping):
            raise SparsifierTypeError(
                f"{type(self).__name__}: the state is a {type(state_dict).__name__}; pass what state_dict() returned"
            )
        levels, groups = len(state_dict.get("base_sl", self.base_sl)), len(self.sparsifier.groups)
        if levels != groups:
            raise SparsifierRuntimeError(
                f"{type(self).__name__}: the state has {levels} groups and the sparsifier {groups}; "
                "prepare it with the same config"
            )
        self.__dict__.update({key: copy.copy(value) for key, value in state_dict.items() if key != "sparsifier"})

    def _warn_of_order(self) -> None:
        replaced = "step" in vars(self.sparsifier)
        # A subclass with a step of its own need not count its calls.
        counted = type(self.sparsifier).step is BaseSparsifier.step
        if self._step_count != 1 or not (replaced or (counted and self.sparsifier._step_count < 1)):
            return
        what = "scheduler.step() is called before sparsifier.step()"
        if replaced:
            what = (
                "sparsifier.step has been replaced, so it cannot be seen whether it is called before scheduler.step()"
            )
        warnings.warn(f"{what}; call sparsifier.step() first", UserWarning, stacklevel=3)

    def _warn_outside_step(self) -> None:
        if not self._get_sl_called_within_step:
            warnings.warn("get_sl() is for step(); to see the levels use get_last_sl()", UserWarning, stacklevel=3)

    def _make_sure_a_list(self, var: Any) -> list[Any]:
        """One value for each group: `var` as it is, or repeated."""
        count = len(_checked(self.sparsifier).groups)
        values = list(var) if isinstance(var, list | tuple) else [var] * count
        if len(values) != count:
            raise SparsifierValueError(
                f"{type(self).__name__}: {len(values)} values for {count} groups; give one, or one for each group"
            )
        return values

    def __repr__(self) -> str:
        return f"{type(self).__name__} (\nSparsifier {self.sparsifier}\n    base_sl: {self.base_sl}\n)"


class LambdaSL(BaseScheduler):
    """
    >>> from torch import nn
    >>> from secateur.ao import WeightNormSparsifier
    >>> sparsifier = WeightNormSparsifier(sparsity_level=0.8)
    >>> sparsifier.prepare(nn.Sequential(nn.Linear(4, 4)), None)
    >>> scheduler = LambdaSL(sparsifier, lambda epoch: min(1, epoch / 2))
    >>> sparsifier.step()
    >>> scheduler.step()
    >>> scheduler.get_last_sl()
    [0.4]

    Each group's level is the one that it had, times `sl_lambda(epoch)`; `sl_lambda` is a function, or a list
    of one for each group.
    """

    def __init__(
        self,
        sparsifier: BaseSparsifier,
        sl_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.sparsifier = sparsifier
        self.sl_lambdas: list[Callable[[int], float]] = self._make_sure_a_list(sl_lambda)
        super().__init__(sparsifier, last_epoch, verbose)

    def get_sl(self) -> list[float]:
        """The level of each group at `last_epoch`."""
        self._warn_outside_step()
        return [base * factor(self.last_epoch) for base, factor in zip(self.base_sl, self.sl_lambdas, strict=True)]


class CubicSL(BaseScheduler):
    """
    >>> from torch import nn
    >>> from secateur.ao import WeightNormSparsifier
    >>> sparsifier = WeightNormSparsifier(sparsity_level=0.8)
    >>> sparsifier.prepare(nn.Sequential(nn.Linear(4, 4)), None)
    >>> scheduler = CubicSL(sparsifier, delta_t=1, total_t=2)
    >>> levels = list(scheduler.get_last_sl())
    >>> for _ in range(2):
    ...     sparsifier.step()
    ...     scheduler.step()
    ...     levels += scheduler.get_last_sl()
    >>> levels
    [0.0, 0.7000000000000001, 0.8]

    Each group's level goes from `init_sl` to the one that it had, fast at first: it starts at epoch `init_t`
    and takes `delta_t * total_t` epochs (https://arxiv.org/abs/1710.01878). Before `init_t` it is `init_sl`,
    or zero if `initially_zero`. Each of these is one value, or a list of one for each group.
    """

    def __init__(
        self,
        sparsifier: BaseSparsifier,
        init_sl: float | Sequence[float] = 0.0,
        init_t: int | Sequence[int] = 0,
        delta_t: int | Sequence[int] = 10,
        total_t: int | Sequence[int] = 100,
        initially_zero: bool | Sequence[bool] = False,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.sparsifier = sparsifier
        self.init_sl: list[float] = self._make_sure_a_list(init_sl)
        self.init_t: list[int] = self._make_sure_a_list(init_t)
        self.delta_t: list[int] = self._make_sure_a_list(delta_t)
        self.total_t: list[int] = self._make_sure_a_list(total_t)
        self.initially_zero: list[bool] = self._make_sure_a_list(initially_zero)
        if not all(interval > 0 and steps > 0 for interval, steps in zip(self.delta_t, self.total_t, strict=True)):
            raise SparsifierValueError(f"CubicSL: delta_t is {delta_t} and total_t {total_t}; both must be positive")
        super().__init__(sparsifier, last_epoch, verbose)

    @staticmethod
    def sparsity_compute_fn(
        s_0: float, s_f: float, t: int, t_0: int, dt: int, n: int, initially_zero: bool = False
    ) -> float:
        """
        >>> CubicSL.sparsity_compute_fn(s_0=0.0, s_f=0.8, t=5, t_0=0, dt=1, n=10)
        0.7000000000000001

        The level at epoch `t` on the way from `s_0` at `t_0` to `s_f` at `t_0 + dt * n`.
        """
        if initially_zero and t < t_0:
            return 0.0
        level = s_f + (s_0 - s_f) * (1 - (t - t_0) / (dt * n)) ** 3
        return min(max(level, min(s_0, s_f)), max(s_0, s_f))

    def get_sl(self) -> list[float]:
        """The level of each group at `last_epoch`."""
        self._warn_outside_step()
        settings = (self.init_sl, self.base_sl, self.init_t, self.delta_t, self.total_t, self.initially_zero)
        return [
            self.sparsity_compute_fn(s_0, s_f, self.last_epoch, t_0, dt, n, zero)
            for s_0, s_f, t_0, dt, n, zero in zip(*settings, strict=True)
        ]


def _checked(sparsifier: Any) -> BaseSparsifier:
    if not isinstance(sparsifier, BaseSparsifier):
        raise SparsifierTypeError(
            f"{type(sparsifier).__name__} is no sparsifier; give the scheduler a secateur.ao.BaseSparsifier"
        )
    return sparsifier


def _level(group: Mapping[str, Any]) -> float:
    if "sparsity_level" not in group:
        raise SparsifierKeyError(
            f"{group['tensor_fqn']}: has no 'sparsity_level' to schedule; give one in the config or the defaults"
        )
    level: float = group["sparsity_level"]
    return level
