"""The plugin library inside TensorRT's real plugin registry: found, created, described, cloned."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import numpy as np
import pytest
from cases import Case, Scene
from numpy.typing import DTypeLike
from plugin_host import (
    ALL_OPS,
    BF16,
    BOOL,
    CHW2,
    FIELD_CHAR,
    FIELD_FLOAT32,
    FIELD_FLOAT64,
    FIELD_INT32,
    FIELD_INT64,
    FLOAT,
    HALF,
    INT8,
    INT32,
    INT64,
    LINEAR,
    Host,
    descs,
    exported_symbols,
    fields,
    library,
)

from kvsift.builder import ops

#: Symbols with different numbers, so that a mixed-up dimension shows.
SIZES = {"B": 4, "E": 3, "L": 2, "Hq": 6, "Hkv": 2, "D": 8, "W": 5, "N": 7, "R": 9}
SIZES |= {"n": 11, "P": 13, "C": 28, "S": 10, "Rl": 1, "Dh": 15}
OPS_WITH_ATTRS = [op for op in ALL_OPS if op.attrs]
FLOATS = (FLOAT, HALF, BF16)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    started = Host()
    yield started
    started.close()


def shape(tensor: ops.Tensor, sizes: dict[str, int]) -> tuple[int, ...]:
    """A symbolic shape in numbers, by Python's own arithmetic."""
    return tuple(int(eval(dim, {}, sizes)) for dim in tensor.shape)


def sized(op: ops.Op) -> tuple[dict[str, int], dict[str, ops.Value]]:
    """SIZES and the default attributes, which give some of them."""
    attrs = op.defaults()
    for attr in op.attrs:
        if attr.symbol:
            attrs[attr.name] = SIZES[attr.symbol]
    return SIZES, attrs


def number(tensor: ops.Tensor, model: int) -> int:
    """nvinfer1::DataType of a tensor where the model's float type is `model`."""
    return {"float32": FLOAT, "int32": INT32, "T": model}[tensor.dtype]


def described(types: list[int], shapes: list[tuple[int, ...]], form: int = LINEAR) -> str:
    words = [str(len(types))]
    for kind, dims in zip(types, shapes, strict=True):
        words += [str(kind), str(form), str(len(dims)), *map(str, dims)]
    return " ".join(words)


@pytest.mark.parametrize("way", ["static", "logged", "registry"])
def test_every_op_is_found(way: str) -> None:
    """By a plain dlopen and by the registry's own loading: every op of the table, once."""
    host = Host(way)
    found = host.ok("creators").words or []
    for op in ALL_OPS:
        assert found.count(op.name) == 1, op.name
        assert host.create(op, op.defaults()).words == [op.name, "1", '""', str(len(op.outputs))]
    host.close()


def test_registry_takes_over_a_library_that_registered_itself() -> None:
    """loadLibrary refuses known plugins, so the library withdraws its own registration."""
    host = Host("static")
    host.ok(f"load registry {library()}")
    found = host.ok("creators").words or []
    assert [found.count(op.name) for op in ALL_OPS] == [1] * len(ALL_OPS)
    host.ok("unload")
    assert not {op.name for op in ALL_OPS} & set(host.ok("creators").words or [])
    host.ok(f"load registry {library()}")
    assert {op.name for op in ALL_OPS} <= set(host.ok("creators").words or [])
    host.close()


def test_errors_reach_stderr_without_a_logger() -> None:
    host = Host("static")
    answer = host.create(ops.TABLE["TopKSelect"], {})
    assert answer.words is None
    assert answer.logs == []
    assert "kvsift: TopKSelect: attribute 'block_size'" in host.close()


@pytest.mark.parametrize("op", ALL_OPS, ids=lambda op: op.name)
def test_declared_fields(host: Host, op: ops.Op) -> None:
    words = host.ok(f"declared {op.name}").words or []
    kinds = {True: str(FIELD_INT32), False: str(FIELD_FLOAT32)}
    want = [word for a in op.attrs for word in (a.name, kinds[a.is_int], "1", "none")]
    assert words == want


