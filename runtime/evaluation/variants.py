"""A variant: a policy with options, as a user would ask for it, named by what differs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvsift.builder.package import Policy

Option = int | float | str


@dataclass(frozen=True)
class Spec:
    """A variant as a user would ask for it: `--eviction`, `--selector`, `--set`, `--scope`."""

    name: str
    eviction: str
    selector: str | None = None
    options: dict[str, Option] = field(default_factory=dict)
    scope: Literal["prefill", "both"] | None = None


@dataclass(frozen=True)
class Variant:
    """A variant with its resolved policy and the bytes of its eviction model, None for `full`."""

    spec: Spec
    policy: Policy
    model: bytes | None

    @property
    def name(self) -> str:
        """The spec's name."""
        return self.spec.name

    def is_sampled(self, in_decode: bool) -> bool:
        """Whether the kept set depends on the eviction seed."""
        if self.policy.scorer == "uniform":
            return True
        same = self.policy.prefill_selector == "same"
        return self.policy.selector == "reservoir" and (same or in_decode)
