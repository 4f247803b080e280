"""transformers' side of `cargo xtask bench generate`: makes a random GPT-2; or loads it and writes, when it is told to."""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

PROMPT = [(7 * i * i + 3 * i) % 50257 for i in range(32)]


def make(folder):
    torch.manual_seed(7)
    # Larger than usual, so that what it writes is not the same word for ever.
    GPT2LMHeadModel(GPT2Config(initializer_range=0.05)).save_pretrained(folder)


def write(folder, threads):
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = torch.tensor([PROMPT])
    for line in sys.stdin:
        count = int(line)
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, min_new_tokens=count,
                do_sample=False, pad_token_id=0, use_cache=True)
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "ids": out[0, len(PROMPT):].tolist()}), flush=True)


if __name__ == "__main__":
    {"make": make, "write": write}[sys.argv[1]](*sys.argv[2:])
