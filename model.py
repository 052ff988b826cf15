"""The transformer of an LLM, from a checkpoint's files to text and back.

One `Config` describes the toy of train.py (2 layers, 64 wide) and the published models alike:
Llama, Mistral, OLMo 2, Qwen 2 and Qwen 3 differ by a few switches. Module names are those of the
checkpoints, so that loading is a lookup, not a translation. The file goes in the order of a run:
Config -> rope, Attention, MLP, Block, Transformer -> weights in -> a 4-bit base -> LoRA ->
sampling -> adapters and merged models out.
B = batch, T = tokens, C = hidden size, D = head size, V = vocabulary. `alpha` and the matrices A and B of LoRA are
LoRA's own names, as theta is rope's: what the papers call so, not the bilevel problem's alpha and theta.
"""
import dataclasses
import fnmatch
import json
import math
import os
import shutil
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass
class Config:
    """Sizes and switches of a transformer; a field that config.json has too bears the same name."""
    vocab_size: int
    hidden_size: int = 64
    intermediate_size: int = 172
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2          # fewer than the query heads: grouped-query attention
    head_dim: int = 0                     # 0: hidden_size / num_attention_heads
    max_position_embeddings: int = 64
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: dict = None             # {"rope_type": ..., "factor": ..., ...}
    sliding_window: int = None            # a token sees itself and the sliding_window - 1 tokens before it
    layer_types: list = None              # one a layer; only "sliding_attention" has the window. None: all have it
    tie_word_embeddings: bool = False
    dropout: float = 0.0                  # on attention and on both residual branches
    model_type: str = "llama"
    # What else tells the architectures apart:
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False               # where `save_pretrained` puts the offset of a logit adjustment
    qk_norm: str = None                   # RMSNorm of queries and keys: "full", all heads at once, or "head", one by one
    norm_after: bool = False              # normalise a branch's output instead of its input

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), field.type
            if value is None and (field.default is None or field.name in ("num_key_value_heads", "head_dim")):
                continue
            if kind is float and type(value) is int:
                value = float(value)
            low = 0 if field.name in ("head_dim", "dropout") else 1 if kind is int else -math.inf
            high = {int: 10_000 if field.name == "num_hidden_layers" else 2 ** 31, float: sys.float_info.max}.get(kind)
            outside = high is not None and type(value) is kind and not low <= value <= high
            if type(value) is not kind or outside:
                wanted = ("a positive " if low == 1 else "a ") + kind.__name__ + f" up to {high}" * (kind is int)
                raise ValueError(f"{field.name} = {value!r} is not {wanted}")
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"num_attention_heads = {self.num_attention_heads} is not a multiple of "
                             f"num_key_value_heads = {self.num_key_value_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} is odd; rotary embedding needs pairs")
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers")
        scaling = {key: value for key, value in (self.rope_scaling or {}).items() if value is not None}
        kind = scaling.get("rope_type", "default")
        if kind not in ROPE_KEYS:
            raise ValueError(f"rope_type {kind!r} is not supported (supported: {', '.join(ROPE_KEYS)})")
        for key in ROPE_KEYS[kind]:
            if key not in scaling:
                raise ValueError(f"rope_type {kind!r} needs {key!r} in rope_scaling or rope_parameters")
        for key in (*ROPE_KEYS[kind], *ROPE_OPTIONS):
            value = scaling.get(key, 1.0)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ValueError(f"{key!r} of rope_type {kind!r} is {value!r}, not a positive number")
        if kind == "yarn" and "mscale" in scaling:
            raise ValueError("'mscale' of rope_type 'yarn' is not supported")


# --- The transformer -----------------------------------------------------------------------------

class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, the mean in float32 (Zhang & Sennrich, 2019, arXiv 1910.07467)."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        y = x if x.dtype == torch.float64 else x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


