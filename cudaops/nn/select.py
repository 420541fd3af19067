"""Which modules are meant: a walk over a model by identity, and include / exclude rules."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import nn

Rule = str | type | Callable[[nn.Module, str], bool]
Rules = Rule | Iterable[Rule] | None

_PRODUCT_TYPES = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
)
_PRODUCT_NAME = re.compile(r"linear|conv(transpose)?[123]d", re.IGNORECASE)


class Transparent:
    """Mixed into a wrapper module whose inner model keeps its own names."""


@dataclass(slots=True)
class Site:
    """One module of a model, with every name it is registered under (first registration first) and its parents."""

    module: nn.Module
    names: list[str] = field(default_factory=list)
    parents: list[nn.Module] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]


def walk(model: nn.Module) -> list[Site]:
    """Every module below and including `model`, each once, in order of registration. Cycles end where they close."""
    sites: dict[int, Site] = {}
    path: set[int] = set()

    def visit(module: nn.Module, name: str, parent: nn.Module | None) -> None:
        if id(module) in path:
            return
        site = sites.setdefault(id(module), Site(module))
        site.names.append(name)
        if parent is not None and not any(parent is seen for seen in site.parents):
            site.parents.append(parent)
        path.add(id(module))
        for child_name, child in module._modules.items():
            if child is not None:
                below = name if isinstance(module, Transparent) else f"{name}.{child_name}" if name else child_name
                visit(child, below, module)
        path.discard(id(module))

    visit(model, "", None)
    return list(sites.values())


def type_name(module: nn.Module) -> str:
    """The class's name; for a TorchScript module, that of the class it was made from."""
    return str(getattr(module, "original_name", None) or type(module).__name__)


def is_product(module: nn.Module) -> bool:
    """Whether `module` is a convolution or linear-like: torch's types and what derives from them, and others by their
    name where they hold a weight (quantised and TorchScript ones, `Conv1D` of transformers)."""
    if isinstance(module, _PRODUCT_TYPES):
        return True
    return hasattr(module, "weight") and _PRODUCT_NAME.search(type_name(module)) is not None


def _as_rules(rules: Rules, what: str) -> tuple[Rule, ...]:
    if rules is None:
        return ()
    single = isinstance(rules, str) or callable(rules) or not isinstance(rules, Iterable)
    listed: tuple[object, ...] = (rules,) if single else tuple(rules)  # type: ignore[arg-type]
    for rule in listed:
        if not isinstance(rule, str) and not callable(rule):
            raise TypeError(
                f"{what} takes a name pattern ('layer1.*'), a module type, a predicate (module, name) -> bool, "
                f"or a list of these; got {type(rule).__name__}: {rule!r}"
            )
    return listed  # type: ignore[return-value]


def _matches(rule: Rule, site: Site) -> bool:
    if isinstance(rule, str):
        return any(fnmatch.fnmatchcase(name, rule) for name in site.names)
    if isinstance(rule, type):
        return isinstance(site.module, rule)
    return any(rule(site.module, name) for name in site.names)


class Selection:
    """`include` and `exclude` as one predicate over sites; a module with several names is meant by any of them.

    Raises:
        TypeError: a rule that is neither a pattern, a type nor callable.
    """

    def __init__(self, include: Rules, exclude: Rules) -> None:
        self.include = None if include is None else _as_rules(include, "include")
        self.exclude = _as_rules(exclude, "exclude")

    def __contains__(self, site: Site) -> bool:
        if self.include is not None and not any(_matches(rule, site) for rule in self.include):
            return False
        return not any(_matches(rule, site) for rule in self.exclude)
