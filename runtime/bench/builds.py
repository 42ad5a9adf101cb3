"""The engines that benchmarks build, and keep for the next run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvsift.builder.errors import KvsiftError, UsageError
from kvsift.builder.linear import Quantize
from kvsift.builder.package import Limits, load_manifest
from kvsift.builder.policies import resolve
from kvsift.builder.targets.ort import BuildOptions, build
from kvsift.builder.weights import WeightSource


def limits_for(source: WeightSource, context: int, density: float, max_batch: int) -> Limits:
    """Return the limits of both engines; UsageError if the model has fewer positions."""
    positions = source.config.max_positions
    if not 2 <= context <= positions:
        raise UsageError(
            f"context must be in [2, {positions}], the model's positions, got {context}"
        )
    return Limits(
        max_input=context,
        max_output=1024,
        max_batch=max_batch,
        density=density,
        max_density=density,
    )


def obtain(
    source: WeightSource,
    policy_name: str,
    quantize: Quantize,
    limits: Limits,
    directory: Path,
    on_build: Callable[[str], None] | None = None,
) -> Path:
    """Return the package `directory/POLICY-QUANTIZE`, built unless it is there and fits.

    `limits.density` holds for the evicting policy; the dense one has density 1.
    """
    policy = resolve(policy_name)
    if not policy.evicts:
        limits = limits.model_copy(update={"density": 1.0, "max_density": 1.0})
    path = directory / f"{policy_name}-{quantize}"
    try:
        found = load_manifest(path)
    except KvsiftError:
        found = None
    wanted = (source.config, policy, quantize, limits)
    if found and (found.model, found.policy, found.quantize, found.limits) == wanted:
        return path
    if on_build:
        on_build(path.name)
    build(source, policy, limits, path, BuildOptions(quantize=quantize, force=True))
    return path
