"""What of collectives lies under compute: the arithmetic of spans, and traces as JAX's profiler writes them."""

import gzip
import json
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from jax.sharding import PartitionSpec
from typer.testing import CliRunner, Result

from k3jax.bench.overlap import Activity, Overlap, collective_name, covered, overlaps, read_trace, union
from sharding import make_mesh

SCRIPT_NAMES = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "overlap.py"))
GPU = {0: "/device:GPU:0", 1: "/device:GPU:1", 9: "/host:CPU"}


def spans(*pairs: tuple[int, int]) -> list[tuple[float, float]]:
    return [(float(start), float(end)) for start, end in pairs]


def test_spans_are_joined() -> None:
    assert union([]) == []
    assert union(spans((5, 6), (0, 2), (2, 3), (1, 2), (4, 4))) == [(0, 3), (5, 6)]


@pytest.mark.parametrize(
    ("mine", "by", "expected"),
    [
        ([], [(0, 9)], (0, 0)),
        ([(0, 10)], [], (10, 0)),
        ([(0, 10)], [(2, 4), (3, 5), (8, 20)], (10, 5)),
        ([(0, 4), (2, 6)], [(1, 3)], (6, 2)),  # what two streams do at once counts once
        ([(0, 1), (2, 3), (4, 5)], [(0, 5)], (3, 3)),
        ([(1, 2)], [(0, 1), (2, 3)], (1, 0)),
    ],
)
def test_what_is_covered(mine: Any, by: Any, expected: tuple[int, int]) -> None:
    assert covered(spans(*mine), spans(*by)) == expected


def test_covered_moment_by_moment() -> None:
    """Against one mark for every moment, on random spans of whole microseconds."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        both = [spans(*((int(a), int(a + n)) for a, n in rng.integers(0, 40, (6, 2)))) for _ in range(2)]
        mine, cover = (np.array([any(s <= t < e for s, e in part) for t in range(100)]) for part in both)
        assert covered(*both) == (mine.sum(), (mine & cover).sum())


def test_a_device_hides_only_its_own() -> None:
    activities = [
        Activity("0", None, (0.0, 10.0)),
        Activity("0", "all-gather.1", (5.0, 15.0)),
        Activity("1", "all-gather.1", (5.0, 15.0)),
        Activity("0", "reduce-scatter", (20.0, 22.0)),
        Activity("0", "all-gather.1", (30.0, 31.0)),
    ]
    assert overlaps(activities) == [Overlap("all-gather.1", 3, 21.0, 5.0), Overlap("reduce-scatter", 1, 2.0, 0.0)]
    assert overlaps(activities)[0].exposed_us == 16
    assert overlaps([]) == []


@pytest.mark.parametrize(
    ("event", "instruction", "name"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-gather-start.2", "all-gather.2"),
        ("ncclDevKernel_SendRecv(args)", None, "ncclDevKernel_SendRecv"),
        ("RaggedAllToAllKernel", "ragged_all_to_all.7", "ragged-all-to-all.7"),
        ("all_gather.3", "all_gather.3", "all-gather.3"),
        ("MemcpyD2D", "collective-permute-start", "collective-permute"),
        ("loop_all_gather_fusion", "loop_all_gather_fusion", None),
        ("gemm_fusion_dot_3", "gemm_fusion_dot.3", None),
        ("MemcpyD2D", None, None),
    ],
)
def test_which_events_are_collectives(event: str, instruction: str | None, name: str | None) -> None:
    assert collective_name(event, {} if instruction is None else {"hlo_op": instruction}) == name


def written(path: Path, events: list[dict[str, Any]], processes: dict[int, str]) -> Path:
    """A trace in which thread 1 of each process is a stream, and thread 2 the profiler's own summary of it."""
    named = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}} for pid, name in processes.items()]
    for pid in processes:
        for tid, thread in ((1, "Stream #14(Compute)"), (2, "XLA Ops")):
            named.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}})
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"displayTimeUnit": "ns", "traceEvents": [*named, *events]}, file)
    return path


def event(pid: int, tid: int, start: float, duration: float, name: str, **arguments: str) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": duration, "name": name, "args": arguments}


EVENTS = [
    event(0, 1, 0, 10, "gemm", hlo_op="dot.1"),
    event(0, 1, 5, 10, "ncclDevKernel_AllGather(x)", hlo_op="all-gather-start"),
    event(1, 1, 5.5, 2, "ncclDevKernel_AllGather(x)", hlo_op="all-gather-start"),
    event(0, 2, 0, 100, "fusion", hlo_op="fusion.9"),
    event(9, 1, 0, 100, "PjitFunction(f)"),
    {"ph": "X", "pid": 0, "tid": 1, "ts": 50, "name": "of no duration"},
]


def script(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(SCRIPT_NAMES["main"])
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_trace_of_two_gpus(tmp_path: Path) -> None:
    path = written(tmp_path / "t.trace.json.gz", EVENTS, GPU)
    assert {activity.device for activity in read_trace(path)} == {"/device:GPU:0", "/device:GPU:1"}
    done = script("--trace", path, "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    (found,) = json.loads((tmp_path / "out.json").read_text())
    assert found == {"collective": "all-gather", "count": 2, "us": 12.0, "hidden_us": 5.0, "exposed_us": 7.0}
    first, last = done.stdout.splitlines()[1:]
    assert first.split() == ["all-gather", "2", "6.0", "41.7", "%", "3.5"]
    assert last.split()[0] == "all"


def test_files_that_say_nothing(tmp_path: Path) -> None:
    idle = written(tmp_path / "idle.trace.json.gz", EVENTS[4:5], {9: "/host:CPU"})
    with pytest.raises(ValueError, match="shows no device at work; it has /host:CPU"):
        read_trace(idle)
    (tmp_path / "no.gz").write_bytes(b"no")
    for path in (tmp_path / "no.gz", tmp_path / "absent.gz"):
        done = script("--trace", path)
        assert done.exit_code == 2
        assert "is no trace of JAX's profiler" in done.stderr


def test_a_profile_of_simulated_devices() -> None:
    """Each call of a program has its collectives on both devices."""
    mesh, by_rank = make_mesh(expert=2), PartitionSpec("expert")

    def body(x: jax.Array) -> jax.Array:
        everything = jax.lax.all_gather(x @ x.T, "expert", tiled=True)
        return jax.lax.psum_scatter(everything, "expert", tiled=True)

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=by_rank, out_specs=by_rank, check_vma=False))
    require_runs(SCRIPT_NAMES["profile"](lambda: program(jnp.ones((8, 64))), 3), 3 * 2)


@pytest.mark.slow
def test_a_layer_on_simulated_devices(tmp_path: Path) -> None:
    sizes = {"groups": 2, "picks": 2, "model": 64, "hidden": 32, "width": 32, "shared": 0, "tokens": 4, "calls": 3}
    done = script(*(f"--{name}={size}" for name, size in sizes.items()), "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert {one.pop("exposed_us") >= 0 for one in found} == {True}
    require_runs([Overlap(**one) for one in found], 3 * 2)


def require_runs(found: list[Overlap], count: int) -> None:
    assert {"all-gather", "reduce-scatter"} <= {one.collective.split(".")[0] for one in found}, found
    for one in found:
        assert one.count == count
        assert 0 <= one.hidden_us <= one.us
        assert one.us > 0