def some_value(attr: ops.Attr, rng: random.Random) -> ops.Value:
    if attr.is_int:
        return rng.randint(int(attr.low), int(min(attr.high, 2**31 - 1)))
    return float(np.float32(rng.uniform(attr.low, attr.high)))


@pytest.mark.parametrize("op", ALL_OPS, ids=lambda op: op.name)
def test_attributes_survive_serialisation_clone_and_attach(host: Host, op: ops.Op) -> None:
    rng = random.Random(op.name)
    choices = [{a.name: some_value(a, rng) for a in op.attrs} for _ in range(5)]
    ends = [
        {a.name: end for a, end in zip(op.attrs, e, strict=True)}
        for e in ([a.low for a in op.attrs], [a.high for a in op.attrs])
    ]
    for attrs in (op.defaults(), *ends, *choices):
        attrs = {k: int(v) if op.attr(k).is_int else v for k, v in attrs.items()}
        assert host.create(op, attrs).words
        for request in ("serialised", "clone", "attach", "recreate", "clone"):
            host.ok(request)
            words = host.ok("serialised").words or []
            assert words[0::4] == list(attrs)
            for text, kind, value in zip(words[3::4], words[1::4], attrs.values(), strict=True):
                assert np.float32(text) == np.float32(value)
                assert kind == str(FIELD_INT32 if isinstance(value, int) else FIELD_FLOAT32)


@pytest.mark.parametrize("op", OPS_WITH_ATTRS, ids=lambda op: op.name)
def test_wide_numbers_are_taken(host: Host, op: ops.Op) -> None:
    """numpy's default types, as a network built in Python may give them."""
    words = [str(len(op.attrs))]
    for a in op.attrs:
        words += [a.name, str(FIELD_INT64 if a.is_int else FIELD_FLOAT64), "1", str(a.default)]
    host.ok(f"create {op.name} {' '.join(words)}")
    values = (host.ok("serialised").words or [])[3::4]
    for text, a in zip(values, op.attrs, strict=True):
        assert np.float32(text) == np.float32(a.default)


@pytest.mark.parametrize("op", ALL_OPS, ids=lambda op: op.name)
def test_created_without_attributes(host: Host, op: ops.Op) -> None:
    """The ONNX parser only warns of an attribute that a node lacks: nothing is a default here."""
    answer = host.create(op, {})
    if not op.attrs:
        assert answer.words
        return
    assert answer.words is None
    assert len(answer.logs) == len(op.attrs)
    for attr, line in zip(op.attrs, answer.logs, strict=True):
        assert line.startswith(f"kvsift: {op.name}: attribute '{attr.name}' must be one ")
        assert "is missing; write every attribute of the node" in line


def bad_fields(attr: ops.Attr) -> Iterator[tuple[str, str]]:
    """(field as the host reads it, what the message must say) of one wrong attribute."""
    kind, other = (FIELD_INT32, FIELD_FLOAT32) if attr.is_int else (FIELD_FLOAT32, FIELD_INT32)
    number = "integer" if attr.is_int else "float"
    good = str(attr.default)
    must = f"attribute '{attr.name}' must be one {number} from "
    yield f"{attr.name} {other} 1 {int(attr.default)}", f"{must}.*, got field type {other} "
    yield f"{attr.name} {FIELD_CHAR} 1 x", f"{must}.*, got field type {FIELD_CHAR} "
    yield f"{attr.name} {kind} 2 {good} {good}", f"{must}.* of length 2"
    yield f"{attr.name} {kind} 0", f"{must}.* of length 0"
    yield f"{attr.name} {kind} 1 {attr.low - 1}", f"{must}.*, got {attr.low - 1:g}$"
    if attr.high < 2**31 - 1:
        yield f"{attr.name} {kind} 1 {attr.high * 2 + 1}", f"{must}.*, got "
    if attr.is_int:
        yield f"{attr.name} {FIELD_INT64} 1 {2**31}", f"{must}.*, got {2**31}$"
    else:
        yield f"{attr.name} {kind} 1 nan", f"{must}.*, got nan"
        yield f"{attr.name} {kind} 1 inf", f"{must}.*, got inf"


