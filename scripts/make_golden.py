#!/usr/bin/env python3
"""Writes tests/golden/<case>.safetensors: losses and gradients of tiny models by transformers, in float64."""

import json
import math
import zlib

import torch
from golden import (
    FLOAT32, arguments, buffers_of, check_norm, check_rope, check_routes, checkpoint_parameters, empty_model, everything_in_float64,
    finite_difference_error, forward, gpt2, llama_like, logits_of, make_model, rope_of, write_safetensors,
)  # fmt: skip

EXPLANATION = """
Contents of a file, for N tokens and a vocabulary of V:

  __metadata__         config: the model's config.json, as a string
  weights/<name>       F32  every parameter, named as in a checkpoint; a tied lm_head is not repeated
  grad/<name>          F64  d loss / d parameter
  tokens    [N]        I32  one stream: a few documents laid end to end
  targets   [N]        I32  the next token of the document, or -1: no loss here
  positions [N]        I32  of each token in its document
  key_begin [N]        I32  the index in the stream of the document's first token
  logits    [N, V]     F64
  logp      [N]        F64  log-prob of the target, 0 where targets is -1
  loss      [1]        F64  mean of -logp over all targets of the stream

Each document goes through the model alone, so a trainer that packs documents must not let them attend to each other.
The last token of a document has no target, and neither has its first quarter, the "prompt".

The script checks its numbers before it writes a file: norms and RoPE against a few lines of plain Python, the gradient
against finite differences of the loss. The table shows the relative error of the finite differences; one float32 hidden
in the model would raise it to about 1e-3. The same versions of torch and transformers write the same bytes on the same
kind of processor.

The loss is that of SFT; make_objective_golden.py covers the other objectives.

Needs: pip install torch transformers safetensors      (the files were made with torch 2.15.0, transformers 5.23.0)
"""


# ---- Cases: a model, and the lengths of the documents ----


def case(lengths, family, **sizes):
    return llama_like(family, **sizes), lengths


LINEAR_ROPE = {"factor": 4.0, "rope_type": "linear"}
# With 32 original positions, wavelengths up to 8 are kept, and those from 32 on are stretched by the full factor.
LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
# Qwen's files contain a window that is disabled.
NO_WINDOW = {"max_window_layers": 1, "sliding_window": 4, "use_sliding_window": False}

# The heads of a delta rule, with odd widths. Its output is normalised and may be near zero, where the gradient is steep: a
# large epsilon keeps rounding errors small.
DELTA = {"linear_conv_kernel_dim": 4, "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 5,
         "linear_value_head_dim": 7, "rms_norm_eps": 0.1}  # fmt: skip

