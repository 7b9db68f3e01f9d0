"""The report: what happened to a model, as a page, as a picture."""

from secateur.errors import MissingPackageError
from secateur.report.html import write_html
from secateur.report.png import write_png
from secateur.report.story import Figure, LayerCost, ReportError, Shape, Story, Strand, Sweep, Table, scores_of
from secateur.report.zero_map import write_zeros

__all__ = ["Story", "Figure", "LayerCost", "Strand", "Shape", "Sweep", "Table", "scores_of", "write_html", "write_png"]
__all__ += ["ReportError", "MissingPackageError", "write_zeros"]
