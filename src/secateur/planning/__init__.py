"""Deciding what stays: targets, costs, and the plan as a value."""

from secateur.planning.plans import AxisPlan, Change, Plan, plan
from secateur.planning.targets import Bytes, Macs, Params, Ratio, Zeros

__all__ = ["AxisPlan", "Bytes", "Change", "Macs", "Params", "Plan", "Ratio", "Zeros", "plan"]
