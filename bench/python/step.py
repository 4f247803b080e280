"""PyTorch's side of `cargo xtask bench step`: eager or compiled, f32 or autocast to bf16, SDPA, fused AdamW. The head of
crates/model/examples/step.rs says what is read and written; the initial weights are read here.
"""

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file


def rss_kib():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])


def main(directory: Path):
    job = json.loads((directory / "job.json").read_text())
    torch.set_num_threads(job["threads"])
    before_kib = rss_kib()
    model, o = job["model"], job["optimiser"]
    hidden = {"gpt2": gpt2, "llama": llama}[model["family"]]
    w = {name: x.clone().requires_grad_() for name, x in load_file(directory / "weights.safetensors").items()}
    tokens = np.fromfile(directory / "batches.bin", dtype="<u4").astype(np.int64)
    batches = torch.from_numpy(tokens.reshape(job["steps"], job["batch"], model["context"] + 1))
    matrices, vectors = [x for x in w.values() if x.dim() == 2], [x for x in w.values() if x.dim() != 2]
    groups = [{"params": matrices, "weight_decay": o["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    betas = (o["beta1"], o["beta2"])
    optimiser = torch.optim.AdamW(groups, lr=o["lr"], betas=betas, eps=o["epsilon"], fused=True)

    def loss_of(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=job["bf16"]):
            x, table = hidden(model, w, batch[:, :-1])
            return F.cross_entropy(F.linear(x, table).flatten(0, 1), batch[:, 1:].flatten())

    if job.get("compiled"):
        loss_of = torch.compile(loss_of)
    batch_number = 0
    for line in sys.stdin:
        began = time.perf_counter()
        losses = []
        for _ in range(int(line)):
            loss = loss_of(batches[batch_number])
            batch_number += 1
            loss.backward()
            torch.nn.utils.clip_grad_norm_(w.values(), o["clip"])
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            losses.append(loss.item())
        seconds = time.perf_counter() - began
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
        print(json.dumps({"seconds": seconds, "losses": losses, "peak_kib": peak_kib}), flush=True)


def gpt2(model, w, tokens_bt):
    b, t = tokens_bt.shape
    x = F.embedding(tokens_bt, w["wte.weight"]) + w["wpe.weight"][:t]
    for i in range(model["layers"]):
        qkv = linear(w, f"h.{i}.attn.c_attn", norm(w, f"h.{i}.ln_1", x))
        q, k, v = (part.view(b, t, model["heads"], -1).transpose(1, 2) for part in qkv.split(model["width"], dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(w, f"h.{i}.attn.c_proj", attended.transpose(1, 2).reshape(b, t, -1))
        inner = F.gelu(linear(w, f"h.{i}.mlp.c_fc", norm(w, f"h.{i}.ln_2", x)), approximate="tanh")
        x = x + linear(w, f"h.{i}.mlp.c_proj", inner)
    return norm(w, "ln_f", x), w["wte.weight"]


def llama(model, w, tokens_bt):
    b, t = tokens_bt.shape
    heads, key_heads, width = model["heads"], model["key_heads"], model["width"] // model["heads"]
    speeds = 1.0 / 10000.0 ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(t).float(), speeds).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    x = F.embedding(tokens_bt, w["embed_tokens.weight"])
    for i in range(model["layers"]):
        p = f"layers.{i}"
        normed = rms_norm(w, f"{p}.input_layernorm", x)
        q, k, v = (
            F.linear(normed, w[f"{p}.self_attn.{part}_proj.weight"]).view(b, t, n, width).transpose(1, 2)
            for part, n in (("q", heads), ("k", key_heads), ("v", key_heads)))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + F.linear(attended.transpose(1, 2).reshape(b, t, -1), w[f"{p}.self_attn.o_proj.weight"])
        normed = rms_norm(w, f"{p}.post_attention_layernorm", x)
        gate, up = (F.linear(normed, w[f"{p}.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, w[f"{p}.mlp.down_proj.weight"])
    return rms_norm(w, "norm", x), w["embed_tokens.weight"]


def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def rms_norm(w, name, x):
    return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], 1e-5)


def norm(w, name, x):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)


def linear(w, name, x):
    """x·W + b, W of [in, out] as GPT-2's files have it: one call of addmm, as Hugging Face's Conv1D."""
    weight = w[f"{name}.weight"]
    return torch.addmm(w[f"{name}.bias"], x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
