"""Straightforward PyTorch versions of the ops, for comparison; of one full slot of fp16 keys."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

Tensors = Mapping[str, Any]
Attrs = Mapping[str, Any]


def attention(torch: Any, i: Tensors) -> Any:
    """Causal attention [Hkv, G, W, C] of the window's heads, of a slot in which row = position."""
    keys, (slots, window) = i["keys"][0].float(), i["q_window"].shape[:2]
    heads, rows, width = keys.shape
    assert slots == 1
    q = i["q_window"][0].float().view(window, heads, -1, width).permute(1, 2, 0, 3)
    logits = q @ keys[:, None].transpose(-1, -2) / width**0.5
    last = torch.arange(rows - window, rows, device=keys.device)
    hidden = torch.arange(rows, device=keys.device) > last[:, None]
    return logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)


def window_mass(torch: Any, i: Tensors, a: Attrs) -> Any:
    """Attention summed over blocks; `mean_qk` averages the queries of all heads and the keys."""
    if a["head_reduce"] == 0:
        keys = i["keys"].float().mean(dim=1, keepdim=True)
        width = keys.shape[-1]
        queries = i["q_window"].float().unflatten(2, (-1, width)).mean(dim=2)
        p = attention(torch, {"keys": keys, "q_window": queries})
    else:
        p = attention(torch, i)
    p = p.mean(dim=1) if a["head_reduce"] == 2 else p.mean(dim=(0, 1))[None]
    return p.unflatten(-1, (-1, a["block_size"])).sum(dim=-1)[None]


def nexus_score(torch: Any, i: Tensors, a: Attrs) -> Any:
    """Mean of the window plus the walk over its newest rows."""
    mass, ids = i["mass"], i["unit_ids"].float()
    walk, window = torch.zeros_like(mass[..., 0, :]), mass.shape[3]
    for q in range(window - min(a["walk_steps"], window), window):
        row = mass[..., q, :]
        walk = walk + (1 + (row * walk).sum(dim=-1, keepdim=True)) * row
    walk = walk / walk.sum(dim=-1, keepdim=True)
    low, high = ids.amin(dim=-1, keepdim=True), ids.amax(dim=-1, keepdim=True)
    ramp = (ids - low) / (high - low)
    return mass.mean(dim=3) + a["walk_lambda"] * walk + a["tie_eps"] * ramp


def reservoir(torch: Any, i: Tensors, a: Attrs) -> Any:
    """The units of the highest mean of keys of a weighted reservoir."""
    key = (i["u"].log() / i["score"].clamp_min(1e-20)[..., None, :]).logsumexp(dim=3)
    return top(torch, {**i, "score": key}, a)


def top(torch: Any, i: Tensors, a: Attrs) -> Any:
    """The best units of every row, ascending; the same number for all."""
    del a
    return i["score"].topk(i["score"].shape[-1] // 2, dim=-1).indices.sort(dim=-1).values


def key_diff(torch: Any, i: Tensors, a: Attrs) -> Any:
    """Minus the cosine with the mean direction."""
    del a
    keys = i["keys"].float()
    unit = torch.nn.functional.normalize(keys, dim=-1)
    return -torch.cosine_similarity(unit, unit.mean(dim=2, keepdim=True), dim=-1)


VERSIONS: dict[str, Callable[[Any, Tensors, Attrs], Any]] = {
    "KNormScore": lambda torch, i, a: -i["keys"].float().norm(dim=-1),
    "KeyDiffScore": key_diff,
    "NexusScore": nexus_score,
    "PhiloxUniform": lambda torch, i, a: torch.rand(
        (*i["unit_ids"].shape[:3], a["draws"], i["unit_ids"].shape[3]), device=i["seed"].device
    ),
    "ReservoirSelect": reservoir,
    "TopKSelect": top,
    "WindowMass": window_mass,
}


def import_torch() -> Any:
    """Return torch if it is there and sees a GPU, else None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def seconds(torch: Any, op: str, attrs: Attrs, inputs: Mapping[str, Any], copies: int) -> float:
    """Seconds of one run on the GPU, over rotating copies of the inputs."""
    run = VERSIONS[op]
    sets = [{k: torch.tensor(v, device="cuda") for k, v in inputs.items()} for _ in range(copies)]
    times: list[float] = []
    for _ in range(4):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for tensors in sets:
            run(torch, tensors, attrs)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / copies)
    del sets
    torch.cuda.empty_cache()
    return statistics.median(times[1:])
