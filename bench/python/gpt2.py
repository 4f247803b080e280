"""GPT-2 in plain PyTorch: parameter names, layouts and arithmetic of the Hugging Face model.

Weights are a dict of tensors, so that the code has no hidden state. Shapes: b batch, t position,
s earlier position, n head, h width of a head, d width of the model, v vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

NORM_EPSILON = 1e-5


@dataclass
class Config:
    vocabulary: int
    context: int
    width: int
    heads: int
    layers: int
    share_every: int = 1  # block i uses the parameters h.{i // share_every}.*
    tied: bool = True  # the head is the token embedding
    activation: str = "gelu_new"  # the tanh form; "gelu" is the exact one
    document_mask: bool = False  # attention stays inside a document


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape. Linear weights are [in, out], as in Hugging Face's Conv1D."""
    d = c.width
    found = {"wte.weight": (c.vocabulary, d), "wpe.weight": (c.context, d)}
    for i in range(math.ceil(c.layers / c.share_every)):
        for norm in ("ln_1", "ln_2"):
            found[f"h.{i}.{norm}.weight"] = found[f"h.{i}.{norm}.bias"] = (d,)
        linears = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "mlp.c_fc": (d, 4 * d), "mlp.c_proj": (4 * d, d)}
        for name, shape in linears.items():
            found[f"h.{i}.{name}.weight"], found[f"h.{i}.{name}.bias"] = shape, shape[1:]
    found["ln_f.weight"] = found["ln_f.bias"] = (d,)
    if not c.tied:
        found["lm_head.weight"] = (c.vocabulary, d)
    return found


def logits(c: Config, w: dict, tokens_bt, documents_bt=None):
    """Scores of the next token, [b, t, v]."""
    if c.document_mask != (documents_bt is not None):
        raise ValueError("documents are given exactly when the model has a document mask")
    if documents_bt is None:
        documents_bt = torch.zeros_like(tokens_bt)
    positions_bt, visible_bts = positions_and_mask(documents_bt)

    x = w["wte.weight"][tokens_bt] + w["wpe.weight"][positions_bt]
    for layer in range(c.layers):
        p = f"h.{layer // c.share_every}"
        x = x + attention(c, w, f"{p}.attn", norm(w, f"{p}.ln_1", x), visible_bts)
        x = x + mlp(c, w, f"{p}.mlp", norm(w, f"{p}.ln_2", x))
    head_vd = w["wte.weight"] if c.tied else w["lm_head.weight"]
    return norm(w, "ln_f", x) @ head_vd.T


def loss_sum(c: Config, w: dict, tokens_bt, targets_bt, documents_bt=None):
    """The sum (not the mean) of cross-entropies over the positions whose target is not -1."""
    return cross_entropies(logits(c, w, tokens_bt, documents_bt), targets_bt)


def cross_entropies(scores_btv, targets_bt):
    return F.cross_entropy(scores_btv.flatten(0, 1), targets_bt.flatten(), ignore_index=-1, reduction="sum")


def positions_and_mask(documents_bt):
    """Positions restart where the document changes; a token sees itself and earlier ones of its document."""
    t = torch.arange(documents_bt.shape[1]).expand_as(documents_bt)
    starts_bt = torch.ones_like(documents_bt, dtype=torch.bool)
    starts_bt[:, 1:] = documents_bt[:, 1:] != documents_bt[:, :-1]
    start_of_bt = torch.where(starts_bt, t, 0).cummax(dim=1).values
    earlier = t[:, None, :] <= t[:, :, None]
    return t - start_of_bt, earlier & (start_of_bt[:, None, :] == start_of_bt[:, :, None])


def norm(w, name, x):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], NORM_EPSILON)


def linear(w, name, x):
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def attention(c, w, name, x, visible_bts):
    split = lambda y: y.unflatten(-1, (c.heads, -1)).transpose(1, 2)  # [b, t, d] -> [b, n, t, h]
    q, k, v = map(split, linear(w, f"{name}.c_attn", x).chunk(3, dim=-1))
    scores_bnts = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    weights_bnts = scores_bnts.masked_fill(~visible_bts[:, None], -torch.inf).softmax(dim=-1)
    return linear(w, f"{name}.c_proj", (weights_bnts @ v).transpose(1, 2).flatten(-2))


def mlp(c, w, name, x):
    approximate = {"gelu_new": "tanh", "gelu": "none"}[c.activation]
    return linear(w, f"{name}.c_proj", F.gelu(linear(w, f"{name}.c_fc", x), approximate=approximate))


def clip(gradients: dict, max_norm) -> dict:
    """Scaled to a global norm of at most max_norm: by min(1, max_norm / norm), without torch's added 1e-6."""
    if max_norm is None:
        return gradients
    total = math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))
    scale = min(1.0, max_norm / total) if total > 0 else 1.0
    return {name: g * scale for name, g in gradients.items()}


def decay_groups(w: dict, weight_decay: float) -> list[dict]:
    """torch.optim's parameter groups: matrices decay; biases and norms do not."""
    matrices = [x for x in w.values() if x.dim() == 2]
    vectors = [x for x in w.values() if x.dim() != 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
