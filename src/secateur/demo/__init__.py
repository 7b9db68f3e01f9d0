"""The demo: train two small classifiers, cut them to half of their MACs, fine-tune them."""

from secateur.demo.job import DATA, DemoOutcome, Stage, run
from secateur.demo.round_trip import RoundTrip, round_trips

__all__ = ["DATA", "DemoOutcome", "RoundTrip", "Stage", "round_trips", "run"]
