"""Starting up on a GPU: how long a layer takes to compile at first, and in a process that finds it on disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from k3jax.bench import layer_calls
from k3jax.bench.layer_cases import LayerCase
from k3jax.compiling import compiler_options

pytestmark = pytest.mark.gpu

# In seconds: tracing and lowering, compiling, and the first call, of a layer whose weights are random.
PROGRAM = """
import json, sys, time
import jax
from k3jax.bench import layer_calls
from k3jax.bench.layer_cases import LayerCase
from k3jax.compiling import keep_compiled_programs

keep_compiled_programs()
case = LayerCase(sys.argv[1], int(sys.argv[2]), groups=16)
layer = layer_calls.make_layer(case, None)
x = layer_calls.make_tokens(case, layer)
start = time.perf_counter()
lowered = jax.jit(lambda layer, x: layer(x)).lower(layer, x)
middle = time.perf_counter()
program = lowered.compile()
end = time.perf_counter()
jax.block_until_ready(program(layer, x))
print(json.dumps([middle - start, end - middle, time.perf_counter() - end]))
"""


def seconds(recipe: str, tokens: int, cache: Path) -> tuple[float, float, float]:
    command = [sys.executable, "-c", PROGRAM, recipe, str(tokens)]
    done = subprocess.run(
        command, env=os.environ | {"K3JAX_CACHE": str(cache)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lower, compile_, first = json.loads(done.stdout.splitlines()[-1])
    return lower, compile_, first


@pytest.mark.parametrize(("recipe", "tokens"), [("w4a16", 1), ("w4a8_fp8", 1024)])
def test_a_layer_compiles_in_20_seconds_and_in_2_where_it_is_on_disk(recipe: str, tokens: int, tmp_path: Path) -> None:
    first, second = (seconds(recipe, tokens, tmp_path) for _ in range(2))
    print(recipe, tokens, "lowered, compiled, first call:", first, "and again:", second)
    assert sum(first) < 20
    assert second[1] < 2


@pytest.mark.parametrize(("recipe", "tokens"), [("w4a16", 1), ("w4a16", 64), ("w4a8_fp8", 8), ("w4a8_fp8", 1024)])
def test_kernels_side_by_side_give_the_same_bits_every_time(recipe: str, tokens: int) -> None:
    case = LayerCase(recipe, tokens, groups=16)
    layer = layer_calls.make_layer(case, None)
    x = layer_calls.make_tokens(case, layer)
    one_by_one = jax.jit(lambda layer, x: layer(x))(layer, x)
    side_by_side = jax.jit(lambda layer, x: layer(x), compiler_options=compiler_options()).lower(layer, x).compile()
    results = [side_by_side(layer, x) for _ in range(100)]
    assert all(bool(jnp.array_equal(result, one_by_one)) for result in results)
