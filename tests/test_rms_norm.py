"""RMSNorm against float64 with the official rounding points, and which rows the kernel takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked_annotations
from norm_truth import require_normed

from pallas_kernels import explain, rms_norm, select


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
def test_rows_are_rounded_normed_rounded_scaled_and_rounded(dtype: type) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 9, 72)) * np.exp(rng.uniform(-9, 9, (2, 9, 1))), dtype).at[0, 0].set(0)
    gain = jnp.asarray(rng.standard_normal(72), jnp.bfloat16)
    y = rms_norm(x, gain, eps=1e-5)
    require_normed(y, x, gain, 1e-5)
    assert not y[0, 0].any()


def test_a_gain_of_another_width() -> None:
    with unchecked_annotations(), pytest.raises(ValueError, match=r"weight has shape \(7,\), and must have .* \(8,\)"):
        rms_norm(jnp.ones((2, 8)), jnp.ones(7, jnp.bfloat16), eps=1e-5)


def test_on_hopper_sums_get_the_kernel_up_to_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "why_not_on_gpu", lambda name, _: None if name == "mosaic" else "absent")
    assert explain("rms_norm", x=jax.ShapeDtypeStruct((2, 4096), jnp.float32)).chosen == "mosaic"
    for x, reason in (
        (jax.ShapeDtypeStruct((2, 64), jnp.bfloat16), "x is bfloat16, and the kernel takes float32"),
        (jax.ShapeDtypeStruct((2, 60), jnp.float32), "rows of a multiple of 8"),
        (jax.ShapeDtypeStruct((2, 4104), jnp.float32), "rows of 4104 are longer than the 4096"),
    ):
        explained = explain("rms_norm", x=x)
        assert explained.chosen == "xla"
        assert reason in explained.others["mosaic"]
