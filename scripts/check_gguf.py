#!/usr/bin/env python3
"""Checks against llama.cpp that streambp reads GGUF files, and that llama.cpp reads its adapters and merged models.

For every family a tiny model with random weights is made by transformers, converted by llama.cpp's converter, and quantised by
llama-quantize to Q4_K_M. Then
  - the unquantised file, unpacked and saved, must have the tensors of the original;
  - the mean log-probs of texts must be those of llama.cpp: of the base, of the base with an adapter that streambp trains on the
    quantised file, and of merged models. llama.cpp rounds activations to 8 bits for its products, which costs some 0.001.

  python scripts/check_gguf.py LLAMA_CPP [FAMILY ...]
  python scripts/check_gguf.py LLAMA_CPP --f32 [FAMILY ...]    base models alone, in float32, so that nothing is rounded

LLAMA_CPP: a checkout of llama.cpp, built in LLAMA_CPP/build (cmake -B build -DBUILD_SHARED_LIBS=ON; cmake --build build).
Needs: pip install torch transformers safetensors tokenizers sentencepiece gguf llama-cpp-python"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
STREAMBP = ROOT / "build/streambp"
SIZES = dict(vocab_size=616, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=None)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=128)
SCALES = dict(embedding_multiplier=6.0, attention_multiplier=0.1, residual_multiplier=0.3, logits_scaling=0.5)
GLOBAL = ["sliding_attention"] * 3 + ["full_attention"]
# The configuration, and the name of the tokenizer's words, which the converter finds by a hash; empty: SentencePiece.
FAMILIES = {
    "llama": ("Llama", dict(rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True, tie_word_embeddings=False), "llama-bpe"),
    "mistral3": ("Ministral3", dict(head_dim=64, rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0,
                                                                     llama_4_scaling_beta=0.1)), "tekken"),
    "qwen2": ("Qwen2", {}, "qwen2"),
    "qwen3": ("Qwen3", dict(head_dim=96, tie_word_embeddings=True), "qwen2"),
    "qwen3-yarn": ("Qwen3", dict(head_dim=64, rope_parameters=YARN), "qwen2"),
    "qwen35": ("Qwen3_5Text", dict(head_dim=64, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=32,
                                   linear_value_head_dim=32, layer_types=["linear_attention"] * 3 + ["full_attention"]), "qwen35"),
    "gemma": ("Gemma", dict(head_dim=64), ""),
    "gemma2": ("Gemma2", dict(head_dim=64, query_pre_attn_scalar=64, sliding_window=48), ""),
    "gemma3": ("Gemma3Text", dict(head_dim=64, query_pre_attn_scalar=64, sliding_window=48), ""),
    "granite": ("Granite", SCALES, "llama-bpe"),
    "granite_swa": ("GraniteSWA", dict(SCALES, sliding_window=48), "llama-bpe"),
    "smollm3": ("SmolLM3", dict(no_rope_layers=[1, 1, 1, 0]), "llama-bpe"),
    "starcoder2": ("Starcoder2", dict(tie_word_embeddings=True), "starcoder"),
    "olmo2": ("Olmo2", {}, "dbrx"),
    "olmo3": ("Olmo3", dict(sliding_window=48), "dbrx"),
    "glm4": ("Glm4", dict(head_dim=64), "glm4"),
    "command-r": ("Cohere", {}, "command-r"),
    "cohere2": ("Cohere2", dict(sliding_window=48, rotary_pct=1.0), "command-r"),
    "hunyuan-dense": ("HunYuanDenseV1", dict(head_dim=64, tie_word_embeddings=True), "hunyuan-dense"),
    "lfm2": ("Lfm2", dict(intermediate_size=384, layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False), "lfm2"),
    "seed_oss": ("SeedOss", dict(head_dim=64, attention_bias=True, attention_out_bias=False), "seed-coder"),
    "ernie4_5": ("Ernie4_5", dict(head_dim=64), ""),
    "arcee": ("Arcee", {}, "llama-bpe"),
    "qwen3moe": ("Qwen3Moe", dict(head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=True), "qwen2"),
    "qwen35moe": ("Qwen3_5MoeText", dict(head_dim=64, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=32,
                                         linear_value_head_dim=32, layer_types=["linear_attention"] * 3 + ["full_attention"], num_experts=8,
                                         num_experts_per_tok=2, moe_intermediate_size=256, shared_expert_intermediate_size=256), "qwen35"),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2), "llama-bpe"),
    "olmoe": ("Olmoe", dict(num_key_value_heads=4, num_experts=8, num_experts_per_tok=2, intermediate_size=256), "dbrx"),
    "granitemoe": ("GraniteMoe", dict(SCALES, num_local_experts=8, num_experts_per_tok=2, intermediate_size=256), "llama-bpe"),
    "lfm2moe": ("Lfm2Moe", dict(intermediate_size=384, moe_intermediate_size=256, num_dense_layers=1, num_experts=8, num_experts_per_tok=2,
                                layer_types=["conv", "full_attention"] * 2, tie_word_embeddings=True), "lfm2"),
    "qwen3next": ("Qwen3Next", dict(head_dim=64, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=32, linear_value_head_dim=32,
                                    layer_types=["linear_attention"] * 3 + ["full_attention"], num_experts=8, num_experts_per_tok=2,
                                    moe_intermediate_size=256, shared_expert_intermediate_size=256), "qwen2"),
    "gpt-oss": ("GptOss", dict(head_dim=64, num_local_experts=8, num_experts_per_tok=2, intermediate_size=256, sliding_window=48,
                               rope_parameters=dict(YARN, rope_theta=15450, truncate=False)), "gpt-4o"),  # a limit of YaRN at 10: llama.cpp rounds it
    "gpt2": ("GPT2", dict(n_embd=256, n_head=4, n_layer=4, n_positions=512, n_ctx=512), "gpt-2"),
}  # fmt: skip
EXPERTS = ["qwen3moe", "qwen35moe", "mixtral", "olmoe", "granitemoe", "lfm2moe", "qwen3next", "gpt-oss"]  # rounding can change which experts a token uses
CONVERT = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import conversion.base, convert_hf_to_gguf
words = sys.argv[2]
for kind in vars(conversion.base).values():
    if hasattr(kind, "get_vocab_base_pre"): kind.get_vocab_base_pre = lambda self, tokenizer: words
sys.argv = ["convert", sys.argv[3], "--outfile", sys.argv[4], "--outtype"] + sys.argv[5:]
convert_hf_to_gguf.main()
"""
WORDS = " ".join((ROOT / "docs" / name).read_text() for name in ["verification.md", "fine-tuning.md"])
TEXTS = [text for text in re.sub(r"\s+", " ", WORDS).split(". ") if 100 < len(text) < 400][:20]


