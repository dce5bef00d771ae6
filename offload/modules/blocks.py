"""Which modules of a model are its blocks: found as members of its lists, or named by patterns.

One invariant: no module that is returned lies inside another one of the same answer, and none is the model
itself.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise

from torch import nn

Blocks = dict[str, dict[str, nn.Module]]
"""By group name, the modules of the group by their qualified name, in the order in which the model has
them."""

Modules = str | Sequence[str] | Mapping[str, str | Sequence[str]]
"""Patterns; or patterns by the name of the group that they are for."""

_BASE_LAYERS = re.compile(r"(\.base_layer)+$")
_CONTAINERS = (nn.ModuleList, nn.Sequential)
_SHOWN = 8


def blocks_of(model: nn.Module, blocks: Modules | None) -> Blocks:
    """Blocks that patterns name, or those of `find_blocks`. Raises ValueError."""
    return find_blocks(model) if blocks is None else without_nested(match_groups(model, blocks, "blocks"))


def groups_of(model: nn.Module, blocks: Modules | None, modules: Modules | None) -> Blocks:
    """Modules that get groups of their own: blocks, or modules, and where blocks are named those inside.
    Raises ValueError."""
    if modules is None:
        return blocks_of(model, blocks)
    found = match_groups(model, modules, "modules")
    if blocks is None:
        return found
    inside = tuple(f"{name}." for name in flat(blocks_of(model, blocks)))
    groups = {
        group: {name: module for name, module in named.items() if f"{name}.".startswith(inside)}
        for group, named in found.items()
    }
    if not all(groups.values()):
        raise ValueError(
            f"modules={modules!r} matches no module inside blocks={blocks!r}, of one pattern at least; leave "
            "blocks out, or name blocks that have such modules"
        )
    return groups


def flat(groups: Blocks) -> dict[str, nn.Module]:
    """The modules of all groups, by name."""
    return {name: module for named in groups.values() for name, module in named.items()}


def names_of(groups: Blocks, patterns: str | Sequence[str] | None, argument: str) -> set[str]:
    """Names of modules in groups that patterns match; none for None. Raises ValueError for a pattern without
    any."""
    names = [*flat(groups)]
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        if not (matched := {name for name in names if fnmatchcase(name, pattern)}):
            raise ValueError(f"{argument}: {pattern!r} matches no block; they are {_listed(names)}")
        found |= matched
    return found


def find_blocks(model: nn.Module) -> Blocks:
    """The members of the outermost lists, the model included, that have another of their class beside them;
    or anywhere in the list, if they are layers: made of modules, and no containers. Also layers between those
    of a Sequential, and all other layers of a ModuleList, or of a ModuleDict whose keys are numbers. A list
    without two of a class holds blocks if it is a ModuleList of layers, none of which has lists with such. A
    group has the name of its list, or "blocks" if that is the model.

    Raises ValueError, which lists the children, if there is none.
    """
    found: Blocks = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        run = _run(module)
        if run:
            prefix = f"{name}." if name else ""
            found[name or "blocks"] = {prefix + child: block for child, block in run.items()}
            for block in run.values():
                inside.update(block.modules())
    if not found:
        children = [f"{name} ({type(child).__name__})" for name, child in model.named_children()]
        name_them = f" Name the blocks, such as blocks={_example(model)!r}, or take" if children else " Take"
        raise ValueError(
            f"{type(model).__name__} has no blocks that can be found: layers in a ModuleList, or two or more "
            f"of one class in a Sequential. {_children(children)}.{name_them} "
            "mode=True, which needs none: every saved tensor leaves"
        )
    return found


def beside_blocks(model: nn.Module, blocks: Blocks) -> list[str]:
    """Names and classes of what has parameters and is no block in the lists that hold these blocks."""
    names = [*flat(blocks)]
    found = []
    for of in dict.fromkeys(name.rpartition(".")[0] for name in names):
        for child, module in _members(model.get_submodule(of)).items():
            name = f"{of}.{child}" if of else child
            if name not in names and any(True for _ in module.parameters()):
                found.append(f"{name} ({type(module).__name__})")
    return found


def _run(container: nn.Module) -> dict[str, nn.Module]:
    """The children of a list that are blocks."""
    members = _members(container)
    alike, all_of = _alike(members), [*members]
    layers = [name for name, child in members.items() if _is_layer(child)]
    if isinstance(container, nn.Sequential):
        all_of = all_of[all_of.index(alike[0]) : all_of.index(alike[-1])] if alike else []
    elif not alike and any(_alike(_members(part)) for name in layers for part in members[name].modules()):
        all_of = []
    run = {*alike, *(name for name in layers if name in all_of)}
    return {name: child for name, child in members.items() if name in run}


def _members(container: nn.Module) -> dict[str, nn.Module]:
    """The children of a list. A ModuleDict with numbers as keys is one, of which a pipeline stage has a
    part."""
    children = dict(container.named_children())
    numbered = isinstance(container, nn.ModuleDict) and all(name.isdigit() for name in children)
    return children if numbered or isinstance(container, _CONTAINERS) else {}


def _alike(members: Mapping[str, nn.Module]) -> list[str]:
    """Names of members with another of their class beside them, or, of layers, anywhere."""
    counts = Counter(map(type, members.values()))
    found = {name for name, child in members.items() if counts[type(child)] > 1 and _is_layer(child)}
    for (name, child), (next_name, following) in pairwise(members.items()):
        if type(child) is type(following) and type(child) not in (nn.ModuleList, nn.ModuleDict):
            found |= {name, next_name}
    return [name for name in members if name in found]


def _is_layer(module: nn.Module) -> bool:
    """Predicate: the module is made of modules, and neither a container nor one module with what an adapter
    or a parametrization adds."""
    parts = {name for name, _ in module.named_children()} - {"parametrizations"}
    return bool(parts) and "base_layer" not in parts and type(module) not in (*_CONTAINERS, nn.ModuleDict)


def find_experts(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the modules that hold experts, and of the mixtures around them: what has a router, or an
    expert for every token, beside the experts, if that is no block of the model.

    Experts are a module whose own weights are stacked, two or more of three dimensions with one length of the
    first; or the members of a list called `experts`. peft calls them from modules around them, which give
    them their weights for the call. Raises ValueError if there are none.
    """
    modules = dict(model.named_modules())
    stacked = (_BASE_LAYERS.sub("", name) for name, module in modules.items() if name and _is_stacked(module))
    found = {name: [name] for name in stacked}
    for name, module in modules.items():
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts" and len(module) > 1:
            found[name] = [f"{name}.{child}" for child, _ in module.named_children()]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts that can be found: a module with two or more weights of "
            "its own of three dimensions, experts first, or a ModuleList called 'experts'. Name their "
            "modules in offload.apply(model, modules=[...])"
        )
    try:
        blocks = {*flat(find_blocks(model))}
    except ValueError:
        blocks = set()
    mixtures: dict[str, None] = {}
    for name, members in found.items():
        around = name.rpartition(".")[0]
        mixtures.update(dict.fromkeys(members if around in {"", *blocks} else [around]))
    outer = [name for name in mixtures if not any(name.startswith(f"{other}.") for other in mixtures)]
    return [member for members in found.values() for member in members], outer


