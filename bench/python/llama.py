"""Llama in plain PyTorch: parameter names, layouts and arithmetic of the Hugging Face model.

Weights are a dict of tensors, so that the code has no hidden state. Shapes: b batch, t position,
s earlier position, n head, h width of a head, d width of the model, v vocabulary.
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from gpt2 import cross_entropies, positions_and_mask

NORM_EPSILON = 1e-5


@dataclass
class Config:
    vocabulary: int
    context: int
    width: int
    heads: int
    layers: int
    key_heads: int
    head_width: int
    inner: int
    family: str = "llama"
    share_every: int = 1  # block i uses the parameters layers.{i // share_every}.*
    tied: bool = True  # the head is the token embedding
    attention_bias: bool = False
    mlp_bias: bool = False
    rope: dict = field(default_factory=lambda: {"theta": 10000.0})  # "scaling" may be Llama 3's
    document_mask: bool = False  # attention stays inside a document


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape. Linear weights are [out, in]."""
    d, f, attended, keys = c.width, c.inner, c.heads * c.head_width, c.key_heads * c.head_width
    found = {"embed_tokens.weight": (c.vocabulary, d)}
    for i in range(math.ceil(c.layers / c.share_every)):
        found[f"layers.{i}.input_layernorm.weight"] = found[f"layers.{i}.post_attention_layernorm.weight"] = (d,)
        attention = {"q_proj": (attended, d), "k_proj": (keys, d), "v_proj": (keys, d), "o_proj": (d, attended)}
        mlp = {"gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f)}
        for part, linears, bias in (("self_attn", attention, c.attention_bias), ("mlp", mlp, c.mlp_bias)):
            for name, shape in linears.items():
                found[f"layers.{i}.{part}.{name}.weight"] = shape
                if bias:
                    found[f"layers.{i}.{part}.{name}.bias"] = shape[:1]
    found["norm.weight"] = (d,)
    if not c.tied:
        found["lm_head.weight"] = (c.vocabulary, d)
    return found


def logits(c: Config, w: dict, tokens_bt, documents_bt=None):
    """Scores of the next token, [b, t, v]."""
    if documents_bt is None:
        documents_bt = torch.zeros_like(tokens_bt)
    positions_bt, visible_bts = positions_and_mask(documents_bt)
    x = w["embed_tokens.weight"][tokens_bt]
    cos_sin = [part[:, None].to(x.dtype) for part in angles(c, positions_bt)]
    for layer in range(c.layers):
        p = f"layers.{layer // c.share_every}"
        x = x + attention(c, w, f"{p}.self_attn", norm(w, f"{p}.input_layernorm", x), cos_sin, visible_bts)
        x = x + mlp(w, f"{p}.mlp", norm(w, f"{p}.post_attention_layernorm", x))
    head_vd = w["embed_tokens.weight"] if c.tied else w["lm_head.weight"]
    return norm(w, "norm", x) @ head_vd.T


def loss_sum(c: Config, w: dict, tokens_bt, targets_bt, documents_bt=None):
    """As GPT-2's."""
    return cross_entropies(logits(c, w, tokens_bt, documents_bt), targets_bt)


def angles(c: Config, positions_bt):
    """Cosines and sines, [b, t, h]: angles are products in f32, as everywhere; the rest is exact."""
    speeds = 1.0 / c.rope["theta"] ** (torch.arange(0, c.head_width, 2).double() / c.head_width)
    scaling = c.rope.get("scaling")
    if scaling:
        turns = scaling["context"] * speeds / (2 * math.pi)
        kept = ((turns - scaling["low"]) / (scaling["high"] - scaling["low"])).clamp(0, 1)
        speeds = (1 - kept) * speeds / scaling["factor"] + kept * speeds
    angle = (positions_bt[..., None].float() * speeds.float()).double()
    both = torch.cat([angle, angle], dim=-1)
    return both.cos(), both.sin()


def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def norm(w, name, x):
    return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], NORM_EPSILON)


def linear(w, name, x):
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def attention(c, w, name, x, cos_sin, visible_bts):
    split = lambda y: y.unflatten(-1, (-1, c.head_width)).transpose(1, 2)  # [b, t, n·h] -> [b, n, t, h]
    q, k, v = (split(linear(w, f"{name}.{part}_proj", x)) for part in "qkv")
    q, k = rotated(q, *cos_sin), rotated(k, *cos_sin)
    k, v = (y.repeat_interleave(c.heads // c.key_heads, dim=1) for y in (k, v))
    scores_bnts = q @ k.transpose(-1, -2) / math.sqrt(c.head_width)
    weights_bnts = scores_bnts.masked_fill(~visible_bts[:, None], -torch.inf).softmax(dim=-1)
    return linear(w, f"{name}.o_proj", (weights_bnts @ v).transpose(1, 2).flatten(-2))


def mlp(w, name, x):
    return linear(w, f"{name}.down_proj", F.silu(linear(w, f"{name}.gate_proj", x)) * linear(w, f"{name}.up_proj", x))
