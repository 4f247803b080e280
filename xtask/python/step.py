"""PyTorch's side of `cargo xtask bench step`: eager, f32, SDPA, fused AdamW. The head of
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
    w = {name: x.clone().requires_grad_() for name, x in load_file(directory / "weights.safetensors").items()}
    tokens = np.fromfile(directory / "batches.bin", dtype="<u4").astype(np.int64)
    batches = torch.from_numpy(tokens.reshape(job["steps"], job["batch"], model["context"] + 1))
    matrices, vectors = [x for x in w.values() if x.dim() == 2], [x for x in w.values() if x.dim() != 2]
    groups = [{"params": matrices, "weight_decay": o["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    betas = (o["beta1"], o["beta2"])
    optimiser = torch.optim.AdamW(groups, lr=o["lr"], betas=betas, eps=o["epsilon"], fused=True)

    batch_number = 0
    for line in sys.stdin:
        began = time.perf_counter()
        losses = []
        for _ in range(int(line)):
            batch = batches[batch_number]
            batch_number += 1
            loss = loss_of(model, w, batch[:, :-1], batch[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(w.values(), o["clip"])
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            losses.append(loss.item())
        seconds = time.perf_counter() - began
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
        print(json.dumps({"seconds": seconds, "losses": losses, "peak_kib": peak_kib}), flush=True)


def loss_of(model, w, tokens_bt, targets_bt):
    b, t = tokens_bt.shape
    x = F.embedding(tokens_bt, w["wte.weight"]) + w["wpe.weight"][:t]
    for i in range(model["layers"]):
        qkv = linear(w, f"h.{i}.attn.c_attn", norm(w, f"h.{i}.ln_1", x))
        q, k, v = (part.view(b, t, model["heads"], -1).transpose(1, 2) for part in qkv.split(model["width"], dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(w, f"h.{i}.attn.c_proj", attended.transpose(1, 2).reshape(b, t, -1))
        inner = F.gelu(linear(w, f"h.{i}.mlp.c_fc", norm(w, f"h.{i}.ln_2", x)), approximate="tanh")
        x = x + linear(w, f"h.{i}.mlp.c_proj", inner)
    logits = F.linear(norm(w, "ln_f", x), w["wte.weight"])
    return F.cross_entropy(logits.flatten(0, 1), targets_bt.flatten())


def norm(w, name, x):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)


def linear(w, name, x):
    """x·W + b, W of [in, out] as GPT-2's files have it: one call of addmm, as Hugging Face's Conv1D."""
    weight = w[f"{name}.weight"]
    return torch.addmm(w[f"{name}.bias"], x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
