"""Writes the embedded default model: a llama architecture of two layers with random weights, as a GGUF file.

The same bytes on every machine: numbers come from numpy's legacy generator, which is frozen by its contract, and
are whole numbers scaled by powers of two, so that no rounding can differ. It talks nonsense, at a true speed.
"""

from __future__ import annotations

import os
from pathlib import Path

from gpuctl.facts.model import ModelFacts, Part

LAYERS, WIDTH, HEADS, KV_HEADS, FEED_FORWARD, CONTEXT = 2, 64, 4, 2, 128, 32768
VOCABULARY = 259  # a token a byte, and three more
BYTES = 436_768  # of the file
SEED = 20261130


def facts() -> ModelFacts:
    """Its size, for planning before it was written."""
    weights = LAYERS * (2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH * KV_HEADS // HEADS + 3 * WIDTH * FEED_FORWARD)
    table = Part("head", VOCABULARY * WIDTH * 4), Part("embedding", VOCABULARY * WIDTH * 4)
    return ModelFacts(
        architecture="llama", model_type="llama", layers=LAYERS, hidden=WIDTH, vocab=VOCABULARY, heads=HEADS,
        kv_heads=KV_HEADS, head_dim=WIDTH // HEADS, value_dim=WIDTH // HEADS, intermediate=FEED_FORWARD,
        context=CONTEXT, dtype="uint8", attention_layers=LAYERS, parts=(Part("weights", weights * 4), *table),
        stored_bytes=BYTES,
    )  # fmt: skip


def write(path: Path) -> None:
    """Writes the model to `path` by rename; its folder is made. Raises OSError."""
    import gguf
    import numpy as np

    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    random = np.random.RandomState(SEED)

    def tensor(*shape: int, scale: float = 1.0) -> np.ndarray:
        """Uniform in [-1/8, 1/8) * scale, in steps of a power of two: exact in float16 and float32."""
        return (random.randint(-128, 128, shape) * scale / 1024).astype(np.float32)

    # One token a byte, as a sentencepiece vocabulary with byte tokens: any text in any language is one token a byte.
    tokens = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{byte:02X}>".encode() for byte in range(256)]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL] + [gguf.TokenType.BYTE] * 256
    try:
        writer = gguf.GGUFWriter(draft, "llama")
        writer.add_name("gpuctl tiny random")
        writer.add_context_length(CONTEXT)
        writer.add_embedding_length(WIDTH)
        writer.add_block_count(LAYERS)
        writer.add_feed_forward_length(FEED_FORWARD)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(WIDTH // HEADS)
        writer.add_rope_freq_base(10000.0)
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        writer.add_vocab_size(len(tokens))
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(True)
        writer.add_chat_template(
            "{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}<assistant> "
        )
        writer.add_tensor("token_embd.weight", tensor(len(tokens), WIDTH))
        kv_width = WIDTH // HEADS * KV_HEADS
        for layer in range(LAYERS):
            name = f"blk.{layer}"
            writer.add_tensor(f"{name}.attn_norm.weight", np.ones(WIDTH, np.float32))
            writer.add_tensor(f"{name}.attn_q.weight", tensor(WIDTH, WIDTH))
            writer.add_tensor(f"{name}.attn_k.weight", tensor(kv_width, WIDTH))
            writer.add_tensor(f"{name}.attn_v.weight", tensor(kv_width, WIDTH))
            # what was said before matters little: the text soon repeats itself, as n-gram speculation likes it
            writer.add_tensor(f"{name}.attn_output.weight", tensor(WIDTH, WIDTH, scale=1 / 64))
            writer.add_tensor(f"{name}.ffn_norm.weight", np.ones(WIDTH, np.float32))
            writer.add_tensor(f"{name}.ffn_gate.weight", tensor(FEED_FORWARD, WIDTH))
            writer.add_tensor(f"{name}.ffn_up.weight", tensor(FEED_FORWARD, WIDTH))
            writer.add_tensor(f"{name}.ffn_down.weight", tensor(WIDTH, FEED_FORWARD))
        writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
        output = tensor(len(tokens), WIDTH)
        printable = np.array(
            [0 <= i - 3 < 256 and chr(i - 3).isascii() and chr(i - 3).isprintable() for i in range(259)]
        )
        output[~printable] = 0  # half characters would make chunks without text
        writer.add_tensor("output.weight", output)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
