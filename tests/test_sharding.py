"""Meshes and axis rules: sizes, collisions and impossible splits, before anything is loaded."""

import jax
import pytest
from annotations import unchecked_annotations

from sharding import AxisRules, MeshSizes, choose_transport, local_shape, make_mesh, mesh_axes, parse_mesh


def test_a_mesh_has_all_three_axes() -> None:
    mesh = make_mesh(data=2, expert=2, tensor=2)
    assert dict(mesh.shape) == {"data": 2, "expert": 2, "tensor": 2}
    assert make_mesh().size == 1
    assert list(make_mesh(expert=2, devices=jax.devices()[4:]).devices.flat) == jax.devices()[4:6]


def test_a_mesh_larger_than_the_devices() -> None:
    with pytest.raises(ValueError, match="needs 16 devices; there are 8"):
        make_mesh(expert=16)


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_sizes_are_positive_integers(size: int) -> None:
    with unchecked_annotations(), pytest.raises(ValueError, match=f"expert={size}"):
        MeshSizes(expert=size)


def test_parsing() -> None:
    assert parse_mesh("expert=8, tensor=2") == MeshSizes(expert=8, tensor=2)
    assert parse_mesh("expert=8, tensor=2").devices == 16
    assert parse_mesh("") == MeshSizes()


@pytest.mark.parametrize("text", ["expert", "expert=", "expert=x", "experts=8", "expert=-8", "expert=8;tensor=2"])
def test_a_malformed_mesh(text: str) -> None:
    with pytest.raises(ValueError, match="must be AXIS=SIZE"):
        parse_mesh(text)


def test_a_mesh_with_an_axis_twice_or_empty() -> None:
    with pytest.raises(ValueError, match="'expert' is named twice"):
        parse_mesh("expert=8,expert=4")
    with pytest.raises(ValueError, match="expert=0"):
        parse_mesh("expert=0")


@pytest.mark.parametrize(
    ("shape", "axes", "local"),
    [
        ((896, 6144, 1792), ("expert", "expert_ff", None), (112, 3072, 1792)),
        ((6144, 7168), ("shared_ff", "hidden"), (384, 7168)),
        ((33792, 7168), ("mlp_ff", "hidden"), (2112, 7168)),
        ((3584, 7168), ("latent", "hidden"), (3584, 7168)),
    ],
)
def test_one_devices_part(shape: tuple[int, ...], axes: tuple[str | None, ...], local: tuple[int, ...]) -> None:
    assert local_shape(shape, axes, MeshSizes(data=3, expert=8, tensor=2)) == local


def test_impossible_layouts() -> None:
    sizes = MeshSizes(expert=5, tensor=2)
    with pytest.raises(ValueError, match=r"expert of size 896 cannot be split evenly over 5 devices .* such as 4$"):
        local_shape((896,), ("expert",), sizes)
    with pytest.raises(ValueError, match=r"collide.*'expert'"):
        mesh_axes(("expert", "shared_ff"), AxisRules())
    with pytest.raises(ValueError, match="'rows' is unknown"):
        mesh_axes(("rows",), AxisRules())
    with pytest.raises(ValueError, match="hidden names 'model'"):
        AxisRules(hidden=("model",))
    with pytest.raises(ValueError, match="different lengths"):
        local_shape((8, 8), ("expert",), sizes)


@pytest.mark.parametrize(
    ("ranks", "gpus_per_node", "chosen"),
    [(2, 8, "all_gather"), (8, 8, "all_gather"), (32, 8, "all_gather"), (16, 72, "all_gather"), (32, 72, "per_rank")],
)
def test_the_transport_of_the_release(ranks: int, gpus_per_node: int, chosen: str) -> None:
    assert choose_transport(ranks, 896, 16, gpus_per_node) == chosen