@pytest.mark.parametrize("op", OPS_WITH_ATTRS, ids=lambda op: op.name)
def test_wrong_attribute_is_logged(host: Host, op: ops.Op) -> None:
    for attr in op.attrs:
        rest = {k: v for k, v in op.defaults().items() if k != attr.name}
        count, _, others = fields(op, rest).partition(" ")
        for field, message in bad_fields(attr):
            answer = host.ask(f"create {op.name} {int(count) + 1} {field} {others}")
            assert answer.words is None, field
            assert len(answer.logs) == 1, (field, answer.logs)
            assert re.match(f"kvsift: {op.name}: {message}", answer.logs[0]), answer.logs
        lacking = host.create(op, rest)
        assert len(lacking.logs) == 1
        assert f"'{attr.name}'" in lacking.logs[0]
    count, _, others = fields(op, op.defaults()).partition(" ")
    answer = host.ask(f"create {op.name} {int(count) + 1} blocksize {FIELD_INT32} 1 4 {others}")
    assert answer.logs == [f"kvsift: {op.name}: unknown attribute 'blocksize'"]
    assert answer.words is None


@pytest.mark.parametrize("model", FLOATS)
@pytest.mark.parametrize("op", ALL_OPS, ids=lambda op: op.name)
def test_output_types_and_shapes(host: Host, op: ops.Op, model: int) -> None:
    for changed in ({}, {"E": 0}, {"N": 1, "S": 1}):
        sizes, attrs = sized(op)
        sizes = sizes | changed
        assert host.create(op, attrs).words
        types = [number(t, model) for t in op.inputs]
        inputs = described(types, [shape(t, sizes) for t in op.inputs])
        want = described(
            [number(t, model) for t in op.outputs], [shape(t, sizes) for t in op.outputs]
        )
        words = host.ok(f"outputs {inputs}").words or []
        # The host answers without the formats.
        kept, numbers = [], iter(want.split()[1:])
        for kind in numbers:
            next(numbers)
            rank = next(numbers)
            kept += [kind, rank, *[next(numbers) for _ in range(int(rank))]]
        assert words == kept


@pytest.mark.parametrize("op", ALL_OPS, ids=lambda op: op.name)
def test_format_combinations(host: Host, op: ops.Op) -> None:
    """Each tensor of its own type, all model floats alike, linear; anything else is refused."""
    sizes, attrs = sized(op)
    assert host.create(op, attrs).words
    tensors = [*op.inputs, *op.outputs]
    shapes = [shape(t, sizes) for t in tensors]
    first_float = next((i for i, t in enumerate(tensors) if t.dtype == "T"), -1)
    for model in FLOATS:
        types = [number(t, model) for t in tensors]
        assert host.ok(f"formats {described(types, shapes)}").words == ["1"] * len(tensors)
        refused = host.ok(f"formats {described(types, shapes, CHW2)}").words
        assert refused == ["0"] * len(tensors)
        for i, tensor in enumerate(tensors):
            for other in {FLOAT, HALF, BF16, INT8, INT32, BOOL, INT64} - {types[i]}:
                changed = [*types[:i], other, *types[i + 1 :]]
                words = host.ok(f"formats {described(changed, shapes)}").words or []
                if i == first_float and other in FLOATS:
                    # Another model type: now the other model floats do not fit.
                    want = [
                        "0" if t.dtype == "T" and j != i else "1" for j, t in enumerate(tensors)
                    ]
                    assert words == want
                else:
                    assert words[i] == "0", (tensor.name, other)


def test_aliases(host: Host) -> None:
    """What is written in place: the cache that grows and the states of every step."""
    in_place = {"KvAppend": ["0"], "AccumUpdate": ["0"], "QueryStatsUpdate": ["0", "1"]}
    for op in ALL_OPS:
        host.create(op, op.defaults())
        want = in_place.get(op.name, ["-1"] * len(op.outputs))
        assert host.ok("aliases").words == want, op.name


