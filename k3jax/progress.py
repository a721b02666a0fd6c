"""The progress bar of long commands. It keeps out of files and pipes."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

Told = Callable[[int, int, str], None]


def progress_bar(console: Console) -> contextlib.AbstractContextManager[Told]:
    """A bar on `console`, driven by `(done, total, what)`; nothing at all where that is no terminal."""
    return _bar(console, MofNCompleteColumn(), TimeElapsedColumn())


def bytes_bar(console: Console) -> contextlib.AbstractContextManager[Told]:
    """The same for bytes, with their rate and the time that is left."""
    return _bar(console, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())


@contextlib.contextmanager
def _bar(console: Console, *numbers: ProgressColumn) -> Iterator[Told]:
    columns = (TextColumn("{task.description}"), BarColumn(), *numbers)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