ROPE_KEYS = {"default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
             "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
ROPE_OPTIONS = ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")          # of yarn


def rope_tables(config, start, T, device):
    """cos and sin of the rotary embedding (Su et al., 2021, arXiv 2104.09864) at the positions
    start .. start + T - 1, each (T, D).

    Pair i turns by theta^(-2i/D) a position. Longer contexts than were pretrained turn slower:
    all pairs ("linear"; Chen et al., 2023, arXiv 2306.15595), the slow pairs by a larger theta
    once the text is too long ("dynamic"), or those whose wavelength does not fit into the
    original context ("llama3"; Llama 3.1), which "yarn" (Peng et al., 2023, arXiv 2309.00071) tells
    by their place, and sharpens attention besides.
    """
    scaling = {key: value for key, value in (config.rope_scaling or {}).items() if value is not None}
    kind, factor = scaling.get("rope_type", "default"), scaling.get("factor")
    theta, D, longest = config.rope_theta, config.head_dim, config.max_position_embeddings
    if kind == "dynamic" and start + T > longest:
        theta *= (factor * (start + T) / longest - (factor - 1)) ** (D / (D - 2))
    frequency = 1 / theta ** (torch.arange(0, D, 2, device=device, dtype=torch.float32) / D)       # (D/2,)
    if kind == "linear":
        frequency = frequency / factor
    if kind == "llama3":
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)            # in the original context
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = keep * frequency + (1 - keep) * frequency / factor
    sharper = 1.0
    if kind == "yarn":
        longest = scaling.get("original_max_position_embeddings", longest)
        # The place of the pair that turns so often in the original context:
        place = lambda turns: D * math.log(longest / (2 * math.pi * turns)) / (2 * math.log(theta))
        first = max(0, math.floor(place(scaling.get("beta_fast", 32))))
        last = min(D - 1, math.ceil(place(scaling.get("beta_slow", 1))))
        slow = ((torch.arange(D // 2, device=device) - first) / max(last - first, 0.001)).clamp(0, 1)
        frequency = slow * frequency / factor + (1 - slow) * frequency
        sharper = scaling.get("attention_factor", 0.1 * math.log(max(factor, 1)) + 1)
    angle = torch.arange(start, start + T, device=device, dtype=torch.float32)[:, None] * frequency   # (T, D/2)
    angle = torch.cat((angle, angle), dim=-1)                                                      # (T, D)
    return sharper * angle.cos(), sharper * angle.sin()


def rotate(x, cos, sin):
    """Turn the pairs (x_i, x_{i + D/2}) of x, (..., T, D), by their position's angles."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention; several query heads may share a key and value head (Ainslie et al., 2023, arXiv 2305.13245)."""

    def __init__(self, config, layer):
        super().__init__()
        c = self.config = config
        self.windowed = bool(c.sliding_window) and (c.layer_types is None or c.layer_types[layer] == "sliding_attention")
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=c.o_bias)
        if c.qk_norm:
            full = c.qk_norm == "full"
            self.q_norm = RMSNorm(self.q_proj.out_features if full else c.head_dim, c.rms_norm_eps)
            self.k_norm = RMSNorm(self.k_proj.out_features if full else c.head_dim, c.rms_norm_eps)

    def forward(self, x, rope, window_mask=None, cache=None):
        """x (B, T, C); rope (cos, sin), each (T, D); window_mask (T, T), None if no window is in
        reach; cache (K, V, start), see `Transformer.hidden`. Returns (B, T, C)."""
        c, (B, T, _) = self.config, x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if c.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.view(B, T, -1, c.head_dim), k.view(B, T, -1, c.head_dim), v.view(B, T, -1, c.head_dim)
        if c.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, D), (B, kv heads, T, D) twice
        q, k = rotate(q, *rope), rotate(k, *rope)

        if cache is not None:
            K, V, start = cache                                            # (n, kv heads, capacity, D) twice
            assert start == 0 or T == 1, "after the prompt a cache takes one token at a time"
            K[:, :, start:start + T], V[:, :, start:start + T] = k, v      # one prompt (B = 1) fills all n rows
            if start:
                first = max(0, start + 1 - c.sliding_window) if self.windowed else 0
                k, v = K[:, :, first:start + 1], V[:, :, first:start + 1]

        group = c.num_attention_heads // c.num_key_value_heads             # query heads that share one k, v
        if T == 1:                                                         # nothing to mask: take them as a row of queries
            y = F.scaled_dot_product_attention(q.reshape(B, -1, group, c.head_dim), k, v).reshape(q.shape)
        else:
            mask = window_mask if self.windowed else None
            y = F.scaled_dot_product_attention(q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1),
                                               attn_mask=mask, is_causal=mask is None,
                                               dropout_p=c.dropout if self.training else 0.0)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer, 2020, arXiv 2002.05202)."""

    def __init__(self, config):
        super().__init__()
        c = config
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A layer: attention, then MLP, each added to the residual stream."""

    def __init__(self, config, layer):
        super().__init__()
        norm = lambda: RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.norm_after:
            self.input_layernorm = norm()
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = norm()                             # in OLMo 2 after attention, else before the MLP
        self.mlp = MLP(config)
        if config.norm_after:
            self.post_feedforward_layernorm = norm()
        self.norm_after, self.dropout = config.norm_after, nn.Dropout(config.dropout)

    def forward(self, x, *context):
        if self.norm_after:
            x = x + self.dropout(self.post_attention_layernorm(self.self_attn(x, *context)))
            return x + self.dropout(self.post_feedforward_layernorm(self.mlp(x)))
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), *context))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Transformer(nn.Module):
    """Token ids (B, T) -> logits (B, T, V).

    Causal, without a padding mask: pad on the right, where no scored token can see it.
    Set `model.checkpointing = True` to keep one hidden state a layer for the backward pass and
    compute the rest again there: less memory, up to a third more time.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.checkpointing = False
        self.source = None                                                 # the directory it came from, if any
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # A tied head is the embedding itself - one parameter - and so has no module of its own.
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=1 / math.sqrt(config.hidden_size))

    def hidden(self, ids, cache=None, start=0):
        """(B, T) -> the last hidden states, (B, T, C).

        With a `cache`, a list of (K, V) for each layer, each (B, kv heads, capacity, D), `ids`
        stand at the positions from `start` on: a prompt at 0, later one token at a time.
        """
        x, T, window = self.embed_tokens(ids), ids.shape[1], self.config.sliding_window
        rope = tuple(table.to(x.dtype) for table in rope_tables(self.config, start, T, ids.device))
        window_mask = None
        if window and T > window:
            seen = torch.ones(T, T, dtype=torch.bool, device=ids.device)
            window_mask = seen.tril() & ~seen.tril(-window)                # 0 <= query position - key position < window
        for i, layer in enumerate(self.layers):
            if cache is not None:
                x = layer(x, rope, window_mask, (*cache[i], start))
            elif self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, rope, window_mask, use_reentrant=False)
            else:
                x = layer(x, rope, window_mask)
        return self.norm(x)

    def head(self, x):
        """Hidden states (..., C) -> logits (..., V). Select positions first: V is large in LLMs."""
        return F.linear(x, self.embed_tokens.weight) if self.config.tie_word_embeddings else self.lm_head(x)

    def forward(self, ids):
        return self.head(self.hidden(ids))

    @classmethod
    def from_pretrained(cls, directory, dtype=torch.float32, device="cpu"):
        """The model in a Hugging Face directory: config.json and one or several *.safetensors or *.bin.

        One tensor after another goes to `dtype` and `device`: the host never holds more than the
        weights and one tensor. Raises FileNotFoundError for a missing file or shard, ValueError
        for an architecture, rope type, tensor or parameter that has no counterpart, a wrong shape
        or a file cut short; the message names it.
        """
        directory = Path(directory)
        config = read_config(directory)
        with torch.device("meta"):                                         # shapes only: no memory, no initialisation
            model = cls(config)
        wanted, state = dict(model.named_parameters()), {}
        for shard in find_shards(directory):
            for full_name, tensor in (read_safetensors if shard.suffix == ".safetensors" else read_bin)(shard):
                name = full_name.removeprefix("model.")
                if name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight" and config.tie_word_embeddings:
                    continue                                               # derived from config.json; the embedding itself
                if name not in wanted:
                    raise ValueError(f"{shard}: tensor {full_name!r} has no place in the {config.model_type} model of "
                                     "config.json")
                if tensor.shape != wanted[name].shape:
                    raise ValueError(f"{shard}: {full_name!r} has shape {tuple(tensor.shape)}, "
                                     f"config.json implies {tuple(wanted[name].shape)}")
                state[name] = tensor.to(device, dtype)
                del tensor                                                 # before the next one is read
        for name in wanted:
            if name not in state:
                raise ValueError(f"{directory}: no file has weights for the parameter {name!r}")
        model.load_state_dict(state, assign=True)
        model.source = directory
        return model.eval()


# --- Hugging Face files, read --------------------------------------------------------------------

# What a model_type implies, and the values its config.json may leave out.
ARCHITECTURES = {
    "llama": dict(rms_norm_eps=1e-6),
    "mistral": dict(rms_norm_eps=1e-6, num_key_value_heads=8, sliding_window=4096),
    "olmo2": dict(rms_norm_eps=1e-5, qk_norm="full", norm_after=True),
    "qwen2": dict(rms_norm_eps=1e-6, qkv_bias=True),
    "qwen3": dict(rms_norm_eps=1e-6, qk_norm="head", head_dim=128),
}
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "max_position_embeddings")


def read_json(path):
    """The JSON object in a file, or an error that names the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def read_config(directory):
    """config.json as transformers 4 or 5 writes it -> Config."""
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such directory")
    path = directory / "config.json"
    raw = read_json(path)
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(f"{path}: model_type {kind!r} is not supported (supported: {', '.join(ARCHITECTURES)})")
    for key in REQUIRED:
        if raw.get(key) is None:
            raise ValueError(f"{path}: {key!r} is missing")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported (supported: 'silu')")
    if raw.get("quantization_config"):
        raise ValueError(f"{path}: the weights are quantised; take the unquantised model and quantize_base")

    known = {field.name for field in dataclasses.fields(Config)}
    values = ARCHITECTURES[kind] | {key: value for key, value in raw.items() if key in known}
    values.setdefault("num_key_value_heads", None)
    # transformers 4 writes rope_theta and rope_scaling, transformers 5 one dict rope_parameters.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{path}: rope_scaling {rope!r} is not an object")
    rope = dict(rope)
    rope.setdefault("rope_type", rope.get("type", "default"))
    values["rope_theta"] = rope.pop("rope_theta", None) or raw.get("rope_theta") or 10_000.0
    values["rope_scaling"] = rope
    if raw.get("attention_bias") and kind != "qwen2":
        values["qkv_bias"] = values["o_bias"] = True
    windows = kind in ("qwen2", "qwen3") and raw.get("use_sliding_window")
    if kind == "mistral":
        values["layer_types"] = None
    elif not windows:
        values["sliding_window"] = None
    try:
        config = Config(**values)
        if windows and not config.layer_types:
            first = raw.get("max_window_layers", 28)
            config.layer_types = ["sliding_attention" if i >= first else "full_attention"
                                  for i in range(config.num_hidden_layers)]
        return config
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def find_shards(directory):
    """The files with a checkpoint's weights: one, or those that an index names."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = directory / f"{name}.index.json"
        if (directory / name).is_file():
            return [directory / name]
        if index.is_file():
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict) or not names or not all(isinstance(shard, str) for shard in names.values()):
                raise ValueError(f"{index}: 'weight_map' is missing, empty or not one of file names")
            shards = [directory / shard for shard in sorted(set(names.values()))]
            for shard in shards:
                if not shard.is_file():
                    raise FileNotFoundError(f"{shard}: missing, though {index.name} names it")
            return shards
    raise FileNotFoundError(f"{directory}: no weights: no model.safetensors, no pytorch_model.bin, no index of either")


def read_bin(path):
    """(name, tensor) pairs of a file written by torch.save, as older checkpoints are."""
    try:
        tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not all(isinstance(name, str) and torch.is_tensor(tensor) for name, tensor in tensors.items()):
            raise TypeError("it holds more than tensors by name")
        return tensors.items()
    except Exception as error:                             # a torn file can make torch raise anything
        why = (str(error).splitlines() or ["?"])[0]
        raise ValueError(f"{path}: not a PyTorch weights file, or cut short ({why})") from None


DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_safetensors(path):
    """Yield (name, tensor) one at a time. The format: eight bytes with the length of a JSON
    header, the header {name: {dtype, shape, data_offsets}}, then the raw little-endian bytes."""
    size = path.stat().st_size
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path}: not a safetensors file, or cut short")
        try:
            header = json.loads(f.read(length))
            header.pop("__metadata__", None)
            entries = [(name, str(e["dtype"]), [int(n) for n in e["shape"]], 8 + length + int(start), 8 + length + int(end))
                       for name, e in header.items() for start, end in [e["data_offsets"]]]
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            raise ValueError(f"{path}: not a safetensors file: its header is malformed") from None
        for name, kind, shape, start, end in entries:
            if min([start - 8 - length, end - start, *shape]) < 0:
                raise ValueError(f"{path}: {name!r} has a negative offset or size")
            if end > size:
                raise ValueError(f"{path}: cut short: {name!r} ends at byte {end} of {size}")
            if kind not in DTYPES:
                raise ValueError(f"{path}: {name!r} has dtype {kind}, which is not supported")
            dtype = DTYPES[kind]
            if math.prod(shape) * dtype.itemsize != end - start:
                raise ValueError(f"{path}: {name!r} has {end - start} bytes, not what its shape {shape} implies")
            yield name, read_tensor(f, start, end, dtype).view(shape)      # keeping no name for it: the caller may free it


def read_tensor(f, start, end, dtype):
    """The bytes start .. end of an open file as a flat tensor."""
    buffer = bytearray(end - start)
    f.seek(start)
    f.readinto(buffer)
    return torch.frombuffer(buffer, dtype=dtype)


# --- A 4-bit base --------------------------------------------------------------------------------

# The 16 values of NF4, quantiles of a normal distribution scaled to [-1, 1] (QLoRA: Dettmers et al.,
# 2023, arXiv 2305.14314, appendix E).
NF4 = torch.tensor([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
                    0.7229568362236023, 1.0])
NF4_PAIRS = torch.stack((NF4.repeat_interleave(16), NF4.repeat(16)), dim=1)    # (256, 2): what a byte stands for
BLOCK, DOUBLE_BLOCK = 64, 256


def in_blocks(x, size):
    """Any shape -> (blocks, size), the last block filled up with zeros."""
    return F.pad(x.flatten(), (0, -x.numel() % size)).view(-1, size)


def nf4_quantize(x):
    """Any shape -> codes, uint8 (blocks, 32), two of them a byte, the first one high; and absmax,
    (blocks,), the largest magnitude of each 64 values. A value's code is that of the nearest of
    the NF4 values times absmax; so an all-zero block stays zero."""
    blocks = in_blocks(x.float(), BLOCK)
    absmax = blocks.abs().amax(dim=1)
    scaled = blocks * (1 / absmax.clamp(min=1e-38))[:, None]
    middle = (NF4[1:] + NF4[:-1]).to(x.device) / 2
    codes = torch.bucketize(scaled, middle, out_int32=True).to(torch.uint8)   # (blocks, 64)
    return codes[:, 0::2] << 4 | codes[:, 1::2], absmax


def nf4_dequantize(codes, absmax, shape):
    """The float32 values, of `shape`, for what `nf4_quantize` returned."""
    pairs = F.embedding(codes.int(), NF4_PAIRS.to(codes.device))           # (blocks, 32, 2)
    values = pairs.view(-1, BLOCK) * absmax[:, None]
    return values.flatten()[:math.prod(shape)].view(shape)


class FrozenMatmul(torch.autograd.Function):
    """x W^T for a `layer` that stores W in 4 bits. The graph keeps the layer, and dequantises again
    in the backward pass, where plain autograd would keep every W in full."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return F.linear(x, layer.dequantize(x.dtype))

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.layer.dequantize(grad.dtype), None


