"""Which tensors a checkpoint must hold: a total and exact table, from the config and from how each weight is stored.

Pure functions of names; no file is touched. A weight `stem` (such as `block_sparse_moe.experts.7.w1`) is stored either
plain, as `stem.weight`, or packed in MXFP4, as `stem.weight_packed` and `stem.weight_scale`. The names that are present
decide, never the config: its `ignore` list does not even name the latent projections, which the release keeps plain.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from k3jax.config import K3Config

PLAIN_DTYPES = ("BF16", "F16", "F32")
BLOCK = 32  # Elements that share a scale byte.
MAX_TENSORS = 4_000_000  # Eight times the release's; a config that asks for more is refused, not listed.

MOE = "block_sparse_moe."
EXPERTS = MOE + "experts."
_NAME = re.compile(r"(?:language_model\.)?model\.layers\.(0|[1-9][0-9]{0,6})\.(.+)", re.DOTALL)
_LAYER_SCOPE = (
    ("attention", re.compile(r"self_attn\..+", re.DOTALL)),
    ("norm", re.compile(r"(input|post_attention)_layernorm\.weight")),
    ("attention residual", re.compile(r"(mlp|self_attention)_res_(norm|proj)\.weight")),
)
_MODEL_SCOPE = (
    ("vision", re.compile(r"(vision_tower|mm_projector)\..+", re.DOTALL)),
    ("embedding", re.compile(r"(language_model\.)?(model\.embed_tokens|lm_head)\.weight")),
    ("norm", re.compile(r"(language_model\.)?model\.norm\.weight")),
    ("attention residual", re.compile(r"(language_model\.)?model\.output_attn_res_(norm|proj)\.weight")),
)


@dataclass(frozen=True)
class TensorSpec:
    """What one tensor may be: any of `dtypes` (safetensors' names), exactly `shape`."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LayerTable:
    """Every tensor of one layer's MLP, by suffix, and the `.weight` suffixes that are stored packed as well."""

    specs: dict[str, TensorSpec]
    stored_twice: tuple[str, ...]


@dataclass
class Inventory:
    """Every name of a checkpoint in exactly one place, and the names that ought to be there.

    Attributes:
        mlp: layer -> suffix -> full name, of the tensors that k3jax reads.
        out_of_scope: class -> names, of the parts of the model that k3jax does not compute.
        doubled: names that say the same thing twice (under both prefixes, or plain as well as packed).
        unknown: names that belong to nothing k3jax knows of.
        missing: suffixes by layer that the config asks for, and no name provides.
    """

    mlp: dict[int, dict[str, str]] = field(default_factory=dict)
    out_of_scope: dict[str, list[str]] = field(default_factory=dict)
    doubled: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    missing: dict[int, list[str]] = field(default_factory=dict)


def split_name(name: str) -> tuple[int, str] | None:
    """`(layer, suffix)` of a tensor of a decoder layer, under either prefix; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


def out_of_scope_class(suffix: str) -> str | None:
    """The class of a layer's tensor that k3jax does not read: attention, norm, attention residual. None for others."""
    return next((label for label, pattern in _LAYER_SCOPE if pattern.fullmatch(suffix)), None)


def layer_table(config: K3Config, layer: int, names: Collection[str]) -> LayerTable:
    """The tensors of `layer`'s MLP, given the suffixes `names` that are present (a set or a dict, for its speed).

    A weight of which nothing is present is expected as the other experts are stored, and else as the config says.

    Raises:
        ValueError: the model has no such layer, or its sizes cannot be packed.
    """
    require_countable(config)
    specs: dict[str, TensorSpec] = {}
    twice: list[str] = []
    experts_packed = _experts_packed(config, names)
    for stem, packable, plain, packed, scale in _weights(config, layer):
        is_plain = f"{stem}.weight" in names
        is_packed = f"{stem}.weight_packed" in names or f"{stem}.weight_scale" in names
        if is_plain and is_packed:
            twice.append(f"{stem}.weight")
        if is_packed or (packable and experts_packed and not is_plain):
            if packed is None or scale is None:
                raise ValueError(
                    f"{stem} must be packed, but its input width {plain.shape[1]} is no multiple of {BLOCK}"
                )
            specs[f"{stem}.weight_packed"] = packed
            specs[f"{stem}.weight_scale"] = scale
        else:
            specs[f"{stem}.weight"] = plain
    specs |= _vectors(config, layer)
    return LayerTable(specs, tuple(twice))


def classify(names: Iterable[str], config: K3Config) -> Inventory:
    """Gives every name of a checkpoint exactly one class, and lists what is missing."""
    require_countable(config)
    inventory = Inventory()
    found: dict[int, dict[str, list[str]]] = {}
    for name in names:
        located = split_name(name)
        if located is None or located[0] >= config.num_hidden_layers:
            label = None if located else _model_class(name)
        elif located[1].startswith(("mlp.", MOE)):
            found.setdefault(located[0], {}).setdefault(located[1], []).append(name)
            continue
        else:
            label = out_of_scope_class(located[1])
        if label is None:
            inventory.unknown.append(name)
        else:
            inventory.out_of_scope.setdefault(label, []).append(name)
    for layer in range(config.num_hidden_layers):
        _classify_layer(inventory, config, layer, found.get(layer, {}))
    return inventory


def _classify_layer(inventory: Inventory, config: K3Config, layer: int, found: dict[str, list[str]]) -> None:
    table = layer_table(config, layer, found)
    matched: dict[str, str] = {}
    for suffix, full_names in found.items():
        if len(full_names) > 1 or suffix in table.stored_twice:
            inventory.doubled.extend(full_names)
        elif suffix in table.specs:
            matched[suffix] = full_names[0]
        else:
            inventory.unknown.extend(full_names)
    if matched:
        inventory.mlp[layer] = matched
    missing = [suffix for suffix in table.specs if suffix not in found]
    if missing:
        inventory.missing[layer] = missing


def _model_class(name: str) -> str | None:
    return next((label for label, pattern in _MODEL_SCOPE if pattern.fullmatch(name)), None)


def require_countable(config: K3Config) -> None:
    """Raises ValueError for a config of more layers and experts than any loop over them should have to bear."""
    tensors = config.num_hidden_layers * (16 + 6 * (config.num_experts or 0))
    if tensors > MAX_TENSORS:
        raise ValueError(
            f"config: num_hidden_layers={config.num_hidden_layers} and num_experts={config.num_experts} ask for about "
            f"{tensors} tensors; at most {MAX_TENSORS} are accepted"
        )


def _experts_packed(config: K3Config, names: Iterable[str]) -> bool:
    stored = {name.rpartition(".")[2] for name in names if name.startswith(EXPERTS)}
    if "weight_packed" in stored or "weight_scale" in stored:
        return True
    return config.quantized and "weight" not in stored


_Weight = tuple[str, bool, TensorSpec, TensorSpec | None, TensorSpec | None]


def _weights(config: K3Config, layer: int) -> Iterator[_Weight]:
    """`(stem, may the loader take it packed, plain, packed, scale)` of each weight matrix of the layer."""
    hidden = config.hidden_size
    if not config.is_moe(layer):
        yield from _mlp("mlp.", hidden, config.intermediate_size)
        return
    assert config.num_experts is not None
    yield (f"{MOE}gate", False, *_stored(config.num_experts, hidden))
    if config.routed_expert_hidden_size is not None:
        yield (f"{MOE}routed_expert_down_proj", False, *_stored(config.latent_size, hidden))
        yield (f"{MOE}routed_expert_up_proj", False, *_stored(hidden, config.latent_size))
    if config.num_shared_experts:
        yield from _mlp(f"{MOE}shared_experts.", hidden, config.shared_intermediate_size)
    into, out = _stored(config.expert_width, config.latent_size), _stored(config.latent_size, config.expert_width)
    for expert in range(config.num_experts):  # The release's order within an expert: w1, w2, w3.
        yield (f"{EXPERTS}{expert}.w1", True, *into)
        yield (f"{EXPERTS}{expert}.w2", True, *out)
        yield (f"{EXPERTS}{expert}.w3", True, *into)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[_Weight]:
    yield (f"{prefix}gate_proj", False, *_stored(width, hidden))
    yield (f"{prefix}up_proj", False, *_stored(width, hidden))
    yield (f"{prefix}down_proj", False, *_stored(hidden, width))


def _stored(rows: int, columns: int) -> tuple[TensorSpec, TensorSpec | None, TensorSpec | None]:
    """How a matrix `[rows, columns]` may be stored: plain, or as codes with scales."""
    plain = TensorSpec(PLAIN_DTYPES, (rows, columns))
    if columns % BLOCK:
        return plain, None, None
    return plain, TensorSpec(("U8",), (rows, columns // 2)), TensorSpec(("U8",), (rows, columns // BLOCK))


def _vectors(config: K3Config, layer: int) -> dict[str, TensorSpec]:
    if not config.is_moe(layer):
        return {}
    assert config.num_experts is not None
    # Float32 and nothing less: biases that differ by 1e-4 choose different experts; bfloat16 cannot tell them apart.
    vectors = {f"{MOE}gate.e_score_correction_bias": TensorSpec(("F32",), (config.num_experts,))}
    if config.routed_expert_hidden_size is not None and config.latent_moe_use_norm:
        vectors[f"{MOE}routed_expert_norm.weight"] = TensorSpec(PLAIN_DTYPES, (config.latent_size,))
    return vectors
