"""Finds every name of TensorRT's Python module that a source file uses, by its types.

mypy tells the class of each object; a class or function of the module itself counts too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mypy import build, modulefinder, nodes, options, types

BINDINGS = "tensorrt_bindings.tensorrt"


def names_used(file: Path, stubs: Path, module: str) -> list[str]:
    """Return dotted names such as `IBuilderConfig.set_preview_feature`, sorted.

    Raises CompileError where the file does not fit the types.
    """
    told = options.Options()
    told.incremental = False
    told.export_types = told.preserve_asts = True
    told.follow_imports = "skip"
    told.ignore_missing_imports = told.ignore_errors = True
    told.allow_untyped_globals = True
    sources = [
        modulefinder.BuildSource(str(stubs / "tensorrt/__init__.pyi"), "tensorrt"),
        modulefinder.BuildSource(
            str(stubs / "tensorrt_bindings/__init__.pyi"), "tensorrt_bindings"
        ),
        modulefinder.BuildSource(str(stubs / "tensorrt_bindings/tensorrt.pyi"), BINDINGS),
        modulefinder.BuildSource(str(file), module),
    ]
    result = build.build(sources, told)
    known = result.types
    return sorted(
        {
            name
            for expression in known
            if isinstance(expression, nodes.MemberExpr)
            for name in _names(expression, known)
        }
    )


def _names(member: nodes.MemberExpr, known: dict[nodes.Expression, types.Type]) -> Iterator[str]:
    base = member.expr
    if isinstance(base, nodes.NameExpr) and isinstance(base.node, nodes.MypyFile):
        if base.node.fullname == "tensorrt":
            yield member.name
        return
    if isinstance(base, nodes.RefExpr) and isinstance(base.node, nodes.TypeInfo):
        yield from _member(base.node, member.name)  # of a class, such as an enumeration's value
        return
    found = types.get_proper_type(known.get(base))
    items = found.items if isinstance(found, types.UnionType) else [found]
    for item in map(types.get_proper_type, items):
        if isinstance(item, types.Instance):
            yield from _member(item.type, member.name)


def _member(kind: nodes.TypeInfo, name: str) -> Iterator[str]:
    if kind.fullname.startswith(f"{BINDINGS}."):
        yield f"{kind.fullname.removeprefix(f'{BINDINGS}.')}.{name}"
