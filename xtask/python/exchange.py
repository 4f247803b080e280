"""transformers' side of the exchange: makes models and says their logits; or loads one and says its logits."""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def logits(model):
    model.eval()
    with torch.no_grad():
        return model.float()(torch.tensor([IDS])).logits[0, -1].tolist()


def make(folder):
    """Random models of odd shapes, stored in every way; the logits are those of what is stored."""
    torch.manual_seed(7)
    common = dict(vocab_size=311, n_positions=24, n_embd=42, n_layer=3, n_head=3, initializer_range=0.3)
    models = {
        "tied": (dict(), torch.float32, "5GB"),
        "untied-gelu-inner": (
            dict(tie_word_embeddings=False, activation_function="gelu", n_inner=50), torch.float32, "5GB"),
        "half": (dict(), torch.float16, "5GB"),
        "bf16-in-shards": (dict(n_layer=5), torch.bfloat16, "60KB"),
    }
    for name, (more, dtype, shard) in models.items():
        model = GPT2LMHeadModel(GPT2Config(**(common | more)))
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
