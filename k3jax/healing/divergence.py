"""When a run of healing is to stop because it makes the layer worse."""

import math
from collections.abc import Sequence
from statistics import fmean

WINDOW = 20  # Steps: one batch alone may be a hard one, and the first steps of AdamW are its roughest.
TIMES = 2.0


def divergence(history: Sequence[dict[str, float]]) -> str | None:
    """What is wrong after the last step of `history`; None while nothing is.

    A number of that step is not finite, or the mean loss of the last `WINDOW` steps is over `TIMES` the first step's.
    """
    for name, value in history[-1].items():
        if not math.isfinite(value):
            return f"step {len(history)} has a {name} of {value}"
    if len(history) <= WINDOW:
        return None
    now, first, steps = fmean(record["loss"] for record in history[-WINDOW:]), history[0]["loss"], len(history)
    if now > TIMES * first:
        return f"the mean loss of steps {steps - WINDOW + 1} to {steps} is {now:.3g}, that of step 1 {first:.3g}"
    return None
