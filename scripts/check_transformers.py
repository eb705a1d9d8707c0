#!/usr/bin/env python3
"""Checks against Hugging Face transformers that streambp loads, saves and fine-tunes models correctly.

For every family a tiny model with random weights is saved by transformers, in one float32 file and in bfloat16 shards.
streambp loads the model and saves it unchanged (a run with a learning rate of 0): every tensor must have the same bits.
In float32, both train it for 20 steps with AdamW on a document, and every loss must be the same.
Then it fine-tunes the model: transformers must load the result with no missing or unexpected tensors, and both must
compute the same loss for the same text; so they must for a new model of the family (train --family). Then it trains adapters (LoRA): PEFT must load them, with no missing or
unexpected tensors, and compute the same loss; and the merged model must give the loss, too. streambp must load the model that
bitsandbytes has quantised to 4 bits, with the loss of transformers.

Needs: pip install torch transformers safetensors tokenizers peft bitsandbytes"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import bitsandbytes
import torch
from peft import PeftModel
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, BitsAndBytesConfig, PreTrainedTokenizerFast
from transformers import (
    ArceeConfig, Cohere2Config, CohereConfig, CwmConfig, Ernie4_5Config, Exaone4Config, Gemma2Config, Gemma3TextConfig, Gemma4TextConfig, GemmaConfig, Glm4Config, GlmConfig, GPT2Config, GptOssConfig,
    GraniteConfig, GraniteMoeConfig, GraniteMoeHybridConfig, GraniteSWAConfig, HeliumConfig, HunYuanDenseV1Config, Lfm2Config, Lfm2MoeConfig, Lfm3Config, LlamaConfig, Ministral3Config, MinistralConfig, MistralConfig,
    MixtralConfig, NanoChatConfig, Olmo2Config, Olmo3Config, OlmoeConfig, OlmoHybridConfig, Phi3Config, Qwen2Config, Qwen3_5MoeConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig,
    Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig, SeedOssConfig, SmolLM3Config, Starcoder2Config,
    Gemma3Config, Mistral3Config, Qwen2_5_VLConfig, Qwen3_5Config, Qwen3VLConfig, SmolVLMConfig,
)  # fmt: skip

SIZES = dict(vocab_size=400, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=0, pad_token_id=None)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)  # fmt: skip
GRANITE = dict(embedding_multiplier=6.0, attention_multiplier=0.1, residual_multiplier=0.3, logits_scaling=0.5)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)


def without_mlp(sizes):
    return {name: size for name, size in sizes.items() if name != "intermediate_size"}


CONFIGS = {
    "gpt2": GPT2Config(vocab_size=400, n_embd=64, n_layer=3, n_head=4, n_positions=512, bos_token_id=None, eos_token_id=0),
    "llama": LlamaConfig(**SIZES),
    "llama3": LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SIZES, sliding_window=48),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "seed_oss": SeedOssConfig(**SIZES, head_dim=32),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1]),
    "starcoder2": Starcoder2Config(**SIZES, sliding_window=48),
    "gemma": GemmaConfig(**SIZES, head_dim=32),
    "gemma2": Gemma2Config(**SIZES, head_dim=32, query_pre_attn_scalar=20, sliding_window=48, attn_logit_softcapping=2.0,
                           final_logit_softcapping=3.0),
    "nanochat": NanoChatConfig(**SIZES),
    "gemma4": Gemma4TextConfig(**SIZES, head_dim=32, global_head_dim=48, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=32,
                               hidden_size_per_layer_input=0, final_logit_softcapping=30.0, layer_types=2 * ["sliding_attention"] + ["full_attention"]),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=32, query_pre_attn_scalar=20, sliding_window=32, sliding_window_pattern=2),
    "ministral": MinistralConfig(**SIZES, head_dim=16, sliding_window=48, layer_types=["full_attention"] + 2 * ["sliding_attention"]),
    "ministral3": Ministral3Config(
        **SIZES, head_dim=16, rope_parameters=dict(
            rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=64, llama_4_scaling_beta=0.2)),
    "phi3": Phi3Config(**SIZES, partial_rotary_factor=0.5),
    "olmo2": Olmo2Config(**SIZES),
    "olmo3": Olmo3Config(**SIZES, sliding_window=48),
    "exaone4": Exaone4Config(**SIZES, sliding_window=48, sliding_window_pattern=2),
    "glm": GlmConfig(**SIZES, head_dim=32),
    "glm4": Glm4Config(**SIZES, head_dim=32),
    "granite": GraniteConfig(**SIZES, **GRANITE),
    "granite_swa": GraniteSWAConfig(**SIZES, **GRANITE, sliding_window=48, layer_rope_theta=[0, 1e3, 1e3]),
    # On CPUs bitsandbytes 0.50 dequantises weights wrongly if their rows are not whole blocks of 64 (96, for example).
    "granite_hybrid": GraniteMoeHybridConfig(
        **SIZES, **GRANITE, shared_intermediate_size=128, num_local_experts=0, position_embedding_type="rope",
        layer_types=3 * ["full_attention"], mamba_n_heads=4),
    "cohere": CohereConfig(**SIZES, use_qk_norm=True),
    "cohere2": Cohere2Config(**SIZES, sliding_window=48, sliding_window_pattern=3),
    "lfm3": Lfm3Config(**SIZES, head_dim=16, layer_types=["conv", "sliding_attention", "full_attention"], sliding_window=48),
    "cwm": CwmConfig(**SIZES | {"bos_token_id": 1}, head_dim=16, layer_types=["full_attention", "sliding_attention", "full_attention"], sliding_window=48),
    "lfm2": Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False),
    "qwen3_5": Qwen3_5TextConfig(
        **SIZES, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"], tie_word_embeddings=True),
    # transformers writes the convolution's tensor in three equal parts. "olmo_no_rope" is the published form.
    "olmo_hybrid": OlmoHybridConfig(
        **SIZES, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=32,
        layer_types=["linear_attention", "full_attention", "linear_attention"]),
    "olmo_no_rope": OlmoHybridConfig(**SIZES, rope_theta=None, linear_value_head_dim=16),
    "hunyuan": HunYuanDenseV1Config(**SIZES, head_dim=32, rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, alpha=20.0, factor=1.0)),
    "ernie4_5": Ernie4_5Config(**SIZES, head_dim=32, use_bias=True),
    "helium": HeliumConfig(**SIZES, head_dim=16),
    "arcee": ArceeConfig(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32, norm_topk_prob=True),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(
        **without_mlp(SIZES), **EXPERTS, head_dim=32, shared_expert_intermediate_size=64, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16, layer_types=["linear_attention", "full_attention", "linear_attention"]),
    "qwen3_next": Qwen3NextConfig(
        **SIZES, **EXPERTS, head_dim=32, shared_expert_intermediate_size=64, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16, layer_types=["linear_attention", "full_attention", "linear_attention"]),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    "granitemoe": GraniteMoeConfig(**SIZES, **GRANITE, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=32, sliding_window=48),
    "lfm2_moe": Lfm2MoeConfig(**SIZES, **EXPERTS, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1),
}
VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16)
QWEN_VISION = dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64)
MULTIMODAL = {
    "gemma3_vision": Gemma3Config(text_config=CONFIGS["gemma3"].to_dict(), vision_config=VISION, tie_word_embeddings=True),
    "mistral3": Mistral3Config(
        text_config=CONFIGS["mistral"].to_dict(), vision_config=dict(VISION, model_type="pixtral", head_dim=16), tie_word_embeddings=False),
    "qwen2_5_vl": Qwen2_5_VLConfig(
        text_config=dict(SIZES, rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])),
        vision_config=QWEN_VISION, tie_word_embeddings=False),
    "qwen3_vl": Qwen3VLConfig(
        text_config=dict(SIZES, head_dim=32, rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[8, 4, 4], mrope_interleaved=True)),
        vision_config=dict(QWEN_VISION, deepstack_visual_indexes=[0]), tie_word_embeddings=True),
    "qwen3_5_vision": Qwen3_5Config(text_config=CONFIGS["qwen3_5"].to_dict(), vision_config=QWEN_VISION, tie_word_embeddings=True),
    "qwen3_5_moe_vision": Qwen3_5MoeConfig(text_config=CONFIGS["qwen3_5_moe"].to_dict(), vision_config=QWEN_VISION, tie_word_embeddings=False),
    "smolvlm": SmolVLMConfig(text_config=CONFIGS["llama"].to_dict(), vision_config=VISION, tie_word_embeddings=False, pad_token_id=0),
}  # fmt: skip
CONFIGS |= MULTIMODAL


def make_tokenizer(text):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<end>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def tensors_of(directory):
    tensors = {}
    for file in directory.glob("model*.safetensors"):
        with safe_open(file, "pt") as f:
            tensors |= {name: f.get_tensor(name) for name in f.keys()}
    return tensors


def dequantised(model):
    """The model with plain float32 weights in place of those in 4 bits."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, bitsandbytes.nn.Linear4bit):
                plain = torch.nn.Linear(child.in_features, child.out_features, child.bias is not None)
                weight = bitsandbytes.functional.dequantize_4bit(child.weight.data, child.weight.quant_state)
                plain.weight = torch.nn.Parameter(weight)
                plain.bias = child.bias
                setattr(module, name, plain)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model


