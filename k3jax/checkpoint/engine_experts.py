"""Routed experts as other engines keep them in memory, brought back to the release's tensors.

An engine stacks a layer's experts, `w13 [E, 2F, ...]` and `w2 [E, L, ...]` (MXFP4 codes and scale bytes, as the release
packs them), and orders the rows of w13 as its kernel wants them:

    vllm      [w1; w3]                           the gate's rows, then up's
    trtllm    [w3; w1]                           up's rows, then the gate's
    deepgemm  w1[0:8], w3[0:8], w1[8:16], ...    8 rows of the gate and 8 of up in turn

Nothing in the arrays tells one order from another, and the wrong one gives a model that runs and is wrong. So the order
is named by whoever saved them, and a digest of the dequantised values must agree.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from k3jax.checkpoint.tensor_table import EXPERTS

LAYOUTS = ("vllm", "trtllm", "deepgemm")
ARRAYS = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
_INTERLEAVED = 8  # rows
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)

Bytes = NDArray[np.uint8]


def release_experts(arrays: Mapping[str, Bytes], *, layout: str, digest: str) -> dict[str, Bytes]:
    """The release's tensors, by suffix, of the experts in `arrays`, whose names are vLLM's (`ARRAYS`).

    Args:
        layout: one of `LAYOUTS`. digest: what `experts_digest` gives for the release's tensors of this layer.

    Raises:
        ValueError: an array is missing, is not uint8, or has a shape that does not belong to the others'; the layout is
            unknown; or the values are not those of the digest.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"{layout=} is not one of {', '.join(LAYOUTS)}")
    _check(arrays)
    tensors: dict[str, Bytes] = {}
    for kind, suffix in (("weight", "weight_packed"), ("weight_scale", "weight_scale")):
        gate, up = _gate_and_up(arrays[f"w13_{kind}"], layout)
        for expert in range(len(gate)):
            stem = f"{EXPERTS}{expert}"
            tensors[f"{stem}.w1.{suffix}"] = gate[expert]
            tensors[f"{stem}.w2.{suffix}"] = arrays[f"w2_{kind}"][expert]
            tensors[f"{stem}.w3.{suffix}"] = up[expert]
    found = experts_digest(tensors)
    if found != digest:
        raise ValueError(
            f"the experts' values have the digest {found}, not {digest}: they are another model's, another layer's, or "
            f"not in {layout}'s order"
        )
    return tensors


def experts_digest(tensors: Mapping[str, Bytes]) -> str:
    """The SHA-256 of a layer's dequantised expert values: float32, expert by expert, w1, w2, w3; -0 counts as 0.

    It depends on the values alone: codes and scales that encode the same numbers otherwise have the same digest.
    """
    sha = hashlib.sha256()
    count = sum(name.startswith(EXPERTS) and name.endswith(".w1.weight_packed") for name in tensors)
    for expert in range(count):
        for part in ("w1", "w2", "w3"):
            stem = f"{EXPERTS}{expert}.{part}"
            values = _dequantized(tensors[f"{stem}.weight_packed"], tensors[f"{stem}.weight_scale"])
            sha.update(np.ascontiguousarray(values + np.float32(0)).view(np.uint8).data)
    return sha.hexdigest()


def _gate_and_up(w13: Bytes, layout: str) -> tuple[Bytes, Bytes]:
    """`[E, F, columns]` of w1 and of w3."""
    experts, rows, columns = w13.shape
    if layout == "deepgemm":
        turns = w13.reshape(experts, rows // (2 * _INTERLEAVED), 2, _INTERLEAVED, columns)
        return turns[:, :, 0].reshape(experts, -1, columns), turns[:, :, 1].reshape(experts, -1, columns)
    first, second = w13[:, : rows // 2], w13[:, rows // 2 :]
    return (first, second) if layout == "vllm" else (second, first)


def _dequantized(codes: Bytes, scales: Bytes) -> NDArray[np.float32]:
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*scales.shape, 32)
    values = np.where(nibbles & 8, -1, 1).astype(np.float32) * _MAGNITUDES[nibbles & 7]
    powers = np.where(scales == 255, np.float32(np.nan), np.ldexp(np.float32(1), scales.astype(np.int32) - 127))
    return (values * powers[..., None]).astype(np.float32)


def _check(arrays: Mapping[str, Bytes]) -> None:
    for name in ARRAYS:
        if name not in arrays:
            raise ValueError(f"{name} is missing; an engine's experts are {', '.join(ARRAYS)}")
        if arrays[name].dtype != np.uint8 or arrays[name].ndim != 3:
            raise ValueError(f"{name} must be uint8 [E, rows, columns], not {arrays[name].dtype}{arrays[name].shape}")
    experts, rows, half = arrays["w13_weight"].shape
    latent, width = 2 * half, rows // 2
    expected = {
        "w13_weight": (experts, 2 * width, latent // 2),
        "w13_weight_scale": (experts, 2 * width, latent // 32),
        "w2_weight": (experts, latent, width // 2),
        "w2_weight_scale": (experts, latent, width // 32),
    }
    for name, shape in expected.items():
        if arrays[name].shape != shape or width % 32 or latent % 32:
            raise ValueError(
                f"{name} has shape {arrays[name].shape}, but w13_weight {arrays['w13_weight'].shape} asks for {shape}, "
                "in multiples of 32 elements"
            )
