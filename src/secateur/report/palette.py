"""The colours of page and picture: safe for red-green colour blindness, with enough contrast to read."""

# name: (in the light theme, in the dark theme)
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


def colours(*, dark: bool) -> dict[str, str]:
    """The colours of one theme.

    >>> colours(dark=True)["paper"]
    '#14171b'
    """
    return {name: pair[dark] for name, pair in PALETTE.items()}
