"""Zeros in place: many weights of a model set to zero in one shot, from a little data and without training."""

from secateur.sparse.admm import ADMM
from secateur.sparse.distribution import ERK
from secateur.sparse.files import sparsify_checkpoint
from secateur.sparse.oneshot import sparsify
from secateur.sparse.patterns import NM, Block, Pattern, Unstructured
from secateur.sparse.problem import Method, Problem
from secateur.sparse.report import Agreement, SparseLayer, Sparsified
from secateur.sparse.ria import RIA
from secateur.sparse.sparsegpt import SparseGPT
from secateur.sparse.spread import Prices, Spread

__all__ = [
    "ADMM",
    "ERK",
    "Prices",
    "Spread",
    "Agreement",
    "Block",
    "Method",
    "NM",
    "Pattern",
    "Problem",
    "RIA",
    "SparseGPT",
    "SparseLayer",
]
__all__ += ["Sparsified", "Unstructured", "sparsify", "sparsify_checkpoint"]
