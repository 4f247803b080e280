"""transformers' side of the exchange: makes models and says their logits; or loads one and says its logits."""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def logits(model):
    model.eval()
    with torch.no_grad():
        return model.float()(torch.tensor([IDS])).logits[0, -1].tolist()


def make(folder):
    """Random models of odd shapes, stored in every way; the logits are those of what is stored."""
    torch.manual_seed(7)
    gpt2 = lambda **more: GPT2Config(**(dict(
        vocab_size=311, n_positions=24, n_embd=42, n_layer=3, n_head=3, initializer_range=0.3) | more))
    llama = lambda **more: LlamaConfig(**(dict(
        vocab_size=311, max_position_embeddings=24, hidden_size=42, intermediate_size=50, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, head_dim=10, initializer_range=0.3) | more))
    llama_3 = dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64)
    models = {
        "tied": (gpt2(), torch.float32, "5GB"),
        "untied-gelu-inner": (
            gpt2(tie_word_embeddings=False, activation_function="gelu", n_inner=50), torch.float32, "5GB"),
        "half": (gpt2(), torch.float16, "5GB"),
        "bf16-in-shards": (gpt2(n_layer=5), torch.bfloat16, "60KB"),
        "llama": (llama(), torch.float32, "5GB"),
        "llama-3-in-shards": (llama(rope_parameters=llama_3, num_hidden_layers=5), torch.bfloat16, "60KB"),
        "llama-biases-tied": (
            llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, num_key_value_heads=6),
            torch.float32, "5GB"),
    }
    for name, (config, dtype, shard) in models.items():
        model = AutoModelForCausalLM.from_config(config)
        # Biases and norms that are not what every model begins with.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
        model.to(dtype).save_pretrained(f"{folder}/{name}", max_shard_size=shard)
        with open(f"{folder}/{name}.json", "w") as out:
            json.dump(logits(model), out)


def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokeniser = AutoTokenizer.from_pretrained(folder)
    text = "Grüße, 世界!\n  two spaces"
    ids = tokeniser(text)["input_ids"]
    print(json.dumps({
        "logits": logits(model), "ids": ids, "same": tokeniser.decode(ids) == text,
        "end": tokeniser.eos_token_id,
    }))


if __name__ == "__main__":
    {"make": make, "load": load}[sys.argv[1]](sys.argv[2])
