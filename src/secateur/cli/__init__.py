"""The command `secateur`: parsing and printing. What it does is in the library."""

from secateur.cli.program import main

__all__ = ["main"]