class NF4Linear(nn.Module):
    """A frozen linear layer in NF4: 4.5 bits a weight, with `double` quantisation 4.13.

    Double quantisation stores absmax, less its mean, as 8-bit floats in blocks of 256. They are
    torch's e4m3 (the paper leaves the format open; bitsandbytes takes a table of its own).
    """

    def __init__(self, linear, double=False):
        super().__init__()
        self.out_features, self.in_features, self.dtype = *linear.weight.shape, linear.weight.dtype
        self.bias = linear.bias
        codes, absmax = nf4_quantize(linear.weight.detach())
        self.register_buffer("codes", codes)
        if double:
            mean = absmax.mean()
            blocks = in_blocks(absmax - mean, DOUBLE_BLOCK)
            scale = (blocks.abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max).clamp(min=1e-38)
            self.register_buffer("absmax8", (blocks / scale).to(torch.float8_e4m3fn))
            self.register_buffer("scale", scale)
            self.register_buffer("mean", mean)
        else:
            self.register_buffer("absmax", absmax)
        self.double = double

    def dequantize(self, dtype):
        """The weight, (out, in), in `dtype`."""
        if self.double:
            absmax = (self.absmax8.float() * self.scale).flatten()[:len(self.codes)] + self.mean
        else:
            absmax = self.absmax
        return nf4_dequantize(self.codes, absmax, (self.out_features, self.in_features)).to(dtype)

    @property
    def weight(self):
        return self.dequantize(self.dtype)

    def forward(self, x):
        y = FrozenMatmul.apply(x, self)
        return y if self.bias is None else y + self.bias


