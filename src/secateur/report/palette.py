"""The colours of page and picture: told apart by people who see no red or no green, and readable on their ground."""

from __future__ import annotations

# name: (on a light ground, on a dark ground)
PALETTE = {
    "paper": ("#fbfbf9", "#14171b"),
    "card": ("#ffffff", "#1b1f25"),
    "line": ("#e2e2dc", "#30363e"),
    "ink": ("#1c2024", "#e7e9ec"),
    "soft": ("#5b6168", "#a4acb6"),
    "kept": ("#0067a5", "#58b4ea"),
    "gone": ("#d55e00", "#f0a030"),
    "gone-ink": ("#a84a00", "#f0a030"),
    "before": ("#c9cdd2", "#4a525c"),
    "glow": ("#fff0d6", "#4a3410"),
}


def style() -> str:
    """The colours as CSS variables that follow the reader's theme.

    >>> style()[:42]
    ':root{--paper:light-dark(#fbfbf9,#14171b);'
    """
    return f":root{{{''.join(f'--{name}:light-dark({light},{dark});' for name, (light, dark) in PALETTE.items())}}}"


def colours(*, dark: bool) -> dict[str, str]:
    """The colours on one ground.

    >>> colours(dark=True)["paper"]
    '#14171b'
    """
    return {name: pair[dark] for name, pair in PALETTE.items()}
