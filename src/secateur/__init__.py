"""Secateur makes PyTorch models smaller and faster by pruning.

>>> import torch
>>> from secateur import prune
>>> layer = prune.l1_unstructured(torch.nn.Linear(4, 4), "weight", amount=0.5)
>>> int(layer.weight_mask.sum())
8
"""

from secateur import ao, prune, schedule, training
from secateur.calibrate import Data
from secateur.compensate import Constants, LeastSquares, Outcome, Statistics
from secateur.errors import (
    ApplyError,
    CalibrationError,
    FileError,
    PlanError,
    SecateurError,
    SecateurWarning,
    TraceError,
    TrainingError,
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
from secateur.io import compress_checkpoint, cut_checkpoint, load, save
from secateur.pipeline.apply import apply, outcome
from secateur.pipeline.compress import Compressed, compress
from secateur.pipeline.depth import ResidualBlock, blocks, plan_depth
from secateur.pipeline.experts import plan_experts
from secateur.pipeline.factor import factor
from secateur.pipeline.rotations import Rotation, rotate, rotations
from secateur.pipeline.sweep import sweep
from secateur.planning import AxisPlan, Bytes, Macs, Params, Plan, Ratio, Zeros, plan
from secateur.schedule import Distill, ScheduleError, iterate
from secateur.sparse import (
    ADMM,
    ERK,
    NM,
    RIA,
    Block,
    Prices,
    SparseGPT,
    Sparsified,
    Unstructured,
    sparsify,
    sparsify_checkpoint,
)
from secateur.timing import Latency, compare, latency
from secateur.tracing import Axis, Blocked, Examples, Graph, Site, Unseen, macs, trace
from secateur.training import Penalty, Recovered, recover

__all__ = ["prune", "ao", "schedule", "training"]
__all__ += ["trace", "plan", "apply", "compress", "iterate", "sparsify", "sweep", "outcome", "recover", "Penalty"]
__all__ += ["rotate", "rotations", "factor", "blocks", "plan_depth", "plan_experts"]
__all__ += ["macs", "latency", "compare", "save", "load", "cut_checkpoint", "compress_checkpoint"]
__all__ += ["sparsify_checkpoint"]
__all__ += [
    "Examples",
    "Graph",
    "Axis",
    "Blocked",
    "Site",
    "Unseen",
    "Plan",
    "AxisPlan",
    "Compressed",
    "Outcome",
    "Distill",
    "Recovered",
    "Data",
    "ResidualBlock",
    "Rotation",
]
__all__ += ["Bytes", "Latency", "Macs", "Params", "Ratio", "Zeros", "Global", "Isomorphic", "PerAxis"]
__all__ += ["Constants", "LeastSquares", "Statistics"]
__all__ += ["Activation", "BNScale", "FPGM", "Hessian", "LAMP", "Magnitude", "Random", "Reconstruction"]
__all__ += ["Taylor", "Wanda"]
__all__ += ["ADMM", "Block", "ERK", "NM", "Prices", "RIA", "SparseGPT", "Sparsified", "Unstructured"]
__all__ += ["Context", "Criterion", "Sum"]
__all__ += ["SecateurError", "SecateurWarning", "TraceError", "PlanError", "ApplyError", "VerifyError"]
__all__ += ["CalibrationError", "FileError", "ScheduleError", "TrainingError"]