def replace(root, name, module):
    """Put `module` where root's submodule of that dotted name was."""
    parent, _, child = name.rpartition(".")
    setattr(root.get_submodule(parent), child, module)


def quantize_base(model, double=False):
    """Freeze `model` and store every linear layer of its blocks in NF4, in place (as QLoRA does:
    embedding, head and norms stay). Before or after `add_lora`; adapters stay as they are. Give
    the model its dtype first: a later model.to(dtype) would round the blocks' absmax too."""
    for name in [name for name, module in model.layers.named_modules() if isinstance(module, nn.Linear)]:
        replace(model.layers, name, NF4Linear(model.layers.get_submodule(name), double))   # frees the full weight
    for name, p in model.named_parameters():
        if "lora_" not in name:
            p.requires_grad_(False)


# --- Low-rank adapters ---------------------------------------------------------------------------

class LoRALinear(nn.Module):
    """W x + (alpha / r) B A x with W frozen (Hu et al., 2021, arXiv 2106.09685). B = 0 at the start:
    nothing changes. A and B are float32 over a half-precision or 4-bit W."""

    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base, self.rank, self.alpha = base, rank, alpha
        weight = base.weight
        like = dict(device=weight.device, dtype=torch.promote_types(weight.dtype, torch.float32))
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, **like))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, **like))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        low = F.linear(x, self.lora_A.to(x.dtype))                         # (..., r)
        return self.base(x) + F.linear(self.alpha / self.rank * low, self.lora_B.to(x.dtype))

    @property
    def weight(self):
        """The merged weight, W + (alpha / r) B A, (out, in), in W's dtype."""
        W = self.base.weight
        return (W + self.alpha / self.rank * (self.lora_B @ self.lora_A)).to(W.dtype)

    @property
    def bias(self):
        return self.base.bias


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def add_lora(model, rank=8, alpha=16, targets=PROJECTIONS):
    """Freeze `model`, put an adapter on every linear layer that one of the patterns `targets`
    matches, return {name: parameter} of the adapters.

    A pattern is the end of a dotted name with shell wildcards: "q_proj", "self_attn.*",
    "layers.1[0-9].*". Raises ValueError for a pattern that matches no layer.
    """
    if rank < 1:
        raise ValueError(f"LoRA needs a rank of at least 1, not {rank}")
    if any(isinstance(module, LoRALinear) for module in model.modules()):
        raise ValueError("the model has LoRA adapters already")
    if not targets:
        raise ValueError("LoRA has no target")
    linear = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, NF4Linear))]
    found = {target: fnmatch.filter(linear, target) + fnmatch.filter(linear, f"*.{target}") for target in targets}
    for target, names in found.items():
        if not names:
            raise ValueError(f"LoRA target {target!r} matches no layer; there are {', '.join(linear[:7])} ...")
    model.requires_grad_(False)
    for name in linear:
        if any(name in names for names in found.values()):
            replace(model, name, LoRALinear(model.get_submodule(name), rank, alpha))
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


