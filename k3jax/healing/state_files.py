"""Resumable states of a run on disk, through orbax: whole or not at all, the last two and the best one kept.

A state is the master weights, the optimiser's state, how many batches were taken, the history so far, and what the run
was asked for; a folder whose run was asked for something else is refused.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from k3jax.healing.step import TrainState

_KEPT = 2


class StateFiles:
    """The states in one folder; made by `open_states`."""

    def __init__(self, manager: Any, run: dict[str, Any], folder: Path) -> None:
        self._manager = manager
        self._run = run
        self._folder = folder

    def save(self, state: TrainState, history: list[dict[str, float]], loss: float) -> None:
        """Adds a state under its step's number; it is there when this returns, whatever happens next.

        The state with the smallest `loss` is the best one.
        """
        from orbax import checkpoint as orbax

        arrays = orbax.args.StandardSave(_numbered(state))
        record = orbax.args.JsonSave({"run": self._run, "position": int(state.step), "history": history})
        arguments = orbax.args.Composite(state=arrays, record=record)
        self._manager.save(int(state.step), args=arguments, metrics={"loss": loss})

    @property
    def last(self) -> int | None:
        """The step of the last state; None where the folder has none."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """The step of the best state; None where the folder has none."""
        return self._manager.best_step()

    def read(self, step: int, like: TrainState) -> tuple[TrainState, list[dict[str, float]]]:
        """The state of `step` with its history, in the shapes and shardings of `like`.

        Raises:
            ValueError: the folder's run was asked for something else; the message names what.
        """
        from orbax import checkpoint as orbax

        record = self._manager.restore(step, args=orbax.args.Composite(record=orbax.args.JsonRestore())).record
        differing = [
            f"{name}={self._run[name]!r}, there {record['run'].get(name)!r}"
            for name in self._run
            if record["run"].get(name) != self._run[name]
        ]
        if differing:
            raise ValueError(f"{self._folder} holds another run's states ({'; '.join(differing)}); name another folder")
        arguments = orbax.args.Composite(state=orbax.args.StandardRestore(_numbered(like)))
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
    from orbax.checkpoint import checkpoint_managers as policies

    kept = [policies.LatestN(_KEPT), policies.BestN(get_metric_fn=_goodness, n=1)]
    options = orbax.CheckpointManagerOptions(
        best_fn=_goodness,
        preservation_policy=policies.AnyPreservationPolicy(kept),
        enable_async_checkpointing=False,
    )
    with orbax.CheckpointManager(folder.absolute(), options=options) as manager:
        yield StateFiles(manager, run, folder)


def _goodness(metrics: dict[str, float]) -> float:
    return -metrics["loss"]


def _numbered(state: TrainState) -> dict[str, Any]:
    """Leaves by their number: independent of how optax names its state."""
    return {f"{number:04d}": leaf for number, leaf in enumerate(jax.tree.leaves(state))}
