"""model.py against transformers, peft and bitsandbytes, by hand, and on the cases that must hold."""
import copy
import json
import os
import shutil
import tracemalloc
import weakref

import bitsandbytes.functional
import peft
import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import model as model_file
from bilevel import LogitAdjustment, peak_bytes
from model import (Config, LoRALinear, NF4Linear, RMSNorm, Transformer, add_lora, generate, load_adapters, merged,
                   nf4_dequantize, nf4_quantize, quantize_base, read_safetensors, rope_tables, rotate, save_adapters,
                   save_pretrained, write_safetensors)

SMALL = dict(vocab_size=67, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=64, pad_token_id=None, bos_token_id=None, eos_token_id=None)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)

# name -> the transformers class, what its config has beside SMALL, and the keys of it that must matter.
VARIANTS = {
    "llama": ("Llama", dict(rope_parameters=dict(rope_type="default", rope_theta=500.0)), ["rope_parameters"]),
    "llama, head_dim, biases": ("Llama", dict(head_dim=16, attention_bias=True, mlp_bias=True), []),
    "llama, tied": ("Llama", dict(tie_word_embeddings=True), []),
    "llama, llama3 rope": ("Llama", dict(rope_parameters=dict(rope_theta=1000.0, **LLAMA3)), ["rope_parameters"]),
    "llama, linear rope": ("Llama", dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=10_000.0)),
                           ["rope_parameters"]),
    "llama, yarn rope": ("Llama", dict(head_dim=16, rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=10_000.0,
                                                                        original_max_position_embeddings=16)), ["rope_parameters"]),
    "qwen3, yarn rope": ("Qwen3", dict(rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=1e6, beta_fast=8, beta_slow=2,
                                                           attention_factor=1.3, original_max_position_embeddings=16)), ["rope_parameters"]),
    "llama, dynamic rope": ("Llama", dict(rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=10_000.0),
                                          max_position_embeddings=16), ["rope_parameters"]),
    "mistral, window": ("Mistral", dict(sliding_window=8), ["sliding_window"]),
    "mistral, no window": ("Mistral", dict(sliding_window=None), []),
    "olmo2": ("Olmo2", {}, []),
    "qwen2": ("Qwen2", {}, []),
    "qwen2, windows above": ("Qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
                             ["use_sliding_window"]),
    "qwen3": ("Qwen3", dict(head_dim=16, tie_word_embeddings=True), []),
}


def small_checkpoint(directory, name="llama", seed=0, **save):
    """A random transformers model of a VARIANT, saved; every parameter matters, norms and biases too."""
    kind, extra, _ = VARIANTS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **extra})
    reference = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in reference.parameters():
            p.normal_(std=0.15).add_(1.0 if p.dim() == 1 and p.numel() in (16, 48, 8) else 0.0)
    reference.save_pretrained(directory, **save)
    return reference


def edit_config(directory, *removed, **changed):
    path = directory / "config.json"
    raw = {key: value for key, value in json.loads(path.read_text()).items() if key not in removed}
    path.write_text(json.dumps(raw | changed))


def toy(seed=0, dtype=torch.float64, **config):
    torch.manual_seed(seed)
    config = {**dict(vocab_size=23, hidden_size=16, intermediate_size=24, num_attention_heads=4), **config}
    return Transformer(Config(**config)).to(dtype)


IDS = torch.randint(67, (2, 40), generator=torch.Generator().manual_seed(1))


# --- The transformer -----------------------------------------------------------------------------

@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers_in_both_config_layouts(name, tmp_path):
    reference = small_checkpoint(tmp_path, name)
    with torch.no_grad():
        expected = reference(IDS).logits
        ours = Transformer.from_pretrained(tmp_path)
        assert (ours(IDS) - expected).abs().max() < 1e-4
        assert (ours(IDS[:, :1]) - expected[:, :1]).abs().max() < 1e-4     # one token takes a path of its own

        edit_config(tmp_path, "rms_norm_eps", "attention_dropout", "use_cache")   # a file may leave out the defaults
        rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
        theta = rope.pop("rope_theta")
        rope["type"] = rope.pop("rope_type")                               # as transformers 4 wrote it
        edit_config(tmp_path, "rope_parameters", rope_theta=theta, rope_scaling=None if rope == {"type": "default"} else rope)
        assert torch.equal(Transformer.from_pretrained(tmp_path)(IDS), ours(IDS))

        for key in VARIANTS[name][2]:
            removed = ["rope_scaling", "rope_theta"] if key == "rope_parameters" else []
            edit_config(tmp_path, *removed, **({} if removed else {key: None}))
            assert (Transformer.from_pretrained(tmp_path)(IDS) - expected).abs().max() > 1e-2, f"{key} changes nothing"


