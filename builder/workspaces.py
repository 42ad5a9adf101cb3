"""How much workspace the CUDA kernel of every op needs: the formulas of docs/ops.md.

A formula is lines `name = expression` in Python, the last of which is `bytes`. It may use the
symbols of the op's shapes, its attributes, T (bytes of the model's float type), min, max and
ceil(a, b), which is a / b rounded up. No workspace shrinks when a size grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What a selector needs to choose from a row, by one block or by several.
_SELECT = """\
rows = L*E*R
select = (16*ceil(N, 1024) + 4144 if N > 8192 else 0)*rows
"""

#: Formula of each op's workspace.
WORKSPACES: dict[str, str] = {
    "WindowMass": """\
rows = (Hq if head_reduce else 1)*E*W
bytes = rows*(4*D + 4*N + 8*ceil(N, 1024))""",
    "NexusScore": """\
steps = min(walk_steps, W) if walk_lambda else 0
bytes = 2*L*E*R*ceil(N, 1024)*steps*(steps - 1)""",
    "PhiloxUniform": "bytes = 0",
    "ReservoirSelect": f"{_SELECT}bytes = select + rows*(4*N + 4*ceil(N, 1024))",
    "TopKSelect": f"{_SELECT}bytes = select + rows*4*N",
    "HeadTopKSelect": """\
rows = L*E*R
bytes = rows*(4*N + 16 + (16*ceil(N, 1024) + 2*4144 if N > 8192 else 0))""",
    "KNormScore": "bytes = 0",
    "KeyDiffScore": "bytes = 4*E*R*(ceil(N, 1024)*(D + 1) + D)",
    "NestedKVScore": """\
tails = 6*4144 if continuum and adaptive else 0
blocks = ceil(N, min(block_min, block_max))
bytes = E*R*(tails + 4*(1 + blocks)*D + 12*N + 60*ceil(N, 1024) + 40)""",
    "WindowScore": """\
rows = E*Hq*W
kept = E*N*min(Hq*W, Hkv*(D*T//8))
bytes = rows*(4*D + 4 + 8*ceil(N, 512)) + 4*E*Hq*N + 4*kept""",
    "AccumUpdate": """\
rows = B*Hq*S
kept = B*C*min(Hq*S, Hkv*(D*T//8))
bytes = rows*(4*D + 4 + 8*ceil(C, 512)) + 4*kept""",
    "QueryStatsUpdate": "bytes = 4*B*Hq*D",
    "ExpectedAttentionScore": """\
matrix = D*D if use_covariance else 0
bytes = 4*E*Hq*(D + matrix + N + 1 + 2*ceil(N, 1024)) + 8*E*(D//2)""",
    "KvAppend": "bytes = 0",
}


def workspace_bytes(op: str, values: Mapping[str, float], float_bytes: int) -> int:
    """Return the bytes of workspace of an op.

    `values` are the sizes behind the symbols of its shapes and its attributes.
    """
    known: dict[str, Any] = {**values, "T": float_bytes}
    known |= {"min": min, "max": max, "ceil": lambda a, b: -(-a // b)}
    for line in WORKSPACES[op].splitlines():
        name, expression = line.split(" = ", 1)
        known[name] = eval(expression, {"__builtins__": {}}, known)
    return int(known["bytes"])
