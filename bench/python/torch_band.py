"""The PyTorch side of `cargo xtask bench torch-band`: trains a GPT-2 in f32 several times, with seeds of its own.

Reads  DIR/job.json       {model, optimiser: {kind: "adamw", betas, eps, weight_decay}, init_std,
                           learning_rates: [one a step], clip: number or null, steps, batch, threads, seeds}
       DIR/windows.bin    u32, little endian, [windows, context + 1]
Writes DIR/curves.json    for each seed the mean loss of each step, before its update
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from gpt2 import Config, clip, decay_groups, loss_sum, shapes


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dir", type=Path, required=True)
    directory = arguments.parse_args().dir
    job = json.loads((directory / "job.json").read_text())
    model = Config(**job["model"])
    torch.set_num_threads(job["threads"])
    windows = read(directory / "windows.bin", model)
    curves = [train(job, model, windows, seed) for seed in range(job["seeds"])]
    (directory / "curves.json").write_text(json.dumps(curves))


def read(path: Path, model: Config):
    tokens = np.fromfile(path, dtype="<u4").astype(np.int64)
    return torch.from_numpy(tokens.reshape(-1, model.context + 1))


def train(job, model: Config, windows, seed: int):
    random = torch.Generator().manual_seed(seed)
    weights = {name: initial(job, model, name, shape, random).requires_grad_() for name, shape in shapes(model).items()}
    order = torch.randperm(len(windows), generator=random)
    o = job["optimiser"]
    optimiser = torch.optim.AdamW(decay_groups(weights, o["weight_decay"]), betas=tuple(o["betas"]), eps=o["eps"])
    losses = []
    for step, learning_rate in enumerate(job["learning_rates"]):
        places = torch.arange(step * job["batch"], (step + 1) * job["batch"]) % len(windows)
        batch = windows[order[places]]
        targets = batch[:, 1:]
        loss = loss_sum(model, weights, batch[:, :-1], targets) / targets.numel()
        losses.append(loss.item())
        gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values()))))
        for name, gradient in clip(gradients, job["clip"]).items():
            weights[name].grad = gradient
        for group in optimiser.param_groups:
            group["lr"] = learning_rate
        optimiser.step()
    return losses


def initial(job, model: Config, name: str, shape, random):
    """As GPT-2 begins: what is added to the residual stream is smaller."""
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    smaller = math.sqrt(2 * model.layers) if name.endswith("c_proj.weight") else 1
    return torch.randn(shape, generator=random) * job["init_std"] / smaller


if __name__ == "__main__":
    main()
