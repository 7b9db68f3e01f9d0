"""Secateur makes PyTorch models smaller and faster by pruning.

>>> import torch
>>> from secateur import prune
>>> layer = prune.l1_unstructured(torch.nn.Linear(4, 4), "weight", amount=0.5)
>>> int(layer.weight_mask.sum())
8
"""

from secateur import ao, prune, schedule
from secateur.apply import apply
from secateur.compensate import Constants, LeastSquares, Statistics
from secateur.compress import Compressed, compress
from secateur.errors import (
    ApplyError,
    CalibrationError,
    FileError,
    PlanError,
    SecateurError,
    SecateurWarning,
    TraceError,
    VerifyError,
)
from secateur.importance import (
    FPGM,
    LAMP,
    Activation,
    BNScale,
    Context,
    Criterion,
    Global,
    Hessian,
    Isomorphic,
    Magnitude,
    PerAxis,
    Random,
    Reconstruction,
    Sum,
    Taylor,
    Wanda,
)
from secateur.io import load, save
from secateur.latency import Latency, compare, latency
from secateur.plan import AxisPlan, Bytes, Macs, Params, Plan, Ratio, Zeros, plan
from secateur.schedule import Distill, ScheduleError, iterate
from secateur.sweep import sweep
from secateur.trace import Axis, Blocked, Graph, Site, macs, trace

__all__ = [
    "prune",
    "ao",
    "trace",
    "plan",
    "apply",
    "compress",
    "macs",
    "latency",
    "compare",
    "save",
    "load",
    "schedule",
    "iterate",
    "sweep",
    "Distill",
    "Plan",
    "AxisPlan",
    "Compressed",
    "Bytes",
    "Latency",
    "Macs",
    "Params",
    "Ratio",
    "Zeros",
    "Constants",
    "LeastSquares",
    "Statistics",
    "Activation",
    "BNScale",
    "Context",
    "Criterion",
    "FPGM",
    "Hessian",
    "LAMP",
    "Magnitude",
    "Random",
    "Reconstruction",
    "Sum",
    "Taylor",
    "Wanda",
    "Global",
    "Isomorphic",
    "PerAxis",
    "Axis",
    "Blocked",
    "Graph",
    "Site",
    "ApplyError",
    "CalibrationError",
    "FileError",
    "PlanError",
    "ScheduleError",
    "SecateurError",
    "SecateurWarning",
    "TraceError",
    "VerifyError",
]
