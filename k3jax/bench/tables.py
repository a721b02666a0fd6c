"""What the tables of `k3jax bench` have in common."""

from rich import box
from rich.table import Table
from rich.text import Text


def table(title: str, first: str) -> Table:
    """An empty one, with its first column."""
    made = Table(title=Text(title, "bold"), title_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    made.add_column(first, no_wrap=True)
    return made


def us(value: float) -> str:
    """Microseconds."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def short(value: float | None) -> str:
    """Three digits, as far as they are worth showing."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
