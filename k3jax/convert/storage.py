"""One layer's arrays to and from disk, by orbax."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

ARRAYS = "arrays"


def save(folder: Path, arrays: Mapping[str, jax.Array]) -> None:
    """Writes `arrays` to `folder / ARRAYS`, uncompressed: packed codes do not get smaller.

    Raises:
        OSError: they could not be written.
    """
    try:
        with _unlogged(), _checkpointer() as checkpointer:
            checkpointer.save((folder / ARRAYS).absolute(), args=_args().PyTreeSave(dict(arrays)))
    except Exception as error:  # orbax and what it stands on raise many kinds, for a full disk too
        raise OSError(f"{folder.parent} could not be written: {error}") from error


def restore(folder: Path, described: Mapping[str, Any], shardings: Mapping[str, jax.sharding.Sharding]) -> Any:
    """The arrays that `described` names, each with its sharding.

    Raises:
        ValueError: they cannot be read back.
    """
    from orbax.checkpoint import checkpoint_utils

    wanted = {
        name: jax.ShapeDtypeStruct(tuple(array["shape"]), array["dtype"], sharding=shardings[name])
        for name, array in described.items()
    }
    try:
        with _unlogged(), _checkpointer() as checkpointer:
            restore_args = checkpoint_utils.construct_restore_args(wanted)
            arguments = _args().PyTreeRestore(item=wanted, restore_args=restore_args)
            return checkpointer.restore((folder / ARRAYS).absolute(), args=arguments)
    except Exception as error:
        raise ValueError(f"{folder} cannot be read back: {error}; remove it and convert again") from error


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Keeps orbax from logging the traceback of an error that is raised and told in words as well."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp  # a second of imports that nothing else needs

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _args() -> Any:
    import orbax.checkpoint as ocp

    return ocp.args