def run(*command):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(str(part) for part in command[:3])} ...: {result.stderr[-600:]}")


def make_tokenizers(folder):
    import sentencepiece
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    files = [str(path) for path in ROOT.glob("docs/*.md")]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|user|>"]
    bpe.train(files, trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    bpe.save(f"{folder}/tokenizer.json")
    sentencepiece.SentencePieceTrainer.train(input=",".join(files), model_prefix=f"{folder}/tokenizer", vocab_size=600, model_type="bpe",
                                             byte_fallback=True, minloglevel=2)  # fmt: skip


def make_models(name, llama_cpp, folder, dtype="bf16"):
    kind, fields, words = FAMILIES[name]
    torch.manual_seed(3)
    config = getattr(transformers, kind + "Config")(**{**SIZES, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p + 0.1 * torch.randn_like(p) if p.dim() == 1 else 0.06 * torch.randn_like(p))
    model.to(torch.bfloat16).save_pretrained(folder / name)
    shutil.copy(folder / ("tokenizer.json" if words else "tokenizer.model"), folder / name)
    (folder / name / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>" if words else "</s>"}))
    plain, quantised = folder / f"{name}.gguf", folder / f"{name}-Q4_K_M.gguf"
    run(sys.executable, "-c", CONVERT, llama_cpp, words, folder / name, plain, dtype, *(["--no-mtp"] if name.startswith(("qwen35", "qwen3next")) else []))
    run(Path(llama_cpp) / "build/bin/llama-quantize", plain, quantised, "Q4_K_M")
    return plain, quantised


def train(model, out, *more):
    shutil.rmtree(out, ignore_errors=True)
    run(STREAMBP, "train", "--model", model, "--data", ROOT / "docs/grpo.md", "--out", out, "--dtype", "f32", "--device", "cpu", "--length", 128, *more)
    return out / "last"


def different_tensors(original, saved):
    theirs, ours = load_file(original / "model.safetensors"), load_file(saved / "model.safetensors")
    different = [key for key in theirs if not torch.equal(theirs[key], ours[key.removeprefix("transformer.")])]
    return len(different), len(theirs)


def of_llama_cpp(model, adapter=None):
    import llama_cpp

    cache = dict(type_k=0, type_v=0, flash_attn=False)  # in float32
    llama = llama_cpp.Llama(str(model), n_ctx=512, n_batch=512, logits_all=True, verbose=False, lora_path=adapter and str(adapter), **cache)
    results = []
    for text in TEXTS:
        tokens = llama.tokenize(text.encode(), add_bos=True, special=False) + [llama.token_eos()]
        llama.reset()
        llama.eval(tokens)
        logits = torch.from_numpy(np.array(llama.scores[: len(tokens) - 1], dtype=np.float64))
        results.append((len(tokens) - 1, torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:])).item()))
    return results


