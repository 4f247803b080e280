"""Writes the golden files beside it: small GPT-2s and Llamas with their loss, gradients and updates from PyTorch.

    target/venv/bin/python crates/model/tests/golden/make_golden.py

Weights are multiples of 1/512, so that a file's decimals are exact in f32 and in f64; everything else is
computed from them in f64. The f32 run and finite differences are checked on the way, so a file is only
written if the truth agrees with itself.

The updates start from "gradients" / tokens_counted, clipped. Feed them that gradient, not a recomputed f32
one: the bias of the keys (the middle third of c_attn.bias) has no effect on the loss, so its gradient is
rounding noise, which Adam and LAMB would blow up to whole steps.
"""

import json
import sys
from pathlib import Path

import torch

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[3] / "xtask" / "python"))
import gpt2  # noqa: E402
import llama  # noqa: E402
from gpt2 import clip, decay_groups  # noqa: E402

SIZES = dict(vocabulary=13, context=6, width=8, heads=2)
# Four heads of another width than 8 / 4 share two heads of keys and values.
LLAMA = dict(vocabulary=13, context=6, width=8, heads=4, key_heads=2, head_width=6, inner=10)
CASES = {
    "tied_gelu_new": gpt2.Config(**SIZES, layers=2),
    "untied_gelu": gpt2.Config(**SIZES, layers=2, tied=False, activation="gelu"),
    "shared_layers": gpt2.Config(**SIZES, layers=4, share_every=2),
    "document_mask": gpt2.Config(**SIZES, layers=2, document_mask=True),
    "llama": llama.Config(**LLAMA, layers=2),
    "llama_untied_biases": llama.Config(
        **LLAMA, layers=2, tied=False, attention_bias=True, mlp_bias=True, document_mask=True,
        rope=dict(theta=20.0, scaling=dict(kind="llama3", factor=2.0, low=1.0, high=4.0, context=24))),
    "llama_shared_layers": llama.Config(**LLAMA, layers=4, share_every=2),
}
DOCUMENTS = [[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 6, 6]]
NO_LOSS = [(0, 1), (1, 3), (1, 5)]  # (row, position) whose target is -1

CLIP = 1.0
ADAMW = dict(learning_rate=1e-2, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1, steps=1)
SGD = dict(learning_rate=1e-2, momentum=0.9, weight_decay=0.0, steps=2)  # two, so that momentum matters
LAMB = ADAMW


def main():
    for seed, (name, config) in enumerate(CASES.items()):
        path = HERE / f"{name}.json"
        text = json.dumps(golden(config, seed), separators=(",", ":"))
        path.write_text(text.replace('],"', '],\n"').replace('},"', '},\n"') + "\n")  # a line a tensor
        print(f"{path.name}: {path.stat().st_size} bytes")


def family(config):
    return llama if isinstance(config, llama.Config) else gpt2


def golden(config, seed: int) -> dict:
    weights = draw_weights(config, seed)
    tokens, targets = draw_tokens(config, seed)
    documents = torch.tensor(DOCUMENTS) if config.document_mask else None
    loss_of = lambda w: family(config).loss_sum(config, w, tokens, targets, documents)

    loss, gradients = loss_and_gradients(loss_of, weights)
    check_f32(loss_of, weights, loss, gradients)
    check_finite_differences(loss_of, weights, gradients)

    counted = int((targets != -1).sum())
    clipped = clip({name: g / counted for name, g in gradients.items()}, CLIP)
    return {
        "config": vars(config),
        "tokens": tokens.tolist(),
        "targets": targets.tolist(),
        "documents": documents.tolist() if documents is not None else None,
        "loss_sum": loss.item(),
        "tokens_counted": counted,
        "weights": {name: {"shape": list(x.shape), "data": x.flatten().tolist()} for name, x in weights.items()},
        "gradients": {name: numbers(x, 11) for name, x in gradients.items()},
        "clip": CLIP,
        "adamw": updated(ADAMW, adamw(weights, clipped)),
        "sgd": updated(SGD, sgd(weights, clipped)),
        "lamb": updated(LAMB, lamb(weights, clipped)),
    }


