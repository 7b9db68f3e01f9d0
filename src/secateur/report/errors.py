"""What can go wrong with a report."""

from __future__ import annotations

from secateur.errors import SecateurError


class ReportError(SecateurError):
    """A story contradicts itself or its model, so no report can be made of it."""


class MissingPackageError(ReportError, ImportError):
    """A package that draws figures is not installed."""