def of_streambp(model, folder, *more):
    results = []
    for text in TEXTS:
        (folder / "text.txt").write_text(text)
        run(STREAMBP, "eval", "--model", model, "--data", folder / "text.txt", "--dtype", "f32", "--device", "cpu", "--json", folder / "eval.json", *more)
        total = json.loads((folder / "eval.json").read_text())["total"]
        results.append((total["targets"], total["loss"]))
    return results


def difference(a, b):
    assert [n for n, _ in a] == [n for n, _ in b], "the tokens differ"
    return max(abs(x - y) for (_, x), (_, y) in zip(a, b))


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    llama_cpp = sys.argv[1]
    os.environ.setdefault("LLAMA_CPP_LIB_PATH", f"{llama_cpp}/build/bin")
    columns = ["base", "adapter", "f16", "q8_0", "q4_0", "cost q8_0", "cost q4_0"]
    exact = "--f32" in sys.argv
    print("largest difference of the mean log-prob of a text; cost: of the type of the merged file\n")
    if not exact:
        print(f"{'family':<14}{'tensors that differ':>22}" + "".join(f"{column:>10}" for column in columns))
    worst = 0.0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_tokenizers(folder)
        for name in [name for name in sys.argv[2:] if name != "--f32"] or FAMILIES:
            plain, model = make_models(name, llama_cpp, folder, "f32" if exact else "bf16")
            if exact:
                found = difference(of_streambp(plain, folder), of_llama_cpp(plain))
                worst = max(worst, found)
                print(f"{name:<14}{found:>10.1e}", flush=True)
                continue
            differ, count = different_tensors(folder / name, train(plain, folder / "saved", "--base", "unpacked", "--steps", 1, "--rate", 0, "--save-dtype", "bf16"))
            adapter = train(model, folder / "tuned", "--lora", 8, "--steps", 12, "--rate", 0.02)
            ours = of_streambp(model, folder, "--adapter", adapter)
            row = [difference(of_streambp(model, folder), of_llama_cpp(model)), difference(ours, of_llama_cpp(model, adapter / "adapter.gguf"))]
            costs = []
            for dtype in ["f16", "q8_0", "q4_0"]:
                merged = folder / f"merged-{dtype}.gguf"
                merged.unlink(missing_ok=True)
                run(STREAMBP, "merge", "--adapter", adapter, "--out", merged, "--save-dtype", dtype)
                of_merged = of_streambp(merged, folder)
                row.append(difference(of_merged, of_llama_cpp(merged)))
                costs.append(difference(of_merged, ours))
            print(f"{name:<14}{f'{differ} of {count}':>22}" + "".join(f"{x:>10.4f}" for x in row + costs[1:]), flush=True)
            worst = max(worst, *(x / 4 for x in row) if name in EXPERTS else row)
            if differ > 1:
                sys.exit(f"{name}: {differ} tensors differ")
    if worst > (3e-4 if exact else 0.03):
        sys.exit(f"a difference of {worst:.4f} is more than rounding")
    print("All models passed.")


if __name__ == "__main__":
    main()
