"""The demo: train two small classifiers, cut them to half of their MACs, fine-tune them."""

from secateur.demo.job import DATA, DemoOutcome, Stage, run

__all__ = ["DATA", "DemoOutcome", "Stage", "run"]
