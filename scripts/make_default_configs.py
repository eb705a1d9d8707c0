#!/usr/bin/env python3
"""Writes tests/golden/default_configs.json: for each model_type, the config.json of transformers' defaults.

It has every field of the configuration class. A test reads all of them: a field with its default value must not stop a model,
and the model must have as many parameters as in transformers.

Needs: pip install torch transformers      (the file was made with transformers 5.24.0)
"""

import json
from pathlib import Path

import torch
from golden import MODELS

OUT = Path(__file__).resolve().parents[1] / "tests" / "golden" / "default_configs.json"
# Where transformers' defaults are another kind of model, with experts and Mamba layers, or no model at all.
CHANGES = {
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "granitemoehybrid": {"num_local_experts": 0, "layer_types": ["attention"] * 32, "position_embedding_type": "rope"},
    "hunyuan_v1_dense": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
}


def main():
    lines = []
    for architecture, model in sorted(MODELS.items()):
        config = model.config_class(**CHANGES.get(model.config_class.model_type, {}))
        with torch.device("meta"):
            parameters = model(config).num_parameters()
        config = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [architecture]}
        lines.append(json.dumps({"parameters": parameters, "config": config}, sort_keys=True))
    OUT.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(f"{OUT}: {len(lines)} configurations")


if __name__ == "__main__":
    main()
