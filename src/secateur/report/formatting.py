"""Numbers as people read them."""

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SMALL = ((1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


def digits(value: float, count: int = 3) -> str:
    """A number with so many significant digits, and never an exponent for what is near one.

    >>> digits(1.8141), digits(18.14), digits(0.01234), digits(1814.1), digits(0)
    ('1.81', '18.1', '0.0123', '1,814', '0')
    """
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (count - 1):
        return f"{value:,.0f}"
    text = f"{value:#.{count}g}"
    return text if "e" in text else text.rstrip(".")


def amount(value: float | None, unit: str = "") -> str:
    """A value with its unit.

    >>> amount(1_814_073_344), amount(46_800_000, "B"), amount(0.0123, "s"), amount(0.932, "%"), amount(None)
    ('1.81 G', '46.8 MB', '12.3 ms', '93.2 %', '–')
    """
    if value is None:
        return "–"
    if unit == "%":
        return f"{100 * value:.1f} %"
    if unit == "s":
        size, prefix = next((s for s in _SMALL if abs(value) >= s[0]), _SMALL[-1] if value else _SMALL[0])
        return f"{digits(value / size)} {prefix}s"
    if unit in ("", "B"):
        size, prefix = next((p for p in _PREFIXES if abs(value) >= p[0]), (1.0, ""))
        number = digits(value / size) if size > 1 or value != int(value) else f"{int(value)}"
        return f"{number} {prefix}{unit}".strip()
    return f"{digits(value)} {unit}"


def change(before: float | None, after: float | None, unit: str = "") -> str:
    """What became of a value, in words.

    >>> change(100, 50), change(0.932, 0.928, "%"), change(100, 100), change(None, 3)
    ('−50.0 %', '−0.4 points', 'unchanged', '')
    """
    if before is None or after is None:
        return ""
    if before == after:
        return "unchanged"
    if unit == "%":
        return signed(100 * (after - before), "points")
    return signed(100 * (after / before - 1), "%") if before else ""


def signed(value: float, unit: str) -> str:
    """A number with its sign; the minus is U+2212, not a hyphen.

    >>> signed(-50, "%"), signed(0.25, "points")
    ('−50.0 %', '+0.2 points')
    """
    return f"{'−' if value < 0 else '+'}{abs(value):.1f} {unit}"
