"""Which tensors a checkpoint must hold: a total and exact table, from the config and from how each weight is stored.

Pure functions of names; no file is touched. A weight `stem` (such as `block_sparse_moe.experts.7.w1`) is stored in one
of three ways:

    plain   stem.weight
    mxfp4   stem.weight_packed, stem.weight_scale                 a scale byte for each 32 elements
    nvfp4   stem.weight (U8), stem.weight_scale (e4m3, for each 16), stem.weight_scale_2, and perhaps stem.input_scale

The names that are present decide, never the config: its `ignore` list does not even name the latent projections, which
the release keeps plain and a derived checkpoint packs. The router is plain everywhere.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from k3jax.config import K3Config

PLAIN_DTYPES = ("BF16", "F16", "F32")
_BLOCKS = {"mxfp4": 32, "nvfp4": 16}  # Elements that share a scale.
MAX_TENSORS = 4_000_000  # Eight times the release's; a config that asks for more is refused, not listed.

MOE = "block_sparse_moe."
EXPERTS = MOE + "experts."
ROUTER = MOE + "gate"
_READ = ("mlp.", MOE)
_NOTHING: frozenset[str] = frozenset()
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
    """What one tensor may be: any of `dtypes` (safetensors' names), exactly `shape`; a scalar may have shape `[1]`."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]

    def allows(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor may have this shape."""
        return shape == self.shape or (self.shape == () and shape == (1,))


@dataclass(frozen=True)
class LayerTable:
    """Every tensor of one layer's MLP.

    Attributes:
        specs: by suffix. stored: of each weight's stem, "plain", "mxfp4" or "nvfp4".
        stored_twice: the `.weight` suffixes that are stored packed as well.
    """

    specs: dict[str, TensorSpec]
    stored: dict[str, str]
    stored_twice: tuple[str, ...]


@dataclass
class Inventory:
    """Every name of a checkpoint in exactly one place, and the names that ought to be there.

    Attributes:
        mlp: layer -> suffix -> full name, of the tensors that k3jax reads.
        tables: layer -> what the tensors of its MLP must be; layers that hold the same ones share a table.
        out_of_scope: class -> names, of the parts of the model that k3jax does not compute.
        doubled: names that say the same thing twice (under both prefixes, or plain as well as packed).
        unknown: names that belong to nothing k3jax knows of.
        missing: suffixes by layer that the config asks for, and no name provides.
    """

    mlp: dict[int, dict[str, str]] = field(default_factory=dict)
    tables: dict[int, LayerTable] = field(default_factory=dict)
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

    An expert's weight of which nothing is present is expected as the other experts are stored, and else as the config
    says; any other weight is then expected plain.

    Raises:
        ValueError: the model has no such layer, or its sizes cannot be packed.
    """
    require_countable(config)
    specs: dict[str, TensorSpec] = {}
    stored: dict[str, str] = {}
    twice: list[str] = []
    parts: dict[str, frozenset[str]] = {}
    for name in names:
        stem, _, part = name.rpartition(".")
        parts[stem] = parts.get(stem, _NOTHING) | {part}
    absent_expert = _absent_expert(config, parts)
    known: dict[object, tuple[str, dict[str, TensorSpec]]] = {}  # Most of the thousands of weights are alike.
    for stem, shape in _weights(config, layer):
        there, expert = parts.get(stem, _NOTHING), stem.startswith(EXPERTS)
        kind = (shape, there, expert)
        if kind not in known:
            how = _storage(there) or (absent_expert if expert else "plain")
            known[kind] = how, _specs(stem, shape, how, there)
        stored[stem], of_kind = known[kind]
        for part, spec in of_kind.items():
            specs[f"{stem}.{part}"] = spec
        if "weight_packed" in there and "weight" in there:
            twice.append(f"{stem}.weight")
    specs |= _vectors(config, layer)
    return LayerTable(specs, stored, tuple(twice))


def classify(names: Iterable[str], config: K3Config) -> Inventory:
    """Gives every name of a checkpoint exactly one class, and lists what is missing."""
    require_countable(config)
    inventory = Inventory()
    found: dict[int, dict[str, str]] = defaultdict(dict)
    again: dict[int, dict[str, list[str]]] = {}  # The further names of suffixes that are there under both prefixes.
    for name in names:
        located = split_name(name)
        if located is None or located[0] >= config.num_hidden_layers:
            label = None if located else _model_class(name)
        elif located[1].startswith(_READ):
            layer, suffix = located
            here = found[layer]
            if suffix in here:
                again.setdefault(layer, {}).setdefault(suffix, []).append(name)
            else:
                here[suffix] = name
            continue
        else:
            label = out_of_scope_class(located[1])
        if label is None:
            inventory.unknown.append(name)
        else:
            inventory.out_of_scope.setdefault(label, []).append(name)
    for layer in range(config.num_hidden_layers):
        here, before = found[layer], found[layer - 1]
        if layer and config.is_moe(layer) == config.is_moe(layer - 1) and here.keys() == before.keys():
            inventory.tables[layer] = inventory.tables[layer - 1]  # as it is for most layers
        else:
            inventory.tables[layer] = layer_table(config, layer, here)
        _classify_layer(inventory, layer, here, again.get(layer, {}))
    return inventory


def _classify_layer(inventory: Inventory, layer: int, found: dict[str, str], again: dict[str, list[str]]) -> None:
    table = inventory.tables[layer]
    if not again and not table.stored_twice and found.keys() == table.specs.keys():
        inventory.mlp[layer] = found
        return
    stored_twice = set(table.stored_twice)
    matched: dict[str, str] = {}
    for suffix, name in found.items():
        if suffix in again or suffix in stored_twice:
            inventory.doubled += [name, *again.get(suffix, ())]
        elif suffix in table.specs:
            matched[suffix] = name
        else:
            inventory.unknown.append(name)
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


def _storage(parts: frozenset[str]) -> str | None:
    """How a weight is stored of which these parts are there; None if nothing of it is."""
    if "weight_packed" in parts:
        return "mxfp4"
    if "weight_scale_2" in parts:
        return "nvfp4"
    if "weight_scale" in parts:  # One tensor of a pair or of three is missing.
        return "nvfp4" if "weight" in parts else "mxfp4"
    return "plain" if "weight" in parts else None


def _absent_expert(config: K3Config, parts: Mapping[str, frozenset[str]]) -> str:
    """How an absent expert ought to be stored: as the first one of which something is there, or as the config says."""
    found = (_storage(there) for stem, there in parts.items() if stem.startswith(EXPERTS))
    return next(filter(None, found), config.quantization or "plain")


def _weights(config: K3Config, layer: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """The stem and the shape (out, in) of each weight matrix of the layer."""
    hidden = config.hidden_size
    if not config.is_moe(layer):
        yield from _mlp("mlp.", hidden, config.intermediate_size)
        return
    assert config.num_experts is not None
    yield ROUTER, (config.num_experts, hidden)
    if config.routed_expert_hidden_size is not None:
        yield f"{MOE}routed_expert_down_proj", (config.latent_size, hidden)
        yield f"{MOE}routed_expert_up_proj", (hidden, config.latent_size)
    if config.num_shared_experts:
        yield from _mlp(f"{MOE}shared_experts.", hidden, config.shared_intermediate_size)
    for expert in range(config.num_experts):  # The release's order within an expert: w1, w2, w3.
        yield f"{EXPERTS}{expert}.w1", (config.expert_width, config.latent_size)
        yield f"{EXPERTS}{expert}.w2", (config.latent_size, config.expert_width)
        yield f"{EXPERTS}{expert}.w3", (config.expert_width, config.latent_size)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield f"{prefix}gate_proj", (width, hidden)
    yield f"{prefix}up_proj", (width, hidden)
    yield f"{prefix}down_proj", (hidden, width)


def _specs(stem: str, shape: tuple[int, int], stored: str, there: frozenset[str]) -> dict[str, TensorSpec]:
    """The tensors of a weight `[rows, columns]` that is stored that way, by the last part of their names."""
    if stored == "plain":
        return {"weight": TensorSpec(PLAIN_DTYPES, shape)}
    (rows, columns), block = shape, _BLOCKS[stored]
    if columns % block:
        raise ValueError(f"{stem} must be packed, but its input width {columns} is no multiple of {block}")
    codes = TensorSpec(("U8",), (rows, columns // 2))
    if stored == "mxfp4":
        return {"weight_packed": codes, "weight_scale": TensorSpec(("U8",), (rows, columns // block))}
    scalar = TensorSpec(("F32",), ())
    specs = {"weight": codes, "weight_scale": TensorSpec(("F8_E4M3",), (rows, columns // block))}
    specs["weight_scale_2"] = scalar
    if "input_scale" in there:  # Of the activations, for engines that quantise them to NVFP4.
        specs["input_scale"] = scalar
    return specs


def _vectors(config: K3Config, layer: int) -> dict[str, TensorSpec]:
    if not config.is_moe(layer):
        return {}
    assert config.num_experts is not None
    # Float32 and nothing less: biases that differ by 1e-4 choose different experts; bfloat16 cannot tell them apart.
    vectors = {f"{MOE}gate.e_score_correction_bias": TensorSpec(("F32",), (config.num_experts,))}
    if config.routed_expert_hidden_size is not None and config.latent_moe_use_norm:
        vectors[f"{MOE}routed_expert_norm.weight"] = TensorSpec(PLAIN_DTYPES, (config.latent_size,))
    return vectors
