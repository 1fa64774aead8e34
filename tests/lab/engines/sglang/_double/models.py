"""What a model folder says about itself: architecture, layers, state sizes, and the weights computed from it.

Only config.json is read, as the engine does before it loads anything. Facts: the models' public configurations;
the state sizes are checked against measured servers (tests/test_sglang_double_memory.py).
"""

import json
from pathlib import Path

GIB = 1 << 30
# Measured: what a loaded model takes beyond its parameters (0.04 to 0.16 GiB).
OVERHEAD_GIB = 0.09

MULTIMODAL = (
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)


class NoModel(Exception):
    """There is no such model; `args[0]` is what the engine's library says."""


class Model:
    """A configuration. `text` is the language model's part of it."""

    def __init__(self, path, config):
        self.path = str(path)
        self.name = Path(path).name
        self.config = config
        self.text = config.get("text_config") or config
        self.architecture = (config.get("architectures") or ["Qwen3ForCausalLM"])[0]
        self.type = config.get("model_type")
        self.layers = self.text["num_hidden_layers"]
        kinds = self.text.get("layer_types") or []
        self.linear_layers = sum(kind == "linear_attention" for kind in kinds)
        self.attention_layers = self.layers - self.linear_layers
        self.heads = self.text["num_attention_heads"]
        self.kv_heads = self.text.get("num_key_value_heads") or self.heads
        self.head_dim = self.text.get("head_dim") or self.text["hidden_size"] // self.heads
        self.mla = "kv_lora_rank" in self.text and self.text["kv_lora_rank"] is not None
        self.hybrid = self.linear_layers > 0
        self.multimodal = self.architecture in MULTIMODAL
        self.context = self.text["max_position_embeddings"]

    def kv_bytes(self, tp, element=2):
        """Bytes of keys and values of one token on one GPU. KV heads are replicated where tp exceeds them."""
        if self.mla:
            return (self.text["kv_lora_rank"] + self.text["qk_rope_head_dim"]) * self.attention_layers * element
        return max(1, self.kv_heads // tp) * 2 * self.head_dim * self.attention_layers * element

    def state(self, tp, ssm_bytes=4):
        """(convolution, recurrent) bytes of one state slot on one GPU, over all linear layers."""
        text = self.text
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
        conv = (values + 2 * keys) // tp * (text["linear_conv_kernel_dim"] - 1) * 2
        ssm = (
            text["linear_num_value_heads"]
            // tp
            * text["linear_value_head_dim"]
            * text["linear_key_head_dim"]
            * ssm_bytes
        )
        return self.linear_layers * conv, self.linear_layers * ssm

    def weights_gib(self, tp):
        """GiB of weights on one GPU, computed from the configuration."""
        return self._bytes() / tp / GIB + OVERHEAD_GIB

    def _bytes(self):
        text, hidden = self.text, self.text["hidden_size"]
        if self.architecture.startswith("DFlash"):
            embeddings = 0  # shares the target's embedding and head; has a projection of the target's layers instead
            embeddings += hidden * hidden * len((self.config.get("dflash_config") or {}).get("target_layer_ids") or [1])
        elif self.architecture.endswith("Eagle3"):
            embeddings = text.get("draft_vocab_size", text["vocab_size"]) * hidden + 3 * hidden * hidden
        else:
            embeddings = text["vocab_size"] * hidden * (1 if text.get("tie_word_embeddings") else 2)
        total = embeddings + self._attention() + self._linear() + self._vision()
        dense, experts = self._mlp()
        return 2 * (total + dense) + experts

    def _attention(self):
        text, hidden = self.text, self.text["hidden_size"]
        if self.mla:
            nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
            q_rank, kv_rank = text["q_lora_rank"], text["kv_lora_rank"]
            one = hidden * q_rank + q_rank * self.heads * (nope + rope) + hidden * (kv_rank + rope)
            one += kv_rank * self.heads * (nope + value) + self.heads * value * hidden
            return self.layers * one
        wide = self.heads * self.head_dim
        gate = 2 if text.get("attn_output_gate") else 1
        return self.attention_layers * (hidden * (gate * wide + 2 * self.kv_heads * self.head_dim) + wide * hidden)

    def _linear(self):
        if not self.hybrid:
            return 0
        text, hidden = self.text, self.text["hidden_size"]
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
        one = hidden * (2 * keys + 2 * values + 2 * text["linear_num_value_heads"]) + values * hidden
        one += (2 * keys + values) * text["linear_conv_kernel_dim"]
        return self.linear_layers * one

    def _mlp(self):
        """(parameters in bf16, bytes of routed experts)"""
        text, hidden = self.text, self.text["hidden_size"]
        experts = text.get("n_routed_experts")
        if not experts:
            return self.layers * 3 * hidden * text["intermediate_size"], 0
        dense_layers = text.get("first_k_dense_replace", 0)
        sparse = self.layers - dense_layers
        one = 3 * hidden * text["moe_intermediate_size"]
        dense = dense_layers * 3 * hidden * text["intermediate_size"] + sparse * one * text.get("n_shared_experts", 0)
        quantized = self.config.get("quantization_config") or text.get("quantization_config")
        per_parameter = 0.5625 if quantized else 2  # int4 with one 16-bit scale for 32 values
        return dense + sparse * experts * hidden, int(sparse * experts * one * per_parameter)

    def _vision(self):
        vision = self.config.get("vision_config") or {}
        if not vision.get("depth"):
            return 0
        hidden, merge = vision["hidden_size"], vision["hidden_size"] * vision.get("spatial_merge_size", 2) ** 2
        one = 4 * hidden * hidden + 2 * hidden * vision["intermediate_size"]
        return vision["depth"] * one + merge * merge + merge * vision["out_hidden_size"]


def read(path):
    """The model in a folder. Raises NoModel."""
    file = Path(path) / "config.json"
    if not file.exists():
        if Path(path).is_dir():
            raise NoModel(
                "%s does not appear to have a file named config.json. Checkout 'https://huggingface.co/%s/tree/main' "
                "for available files." % (path, path)
            )
        raise NoModel(
            "Repo id must be in the form 'repo_name' or 'namespace/repo_name': '%s'. Use `repo_type` argument if "
            "needed." % path
        )
    try:
        config = json.loads(file.read_text())
    except ValueError:
        raise NoModel("It looks like the config file at '%s' is not a valid JSON file." % file) from None
    return Model(path, config)


def weight_files(path):
    """The weight files of a folder, and those that its index names and that are not there."""
    folder = Path(path)
    present = sorted(file for file in folder.glob("*.safetensors") if file.exists())
    index = folder / "model.safetensors.index.json"
    named = []
    if index.exists():
        named = sorted(set(json.loads(index.read_text()).get("weight_map", {}).values()))
    return present, [name for name in named if not (folder / name).exists()]
