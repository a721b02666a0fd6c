"""Turns the enforced annotations off for a moment: outside the tests a caller meets the functions' own messages."""

import contextlib
from collections.abc import Iterator

import jaxtyping


@contextlib.contextmanager
def unchecked_annotations() -> Iterator[None]:
    """Within it wrong dtypes and shapes reach the functions, as they do in a user's program."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