# --- Sampling ------------------------------------------------------------------------------------

@torch.no_grad()
def generate(model, ids, max_new_tokens, temperature=1.0, n=1, adjustment=None, stop_ids=(), stop=(), decode=None, seed=0):
    """n answers to one prompt, sampled from softmax(z~ / temperature); at temperature 0, the likeliest token each time.

    ids: the prompt's tokens, (P,). adjustment: a function logits (n, V) -> adjusted logits z~. An
    answer ends before a token of `stop_ids`, or once decode(tokens), a string, contains one of
    the strings `stop` (which its last tokens then hold). Returns n lists of at most
    `max_new_tokens` tokens; they depend on `seed` alone, not on torch's global generator.
    """
    if len(ids) == 0:
        raise ValueError("generate needs a prompt of at least one token")
    if temperature < 0:
        raise ValueError(f"temperature must not be negative, it is {temperature}")
    if stop and decode is None:
        raise ValueError("stop strings need decode, a function from tokens to text")
    weight, c, training = model.embed_tokens.weight, model.config, model.training
    ids = torch.as_tensor(ids, device=weight.device)[None]                 # (1, P)
    generator = torch.Generator(weight.device).manual_seed(seed)
    room = (n, c.num_key_value_heads, ids.shape[1] + max_new_tokens, c.head_dim)
    cache = [(weight.new_empty(room), weight.new_empty(room)) for _ in model.layers]
    wide = torch.float32 if weight.device.type == "mps" else torch.float64 # summing V probabilities; MPS has no float64
    answers, open_rows, start = [[] for _ in range(n)], set(range(n)), 0
    model.eval()
    try:
        for _ in range(max_new_tokens):
            logits = model.head(model.hidden(ids, cache, start)[:, -1])    # (1, V) after the prompt, then (n, V)
            start += ids.shape[1]
            if adjustment is not None:
                logits = adjustment(logits)
            if temperature == 0:
                tokens = logits.argmax(-1).expand(n)
            else:
                # Inverse transform: the first token at which the cumulated probability reaches a uniform u in (0, 1].
                # torch.multinomial draws V random numbers a row, this one.
                cumulated = (logits.to(wide) / temperature).softmax(-1).cumsum(-1)         # (1, V) or (n, V)
                u = 1 - torch.rand(n, 1, generator=generator, dtype=wide, device=weight.device)
                tokens = torch.searchsorted(cumulated.expand(n, -1).contiguous(), u * cumulated[:, -1:])[:, 0]
            for row, token in enumerate(tokens.tolist()):
                if row not in open_rows:
                    continue
                if token not in stop_ids:
                    answers[row].append(token)
                if token in stop_ids or stop and any(text in decode(answers[row]) for text in stop):
                    open_rows.remove(row)
            if not open_rows:
                break
            ids = tokens[:, None]                                          # (n, 1)
    finally:
        model.train(training)
    return answers


