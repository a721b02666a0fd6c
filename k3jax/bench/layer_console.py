"""What `k3jax bench --op layer` prints: a line a layer, and with a breakdown a table of its stages."""

from collections.abc import Iterator

from rich.table import Table

from k3jax.bench.layer_cases import GEMM_STAGES
from k3jax.bench.layer_run import LayerResult
from k3jax.bench.tables import short, table, us


def layer_tables(results: list[LayerResult]) -> Iterator[Table]:
    """All layers, their routed paths beside a peer's, then the stages of each that has more than the two products."""
    case = results[0].case
    names = ", ".join(dict.fromkeys(result.implementation for result in results))
    made = table(f"layer, {names}: {case.groups} experts, {case.picks} picks, [tokens, {case.model}]", "tokens")
    for heading in ("us", "% floor", "% read", "routed us", "2 GEMMs", "routed/GEMMs", "compile s"):
        made.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        made.add_row(
            _label(result),
            us(result.whole.timing.us),
            _share(result.whole.floor_us, result.whole.timing.us),
            short(100 * result.weight_share),
            us(result.routed.timing.us),
            us(result.gemm_us),
            f"{result.routed_ratio:.2f}",
            short(result.compile_s),
        )
    yield made
    if any(result.peers.get("humming_routed_us") is not None for result in results):
        yield _beside(results)
    for result in results:
        if result.stages.keys() > set(GEMM_STAGES):
            yield _stages(result)


def _beside(results: list[LayerResult]) -> Table:
    """The routed path and Humming's, both from the first kernel to the last one's end."""
    made = table("routed path, beside Humming's", "tokens")
    for heading in ("routed us", "Humming's", "by events", "routed us / Humming's", "layout"):
        made.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        ours = result.routed.timing.us
        theirs, by_events = (result.peers[f"humming_routed_{name}"] for name in ("kernel_us", "us"))
        made.add_row(
            _label(result),
            us(ours),
            "-" if theirs is None else us(theirs),
            "-" if by_events is None else us(by_events),
            "-" if theirs is None else f"{ours / theirs:.2f}",
            result.peers["humming_routed_layout"] or "-",
        )
    return made


def _stages(result: LayerResult) -> Table:
    made = table(f"{_label(result).strip()}: {result.experts_hit} experts hit, {result.rows_max} rows at most", "stage")
    for heading in ("us", "min-max", "floor us", "% floor", "TB/s", "TFLOP/s"):
        made.add_column(heading, justify="right", no_wrap=True)
    whole = {"routed path": result.routed, "layer": result.whole}
    for name, stage in (result.stages | whole).items():
        timing, work = stage.timing, stage.work
        made.add_row(
            name,
            us(timing.us),
            f"{us(timing.us_min)}-{us(timing.us_max)}",
            us(stage.floor_us),
            _share(stage.floor_us, timing.us),
            short(work.bytes / timing.us / 1e6),
            short(work.flop / timing.us / 1e6) if work.flop else "-",
        )
    return made


def _label(result: LayerResult) -> str:
    return f"{result.case.tokens:>5} {result.case.recipe}"


def _share(floor: float, time: float) -> str:
    return short(100 * floor / time)
