"""Deciding what stays: targets, costs, and the plan as a value."""

from secateur.plan.plan import AxisPlan, Change, Plan, plan
from secateur.plan.targets import Bytes, Macs, Params, Ratio, Zeros

__all__ = ["AxisPlan", "Bytes", "Change", "Macs", "Params", "Plan", "Ratio", "Zeros", "plan"]