# --- Hugging Face files, written -----------------------------------------------------------------

def write_atomically(path, write):
    """Let write(file) fill a temporary neighbour of `path` and move it there in one step, so that
    a reader never meets half a file."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as f:
            write(f)
        os.replace(partial, path)
    except BaseException:                                  # a full disk is not left fuller
        partial.unlink(missing_ok=True)
        raise


def write_config(path, value):
    """`value` as indented JSON, in one step."""
    write_atomically(path, lambda f: f.write((json.dumps(value, indent=2) + "\n").encode()))


def write_safetensors(path, items):
    """items() yields (name, tensor). It is called twice, for the header and for the bytes, so that
    a tensor made on the fly need not outlive its turn. Returns the names."""
    names, header, end = {dtype: name for name, dtype in DTYPES.items()}, {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)                                        # the bytes start at a multiple of 8

    def write(f):
        f.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in items():
            f.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    write_atomically(path, write)
    return header.keys()


def hub_name(name):
    """Our name of a module or parameter -> that in a checkpoint."""
    return name if name.startswith("lm_head") else f"model.{name}"


def save_adapters(model, directory, adjustment=None):
    """The adapters of `model` in PEFT's format, adapter_config.json and adapter_model.safetensors, and
    `adjustment` (its tensors log_scale and offset) beside them in logit_adjustment.safetensors.

    Raises ValueError if the model has no adapters. PEFT knows nothing of the third file: who loads
    the first two with it gets the raw logits z, not z~.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    if not layers:
        raise ValueError("the model has no LoRA adapters to save; add_lora first")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {f"base_model.model.{hub_name(name)}.lora_{x}.weight": getattr(layer, f"lora_{x}")
               for name, layer in layers.items() for x in "AB"}
    write_safetensors(directory / "adapter_model.safetensors", tensors.items)
    if adjustment is not None:
        tensors = {"log_scale": adjustment.log_scale, "offset": adjustment.offset}
        write_safetensors(directory / "logit_adjustment.safetensors", tensors.items)
    layer = next(iter(layers.values()))
    leaves = sorted({name.rpartition(".")[2] for name in layers})
    everywhere = len(layers) == len(leaves) * len(model.layers)            # then PEFT's short form says it
    write_config(directory / "adapter_config.json", {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model.source or ""),
        "r": layer.rank, "lora_alpha": layer.alpha, "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
        "target_modules": leaves if everywhere else [hub_name(name) for name in layers]})


