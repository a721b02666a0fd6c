"""Resumable states of a run on disk, through orbax: whole or not at all, the last two kept.

A state is the master weights, the optimiser's state, how many batches were taken, the history so far, and what the run
was asked for; a folder whose run was asked for something else is refused.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from k3jax.healing.step import TrainState

_KEPT = 2


class StateFiles:
    """The states in one folder; made by `open_states`."""

    def __init__(self, manager: Any, run: dict[str, Any], folder: Path) -> None:
        self._manager = manager
        self._run = run
        self._folder = folder

    def save(self, state: TrainState, history: list[dict[str, float]]) -> None:
        """Adds a state under its step's number; it is there when this returns, whatever happens next."""
        from orbax import checkpoint as orbax

        arrays = orbax.args.StandardSave(_numbered(state))
        record = orbax.args.JsonSave({"run": self._run, "position": int(state.step), "history": history})
        self._manager.save(int(state.step), args=orbax.args.Composite(state=arrays, record=record))

    def latest(self, like: TrainState) -> tuple[TrainState, list[dict[str, float]]] | None:
        """The last state with its history, in the shapes and shardings of `like`; None where the folder has none.

        Raises:
            ValueError: the folder's run was asked for something else; the message names what.
        """
        from orbax import checkpoint as orbax

        step = self._manager.latest_step()
        if step is None:
            return None
        record = self._manager.restore(step, args=orbax.args.Composite(record=orbax.args.JsonRestore())).record
        differing = [
            f"{name}={self._run[name]!r}, there {record['run'].get(name)!r}"
            for name in self._run
            if record["run"].get(name) != self._run[name]
        ]
        if differing:
            raise ValueError(f"{self._folder} holds another run's states ({'; '.join(differing)}); name another folder")
        wanted = jax.tree.map(orbax.utils.to_shape_dtype_struct, _numbered(like))
        arguments = orbax.args.Composite(state=orbax.args.StandardRestore(wanted))
        arrays = self._manager.restore(step, args=arguments).state
        leaves = [arrays[name] for name in _numbered(like)]
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        assert int(state.step) == record["position"] == step, (state.step, record["position"], step)
        return state, record["history"]


@contextlib.contextmanager
def open_states(folder: Path | None, run: dict[str, Any]) -> Iterator[StateFiles | None]:
    """The states of `folder`, made if it is not there, for a run that is described by the JSON values `run`.

    None for None: a run that cannot be resumed.
    """
    if folder is None:
        yield None
        return
    from orbax import checkpoint as orbax  # Seconds of imports that only a resumable run needs.

    options = orbax.CheckpointManagerOptions(max_to_keep=_KEPT, enable_async_checkpointing=False)
    with orbax.CheckpointManager(folder.absolute(), options=options) as manager:
        yield StateFiles(manager, run, folder)


def _numbered(state: TrainState) -> dict[str, jax.Array | np.ndarray]:
    """Leaves by their number: independent of how optax names its state."""
    return {f"{number:04d}": leaf for number, leaf in enumerate(jax.tree.leaves(state))}
