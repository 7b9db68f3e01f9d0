"""Masks that keep a band around the main diagonal."""

from typing import Any

import torch
from torch import nn

from secateur.ao.config import Group, check_matrix
from secateur.ao.parametrization import mask_of
from secateur.ao.sparsifier import BaseSparsifier
from secateur.errors import SparsifierValueError


class NearlyDiagonalSparsifier(BaseSparsifier):
    """
    >>> model = nn.Sequential(nn.Linear(4, 3))
    >>> sparsifier = NearlyDiagonalSparsifier(nearliness=3)
    >>> sparsifier.prepare(model, None)
    >>> sparsifier.step()
    >>> model[0].parametrizations.weight[0].mask
    tensor([[1., 1., 0., 0.],
            [1., 1., 1., 0.],
            [0., 1., 1., 1.]])

    Keeps the `nearliness` diagonals of a matrix that are nearest to the main one, an odd number; 0 or less
    keeps nothing.
    """

    def __init__(self, nearliness: int = 1) -> None:
        super().__init__(defaults={"nearliness": nearliness})

    def _check_tensor(self, group: Group) -> None:
        check_matrix(group)

    def update_mask(  # type: ignore[override]
        self, module: nn.Module, tensor_name: str, nearliness: int, **kwargs: Any
    ) -> None:
        """Mask one matrix; see the class."""
        where = kwargs.get("tensor_fqn", tensor_name)
        mask = mask_of(module, tensor_name)
        if not isinstance(nearliness, int) or (nearliness > 0 and nearliness % 2 == 0):
            raise SparsifierValueError(f"{where}: nearliness is {nearliness!r}; give an odd number")
        if nearliness <= 0:
            mask.zero_()
            return
        reach = nearliness // 2
        if reach >= min(mask.shape):
            raise SparsifierValueError(
                f"{where}: nearliness {nearliness} reaches beyond a matrix of {tuple(mask.shape)}; "
                f"give at most {2 * min(mask.shape) - 1}"
            )
        rows, cols = (torch.arange(size, device=mask.device) for size in mask.shape)
        mask.copy_((rows[:, None] - cols).abs() <= reach)