@pytest.mark.parametrize("op", ALL_OPS, ids=lambda op: op.name)
def test_wrong_shapes_are_logged(host: Host, op: ops.Op) -> None:
    """Every size that two inputs share, changed in one of them; every rank."""
    sizes, attrs = sized(op)
    shapes = [shape(t, sizes) for t in op.inputs]
    types: list[DTypeLike] = [np.int32 if t.dtype == "int32" else np.float32 for t in op.inputs]
    outs: list[tuple[DTypeLike, tuple[int, ...]]] = [
        (np.int32 if t.dtype == "int32" else np.float32, shape(t, sizes)) for t in op.outputs
    ]
    used = [d for t in op.inputs for dim in t.shape for d in dim.split("*")]
    assert host.create(op, attrs).words

    def ask(changed: list[tuple[int, ...]]) -> list[str]:
        given = descs(zip(types, changed, strict=True))
        payload = b"\0" * (4 * sum(int(np.prod(s)) for s in changed))
        answer = host.ask(f"run aliased {given} {descs(outs)}", payload)
        assert answer.words is None
        return answer.logs

    refused = 0
    for i, tensor in enumerate(op.inputs):
        for axis, dim in enumerate(tensor.shape):
            if all(used.count(symbol) == 1 and not symbol.isdigit() for symbol in dim.split("*")):
                continue
            bad = [*shapes[i][:axis], shapes[i][axis] + 1, *shapes[i][axis + 1 :]]
            logs = ask([*shapes[:i], tuple(bad), *shapes[i + 1 :]])
            assert re.match(
                rf"kvsift: {op.name}: input '\w+' is \[.*\], must be \[.* with ", logs[0]
            )
            refused += 1
        longer = [*shapes[:i], (*shapes[i], 1), *shapes[i + 1 :]]
        rank = len(shapes[i]) + 1
        want = f"kvsift: {op.name}: input '{tensor.name}' has {rank} dimensions, must be ["
        assert ask(longer)[0].startswith(want)
    assert refused


def test_wrong_counts_are_logged(host: Host) -> None:
    op = ops.TABLE["KNormScore"]
    host.create(op, {})
    answer = host.ask(f"outputs {described([FLOAT], [(4, 2, 28, 8)])}")
    assert answer.words is None
    assert answer.logs == ["kvsift: KNormScore: got 1 inputs and 1 outputs, takes 3 and 1"]


def test_library_exports_its_entry_points_only() -> None:
    """Hidden visibility: two plugin libraries in one process cannot take each other's symbols."""
    defined = exported_symbols(library())
    assert {"getCreators", "setLoggerFinder"} <= defined
    assert all(s in ("getCreators", "setLoggerFinder") or s.startswith("kvsift_") for s in defined)


def test_workspace_does_not_shrink(host: Host) -> None:
    """The workspace of a profile's largest shapes serves every smaller one."""
    for op in ALL_OPS:
        host.create(op, op.defaults())
        for symbol in ("E", "N", "C", "B", "S", "W", "L", "n", "P"):
            small, large = (
                workspace(host, op, SIZES | {"n": 5, symbol: value}) for value in (1, 4096)
            )
            assert small <= large, (op.name, symbol)


def workspace(host: Host, op: ops.Op, sizes: dict[str, int]) -> int:
    def listed(tensors: tuple[ops.Tensor, ...]) -> str:
        return described([number(t, HALF) for t in tensors], [shape(t, sizes) for t in tensors])

    answer = host.ok(f"workspace {listed(op.inputs)} {listed(op.outputs)}")
    return int((answer.words or ["-1"])[0])


def test_scene_and_sizes_agree() -> None:
    """The shapes above are the generated cases' own arithmetic, done twice."""
    scene = Scene(Case("WindowMass", "check", ops.TABLE["WindowMass"].defaults()))
    for tensor in ops.TABLE["WindowMass"].inputs:
        assert shape(tensor, scene.size) == scene.shape(tensor)