CASES = {
    "gpt2": (gpt2(vocab=61, hidden=24, heads=3, mlp=None), [23, 2, 17]),
    "gpt2_odd": (gpt2(vocab=47, hidden=20, heads=2, mlp=50), [2, 29, 13]),
    "llama2": case(
        [23, 2, 17], "Llama", vocab=53, hidden=24, heads=3, kv_heads=3, mlp=40,
        rope_scaling=None, rope_theta=10000.0, attention_bias=False, tie_word_embeddings=False),
    "llama3": case(
        [31, 3, 19], "Llama", vocab=59, hidden=32, heads=4, kv_heads=2, mlp=36, head_dim=8,
        rope_scaling=LLAMA3_ROPE, rope_theta=100.0, attention_bias=False, mlp_bias=False,
        tie_word_embeddings=True),
    # The newer form: transformers 5 saves "rope_parameters", earlier ones rope_theta and rope_scaling.
    "llama_bias": case(
        [14, 25, 2], "Llama", vocab=53, hidden=24, heads=2, kv_heads=1, mlp=36, head_dim=14,
        rope_parameters={"rope_theta": 200.0, **LLAMA3_ROPE}, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=False),
    "mistral": case(
        [23, 2, 17, 5], "Mistral", vocab=53, hidden=24, heads=3, kv_heads=1, mlp=44,
        rope_theta=10000.0, sliding_window=5, tie_word_embeddings=False),
    "qwen2": case(
        [19, 1, 22], "Qwen2", vocab=67, hidden=24, heads=4, kv_heads=2, mlp=44,
        rope_theta=1000.0, tie_word_embeddings=True, **NO_WINDOW),
    "qwen2_untied": case(
        [2, 16, 27], "Qwen2", vocab=43, hidden=32, heads=4, kv_heads=1, mlp=34,
        rope_theta=1000000.0, tie_word_embeddings=False, **NO_WINDOW),
    "qwen3": case(
        [23, 2, 17], "Qwen3", vocab=51, hidden=20, heads=3, kv_heads=1, mlp=48, head_dim=10,
        rope_scaling=None, rope_theta=1000.0, attention_bias=False, tie_word_embeddings=False,
        max_window_layers=2, sliding_window=None, use_sliding_window=False),
    "qwen3_tied": case(
        [20, 11, 2, 15], "Qwen3", vocab=71, hidden=28, heads=4, kv_heads=2, mlp=38, head_dim=8,
        rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"}, attention_bias=False,
        layer_types=["full_attention", "full_attention"], tie_word_embeddings=True),
    # Qwen3's published form, with 32 original positions.
    "qwen3_yarn": case(
        [40, 3, 19], "Qwen3", vocab=47, hidden=20, heads=2, kv_heads=1, mlp=36, head_dim=16,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 32, "rope_type": "yarn"},
        rope_theta=100.0, attention_bias=False, tie_word_embeddings=True),
    "llama_yarn": case(
        [29, 2, 14], "Llama", vocab=41, hidden=16, heads=2, kv_heads=2, mlp=28, head_dim=12,
        rope_scaling={"beta_fast": 8.0, "beta_slow": 0.5, "factor": 6.0, "mscale": 1.0, "mscale_all_dim": 0.4,
                      "original_max_position_embeddings": 24, "truncate": False, "type": "yarn"},
        rope_theta=50.0, tie_word_embeddings=False),
    "llama_linear": case(
        [17, 9], "Llama", vocab=37, hidden=16, heads=2, kv_heads=1, mlp=28, head_dim=8,
        rope_scaling={"factor": 2.5, "type": "linear"}, rope_theta=1000.0, tie_word_embeddings=True),
    # These two depend on the length: transformers scales by that of a forward pass, and keeps dynamic NTK's frequencies until
    # a longer one, or one within max_position_embeddings. Here all documents have the frequencies of the longest.
    "llama_dynamic": case(
        [31, 17, 20], "Llama", vocab=37, hidden=16, heads=2, kv_heads=1, mlp=28, head_dim=8,
        rope_scaling={"factor": 3.0, "type": "dynamic"}, rope_theta=50.0, tie_word_embeddings=True,
        max_position_embeddings=16),
    "qwen3_longrope": case(
        [17, 29, 21], "Qwen3", vocab=37, hidden=16, heads=2, kv_heads=1, mlp=28, head_dim=8,
        rope_parameters={"rope_theta": 50.0, "rope_type": "longrope", "original_max_position_embeddings": 16,
                         "long_factor": [1.25, 2.0, 3.5, 4.0], "short_factor": [1.0, 1.0, 1.25, 1.5]},
        attention_bias=False, tie_word_embeddings=True),
    # Short documents, and an attention factor.
    "llama_longrope": case(
        [32, 9], "Llama", vocab=41, hidden=16, heads=2, kv_heads=2, mlp=28, head_dim=8,
        rope_scaling={"type": "longrope", "factor": 8.0, "attention_factor": 1.25,
                      "original_max_position_embeddings": 32,
                      "long_factor": [1.25, 2.0, 3.5, 4.0], "short_factor": [1.0, 1.125, 1.25, 1.5]},
        rope_theta=50.0, tie_word_embeddings=False),
    # The form of the published files, and the newer form with the type of every layer.
    "gemma3": case(
        [23, 2, 17], "Gemma3", vocab=57, hidden=24, heads=3, kv_heads=1, mlp=36, head_dim=10,
        attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=False,
        query_pre_attn_scalar=7, rope_local_base_freq=100.0, rope_theta=1000.0, rope_scaling=None,
        pad_token_id=None, sliding_window=6, sliding_window_pattern=2),
    "gemma3_scaled": case(
        [19, 11, 8], "Gemma3", vocab=45, hidden=28, heads=4, kv_heads=2, mlp=32, head_dim=8,
        query_pre_attn_scalar=8, pad_token_id=None, sliding_window=4, tie_word_embeddings=False, final_logit_softcapping=2.0,
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters={"full_attention": {"rope_theta": 500.0, **LINEAR_ROPE},
                         "sliding_attention": {"rope_theta": 50.0, "rope_type": "default"}}),
    # The published form: global layers have wider heads, rotate a part of each head, and use keys as values.
    "gemma4": case(
        [23, 2, 17], "Gemma4", vocab=53, hidden=24, heads=4, kv_heads=2, mlp=36, head_dim=10, global_head_dim=16,
        num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=6, final_logit_softcapping=3.0, pad_token_id=None,
        layer_types=["sliding_attention", "full_attention"], use_bidirectional_attention="vision", num_kv_shared_layers=0,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=53, enable_moe_block=False, num_experts=None, top_k_experts=None,
        moe_intermediate_size=None, use_double_wide_mlp=False, attention_bias=False, tie_word_embeddings=True,
        rope_parameters={"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 500.0, "rope_type": "proportional"},
                         "sliding_attention": {"rope_theta": 50.0, "rope_type": "default"}}),
    # All layers have a projection for values.
    "gemma4_values": case(
        [19, 8], "Gemma4", vocab=41, hidden=20, heads=2, kv_heads=1, mlp=28, head_dim=6, global_head_dim=8, attention_k_eq_v=False,
        sliding_window=5, final_logit_softcapping=None, pad_token_id=None, layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0, attention_bias=False, tie_word_embeddings=False,
        rope_parameters={"full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 300.0, "rope_type": "proportional"},
                         "sliding_attention": {"rope_theta": 60.0, "rope_type": "default"}}),
    # A global and a local layer, with one RoPE.
    "cwm": case(
        [23, 2, 17], "Cwm", vocab=43, hidden=24, heads=4, kv_heads=2, mlp=36, head_dim=8, sliding_window=6, mlp_bias=False, bos_token_id=1,
        layer_types=["full_attention", "sliding_attention"], pad_token_id=None, tie_word_embeddings=False,
        rope_parameters={"rope_theta": 100.0, **LLAMA3_ROPE}),
    # Two layers: a local and a global one. Scores and logits reach the bend of their caps.
    "gemma2": case(
        [23, 3, 16], "Gemma2", vocab=47, hidden=24, heads=4, kv_heads=2, mlp=36, head_dim=10, rope_theta=300.0,
        attn_logit_softcapping=1.5, final_logit_softcapping=2.0, query_pre_attn_scalar=12, sliding_window=6,
        sliding_window_size=6, attention_bias=False, cache_implementation="hybrid", pad_token_id=None),
    "gemma2_uncapped": case(
        [14, 9], "Gemma2", vocab=37, hidden=20, heads=2, kv_heads=1, mlp=28, head_dim=8, rope_theta=300.0,
        attn_logit_softcapping=None, final_logit_softcapping=None, query_pre_attn_scalar=8, sliding_window=5,
        layer_types=["full_attention", "sliding_attention"], pad_token_id=None, tie_word_embeddings=False),
    "nanochat": case(
        [21, 3, 18], "NanoChat", vocab=43, hidden=24, heads=3, kv_heads=1, mlp=40, rope_theta=300.0,
        final_logit_softcapping=2.0, attention_bias=False, pad_token_id=None, tie_word_embeddings=False),
    "seed_oss": case(
        [19, 2, 21], "SeedOss", vocab=53, hidden=20, heads=4, kv_heads=2, mlp=36, head_dim=6,
        rope_theta=100.0, attention_bias=True, attention_out_bias=False, attention_dropout=0.1, residual_dropout=0.1,
        tie_word_embeddings=False),
    "smollm3": case(
        [23, 4, 14], "SmolLM3", vocab=47, hidden=24, heads=4, kv_heads=1, mlp=32, no_rope_layers=[1, 0],
        rope_theta=500.0, attention_bias=False, layer_types=["full_attention", "full_attention"],
        no_rope_layer_interval=4, use_sliding_window=False, sliding_window=None, pad_token_id=None,
        tie_word_embeddings=True),
    "starcoder2": case(
        [17, 3, 26], "Starcoder2", vocab=59, hidden=24, heads=3, kv_heads=1, mlp=52,
        rope_theta=999.5, sliding_window=7, use_bias=True, residual_dropout=0.1, embedding_dropout=0.1,
        attention_dropout=0.1),
    "gemma": case(
        [19, 3, 18], "Gemma", vocab=47, hidden=20, heads=2, kv_heads=1, mlp=36, head_dim=12,
        rope_theta=500.0, attention_bias=False, hidden_activation=None, pad_token_id=None),
    "ministral": case(
        [23, 5, 12], "Ministral", vocab=43, hidden=24, heads=3, kv_heads=1, mlp=40, head_dim=10, rope_theta=500.0,
        sliding_window=6, layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=False),
    "ministral3": case(
        [40, 3, 18], "Ministral3", vocab=43, hidden=20, heads=3, kv_heads=1, mlp=36, head_dim=10, sliding_window=None,
        rope_parameters={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "llama_4_scaling_beta": 0.3, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "original_max_position_embeddings": 16, "rope_theta": 30.0,
                         "max_position_embeddings": 64, "rope_type": "yarn", "type": "yarn"},
        pad_token_id=None, tie_word_embeddings=True),
    "phi3": case(
        [19, 2, 24], "Phi3", vocab=53, hidden=24, heads=4, kv_heads=2, mlp=36, rope_theta=300.0, rope_scaling=None,
        attention_bias=False, original_max_position_embeddings=64, pad_token_id=None, sliding_window=9,
        tie_word_embeddings=False),
    # Phi-4-mini's form: RoPE rotates a part of each head.
    "phi3_partial": case(
        [17, 22, 18], "Phi3", vocab=41, hidden=32, heads=4, kv_heads=1, mlp=28, rope_theta=300.0,
        partial_rotary_factor=0.75, original_max_position_embeddings=16, full_attn_mod=1, interpolate_factor=1,
        lm_head_bias=False, mlp_bias=False, attention_bias=False, pad_token_id=None, sliding_window=262144,
        rope_scaling={"type": "longrope", "long_factor": [1.25, 2.0, 3.5], "short_factor": [1.0, 1.0, 1.25]},
        tie_word_embeddings=True),
    "olmo2": case(
        [21, 3, 17], "Olmo2", vocab=47, hidden=24, heads=4, kv_heads=2, mlp=36, rope_theta=500.0, rope_scaling=None,
        attention_bias=False, pad_token_id=None, tie_word_embeddings=False),
    # The published form, and the newer form with RoPE for each layer type.
    "olmo3": case(
        [40, 3, 17], "Olmo3", vocab=43, hidden=24, heads=2, kv_heads=2, mlp=36, rope_theta=500000.0, sliding_window=7,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "beta_fast": 32.0,
                      "beta_slow": 1.0, "attention_factor": 1.125},
        layer_types=["sliding_attention", "full_attention"], pad_token_id=None, tie_word_embeddings=False),
    "olmo3_parameters": case(
        [19, 8], "Olmo3", vocab=37, hidden=20, heads=2, kv_heads=1, mlp=28, head_dim=10, sliding_window=5,
        rope_parameters={"full_attention": {"rope_theta": 300.0, **LINEAR_ROPE},
                         "sliding_attention": {"rope_theta": 50.0, "rope_type": "default"}},
        layer_types=["full_attention", "sliding_attention"], pad_token_id=None, tie_word_embeddings=False),
    "exaone4": case(
        [23, 4, 15], "Exaone4", vocab=47, hidden=24, heads=3, kv_heads=1, mlp=40, head_dim=10, rope_theta=500.0,
        rope_scaling=LLAMA3_ROPE | {"factor": 16.0}, sliding_window=6, sliding_window_pattern="LG",
        layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=False),
    "exaone4_global": case(
        [19, 9], "Exaone4", vocab=37, hidden=16, heads=2, kv_heads=2, mlp=28, rope_theta=500.0, sliding_window=None,
        sliding_window_pattern=None, layer_types=["full_attention", "full_attention"], tie_word_embeddings=True),
    "glm": case(
        [18, 3, 21], "Glm", vocab=43, hidden=24, heads=3, kv_heads=1, mlp=36, head_dim=12, rope_theta=500.0,
        partial_rotary_factor=0.5, attention_bias=True, pad_token_id=None, tie_word_embeddings=False),
    "glm4": case(
        [22, 2, 14], "Glm4", vocab=47, hidden=24, heads=4, kv_heads=2, mlp=32, head_dim=8, attention_bias=False,
        rope_parameters={"rope_theta": 300.0, "rope_type": "default", "partial_rotary_factor": 0.5}, pad_token_id=None,
        tie_word_embeddings=False),
    "granite": case(
        [21, 3, 17], "Granite", vocab=49, hidden=24, heads=4, kv_heads=2, mlp=36, rope_theta=500.0, rope_scaling=None,
        attention_bias=False, mlp_bias=False, embedding_multiplier=6.0, attention_multiplier=0.2,
        residual_multiplier=0.3, logits_scaling=4.0, tie_word_embeddings=True),
    "granite_swa": case(
        [24, 3, 17], "GraniteSWA", vocab=47, hidden=24, heads=4, kv_heads=2, mlp=36, sliding_window=6,
        rope_theta=500.0, layer_rope_theta=[0, 100.0], embedding_multiplier=6.0, attention_multiplier=0.2,
        residual_multiplier=0.3, logits_scaling=4.0, pad_token_id=None, tie_word_embeddings=True),
    "granite_hybrid": case(
        [19, 3, 19], "GraniteMoeHybrid", vocab=43, hidden=24, heads=4, kv_heads=2, mlp=99, rope_theta=500.0,
        shared_intermediate_size=36, num_local_experts=0, num_experts_per_tok=0, position_embedding_type="rope",
        layer_types=["attention", "attention"], mamba_n_heads=4, mamba_d_head=12, mamba_expand=2, mamba_n_groups=1,
        embedding_multiplier=6, attention_multiplier=0.2, residual_multiplier=0.3, logits_scaling=4,
        attention_bias=False, normalization_function="rmsnorm", tie_word_embeddings=True),
    "cohere": case(
        [17, 3, 23], "Cohere", vocab=47, hidden=24, heads=3, kv_heads=1, mlp=36, rope_theta=500.0, logit_scale=0.3,
        use_qk_norm=False, attention_bias=False, pad_token_id=None),
    "cohere_norms": case(
        [19, 2, 18], "Cohere", vocab=41, hidden=24, heads=4, kv_heads=2, mlp=28, rope_theta=300.0, logit_scale=0.5,
        use_qk_norm=True, attention_bias=False, pad_token_id=None),
    "cohere2": case(
        [24, 2, 18], "Cohere2", vocab=43, hidden=24, heads=4, kv_heads=2, mlp=40, rope_theta=500.0, logit_scale=0.25,
        sliding_window=6, sliding_window_pattern=2, attention_bias=False, order_of_interleaved_layers="local_attn_first",
        position_embedding_type="rope_gptj", rotary_pct=1.0, use_parallel_block=True, pad_token_id=None),
    "hunyuan": case(
        [21, 3, 16], "HunYuanDenseV1", vocab=47, hidden=20, heads=3, kv_heads=1, mlp=36, head_dim=10, rope_theta=100.0,
        rope_scaling={"alpha": 50.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                      "mscale_all_dim": 1.0, "type": "dynamic"},
        attention_bias=False, use_qk_norm=True, attention_head_dim=10, tie_word_embeddings=True),
    "ernie4_5": case(
        [19, 4, 17], "Ernie4_5", vocab=43, hidden=20, heads=4, kv_heads=2, mlp=36, head_dim=6, rope_theta=500.0,
        rope_scaling=None, use_bias=True, pad_token_id=None, tie_word_embeddings=True),
    "helium": case(
        [18, 2, 22], "Helium", vocab=43, hidden=24, heads=3, kv_heads=1, mlp=36, head_dim=8, rope_theta=500.0,
        attention_bias=False, mlp_bias=False, pad_token_id=None, tie_word_embeddings=False),
    # The published form, in which the MLP's width is adjusted (40 becomes 32), and the newer form.
    "lfm2": case(
        [23, 2, 17], "Lfm2", vocab=53, hidden=24, heads=3, kv_heads=1, mlp=44, block_ff_dim=40, block_multiple_of=8,
        full_attn_idxs=[1], conv_L_cache=3, conv_bias=False, rope_theta=300.0, tie_embedding=True, pad_token_id=None,
        num_heads=3),
    "lfm2_wide": case(
        [1, 19, 3, 12], "Lfm2", vocab=41, hidden=20, heads=2, kv_heads=1, mlp=28, block_auto_adjust_ff_dim=False,
        layer_types=["full_attention", "conv"], conv_L_cache=4, pad_token_id=None, tie_word_embeddings=False,
        rope_parameters={"rope_theta": 200.0, "rope_type": "default"}),
    # The published form: layers of all three kinds, gates of heads, and a long convolution.
    "lfm3": case(
        [23, 2, 17], "Lfm3", vocab=43, hidden=24, heads=4, kv_heads=2, mlp=28, head_dim=8, num_hidden_layers=3, conv_L_cache=7,
        conv_bias=False, sliding_window=6, layer_types=["conv", "sliding_attention", "full_attention"], use_sandwich_norm=True,
        use_attention_gate=True, attention_bias=False, pad_token_id=None, tie_word_embeddings=True,
        rope_parameters={"full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 300.0, "rope_type": "proportional"},
                         "sliding_attention": {"rope_theta": 50.0, "rope_type": "default"}}),
    # The published form and a shorter one. Lengths about that of a block of the delta rule, 64, and documents of one token.
    "qwen3_5": case(
        [23, 1, 64, 2], "Qwen3_5", vocab=19, hidden=10, heads=3, kv_heads=1, mlp=16, head_dim=12, num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        **DELTA | dict(linear_key_head_dim=6, linear_value_head_dim=6),  # llama.cpp knows one width only
        attention_bias=False, attn_output_gate=True, full_attention_interval=4, mamba_ssm_dtype="float32",
        mlp_only_layers=[], mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, partial_rotary_factor=0.5,
        rope_parameters={"mrope_interleaved": True, "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5,
                         "rope_theta": 300.0, "rope_type": "default"},
        bos_token_id=None, pad_token_id=None, tie_word_embeddings=True),
    "qwen3_5_wide": case(
        [1, 63, 64, 65, 257, 1, 1], "Qwen3_5", vocab=11, hidden=10, heads=2, kv_heads=2, mlp=12, head_dim=8,
        num_hidden_layers=3, full_attention_interval=2, **DELTA | {"linear_conv_kernel_dim": 3}, attention_bias=True,
        output_gate_type="swish", rope_theta=200.0, partial_rotary_factor=0.5, pad_token_id=None,
        tie_word_embeddings=False),
    "qwen3_5_long": case(
        [1000], "Qwen3_5", vocab=5, hidden=8, heads=1, kv_heads=1, mlp=8, head_dim=8, num_hidden_layers=2,
        full_attention_interval=2, **DELTA, rope_theta=500.0, partial_rotary_factor=0.25, pad_token_id=None, tie_word_embeddings=True),
    # The published form, without RoPE, and a shorter one.
    "olmo_hybrid": case(
        [23, 1, 64, 2], "OlmoHybrid", vocab=19, hidden=12, heads=3, kv_heads=3, mlp=16, num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"], attention_bias=False,
        **DELTA, linear_a_log_max=16.0, linear_a_log_min=0.0, linear_allow_neg_eigval=True, linear_dt_init_floor=0.0001,
        linear_dt_max=0.1, linear_dt_min=0.001, rope_parameters=None, rope_theta=None, bos_token_id=None,
        pad_token_id=None, tie_word_embeddings=False),
    "olmo_hybrid_rope": case(
        [1, 63, 64, 65, 257, 1, 1], "OlmoHybrid", vocab=11, hidden=12, heads=2, kv_heads=1, mlp=12, num_hidden_layers=3,
        attention_bias=True, linear_conv_kernel_dim=3, rms_norm_eps=0.1, rope_parameters={"rope_theta": 200.0, "rope_type": "default"},
        pad_token_id=None, tie_word_embeddings=True),
    # Three of seven experts; all of them.
    "qwen3_moe": case(
        [23, 2, 17], "Qwen3Moe", vocab=41, hidden=20, heads=4, kv_heads=2, mlp=44, head_dim=6, num_local_experts=7,
        num_experts_per_tok=3, moe_intermediate_size=12, norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=[],
        output_router_logits=False, router_aux_loss_coef=0.001, attention_bias=False, use_sliding_window=False, sliding_window=None,
        rope_theta=300.0, rope_scaling=None, pad_token_id=None, tie_word_embeddings=False),
    "qwen3_moe_all": case(
        [12, 1, 19], "Qwen3Moe", vocab=31, hidden=16, heads=2, kv_heads=1, mlp=8, head_dim=8, num_experts=3,
        num_experts_per_tok=3, moe_intermediate_size=6, norm_topk_prob=True, rope_theta=300.0, pad_token_id=None, tie_word_embeddings=True),
    "mixtral": case(
        [19, 3, 21], "Mixtral", vocab=37, hidden=24, heads=4, kv_heads=2, mlp=14, num_local_experts=5, num_experts_per_tok=2,
        router_jitter_noise=0.0, output_router_logits=False, router_aux_loss_coef=0.02, sliding_window=None, rope_theta=500.0,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=False),
    "olmoe": case(
        [22, 3, 15], "Olmoe", vocab=37, hidden=20, heads=2, kv_heads=2, mlp=10, num_experts=6, num_experts_per_tok=2,
        clip_qkv=None, norm_topk_prob=False, output_router_logits=False, router_aux_loss_coef=0.01, attention_bias=False, rope_theta=300.0,
        rope_scaling=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False),
    "granitemoe": case(
        [19, 3, 18], "GraniteMoe", vocab=41, hidden=24, heads=4, kv_heads=2, mlp=10, num_local_experts=5, num_experts_per_tok=3,
        rope_theta=500.0, rope_scaling=None, attention_bias=False, embedding_multiplier=6.0, attention_multiplier=0.2,
        residual_multiplier=0.3, logits_scaling=4.0, output_router_logits=False, router_aux_loss_coef=0.001, tie_word_embeddings=True),
    # The first layer is dense; an expert that everyone chooses, and one that nobody does.
    "lfm2_moe": case(
        [23, 2, 17], "Lfm2Moe", vocab=43, hidden=24, heads=3, kv_heads=1, mlp=28, num_hidden_layers=3, moe_intermediate_size=10,
        layer_types=["conv", "full_attention", "conv"], num_dense_layers=1, num_experts=5, num_experts_per_tok=3, use_expert_bias=True,
        norm_topk_prob=True, routed_scaling_factor=1.5, conv_L_cache=3, conv_bias=False, pad_token_id=None,
        rope_parameters={"rope_theta": 300.0, "rope_type": "default"}, tie_word_embeddings=True),
    "qwen3_next": case(
        [23, 1, 64, 2], "Qwen3Next", vocab=19, hidden=10, heads=3, kv_heads=1, mlp=16, head_dim=12, **DELTA, num_experts=5,
        num_experts_per_tok=2, moe_intermediate_size=7, shared_expert_intermediate_size=9, decoder_sparse_step=1, mlp_only_layers=[],
        norm_topk_prob=True, output_router_logits=False, router_aux_loss_coef=0.001, full_attention_interval=2, attention_bias=False,
        partial_rotary_factor=0.5, rope_theta=300.0, rope_scaling=None, pad_token_id=None, tie_word_embeddings=False),
    "qwen3_5_moe": case(
        [21, 1, 40, 2], "Qwen3_5Moe", vocab=19, hidden=10, heads=2, kv_heads=1, mlp=16, head_dim=8, **DELTA,
        layer_types=["linear_attention", "full_attention"], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6,
        shared_expert_intermediate_size=5, output_router_logits=False, router_aux_loss_coef=0.001, attn_output_gate=True,
        full_attention_interval=4, mamba_ssm_dtype="float32", attention_bias=False,
        rope_parameters={"mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5,
                         "rope_theta": 300.0, "rope_type": "default"},
        bos_token_id=None, pad_token_id=None, tie_word_embeddings=True),
    # The published form. Gates and ups are on both sides of the activation's limits.
    "gpt_oss": case(
        [23, 2, 17], "GptOss", vocab=41, hidden=20, heads=4, kv_heads=2, mlp=12, head_dim=6, num_local_experts=7, num_experts_per_tok=3,
        num_hidden_layers=3, experts_per_token=3, initial_context_length=16, sliding_window=6, swiglu_limit=7.0, attention_bias=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], output_router_logits=True, router_aux_loss_coef=0.4,
        rope_scaling={"beta_fast": 8.0, "beta_slow": 0.2, "factor": 32.0, "original_max_position_embeddings": 16, "rope_type": "yarn", "truncate": False},
        rope_theta=50.0, pad_token_id=None, tie_word_embeddings=False),
    # A loss balances the experts; the second document begins at a multiple of 64 rows, and unused rows do not count.
    "qwen3_moe_balanced": case(
        [23, 2, 17], "Qwen3Moe", vocab=29, hidden=16, heads=2, kv_heads=1, mlp=8, head_dim=8, num_local_experts=7,
        num_experts_per_tok=3, moe_intermediate_size=6, output_router_logits=True, router_aux_loss_coef=0.4, rope_theta=300.0,
        pad_token_id=None, tie_word_embeddings=True),
    "qwen3_next_balanced": case(
        [200, 90, 3], "Qwen3Next", vocab=11, hidden=8, heads=1, kv_heads=1, mlp=8, head_dim=8, **DELTA, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=5, shared_expert_intermediate_size=4, output_router_logits=True,
        router_aux_loss_coef=0.6, full_attention_interval=2, partial_rotary_factor=0.5, rope_theta=300.0, rope_scaling=None, pad_token_id=None,
        tie_word_embeddings=True),
    "arcee": case(
        [17, 3, 20], "Arcee", vocab=41, hidden=24, heads=3, kv_heads=1, mlp=52, head_dim=8, rope_theta=500.0,
        attention_bias=False, mlp_bias=False, rope_scaling=None, tie_word_embeddings=False),
}  # fmt: skip


