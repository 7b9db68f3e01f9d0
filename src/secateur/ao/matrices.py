"""Masks of matrices: the blocks, and in each the entries, of smallest norm go; or all but a band on the diagonal."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.ao.config import Group, sparsity_level
from secateur.ao.errors import SparsifierNotImplementedError, SparsifierValueError
from secateur.ao.parametrization import mask_of
from secateur.ao.sparsifier import BaseSparsifier
from secateur.distributed import whole

BlockShape = tuple[int, int]
_NORMS: dict[int, Callable[[Tensor], Tensor]] = {1: torch.abs, 2: torch.square}


class _MatrixSparsifier(BaseSparsifier):
    def _check_tensor(self, group: Group) -> None:
        shape = tuple(getattr(group["module"], group["tensor_name"]).shape)
        if len(shape) != 2:
            raise SparsifierValueError(
                f"{group['tensor_fqn']}: has shape {shape}; only a matrix (2-d) can be masked like this"
            )


class WeightNormSparsifier(_MatrixSparsifier):
    """
    >>> model = nn.Sequential(nn.Linear(4, 1, bias=False))
    >>> _ = model[0].weight.data.copy_(torch.tensor([[0.1, -3.0, 2.0, 0.2]]))
    >>> two_of_four = WeightNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2)
    >>> two_of_four.prepare(model, None)
    >>> two_of_four.step()
    >>> model[0].parametrizations.weight[0].mask
    tensor([[0., 1., 1., 0.]])

    Cuts a matrix into blocks from its upper left corner. The fraction `sparsity_level` of the blocks, those
    with the smallest mean norm, get `zeros_per_block` zeros each (all, if not said), at their smallest
    entries. N:M sparsity is `sparsity_level=1, sparse_block_shape=(1, M), zeros_per_block=M - N`.

    A level of 0 or less masks nothing, of 1 or more every block. Between the two at least one block stays. A
    block that reaches over the edge counts only what is inside. `norm` is 1, 2 (the default; values squared)
    or a function from a tensor to one of the same shape. What is masked already counts as zero.
    """

    def __init__(
        self,
        sparsity_level: float = 0.5,
        sparse_block_shape: BlockShape = (1, 4),
        zeros_per_block: int | None = None,
        norm: Callable[[Tensor], Tensor] | int | None = None,
    ) -> None:
        norm = 2 if norm is None else norm
        if not callable(norm) and norm not in _NORMS:
            raise SparsifierNotImplementedError(f"WeightNormSparsifier: no norm {norm!r}; give 1, 2 or a function")
        self.norm_fn: Callable[[Tensor], Tensor] = norm if callable(norm) else _NORMS[norm]
        _check_block("WeightNormSparsifier", sparse_block_shape)
        super().__init__(
            defaults={
                "sparsity_level": sparsity_level,
                "sparse_block_shape": sparse_block_shape,
                "zeros_per_block": math.prod(sparse_block_shape) if zeros_per_block is None else zeros_per_block,
            }
        )

    def _check(self, group: Group) -> None:
        name, block, zeros = group["tensor_fqn"], group["sparse_block_shape"], group["zeros_per_block"]
        sparsity_level(group)
        _check_block(name, block)
        if not isinstance(zeros, int) or not 0 <= zeros <= math.prod(block):
            raise SparsifierValueError(
                f"{name}: zeros_per_block is {zeros!r}; give an integer from 0 to {math.prod(block)}, "
                f"the number of elements in a block of {tuple(block)}"
            )

    def update_mask(  # type: ignore[override]
        self,
        module: nn.Module,
        tensor_name: str,
        sparsity_level: float,
        sparse_block_shape: BlockShape,
        zeros_per_block: int,
        **kwargs: Any,
    ) -> None:
        """Mask the blocks of one matrix; see the class."""
        mask = mask_of(module, tensor_name)
        if sparsity_level <= 0 or zeros_per_block == 0:
            mask.fill_(1)
            return
        score = self.norm_fn(whole(getattr(module, tensor_name)))
        keep = block_mask(score, float(sparsity_level), sparse_block_shape)
        if zeros_per_block < math.prod(sparse_block_shape):
            keep |= entry_mask(score, sparse_block_shape, zeros_per_block)
        mask.copy_(keep)


def block_mask(score: Tensor, level: float, block: BlockShape) -> Tensor:
    """
    >>> block_mask(torch.tensor([[1.0, 1.0, 5.0, 5.0]]), 0.5, (1, 2))
    tensor([[False, False,  True,  True]])

    False on the fraction `level` of the blocks, those with the smallest mean.
    """
    means = F.avg_pool2d(score[None, None], block, stride=block, ceil_mode=True)[0, 0]
    drop = means.numel() if level >= 1 else min(round(level * means.numel()), means.numel() - 1)
    smallest = means.flatten().topk(drop, largest=False, sorted=False).indices
    keep = torch.ones_like(means, dtype=torch.bool)
    keep.view(-1)[smallest] = False
    keep = keep.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return keep[: score.shape[0], : score.shape[1]]


def entry_mask(score: Tensor, block: BlockShape, zeros: int) -> Tensor:
    """
    >>> entry_mask(torch.tensor([[1.0, 2.0, 6.0, 5.0]]), (1, 2), 1)
    tensor([[False,  True,  True, False]])

    False on the `zeros` smallest entries of every block.
    """
    (height, width), (rows, cols) = score.shape, block
    # topk ranks NaN above every number, so what is outside the matrix is taken last.
    padded = F.pad(score, (0, -width % cols, 0, -height % rows), value=math.nan)
    tiles = padded.unflatten(1, (-1, cols)).unflatten(0, (-1, rows)).transpose(1, 2)
    smallest = tiles.flatten(2).topk(zeros, dim=2, largest=False, sorted=False).indices
    keep = torch.ones_like(tiles.flatten(2), dtype=torch.bool).scatter_(2, smallest, False)
    return keep.view(tiles.shape).transpose(1, 2).reshape(padded.shape)[:height, :width]


def _check_block(where: str, block: Any) -> None:
    if not (isinstance(block, tuple | list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise SparsifierValueError(f"{where}: sparse_block_shape is {block!r}; give two positive integers (rows, cols)")


class NearlyDiagonalSparsifier(_MatrixSparsifier):
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
