"""The PyTorch side of `cargo xtask bench torch-parity`: trains a GPT-2 in f32 on given batches.

Reads  DIR/job.json             {model, optimiser: {kind: "adamw", betas, eps, weight_decay},
                                 learning_rates: [one a step], clip: number or null, steps, batch, threads}
       DIR/weights.safetensors  initial weights, f32
       DIR/batches.bin          u32, little endian, [steps, batch, context + 1]
Writes DIR/losses.json          the mean loss of each step, before its update
       DIR/final.safetensors    weights after the last step
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from gpt2 import Config, clip, decay_groups, loss_sum, shapes
from safetensors.torch import load_file, save_file


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--dir", type=Path, required=True)
    train(arguments.parse_args().dir)


def train(directory: Path):
    job = json.loads((directory / "job.json").read_text())
    model = Config(**job["model"])
    torch.set_num_threads(job["threads"])
    weights = {name: x.requires_grad_() for name, x in load_file(directory / "weights.safetensors").items()}
    batches = read_batches(directory / "batches.bin", job, model)
    check(job, model, weights)

    o = job["optimiser"]
    optimiser = torch.optim.AdamW(decay_groups(weights, o["weight_decay"]), betas=tuple(o["betas"]), eps=o["eps"])
    losses = []
    for batch, learning_rate in zip(batches, job["learning_rates"]):
        tokens, targets = batch[:, :-1], batch[:, 1:]
        loss = loss_sum(model, weights, tokens, targets) / targets.numel()
        losses.append(loss.item())

        gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values()))))
        for name, gradient in clip(gradients, job["clip"]).items():
            weights[name].grad = gradient
        for group in optimiser.param_groups:
            group["lr"] = learning_rate
        optimiser.step()

    (directory / "losses.json").write_text(json.dumps(losses))
    save_file({name: x.detach() for name, x in weights.items()}, directory / "final.safetensors")


def read_batches(path: Path, job, model: Config):
    tokens = np.fromfile(path, dtype="<u4").astype(np.int64)
    return torch.from_numpy(tokens.reshape(job["steps"], job["batch"], model.context + 1))


def check(job, model: Config, weights):
    """Refuses a job that this script would train differently from what it says."""
    if job["optimiser"]["kind"] != "adamw":
        raise SystemExit(f"optimiser {job['optimiser']['kind']!r}: only adamw is known here")
    if len(job["learning_rates"]) != job["steps"]:
        raise SystemExit(f"{len(job['learning_rates'])} learning rates for {job['steps']} steps")
    found = {name: tuple(x.shape) for name, x in weights.items()}
    if found != shapes(model):
        differing = dict(set(found.items()) ^ set(shapes(model).items()))
        raise SystemExit(f"weights.safetensors does not fit the model: {sorted(differing)}")
    if any(x.dtype != torch.float32 for x in weights.values()):
        raise SystemExit("weights.safetensors must hold f32")


if __name__ == "__main__":
    main()
