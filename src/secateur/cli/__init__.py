"""The command `secateur`: parsing and printing. What it does is in the library."""

from secateur.cli.main import main

__all__ = ["main"]
