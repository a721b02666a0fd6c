"""The bytes of several layers, counted for progress; `progress.bytes_bar` adds their rate and the time left."""

import contextlib
from collections.abc import Callable, Iterator

Told = Callable[[int, int, str], None]
"""`(bytes done, bytes in all, what)`."""


class ByteCount:
    """Tells `told` how many of `total` bytes are done, over one layer after another, by all processes together."""

    def __init__(self, total: int, told: Told | None) -> None:
        self._total, self._told, self._before = total, told, 0

    @contextlib.contextmanager
    def layer(self, layer: int, nbytes: int) -> Iterator[Callable[[int, int], None]]:
        """`layer` has `nbytes`; within the block, its caller tells how much is done of what it has to do."""

        def tell(done: int, of: int) -> None:
            if self._told is not None:
                self._told(self._before + nbytes * done // of, self._total, f"layer {layer}")

        tell(0, 1)
        yield tell
        tell(1, 1)
        self._before += nbytes