def load_adapters(model, directory):
    """Put adapters in PEFT's format on `model`. Returns {name: parameter} of the adapters and the state
    dict of the logit adjustment saved beside them, {"log_scale", "offset"}, or None.

    Raises ValueError, naming it, for a kind of adapter other than plain LoRA and for a tensor that is missing,
    has no place or a wrong shape.
    """
    directory = Path(directory)
    path, file = directory / "adapter_config.json", directory / "adapter_model.safetensors"
    config = read_json(path)
    plain = {"peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False, "fan_in_fan_out": False,
             "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": []}
    for key, value in plain.items():
        if (config.get(key) or value) != value:
            raise ValueError(f"{path}: {key} = {config[key]!r} is not supported (supported: {value!r})")
    for key in ("r", "lora_alpha"):
        if type(config.get(key)) not in ((int,) if key == "r" else (int, float)) or not 0 < config[key] < 2 ** 31:
            raise ValueError(f"{path}: {key!r} is missing or not a positive number")
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing weights file")
    state = {}
    for name, tensor in read_safetensors(file):
        if name.endswith(".base_layer.weight"):                            # PEFT's frozen copy of a head with adapters
            continue
        state[name.removeprefix("base_model.model.").removeprefix("model.").removesuffix(".weight")] = tensor
    if not state:
        raise ValueError(f"{file}: holds no tensors")
    try:
        adapters = add_lora(model, config["r"], config["lora_alpha"], sorted({name.rpartition(".")[0] for name in state}))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    for name in sorted(adapters.keys() | state.keys()):
        if name not in state or name not in adapters:
            raise ValueError(f"{file}: {name!r} " + ("is missing" if name in adapters else "has no place in this model"))
        if state[name].shape != adapters[name].shape:
            raise ValueError(f"{file}: {name!r} has shape {tuple(state[name].shape)}, "
                             f"the model implies {tuple(adapters[name].shape)}")
        adapters[name].data.copy_(state[name])
    file = directory / "logit_adjustment.safetensors"
    return adapters, dict(read_safetensors(file)) if file.is_file() else None