def train_in_transformers(model, ids, steps):
    """The loss of each step of AdamW on one document."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    losses = []
    model.eval()  # without dropout
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check(name, dtype, folder, binary, data, documents):
    def run(*arguments):
        done = subprocess.run([binary, *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: streambp {arguments[0]}: {done.stdout}{done.stderr}"

    def tune(out, rate, *options):
        run("train", "--model", base, "--data", data, "--steps", 3, "--rate", rate, "--eval-fraction", 0, "--device",
            "cpu", "--out", out, *options)  # fmt: skip
        return out / "step-000003"

    def loss_of(model, *source, own=None):
        """The loss in transformers, after comparing it with that of streambp."""
        run("eval", *source, "--data", data, "--dtype", "f32", "--device", "cpu", "--json", folder / "eval.json")
        ours = json.loads((folder / "eval.json").read_text())["total"]
        loss, count = 0.0, 0
        with torch.no_grad():
            for document in documents:
                ids = torch.tensor((own or tokenizer)(document).input_ids + [0])
                logp = model(ids[None]).logits[0, :-1].log_softmax(-1)
                loss -= logp.gather(1, ids[1:, None]).sum().item()
                count += len(ids) - 1
        errors.append(abs(ours["loss"] - loss / count) / (loss / count))
        assert ours["targets"] == count, f"{name}: {ours['targets']} targets, not {count}"
        assert errors[-1] < 1e-5, f"{name}: loss {ours['loss']}, in transformers {loss / count}"
        return loss / count

    errors = []
    auto = AutoModelForImageTextToText if name in MULTIMODAL else AutoModelForCausalLM
    base = folder / "base"
    torch.manual_seed(1)
    model = auto.from_config(CONFIGS[name]).to(dtype)
    for parameter_name, parameter in model.named_parameters():
        if name == "gemma4" and parameter_name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.data.fill_(0.4)  # scores are not scaled: with the initial weights of 1, softmax is a maximum, and rounding is amplified
    model.save_pretrained(base, max_shard_size="100KB" if dtype == torch.bfloat16 else "5GB")
    model.config.to_json_file(base / "config.json", use_diff=False)  # with all fields that have their usual values
    tokenizer = make_tokenizer("\n".join(documents))
    tokenizer.save_pretrained(base)

    before, after = tensors_of(base), tensors_of(tune(folder / "untouched", 0))
    assert before.keys() == after.keys(), f"{name}: other tensors: {before.keys() ^ after.keys()}"
    for tensor in before:
        same = before[tensor].dtype == after[tensor].dtype and torch.equal(before[tensor], after[tensor])
        assert same, f"{name}: {tensor} has changed"

    trained = "-"
    if dtype == torch.float32:
        one = folder / "one.jsonl"
        one.write_text(json.dumps({"text": documents[0]}) + "\n")
        run("train", "--model", base, "--data", one, "--steps", 20, "--rate", 1e-3, "--warmup", 0, "--schedule", "constant",
            "--eval-fraction", 0, "--device", "cpu", "--out", folder / "one")  # fmt: skip
        lines = [json.loads(line) for line in (folder / "one/metrics.jsonl").read_text().splitlines()]
        ours = [line["loss"] for line in lines if "loss" in line]
        theirs = train_in_transformers(model, torch.tensor(tokenizer(documents[0]).input_ids + [0]), 20)
        assert theirs[-1] < theirs[0] and len(ours) == 20
        trained = max(abs(a - b) / b for a, b in zip(ours, theirs))
        assert trained < 1e-4, f"{name}: losses of training {ours}, in transformers {theirs}"

    tuned = tune(folder / "tuned", 1e-3)
    model, loading = auto.from_pretrained(tuned, output_loading_info=True, dtype=torch.float32)
    assert not any(loading.values()), f"{name}: {loading}"
    loss = loss_of(model, "--model", tuned)

    if name not in MULTIMODAL and name != "llama3" and dtype == torch.float32:
        run("train", "--family", model.config.model_type.removesuffix("_text").removesuffix("_v1_dense"), "--steps", 1, "--sample", 0,
            "--length", 640, "--device", "cpu", "--out", folder / "new")  # fmt: skip
        new = folder / "new/step-000001"
        model, loading = auto.from_pretrained(new, output_loading_info=True, dtype=torch.float32)
        assert not any(loading.values()), f"{name}: {loading}"
        loss_of(model, "--model", new, own=AutoTokenizer.from_pretrained(new))

    # PEFT takes the names of a shared expert in qwen3_next for those of experts. nanochat's norms have no weights, and adapters
    # alone change little in three steps
    has_experts = hasattr(model.config.get_text_config(), "num_experts_per_tok") and name != "granite_hybrid"
    lora_on = ["attention", "experts", "router"] if name == "qwen3_next" else ["all", "experts", "router"] if has_experts else ["all"]
    rate, norms = (1e-1, ()) if name == "nanochat" else (1e-2, ("--train", ".*(norm|ln_).*"))
    adapters = tune(folder / "adapters", rate, "--lora", 4, "--lora-on", *lora_on, *norms)
    adapted = PeftModel.from_pretrained(auto.from_pretrained(base, dtype=torch.float32), adapters)
    loaded = adapted.load_adapter(adapters, adapter_name="again")
    assert not loaded.missing_keys and not loaded.unexpected_keys, f"{name}: {loaded}"
    with_adapters = loss_of(adapted, "--adapter", adapters)
    assert abs(with_adapters - loss_of(auto.from_pretrained(base, dtype=torch.float32), "--model", base)) > 1e-3
    run("merge", "--adapter", adapters, "--out", folder / "merged", "--save-dtype", "f32")
    merged = auto.from_pretrained(folder / "merged", dtype=torch.float32)
    assert abs(loss_of(merged, "--model", folder / "merged") - with_adapters) < 1e-5 * with_adapters

    # bitsandbytes transposes GPT-2's weights, quantises vision too, and leaves experts as they are
    if name not in MULTIMODAL and name != "gpt2" and not has_experts:
        fused = name in ("phi3", "glm", "glm4", "granite_hybrid", "lfm2", "lfm3", "qwen3_5")  # layers that are one tensor have other scales here
        nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=not fused,
                                 bnb_4bit_compute_dtype=torch.float32)  # fmt: skip
        quantised = auto.from_pretrained(base, quantization_config=nf4, dtype=dtype)
        quantised.save_pretrained(folder / "nf4")
        tokenizer.save_pretrained(folder / "nf4")
        in_four_bits = loss_of(dequantised(quantised), "--model", folder / "nf4")
        run("eval", "--model", base, "--base", "nf4", "--data", data, "--dtype", "f32", "--device", "cpu", "--json",
            folder / "eval.json")  # fmt: skip
        here = json.loads((folder / "eval.json").read_text())["total"]["loss"]
        assert abs(here - in_four_bits) < 1e-3, f"{name}: quantised by streambp {here}, by bitsandbytes {in_four_bits}"
    print(f"{name:15}{str(dtype):16}{len(before):8}{loss:10.4f}{with_adapters:15.4f}{max(errors):12.1e}{trained if trained == '-' else f'{trained:.1e}':>12}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("model", nargs="*", default=list(CONFIGS), help=f"to check (default: all): {', '.join(CONFIGS)}")
    parser.add_argument("--streambp", type=Path, default=root / "build" / "streambp", help="the program")
    options = parser.parse_args()
    documents = [p for p in (root / "README.md").read_text().split("\n\n") if 100 < len(p) < 600]
    print(f"{'model':15}{'type':16}{'tensors':>8}{'loss':>10}{'with adapters':>15}{'difference':>12}{'20 steps':>12}")
    for name in options.model:
        for dtype in (torch.float32, torch.bfloat16):
            with tempfile.TemporaryDirectory() as folder:
                data = Path(folder) / "data.jsonl"
                data.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
                check(name, dtype, Path(folder), options.streambp, data, documents)
    print("All models passed.")


if __name__ == "__main__":
    main()
