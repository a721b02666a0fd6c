"""A step of healing at the release's widths compiled for one H200 that is not there: what it holds in memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from annotations import unchecked_annotations
from jax.sharding import Mesh

from k3jax import MoE
from k3jax.healing import memory
from k3jax.healing.loss import LossWeights, Power
from k3jax.healing.optimizer import Schedule
from k3jax.healing.step import make_step, split, start
from k3jax.healing.synthetic import real_widths
from k3jax.moe_arrays import MoEArrays

TOKENS = 2048


def test_a_step_needs_less_than_the_stated_function(hopper: Mesh, choose_for: Callable[[Mesh], None]) -> None:
    """112 experts in the kernel's layout: frozen bytes + 16 bytes a trained parameter + `activation_bytes`."""
    choose_for(hopper)
    config = real_widths(112)
    with unchecked_annotations(), jax.set_mesh(hopper):
        layer = MoE(config, implementation="mosaic", arrays=MoEArrays.abstract(config, packed=True))
        student, params, frozen = split(layer)
        optimizer = Schedule(steps=20).optimizer()
        state = jax.eval_shape(lambda params: start(params, optimizer), params)
        widths = {"x": config.hidden_size, "output": config.hidden_size, "normed_latent": config.latent_size}
        batch = {name: jax.ShapeDtypeStruct((1, TOKENS, width), jnp.bfloat16) for name, width in widths.items()}
        step: Any = make_step(student, optimizer, Power(1.0, 1.0), LossWeights())
        memory_of = step.trace(state, frozen, batch).lower(lowering_platforms=("cuda",)).compile().memory_analysis()
    assert memory_of is not None
    needs = memory_of.argument_size_in_bytes + memory_of.temp_size_in_bytes
    needs += memory_of.output_size_in_bytes - memory_of.alias_size_in_bytes
    frozen_bytes, trained_bytes = memory.state_bytes(layer)
    bound = memory.activation_bytes(config, TOKENS, trained_bytes // memory.BYTES_A_PARAMETER)
    print(f"frozen {frozen_bytes}, trained {trained_bytes}, step {needs}, activations {bound}")
    assert memory_of.alias_size_in_bytes >= 3 * trained_bytes // 4, "the old state's memory is taken over"
    assert needs < frozen_bytes + trained_bytes + bound