def _is_stacked(module: nn.Module) -> bool:
    firsts = [weight.shape[0] for weight in module.parameters(recurse=False) if weight.dim() == 3]
    return len(firsts) > 1 and len(set(firsts)) == 1


def match_modules(model: nn.Module, patterns: str | Sequence[str], argument: str) -> Blocks:
    """The modules whose qualified name matches a pattern (fnmatch, case counts). Of a module and what lies
    inside it the same pattern takes the outer one. A group has its pattern's name, without the wildcards at
    its ends.

    argument: of `apply`, for errors. Raises ValueError for a pattern that matches nothing, with the nearest
    names.
    """
    given = [patterns] if isinstance(patterns, str) or not isinstance(patterns, Iterable) else list(patterns)
    if not given or not all(isinstance(pattern, str) and pattern for pattern in given):
        raise ValueError(
            f"{argument} is {patterns!r}, must be a pattern such as {_example(model)!r}, or a list of such"
        )
    found: Blocks = {}
    for pattern in given:
        inside: set[nn.Module] = set()
        matched: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            if name and module not in inside and fnmatchcase(name, pattern):
                matched[name] = module
                inside.update(module.modules())
        if not matched:
            raise ValueError(
                f"{argument}: {pattern!r} matches no module of {type(model).__name__}; "
                + _near(model, pattern)
            )
        found.setdefault(pattern.strip("*.") or "blocks", {}).update(matched)
    return found


def match_groups(model: nn.Module, given: Modules, argument: str) -> Blocks:
    """The modules that `apply` was given as `argument`, by group: as `match_modules`, or by the names that it
    was given for them."""
    if not isinstance(given, Mapping):
        return match_modules(model, given, argument)
    if not given or not all(isinstance(group, str) and group for group in given):
        raise ValueError(f"{argument} is {given!r}, must name each group, such as {{'experts': '*.experts'}}")
    return {
        group: flat(without_nested(match_modules(model, patterns, argument)))
        for group, patterns in given.items()
    }


def without_nested(groups: Blocks) -> Blocks:
    """`groups` without the modules that lie inside another one of them, whichever pattern matched."""
    inner = {part for module in flat(groups).values() for part in module.modules() if part is not module}
    outer = {
        group: {name: module for name, module in modules.items() if module not in inner}
        for group, modules in groups.items()
    }
    return {group: modules for group, modules in outer.items() if modules}


def _near(model: nn.Module, pattern: str) -> str:
    """Names that `pattern`, which matches none, may have meant, as text."""
    names = [name for name, _ in model.named_modules() if name]
    of_class = [
        name for name, module in model.named_modules() if name and fnmatchcase(type(module).__name__, pattern)
    ]
    if of_class:
        return (
            "patterns are names of modules, not of classes. Modules of that class are "
            f"{_listed(of_class)}: write {_patterns_of(model, of_class)!r}"
        )
    near = difflib.get_close_matches(pattern, names, 4, 0.3)
    children = [name for name, _ in model.named_children()]
    nearest = f"the nearest names are {_listed(near)}" if near else "no name is like it"
    return f"{nearest}. {_children(children)}"


def _patterns_of(model: nn.Module, names: Sequence[str]) -> str | list[str]:
    """Patterns that match the modules of these names, and no other: one pattern for a container that has only
    such."""
    patterns: dict[str, None] = {}
    for name in names:
        container = name.rpartition(".")[0]
        children = model.get_submodule(container).named_children()
        whole = container and all(f"{container}.{child}" in names for child, _ in children)
        patterns[f"{container}.*" if whole else name] = None
    found = list(patterns)
    return found[0] if len(found) == 1 else found


def _example(model: nn.Module) -> str | list[str]:
    """Pattern that matches modules of this model: the members of its first list, else its children."""
    first = next((name for name, _ in model.named_modules() if name.endswith(".0")), "")
    if first:
        return f"{first.rpartition('.')[0]}.*"
    children = [name for name, _ in model.named_children()]
    return _patterns_of(model, children[:_SHOWN]) if children else "layers.*"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _children(children: Sequence[str]) -> str:
    return f"Its children are {_listed(children)}" if children else "It has no children"