def test_smollm2_logits_equal_transformers(smollm2):
    """In float32 to 1e-4; in bfloat16 as closely as transformers' two ways to compute attention agree (they are two
    samples of the same rounding: half as much again allows for the luck of a third)."""
    tokenizer = tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode("The capital of France is Paris, and water boils at 100 degrees. " * 3).ids])
    load = lambda dtype, attention: transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        assert (Transformer.from_pretrained(smollm2)(ids) - load(torch.float32, "sdpa")(ids).logits).abs().max() < 1e-4
        sdpa, eager = load(torch.bfloat16, "sdpa")(ids).logits.float(), load(torch.bfloat16, "eager")(ids).logits.float()
        ours = Transformer.from_pretrained(smollm2, dtype=torch.bfloat16)(ids).float()
    for size in (torch.mean, torch.max):
        assert size((ours - sdpa).abs()) <= 1.5 * size((sdpa - eager).abs())


@pytest.mark.parametrize("window", [None, 3])
def test_case_15_padding_on_the_right_changes_nothing(window):
    model = toy(dtype=torch.float32, sliding_window=window).eval()
    short, long = torch.randint(23, (7,)), torch.randint(23, (12,))
    padded = torch.stack((F.pad(short, (0, 5), value=9), long))
    torch.testing.assert_close(model(padded)[0, :7], model(short[None])[0], atol=1e-5, rtol=0)


def test_case_21_rms_norm_and_tied_weights(tmp_path):
    norm = RMSNorm(2, 1e-5)
    torch.testing.assert_close(norm(torch.tensor([1e-3, -1e-3])), torch.tensor([0.3015, -0.3015]), atol=1e-4, rtol=0)

    small_checkpoint(tmp_path / "a", "llama, tied")
    model = Transformer.from_pretrained(tmp_path / "a").to(torch.float64).to(torch.float32)
    save_pretrained(model, tmp_path / "b")
    again = Transformer.from_pretrained(tmp_path / "b")
    for m in (model, again):
        before = m(IDS)[0, 0]
        with torch.no_grad():
            m.embed_tokens.weight[5] *= 2
        assert "lm_head.weight" not in m.state_dict() and torch.allclose(m(IDS)[0, 0, 5], 2 * before[5])
    assert "lm_head.weight" not in dict(read_safetensors(tmp_path / "b" / "model.safetensors"))


def test_case_22_rope_is_the_half_split_layout():
    cos, sin = rope_tables(Config(vocab_size=2, hidden_size=4, num_attention_heads=1, num_key_value_heads=1), 1, 1, "cpu")
    turned = rotate(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), cos, sin)
    torch.testing.assert_close(turned, torch.tensor([[0.5403, 0.0, 0.8415, 0.0]]), atol=1e-4, rtol=0)


def test_bad_sizes_are_refused():
    for sizes, message in [(dict(num_attention_heads=4, num_key_value_heads=3), "not a multiple"),
                           (dict(head_dim=5), "odd"), (dict(rope_scaling={"rope_type": "linear"}), "'factor'")]:
        with pytest.raises(ValueError, match=message):
            Config(vocab_size=5, **sizes)


# --- Second derivatives --------------------------------------------------------------------------

def gradient(model, parameters, ids):
    logits = model(ids[:, :-1])
    return torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), parameters, create_graph=True)


def dot(a, b):
    return sum((x * y).sum() for x, y in zip(a, b))


