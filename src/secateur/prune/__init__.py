"""Masks: every public name of `torch.nn.utils.prune`, faster, and safe to copy, save and fail with.

>>> import torch
>>> from secateur import prune
>>> layer = prune.l1_unstructured(torch.nn.Linear(4, 4), "weight", amount=0.5)
>>> sorted(layer.state_dict())
['bias', 'weight_mask', 'weight_orig']
"""

from secateur.prune.base import BasePruningMethod, PruningContainer
from secateur.prune.checks import (
    _compute_nparams_toprune,
    _validate_pruning_amount,
    _validate_pruning_amount_init,
    _validate_pruning_dim,
    _validate_structured_pruning,
)
from secateur.prune.global_ import global_unstructured
from secateur.prune.methods import (
    CustomFromMask,
    Identity,
    L1Unstructured,
    LnStructured,
    RandomStructured,
    RandomUnstructured,
    custom_from_mask,
    identity,
    l1_unstructured,
    ln_structured,
    random_structured,
    random_unstructured,
)
from secateur.prune.norms import _compute_norm
from secateur.prune.sites import is_pruned, remove

__all__ = ["BasePruningMethod", "PruningContainer"]
__all__ += ["Identity", "RandomUnstructured", "L1Unstructured", "RandomStructured", "LnStructured", "CustomFromMask"]
__all__ += ["identity", "random_unstructured", "l1_unstructured", "random_structured", "ln_structured"]
__all__ += ["custom_from_mask", "global_unstructured", "remove", "is_pruned"]
__all__ += ["_compute_nparams_toprune", "_compute_norm", "_validate_pruning_amount", "_validate_pruning_amount_init"]
__all__ += ["_validate_pruning_dim", "_validate_structured_pruning"]