def draw_weights(config, seed: int) -> dict:
    """Large enough that gradients are not tiny: std 0.3, norms around 1, biases around 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in family(config).shapes(config).items():
        centre = 1.0 if len(shape) == 1 and name.endswith("weight") else 0.0
        drawn = centre + 0.3 * torch.randn(shape, generator=generator).double()
        weights[name] = (drawn * 512).round() / 512
    return weights


def draw_tokens(config, seed: int):
    generator = torch.Generator().manual_seed(1000 + seed)
    text = torch.randint(config.vocabulary, (2, config.context + 1), generator=generator)
    tokens, targets = text[:, :-1].clone(), text[:, 1:].clone()
    for row, position in NO_LOSS:
        targets[row, position] = -1
    return tokens, targets


def loss_and_gradients(loss_of, weights):
    leaves = {name: x.clone().requires_grad_() for name, x in weights.items()}
    loss = loss_of(leaves)
    return loss.detach(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))


def check_f32(loss_of, weights, loss, gradients):
    loss32, gradients32 = loss_and_gradients(loss_of, {name: x.float() for name, x in weights.items()})
    assert abs(loss32.double() - loss) <= 1e-5 * loss, (loss32, loss)
    for name, g in gradients.items():
        torch.testing.assert_close(gradients32[name].double(), g, rtol=1e-4, atol=1e-4, msg=name)


def check_finite_differences(loss_of, weights, gradients):
    """Along a random direction of each tensor, (f(w + hd) - f(w - hd)) / 2h is the gradient's product with d."""
    generator = torch.Generator().manual_seed(0)
    for name, x in weights.items():
        direction = torch.randn(x.shape, generator=generator).double()
        moved = lambda h: loss_of({**weights, name: x + h * direction})
        h = 1e-5
        measured = (moved(h) - moved(-h)) / (2 * h)
        torch.testing.assert_close(measured, (gradients[name] * direction).sum(), rtol=1e-6, atol=1e-6, msg=name)


def adamw(weights, gradients):
    return stepped(weights, gradients, ADAMW["steps"], lambda w: torch.optim.AdamW(
        decay_groups(w, ADAMW["weight_decay"]), lr=ADAMW["learning_rate"], betas=tuple(ADAMW["betas"]), eps=ADAMW["eps"]))


def sgd(weights, gradients):
    return stepped(weights, gradients, SGD["steps"], lambda w: torch.optim.SGD(
        w.values(), lr=SGD["learning_rate"], momentum=SGD["momentum"]))


def stepped(weights, gradients, steps, make_optimiser):
    """Takes the steps on the same gradient."""
    leaves = {name: x.clone().requires_grad_() for name, x in weights.items()}
    for name, x in leaves.items():
        x.grad = gradients[name].clone()
    optimiser = make_optimiser(leaves)
    for _ in range(steps):
        optimiser.step()
    return leaves


def lamb(weights, gradients):
    """The first step of LAMB (You et al. 2020, algorithm 2), trust ratio unclamped, one ratio a tensor.

    Biases and norms have neither decay nor trust ratio, as in the authors' code."""
    beta1, beta2 = LAMB["betas"]
    after = {}
    for name, w in weights.items():
        g = gradients[name]
        m_hat = (1 - beta1) * g / (1 - beta1)
        v_hat = (1 - beta2) * g.square() / (1 - beta2)
        adapted = w.dim() == 2
        decay = LAMB["weight_decay"] if adapted else 0.0
        update = m_hat / (v_hat.sqrt() + LAMB["eps"]) + decay * w
        w_norm, update_norm = w.norm().item(), update.norm().item()
        trust = w_norm / update_norm if adapted and w_norm > 0 and update_norm > 0 else 1.0
        after[name] = w - LAMB["learning_rate"] * trust * update
    return after


def updated(settings: dict, weights: dict) -> dict:
    return {**settings, "weights": {name: numbers(x, 10) for name, x in weights.items()}}


def numbers(x, digits: int) -> list[float]:
    """Row-major, rounded to so many significant digits, which keeps the files small."""
    return [float(f"{value:.{digits}g}") for value in x.detach().flatten().tolist()]


if __name__ == "__main__":
    main()
