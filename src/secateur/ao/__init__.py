"""Masks that are kept while training: a drop-in for `torch.ao.pruning` and its structured pruners.

>>> import torch
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
>>> sparsifier = WeightNormSparsifier(sparsity_level=0.5)
>>> sparsifier.prepare(model, None)
>>> sparsifier.step()
>>> sparsifier.squash_mask()
>>> [round((layer.weight == 0).float().mean().item(), 2) for layer in (model[0], model[2])]
[0.5, 0.5]
"""

from secateur.ao.config import fqn_to_module, get_arg_info_from_tensor_fqn, module_to_fqn
from secateur.ao.fpgm import FPGMPruner
from secateur.ao.gated import GRUSaliencyPruner, LSTMSaliencyPruner
from secateur.ao.matrices import NearlyDiagonalSparsifier, WeightNormSparsifier
from secateur.ao.parametrization import BiasHook, FakeSparsity, FakeStructuredSparsity, module_contains_param
from secateur.ao.rows import SaliencyPruner
from secateur.ao.scheduler import BaseScheduler, CubicSL, LambdaSL
from secateur.ao.sparsifier import BaseSparsifier
from secateur.ao.structured import BaseStructuredSparsifier

__all__ = ["BaseSparsifier", "WeightNormSparsifier", "NearlyDiagonalSparsifier", "FakeSparsity"]
__all__ += ["BaseScheduler", "LambdaSL", "CubicSL"]
__all__ += ["BaseStructuredSparsifier", "SaliencyPruner", "LSTMSaliencyPruner", "GRUSaliencyPruner", "FPGMPruner"]
__all__ += ["FakeStructuredSparsity", "BiasHook"]
__all__ += ["module_to_fqn", "fqn_to_module", "get_arg_info_from_tensor_fqn", "module_contains_param"]