@torch.no_grad()
def merged(model, adjustment=None):
    """Yield (name, tensor) of a plain checkpoint that predicts what `model` with its adapters and
    `adjustment` predicts: LoRA added to the weights, exp(log_scale) multiplied into the rows of the
    head, the offset added to its bias. A tied head is untied if the adjustment does anything."""
    tied = model.config.tie_word_embeddings
    head = model.embed_tokens if tied else model.lm_head
    for name, module in model.named_modules():
        if name.endswith(".base") or name == "lm_head" or not hasattr(module, "weight"):
            continue
        yield hub_name(f"{name}.weight"), module.weight
        if getattr(module, "bias", None) is not None:
            yield hub_name(f"{name}.bias"), module.bias
    weight, bias = head.weight, getattr(head, "bias", None)                # (V, C), (V,)
    if adjustment is not None and (adjustment.log_scale.any() or adjustment.offset.any()):
        if adjustment.log_scale.numel() not in (1, len(weight)):
            raise ValueError(f"the adjustment is for {adjustment.log_scale.numel()} logits, the model has {len(weight)}")
        scale = adjustment.log_scale.exp().expand(len(weight))
        bias = adjustment.offset + (0 if bias is None else scale * bias)
        weight, bias, tied = (scale[:, None] * weight).to(weight.dtype), bias.expand(len(weight)).to(weight.dtype), False
    if not tied:
        yield "lm_head.weight", weight
    if bias is not None and bias.any():
        yield "lm_head.bias", bias


TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*",
                   "generation_config.json")


def save_pretrained(model, directory, adjustment=None):
    """`merged(model, adjustment)` as a Hugging Face directory: config.json, model.safetensors in the dtype
    of `model`, and the tokenizer files of the directory it came from. `model` itself stays as it is.

    An offset becomes lm_head.bias, with "head_bias": true in config.json. `from_pretrained` reads
    both; transformers, whose models of these families have no head bias, warns of an unused tensor and
    predicts softmax(exp(log_scale) z): everything but the offset.
    Raises ValueError if `directory` holds another checkpoint in several files, or is the model's own.
    """
    directory, source = Path(directory), model.source
    if (directory / "model.safetensors.index.json").exists() or source and directory.resolve() == source.resolve():
        raise ValueError(f"{directory}: holds another checkpoint already; choose an empty directory")
    directory.mkdir(parents=True, exist_ok=True)
    names = write_safetensors(directory / "model.safetensors", lambda: merged(model, adjustment))
    config = {"architectures": [model.config.model_type.capitalize() + "ForCausalLM"], **dataclasses.asdict(model.config)}
    if source:
        config = read_json(source / "config.json")
        config.pop("dtype", None)                                          # transformers 5's name for torch_dtype
        for pattern in TOKENIZER_FILES:
            for file in source.glob(pattern):
                shutil.copy(file, directory)
    config |= {"tie_word_embeddings": "lm_head.weight" not in names, "head_bias": "lm_head.bias" in names,
               "torch_dtype": str(model.embed_tokens.weight.dtype).removeprefix("torch.")}
    write_config(directory / "config.json", config)                        # last: without it the directory is no model
