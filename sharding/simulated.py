"""CPU devices that stand for accelerators: what a mesh needs on a machine that has none."""

import jax


def simulate_devices(count: int) -> None:
    """Makes JAX show at least `count` CPU devices, where nothing else says how many. Accelerators are left alone.

    It must run before JAX is first used; after that it changes nothing, and a mesh that is too large raises.
    """
    if jax.config.jax_num_cpu_devices >= 0:  # by a caller or by JAX_NUM_CPU_DEVICES
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX has its devices already.
        return
