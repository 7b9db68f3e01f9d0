"""Secateur makes PyTorch models smaller and faster by pruning.

>>> import torch
>>> from secateur import prune
>>> layer = prune.l1_unstructured(torch.nn.Linear(4, 4), "weight", amount=0.5)
>>> int(layer.weight_mask.sum())
8
"""

from secateur import ao, prune
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
from secateur.importance import FPGM, BNScale, Context, Magnitude, Random
from secateur.io import load, save
from secateur.plan import AxisPlan, Macs, Params, Plan, Ratio, Zeros, plan
from secateur.trace import Axis, Blocked, Graph, Site, macs, trace

__all__ = [
    "prune",
    "ao",
    "trace",
    "plan",
    "apply",
    "macs",
    "save",
    "load",
    "Plan",
    "AxisPlan",
    "Macs",
    "Params",
    "Ratio",
    "Zeros",
    "BNScale",
    "Context",
    "FPGM",
    "Magnitude",
    "Random",
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
