"""The main job on embedded data: train two small classifiers, cut them to half, let them recover."""

from secateur.demo.run import DATA, Outcome, Stage, run

__all__ = ["DATA", "Outcome", "Stage", "run"]
