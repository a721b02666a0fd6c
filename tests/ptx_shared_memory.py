"""Shared memory of the blocks that `ptx_interpreter` runs, and which lanes' accesses to it a barrier has ordered.

Time is counted in accesses and barriers. Of every word it is known when it was last written and when each warp of its
block last read it; of every warp, up to when it has seen what each warp of its block did. A barrier tells those who
meet there what any of them has seen, and nobody else. (Of a warp's own lanes, a store after a load is not noticed.)
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ptx_arithmetic import GARBAGE, Lanes

Places = NDArray[Any]  # [accesses, words of each]

_NOBODY = -1
_NO_LANE = 32  # but its whole warp


class SharedMemory:
    """So many words a block, at one address in all blocks."""

    def __init__(self, base: int, blocks: int, warps_a_block: int, words: int) -> None:
        self.base, self.block_words, self.warps_a_block = base, words, warps_a_block
        self.words = np.zeros(blocks * words, np.uint64)
        self.writer, self.writer_lane = np.full((2, len(self.words)), _NOBODY)
        self.write_time = np.zeros(len(self.words), int)
        self.read_time = np.zeros((len(self.words), warps_a_block), int)
        self.seen = np.zeros((blocks * warps_a_block, warps_a_block), int)
        self.time = 0

    def meet(self, warps: NDArray[Any]) -> None:
        """These warps of one block wait for one another; one warp alone: its lanes do."""
        self.time += 1
        known = self.seen[warps].max(0)
        known[warps % self.warps_a_block] = self.time
        self.seen[warps] = known

    def load(self, address: Lanes, width: int, on: Lanes) -> Lanes:
        """So many neighbouring words a lane, `[width, warps, 32]`; `GARBAGE` where another lane wrote one and no
        barrier came between."""
        warp, lane = np.nonzero(on)
        place = self._places(address[on], width, warp)
        assert (self.writer[place] != _NOBODY).all(), "a shared word is read that nobody wrote"
        loaded = np.zeros((width, *on.shape), np.uint64)
        unordered = self._written_meanwhile(place, warp, lane)
        loaded[:, on] = np.where(unordered, np.uint64(GARBAGE), self.words[place]).T
        self.time += 1
        self.read_time[place, (warp % self.warps_a_block)[:, None]] = self.time
        return loaded

    def store(self, address: Lanes, value: Lanes, on: Lanes) -> None:
        """A word a lane."""
        warp, lane = np.nonzero(on)
        self._put(self._places(address[on], 1, warp), value[on][:, None], warp, lane)

    def store_turned(self, address: Lanes, values: Sequence[Lanes], active: NDArray[Any]) -> None:
        """What `stmatrix.x4.trans` stores of whole warps: four matrices of 8 x 8 numbers of 16 bits.

        Lane t has of each matrix, in column t / 4, rows 2 * (t % 4) + {0, 1}. It has the address of row t % 8 of matrix
        t / 8.
        """
        warp = np.repeat(np.flatnonzero(active), 32)
        lanes = np.stack([value[active] for value in values], 1).reshape(-1, 4, 8, 4)  # [.., column, pair of rows]
        numbers = np.stack([lanes & np.uint64(0xFFFF), lanes >> np.uint64(16)], -1).reshape(-1, 4, 8, 8)
        rows = numbers.swapaxes(2, 3).reshape(-1, 8)
        pairs = rows[:, 0::2] | rows[:, 1::2] << np.uint64(16)
        place = self._places(address[active].reshape(-1), 4, warp)
        self._put(place, pairs, warp, np.full(warp.shape, _NO_LANE))

    def _places(self, address: NDArray[Any], width: int, warp: NDArray[Any]) -> Places:
        offset = address - self.base
        assert not (offset % (4 * width)).any(), "misaligned"
        assert ((offset >= 0) & (offset // 4 + width <= self.block_words)).all(), "beyond the end of shared memory"
        first = warp // self.warps_a_block * self.block_words + offset // 4
        return first[:, None] + np.arange(width)

    def _put(self, place: Places, values: NDArray[Any], warp: NDArray[Any], lane: NDArray[Any]) -> None:
        assert not self._written_meanwhile(place, warp, lane).any(), (
            "a lane stores to a shared word that another wrote, with no barrier between"
        )
        assert not self._read_meanwhile(place, warp).any(), (
            "a lane stores to a shared word that another warp read, with no barrier between"
        )
        assert len(np.unique(place)) == place.size, "two lanes store to a shared word at once"
        self.time += 1
        self.words[place], self.write_time[place] = values, self.time
        self.writer[place], self.writer_lane[place] = warp[:, None], lane[:, None]

    def _written_meanwhile(self, place: Places, warp: NDArray[Any], lane: NDArray[Any]) -> NDArray[Any]:
        """Whether another lane wrote a word, and none of the barriers that this one came to tells of it."""
        writer = self.writer[place]
        unseen = self.write_time[place] > self.seen[warp[:, None], writer % self.warps_a_block]
        return unseen & ((writer != warp[:, None]) | (self.writer_lane[place] != lane[:, None]))

    def _read_meanwhile(self, place: Places, warp: NDArray[Any]) -> NDArray[Any]:
        """Whether other warps of the block read a word, as above."""
        unseen = self.read_time[place] > self.seen[warp][:, None]
        return unseen & (np.arange(self.warps_a_block) != (warp % self.warps_a_block)[:, None, None])