def make_stream(lengths, vocab, random):
    """Random documents of these lengths, laid end to end: tokens, targets, positions, key_begin."""
    tokens = torch.randint(vocab, [sum(lengths)], generator=random)
    targets, positions, key_begin = [], [], []
    for length in lengths:
        begin = len(targets)
        document = tokens[begin : begin + length].tolist()
        prompt = length // 4
        targets += [-1] * prompt + document[prompt + 1 :] + [-1]
        positions += range(length)
        key_begin += [begin] * length
    stream = {"tokens": tokens, "targets": targets, "positions": positions, "key_begin": key_begin}
    return {name: torch.as_tensor(values, dtype=torch.int32) for name, values in stream.items()}


# ---- bfloat16 ----


def gradient_from(config, weights, buffers, stream, lengths, dtype):
    """The gradient with weights and activations in `dtype` and the loss in float32 or wider."""
    model = empty_model(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        for name, buffer in buffers_of(model).items():
            buffer.data = buffers[name].to(torch.promote_types(dtype, FLOAT32))
    logits, targets = logits_of(model, stream, lengths), stream["targets"].long()
    torch.nn.functional.cross_entropy(logits.to(torch.promote_types(dtype, FLOAT32)), targets, ignore_index=-1).backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


def bfloat16_error(config, weights, buffers, stream, lengths):
    """The distance of PyTorch's bfloat16 gradient from its float64 gradient, for weights that bfloat16 can represent.

    |rounded - truth| / |truth|, with norms over all parameters together.
    """
    weights = {name: weight.detach().bfloat16().double() for name, weight in weights.items()}
    with everything_in_float64():
        truth = gradient_from(config, weights, buffers, stream, lengths, torch.double)
    rounded = gradient_from(config, weights, buffers, stream, lengths, torch.bfloat16)
    difference = sum(((rounded[name] - g) ** 2).sum().item() for name, g in truth.items())
    return math.sqrt(difference / sum((g**2).sum().item() for g in truth.values()))


# ---- Writing the cases ----


def make_case(name, folder):
    config, lengths = CASES[name]
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with everything_in_float64():
        model = make_model(config, random)
        stream = make_stream(lengths, config["vocab_size"], random)
        logits, logp, loss = forward(model, stream, lengths)
        loss.backward()
        parameters = checkpoint_parameters(model)
        tensors = {
            **{f"weights/{n}": p.detach().type(FLOAT32) for n, p in (parameters | buffers_of(model)).items()},
            **{f"grad/{n}": p.grad.contiguous() for n, p in parameters.items()},
            **stream,
            "logits": logits.detach(),
            "logp": logp.detach(),
            "loss": loss.detach()[None],
        }
        check_norm(model, config)
        if config["model_type"] in ("mixtral", "lfm2_moe"):
            check_routes(model, stream, lengths)
        if "n_embd" not in config and rope_of(model) is not None:
            check_rope(model, config, max(lengths))
        error = finite_difference_error(model, lambda: forward(model, stream, lengths)[2], random)
        assert error < 1e-8, f"{name}: the gradient differs from the slope of the loss by {error:.1e}; is a float32 left in the model?"

    file = folder / f"{name}.safetensors"
    write_safetensors(file, tensors, {"config": json.dumps(config)})

    errors_file = folder / "bfloat16_errors.json"
    errors = json.loads(errors_file.read_text()) if errors_file.exists() else {}
    errors[name] = float(f"{bfloat16_error(config, dict(model.named_parameters()), buffers_of(model), stream, lengths):.3g}")
    errors_file.write_text(json.dumps(dict(sorted(errors.items())), indent=2) + "\n")

    count = sum(p.numel() for p in parameters.values())
    size = file.stat().st_size
    print(f"{name:14}{count:11,}{sum(lengths):8}{loss.item():9.4f}{error:19.1e}{size:12,}", flush=True)
    return size


def main():
    options = arguments(__doc__, EXPLANATION, "golden", CASES)
    print(f"{'case':14}{'parameters':>11}{'tokens':>8}{'loss':>9}{'finite difference':>19}{'bytes':>12}")
    total = sum(make_case(name, options.out) for name in options.case)
    print(f"{'total':14}{total:59,}")


if __name__ == "__main__":
    main()