def directions(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_case_05_the_hessian_is_symmetric_with_dropout_and_checkpointing(checkpointing, window):
    model = toy(dropout=0.2, sliding_window=window, qk_norm="head").train()
    model.checkpointing = checkpointing
    parameters, ids = list(model.parameters()), torch.randint(23, (2, 8))
    u, v = directions(parameters, 1), directions(parameters, 2)
    with sdpa_kernel(SDPBackend.MATH):
        g = gradient(model, parameters, ids)
        Hu = torch.autograd.grad(g, parameters, u, retain_graph=True)
        Hv = torch.autograd.grad(g, parameters, v)
    assert abs(dot(u, Hv) - dot(v, Hu)) < 1e-10 * abs(dot(u, Hv)) + 1e-10


def test_checkpointing_changes_neither_gradient_nor_dropout():
    model, ids, found = toy(dropout=0.2, dtype=torch.float32).train(), torch.randint(23, (2, 8)), []
    calls = []
    model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    for model.checkpointing, computed in ((False, 1), (True, 3)):
        torch.manual_seed(7)
        found.append(gradient(model, list(model.parameters()), ids))
        assert len(calls) == computed                                      # once, then once and once more
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("quantised", [False, True])
def test_case_06_a_tied_head_is_one_parameter_with_one_hessian(quantised):
    model = toy(tie_word_embeddings=True)
    if quantised:
        quantize_base(model)
        model.embed_tokens.weight.requires_grad_(True)
    parameters, ids = [p for p in model.parameters() if p.requires_grad], torch.randint(23, (2, 8))
    v, eps = directions(parameters, 1), 1e-5
    with sdpa_kernel(SDPBackend.MATH):
        Hv = torch.autograd.grad(gradient(model, parameters, ids), parameters, v)
        ends = []
        for sign in (1, -2):
            with torch.no_grad():
                for p, d in zip(parameters, v):
                    p += sign * eps * d
            ends.append(gradient(model, parameters, ids))
    for h, plus, minus in zip(Hv, *ends):
        torch.testing.assert_close(h, (plus - minus) / (2 * eps), atol=1e-7, rtol=1e-6)


# --- Files in ------------------------------------------------------------------------------------

def test_case_20_shards_load_and_each_fault_is_named(tmp_path):
    reference = small_checkpoint(tmp_path / "good", max_shard_size="60KB")
    index = json.loads((tmp_path / "good" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2
    with torch.no_grad():
        assert (Transformer.from_pretrained(tmp_path / "good")(IDS) - reference(IDS).logits).abs().max() < 1e-4

    def broken(change, error, *words):
        directory = tmp_path / "bad"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(tmp_path / "good", directory)
        change(directory)
        with pytest.raises(error) as caught:
            Transformer.from_pretrained(directory)
        message = str(caught.value)
        assert all(word in message for word in words) and "\n" not in message, message

    def rewrite(directory, change):
        file = directory / index["weight_map"]["model.norm.weight"]
        tensors = dict(read_safetensors(file))
        change(tensors)
        write_safetensors(file, tensors.items)

    rope = lambda **kw: lambda d: edit_config(d, rope_parameters=dict(rope_theta=1e4, **kw))
    broken(lambda d: (d / shards[1]).unlink(), FileNotFoundError, shards[1])
    broken(lambda d: shutil.rmtree(d), FileNotFoundError, "bad")
    broken(lambda d: (d / "config.json").unlink(), FileNotFoundError, "config.json")
    broken(lambda d: (d / "config.json").write_text("{"), ValueError, "config.json", "JSON")
    broken(lambda d: (d / "model.safetensors.index.json").write_text("{}"), ValueError, "index.json", "weight_map")
    broken(lambda d: edit_config(d, model_type="gpt2"), ValueError, "gpt2", "olmo2")
    broken(lambda d: edit_config(d, "hidden_size"), ValueError, "config.json", "hidden_size")
    broken(lambda d: edit_config(d, hidden_act="gelu"), ValueError, "gelu")
    broken(lambda d: edit_config(d, quantization_config={"bits": 4}), ValueError, "quantised")
    broken(rope(rope_type="longrope"), ValueError, "config.json", "longrope", "llama3")
    broken(rope(rope_type="llama3", factor=8.0), ValueError, "config.json", "low_freq_factor")
    broken(rope(rope_type="yarn", factor=8.0, beta_fast=0), ValueError, "config.json", "beta_fast")
    broken(rope(rope_type="yarn", factor=8.0, mscale=1.0), ValueError, "config.json", "mscale")
    broken(lambda d: rewrite(d, lambda t: t.update(extra=torch.ones(3))), ValueError, "extra", "no place")
    broken(lambda d: rewrite(d, lambda t: t.pop("model.norm.weight")), ValueError, "norm.weight", "no file has weights")
    broken(lambda d: rewrite(d, lambda t: t.update({"model.norm.weight": torch.ones(47)})), ValueError, "norm.weight", "47", "48")
    broken(lambda d: os.truncate(d / shards[0], (d / shards[0]).stat().st_size - 5), ValueError, shards[0], "cut short")
    broken(lambda d: os.truncate(d / shards[0], 5), ValueError, shards[0], "cut short")
    broken(lambda d: (d / shards[0]).write_bytes(b"\4" + bytes(7) + b"{{{{"), ValueError, shards[0], "safetensors")


def test_pytorch_bin_files_load_too(tmp_path):
    reference = small_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no weights"):
        Transformer.from_pretrained(tmp_path)
    state = list(reference.state_dict().items())
    for i, part in enumerate((state[:9], state[9:])):
        torch.save(dict(part), tmp_path / f"pytorch_model-{i}.bin")
    index = {name: f"pytorch_model-{int(i >= 9)}.bin" for i, (name, _) in enumerate(state)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    with torch.no_grad():
        assert (Transformer.from_pretrained(tmp_path)(IDS) - reference(IDS).logits).abs().max() < 1e-4
    os.truncate(tmp_path / "pytorch_model-1.bin", 3000)
    with pytest.raises(ValueError, match="pytorch_model-1.bin.*cut short"):
        Transformer.from_pretrained(tmp_path)


def test_weights_are_read_one_by_one_into_the_target_dtype(tmp_path, monkeypatch):
    small_checkpoint(tmp_path)
    earlier, read = [], model_file.read_safetensors

    def watched(path):
        for name, tensor in read(path):
            assert all(ref() is None for ref in earlier), "a tensor outlives its turn in float32"
            earlier.append(weakref.ref(tensor))
            held = [tensor]
            del tensor
            yield name, held.pop()
    monkeypatch.setattr(model_file, "read_safetensors", watched)
    model = Transformer.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert len(earlier) > 20 and {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_needs_the_weights_and_one_tensor(dtype, tmp_path):
    """Peak host memory: what torch allocates beside what Python does, the raw bytes of the tensor that is being read."""
    config = dict(SMALL, vocab_size=8000, hidden_size=192, intermediate_size=2000)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).save_pretrained(tmp_path, max_shard_size="7MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    Transformer.from_pretrained(tmp_path, dtype=dtype)                     # what is imported on first use counts for nothing
    kept = []
    tracemalloc.start()
    torch_bytes = peak_bytes(lambda: kept.append(Transformer.from_pretrained(tmp_path, dtype=dtype)))
    python_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    weights = sum(p.numel() * p.element_size() for p in kept[0].parameters())
    one = max(4 * p.numel() for p in kept[0].parameters())                 # the files hold float32
    assert torch_bytes + python_bytes < weights + one + 500_000            # the last term for the module objects; a layer's MLP tensor has 1,500,000


# --- A 4-bit base --------------------------------------------------------------------------------

def test_nf4_equals_bitsandbytes():
    x = torch.randn(30, 70, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 30)[:, None]
    x[3:5] = 0                                                             # one whole block among them
    theirs, state = bitsandbytes.functional.quantize_4bit(x, quant_type="nf4", blocksize=64)
    codes, absmax = nf4_quantize(x)
    assert torch.equal(codes.flatten()[:x.numel() // 2], theirs.flatten())
    assert torch.equal(absmax[:-1], state.absmax[:-1]) and torch.equal(model_file.NF4, state.code)
    for dtype in (torch.float32, torch.bfloat16):
        state.dtype = dtype
        expected = bitsandbytes.functional.dequantize_4bit(theirs, state)
        assert torch.equal(nf4_dequantize(codes, absmax, x.shape).to(dtype), expected)


def test_nf4_by_hand():
    """absmax 2: 2, -1, 0.1, 0.07 scaled are 1, -0.5, 0.05, 0.035; the nearest values are 1, -0.525, 0.0796, 0 (middle 0.0398)."""
    codes, absmax = nf4_quantize(torch.tensor([2.0, -1.0, 0.1, 0.07]))
    assert absmax.tolist() == [2.0] and codes[0, :2].tolist() == [15 << 4 | 2, 8 << 4 | 7]
    expected = torch.tensor([2.0, -2 * 0.5250730514526367, 2 * 0.07958029955625534, 0.0])
    torch.testing.assert_close(nf4_dequantize(codes, absmax, (4,)), expected)


def test_case_24_nf4_blocks():
    x = torch.randn(65)
    codes, absmax = nf4_quantize(x)
    assert absmax.shape == (2,) and nf4_dequantize(codes, absmax, x.shape)[64] == x[64]
    for tiny in (0.0, 1e-42):                                              # 1 / 1e-42 overflows
        assert nf4_dequantize(*nf4_quantize(torch.full((64,), tiny)), (64,)).abs().max() <= 1e-42


def test_double_quantisation_costs_no_more_than_in_bitsandbytes():
    x = torch.randn(512, 300, generator=torch.Generator().manual_seed(0))
    linear = torch.nn.Linear(300, 512, bias=False)
    linear.weight.data = x
    single, double = NF4Linear(linear).weight, NF4Linear(linear, double=True)
    theirs = bitsandbytes.functional.dequantize_4bit(
        *bitsandbytes.functional.quantize_4bit(x, quant_type="nf4", blocksize=64, compress_statistics=True))
    error = lambda w: float((w - x).square().mean().sqrt())
    assert error(single) < error(double.weight) < 1.002 * error(theirs) and (double.weight - single).abs().max() < 0.1
    bits = 8 * sum(b.numel() * b.element_size() for b in double.buffers()) / x.numel()
    assert bits < 4.14


def test_quantising_frees_each_full_weight_before_the_next(monkeypatch):
    earlier, quantize = [], model_file.nf4_quantize

    def watched(x):
        assert all(ref() is None for ref in earlier[:-1])
        earlier.append(weakref.ref(x.untyped_storage()))
        return quantize(x)
    monkeypatch.setattr(model_file, "nf4_quantize", watched)
    quantize_base(toy())
    assert len(earlier) == 14


def test_quantised_base_trains_adapters_and_keeps_no_full_weight():
    model, ids = toy(dtype=torch.float32, qkv_bias=True), torch.randint(23, (2, 8))
    plain = copy.deepcopy(model)
    quantize_base(model)
    assert not any(p.requires_grad for p in model.parameters())
    for name, module in plain.named_modules():                             # the same weights, held in full
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = model.get_submodule(name).weight
    adapters, expected = add_lora(model, 2, 4), add_lora(plain, 2, 4)
    for name, p in expected.items():
        p.data = adapters[name].data = torch.randn_like(p)
    torch.testing.assert_close(model(ids), plain(ids), atol=1e-6, rtol=1e-6)
    for g, e in zip(gradient(model, list(adapters.values()), ids), gradient(plain, list(expected.values()), ids)):
        torch.testing.assert_close(g, e, atol=1e-6, rtol=1e-5)

    kept = {}
    for key, m in (("4-bit", model), ("plain", plain)):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(key, []).append(t) or t, lambda t: t):
            m(ids[:, :5])
    full = lambda key: [t for t in kept[key] if t.dim() == 2 and t.numel() == 24 * 16]
    assert not full("4-bit") and full("plain")
    assert not any(p.requires_grad for name, p in model.named_parameters() if "lora_" not in name)


# --- Adapters ------------------------------------------------------------------------------------

def with_adapters(directory, rank=8, alpha=16, **lora):
    """A checkpoint's model with random adapters, and a random adjustment."""
    model = Transformer.from_pretrained(directory)
    for p in add_lora(model, rank, alpha, **lora).values():
        p.data.normal_(std=0.1)
    adjustment = LogitAdjustment(67)
    for p in adjustment.parameters():
        p.data.normal_(std=0.3)
    return model, adjustment


def test_case_23_lora_starts_as_the_identity_with_scale_2_and_trains_every_adapter():
    for base in (torch.float32, torch.bfloat16):
        model, ids = toy(dtype=base), torch.randint(23, (2, 8))
        before = model(ids)
        adapters = add_lora(model, rank=8, alpha=16)
        assert torch.equal(model(ids), before) and len(adapters) == 2 * 2 * 7
        assert {p.dtype for p in adapters.values()} == {torch.float32}
        assert [name for name, p in model.named_parameters() if p.requires_grad] == list(adapters)
        optimizer = torch.optim.SGD(adapters.values(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
        assert all(p.grad.abs().max() > 0 for p in adapters.values())

    layer = LoRALinear(torch.nn.Linear(3, 2), rank=8, alpha=16)
    layer.lora_A.data, layer.lora_B.data = torch.zeros(8, 3), torch.zeros(2, 8)
    layer.lora_A.data[0, 1], layer.lora_B.data[1, 0] = 3.0, 5.0            # B A = 15 at (1, 1)
    x = torch.tensor([0.0, 1.0, 0.0])
    torch.testing.assert_close(layer(x) - layer.base(x), torch.tensor([0.0, 30.0]))


def test_lora_goes_where_its_patterns_say():
    names = lambda *targets: {name.rpartition(".")[0] for name in add_lora(toy(), 2, 4, targets)}
    assert names("q_proj") == {"layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"}
    assert names("layers.1.mlp.*", "lm_head") == {f"layers.1.mlp.{x}_proj" for x in ("gate", "up", "down")} | {"lm_head"}
    assert names("self_attn.[kv]_proj") == {f"layers.{i}.self_attn.{x}_proj" for i in (0, 1) for x in "kv"}


def test_case_23_nothing_matched_or_nothing_to_save_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="'c_attn' matches no layer.*q_proj"):
        add_lora(toy(), 8, 16, ["q_proj", "c_attn"])
    with pytest.raises(ValueError, match="no target"):
        add_lora(toy(), 8, 16, [])
    with pytest.raises(ValueError, match="rank"):
        add_lora(toy(), 0, 16)
    with pytest.raises(ValueError, match="no LoRA adapters to save"):
        save_adapters(toy(), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    model = toy()
    add_lora(model)
    with pytest.raises(ValueError, match="already"):
        add_lora(model)


@pytest.mark.parametrize("lora, named", [
    ({}, ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]),
    ({"targets": ("layers.1.mlp.*", "lm_head")}, [f"model.layers.1.mlp.{x}_proj" for x in ("gate", "up", "down")] + ["lm_head"])])
def test_case_23_adapters_reload_here_and_in_peft(lora, named, tmp_path):
    reference = small_checkpoint(tmp_path / "base")
    model, adjustment = with_adapters(tmp_path / "base", **lora)
    save_adapters(model, tmp_path / "out", adjustment)
    assert not list((tmp_path / "out").glob("*.partial"))
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["target_modules"] == named
    again, fresh = Transformer.from_pretrained(tmp_path / "base"), LogitAdjustment(67)
    adapters, state = load_adapters(again, tmp_path / "out")
    fresh.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(fresh(again(IDS)), adjustment(model(IDS))) and all(p.requires_grad for p in adapters.values())
        theirs = peft.PeftModel.from_pretrained(reference, tmp_path / "out")
        assert (theirs(IDS).logits - model(IDS)).abs().max() < 1e-5
    theirs.save_pretrained(tmp_path / "peft")                              # and theirs here
    again = Transformer.from_pretrained(tmp_path / "base")
    assert load_adapters(again, tmp_path / "peft")[1] is None and torch.equal(again(IDS), model(IDS))


def test_case_20_faulty_adapters_are_named(tmp_path):
    small_checkpoint(tmp_path / "base")
    model, _ = with_adapters(tmp_path / "base")
    save_adapters(model, tmp_path / "good")
    tensors = dict(read_safetensors(tmp_path / "good" / "adapter_model.safetensors"))
    first = next(iter(tensors))

    def broken(change, error, *words):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        change(tmp_path / "bad")
        with pytest.raises(error) as caught:
            load_adapters(Transformer.from_pretrained(tmp_path / "base"), tmp_path / "bad")
        assert all(word in str(caught.value) for word in words), caught.value

    def edit(**changed):
        return lambda d: (d / "adapter_config.json").write_text(json.dumps(
            json.loads((d / "adapter_config.json").read_text()) | changed))

    def weights(change):
        def write(d):
            copied = dict(tensors)
            change(copied)
            write_safetensors(d / "adapter_model.safetensors", copied.items)
        return write
    broken(lambda d: (d / "adapter_model.safetensors").unlink(), FileNotFoundError, "adapter_model.safetensors")
    broken(lambda d: (d / "adapter_config.json").unlink(), FileNotFoundError, "adapter_config.json")
    broken(edit(use_dora=True), ValueError, "use_dora")
    broken(edit(peft_type="IA3"), ValueError, "IA3")
    broken(edit(r=None), ValueError, "'r'")
    broken(weights(lambda t: t.clear()), ValueError, "no tensors")
    broken(weights(lambda t: t.pop(first)), ValueError, "layers.0.self_attn.q_proj.lora_A", "missing")
    broken(weights(lambda t: t.update({first: torch.ones(8, 3)})), ValueError, "layers.0.self_attn.q_proj.lora_A", "(8, 3)")
    broken(weights(lambda t: t.update({first.replace("q_proj", "z_proj"): torch.ones(8, 3)})), ValueError, "z_proj")


# --- Merged models -------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["llama, tied", "qwen2", "olmo2"])
def test_case_23_merged_directories_reload_with_the_same_logits(name, tmp_path):
    small_checkpoint(tmp_path / "base", name)
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    model, adjustment = with_adapters(tmp_path / "base")
    kept = {key: p.clone() for key, p in model.named_parameters()}
    plain = {"none": None, "zero": LogitAdjustment(67), "both": adjustment, "scale": copy.deepcopy(adjustment),
             "offset": copy.deepcopy(adjustment), "scalar": LogitAdjustment(67, "scalar")}
    plain["scale"].offset.data.zero_()
    plain["offset"].log_scale.data.zero_()
    plain["scalar"].log_scale.data.fill_(-0.7)
    for case, a in plain.items():
        directory = tmp_path / case
        save_pretrained(model, directory, a)
        with torch.no_grad():
            logits = model(IDS)
            expected = logits if a is None else a(logits)
            again = Transformer.from_pretrained(directory)
            assert (again(IDS) - expected).abs().max() < 1e-5
            assert again.config.tie_word_embeddings == ("tied" in name and case in ("none", "zero"))
            theirs = transformers.AutoModelForCausalLM.from_pretrained(directory)(IDS).logits
            without_offset = expected - (a.offset if a is not None else 0)
            assert (theirs - without_offset).abs().max() < 2e-5
        assert sorted(f.name for f in directory.iterdir() if "generation" not in f.name) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert all(torch.equal(p, kept[key]) for key, p in model.named_parameters())


def test_merging_a_quantised_base_and_a_model_without_source(tmp_path):
    model = toy(dtype=torch.float32, rope_scaling={"rope_type": "linear", "factor": 2.0})
    quantize_base(model, double=True)
    for p in add_lora(model, 2, 4).values():
        p.data.normal_(std=0.1)
    save_pretrained(model, tmp_path / "merged")
    ids = torch.randint(23, (2, 8))
    with torch.no_grad():
        assert (Transformer.from_pretrained(tmp_path / "merged")(ids) - model.eval()(ids)).abs().max() < 1e-5
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert (theirs(ids).logits - model(ids)).abs().max() < 1e-5
    with pytest.raises(ValueError, match="5 logits, the model has 23"):
        a = LogitAdjustment(5)
        a.offset.data += 1
        list(merged(model, a))


def test_saving_never_overwrites_the_source_or_leaves_half_a_file(tmp_path):
    small_checkpoint(tmp_path / "base", max_shard_size="60KB")
    model = Transformer.from_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="another checkpoint"):
        save_pretrained(model, tmp_path / "base")
    save_pretrained(model, tmp_path / "out")
    assert {f.name for f in (tmp_path / "out").iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    calls = []

    def failing():
        calls.append(1)
        yield "a", torch.ones(2)
        if len(calls) == 2:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        write_safetensors(tmp_path / "out" / "model.safetensors", failing)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_written_safetensors_are_read_by_the_safetensors_package(tmp_path):
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "0-d": torch.tensor(2.5, dtype=torch.float64),
               "t": torch.randn(4, 6).T, "h": torch.randn(1, 1).half()}
    write_safetensors(tmp_path / "x.safetensors", tensors.items)
    theirs = safetensors.torch.load_file(tmp_path / "x.safetensors")
    ours = dict(read_safetensors(tmp_path / "x.safetensors"))
    assert theirs.keys() == ours.keys() == tensors.keys()
    assert all(torch.equal(theirs[k], t) and torch.equal(ours[k], t) for k, t in tensors.items())


# --- Sampling ------------------------------------------------------------------------------------

PROMPTS = ["The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time", "2 + 2 =", "A",
           "The largest planet in the solar system is called", "Roses are red, violets", "Dear Sir or Madam,\n\n", "1, 2, 3, 4,"]


def test_greedy_tokens_equal_transformers(smollm2):
    tokenizer = tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    ours = Transformer.from_pretrained(smollm2)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        expected = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=8, eos_token_id=None, pad_token_id=0)
        assert generate(ours, ids, 8, temperature=0) == [expected[0, len(ids):].tolist()], prompt


@pytest.mark.parametrize("name", VARIANTS)
def test_the_cache_changes_nothing(name, tmp_path):
    """Twenty greedy tokens, past every window, against the whole text computed anew for each of them."""
    small_checkpoint(tmp_path, name)
    model, ids = Transformer.from_pretrained(tmp_path), IDS[0, :5].tolist()
    if "dynamic" in name:
        model.config.max_position_embeddings = 40                          # beyond it, earlier keys would keep their faster turns
    answers = generate(model, ids, 20, temperature=0, n=3)
    for _ in range(20):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert answers == [ids[5:]] * 3


def test_samples_follow_the_adjusted_distribution_and_the_seed():
    model, adjustment, prompt = toy(dtype=torch.float32).eval(), LogitAdjustment(23), [3, 1, 4]
    for p in adjustment.parameters():
        p.data.normal_(std=0.5)
    first = torch.tensor(generate(model, prompt, 1, temperature=0.7, n=20_000, adjustment=adjustment, seed=5))[:, 0]
    p = (adjustment(model(torch.tensor([prompt]))[0, -1]) / 0.7).softmax(-1)
    share = torch.bincount(first, minlength=23) / 20_000
    assert (share - p).abs().max() < 4 * 0.5 / 20_000 ** 0.5               # four standard errors at most
    draw = lambda seed: generate(model, prompt, 6, n=4, seed=seed)
    torch.manual_seed(1)
    a = draw(5)
    torch.manual_seed(2)
    assert draw(5) == a and draw(6) != a and len({tuple(row) for row in a}) > 1
    greedy = generate(model, prompt, 1, temperature=0, adjustment=adjustment)
    assert greedy == [[int(adjustment(model(torch.tensor([prompt]))[0, -1]).argmax())]]


def test_one_prompt_is_read_once_for_all_samples(monkeypatch):
    model, seen, hidden = toy(dtype=torch.float32, dropout=0.5).train(), [], Transformer.hidden
    monkeypatch.setattr(Transformer, "hidden", lambda self, ids, *a: seen.append((tuple(ids.shape), self.training)) or hidden(self, ids, *a))
    generate(model, [1, 2, 3, 4, 5], 3, n=7)
    assert seen == [((1, 5), False), ((7, 1), False), ((7, 1), False)] and model.training


def test_answers_stop_at_ids_and_strings():
    model = toy(dtype=torch.float32).eval()
    free = generate(model, [1, 2], 10, temperature=0)[0]
    third = next(t for t in free[1:] if free.index(t) > 0)
    cut = free.index(third)
    assert generate(model, [1, 2], 10, temperature=0, stop_ids=[third]) == [free[:cut]]
    decode = lambda tokens: "".join(f"<{t}>" for t in tokens)
    assert generate(model, [1, 2], 10, temperature=0, stop=[f"><{third}"], decode=decode) == [free[:cut + 1]]
    assert generate(model, [1, 2], 10, temperature=0, stop_ids=[free[0]]) == [[]]
    assert generate(model, [1, 2], 0) == [[]]
    for bad, message in [(dict(ids=[]), "prompt"), (dict(temperature=-1), "temperature"), (dict(stop=["x"]), "decode")]:
        with pytest.raises(ValueError, match=message):
            generate(**{**dict(model=model, ids=[1], max_new_tokens=2), **bad})
