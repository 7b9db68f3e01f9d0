"""Secateur makes PyTorch models smaller and faster by pruning.

>>> import torch
>>> from secateur import prune
from secateur.apply import apply
>>> layer = prune.l1_unstructured(torch.nn.Linear(4, 4), "weight", amount=0.5)
>>> int(layer.weight_mask.sum())
8
"""

from secateur import prune
from secateur.apply import apply
from secateur.errors import (
    ApplyError,
    FileError,
    PlanError,
    SecateurError,
    SecateurWarning,
    TraceError,
    VerifyError,
)
from secateur.importance import Magnitude
from secateur.plan.plan import AxisPlan, Plan, plan
from secateur.plan.targets import Ratio
from secateur.trace import Axis, Blocked, Graph, Site, trace

__all__ = [
    "prune",
    "trace",
    "plan",
    "apply",
    "Plan",
    "AxisPlan",
    "Ratio",
    "Magnitude",
    "Axis",
    "Blocked",
    "Graph",
    "Site",
    "ApplyError",
    "FileError",
    "PlanError",
    "SecateurError",
    "SecateurWarning",
    "TraceError",
    "VerifyError",
]
