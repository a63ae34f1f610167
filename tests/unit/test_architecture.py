"""Imports go one way, down README's code map, and heavy packages stay at home (CONTRIBUTING.md, house rules)."""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import checkrun_format

ROOT = Path(__file__).parents[2]
PACKAGE = "checkrun_format"
COMPILED = {f"{PACKAGE}.movement.kernels"} | {
    f"{PACKAGE}.quantize.{name}" for name in ("decoding", "kernels", "lanes", "lines", "stored", "vectors")
}
TENSORS = {f"{PACKAGE}.quantize.tensors", f"{PACKAGE}.devices"}
NOT_LOADED = {"click", "cupy", "jax", "jsonschema", "numba", "rich", "s3fs", "safetensors", "torch", "zarr"}
"""What `import checkrun_format` must not load."""

NO_NOUNS = {"base", "bases", "common", "helper", "helpers", "manager", "managers", "misc", "util", "utils"}
UNPICKLERS = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module, and whether importing the importer imports it too."""

    target: str
    line: int
    at_import: bool


class ImportCollector(ast.NodeVisitor):
    """Collects every import of a module, at whatever depth."""

    def __init__(self, module: str, *, is_package: bool, known: frozenset[str]) -> None:
        self.found: list[Import] = []
        self._package = module if is_package else module.rpartition(".")[0]
        self._known = known
        self._deferred = 0

    def _add(self, target: str, line: int) -> None:
        self.found.append(Import(target=target, line=line, at_import=not self._deferred))

    def _visit_deferred(self, nodes: list[ast.stmt]) -> None:
        self._deferred += 1
        for node in nodes:
            self.visit(node)
        self._deferred -= 1

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_deferred(node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_deferred(node.body)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            self._visit_deferred(node.body)
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = node.module or ""
        if node.level:
            parts = self._package.split(".")
            source = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
        for alias in node.names:
            submodule = f"{source}.{alias.name}"
            is_module = submodule in self._known or not source.startswith(PACKAGE)
            self._add(submodule if is_module else source, node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        named = ast.unparse(node.func) in {"__import__", "import_module", "importlib.import_module"}
        if named and node.args and isinstance(node.args[0], ast.Constant):
            self._add(str(node.args[0].value), node.lineno)
        self.generic_visit(node)


@functools.cache
def sources() -> dict[str, Path]:
    """Every module of the library by its dotted name; a package's name stands for its `__init__`."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports_of(module: str) -> tuple[Import, ...]:
    path = sources()[module]
    collector = ImportCollector(module, is_package=path.name == "__init__.py", known=frozenset(sources()))
    collector.visit(ast.parse(path.read_text("utf-8")))
    return tuple(collector.found)


def room_of(module: str) -> str:
    """The entry of the code map that a module of the library belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


@functools.cache
def code_map() -> tuple[str, ...]:
    """The rooms of README's code map, ground floor first."""
    section = (ROOT / "README.md").read_text("utf-8").partition("## Code map")[2].partition("\n## ")[0]
    cells = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")]
    return tuple(room for cell in cells for room in re.findall(r"`([a-z_]+)/?`", cell))


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def wrong_way(module: str, rooms: tuple[str, ...]) -> list[str]:
    """The imports of a module that do not go to an earlier room or stay in its own."""
    number_of = {room: number for number, room in enumerate(rooms)}
    here = number_of.get(room_of(module), -1)
    ours = [found for found in imports_of(module) if is_in(found.target, PACKAGE)]
    later = [found for found in ours if number_of.get(room_of(found.target), len(rooms)) > here]
    return [f"{module}:{found.line} imports {found.target}" for found in later]


def test_the_collector_finds_every_kind_of_import() -> None:
    source = """
import zarr.core.array
from checkrun_format import errors, CheckrunError
from checkrun_format.errors import CheckrunError
if TYPE_CHECKING:
    import torch
else:
    import json
class A:
    from . import rows
    def f(self):
        from ..errors import CheckrunError
        importlib.import_module("numba")
"""
    known = frozenset({PACKAGE, f"{PACKAGE}.errors", f"{PACKAGE}.cli", f"{PACKAGE}.cli.rows"})
    collector = ImportCollector(f"{PACKAGE}.cli.main", is_package=False, known=known)
    collector.visit(ast.parse(source))
    assert [(found.target, found.at_import) for found in collector.found] == [
        ("zarr.core.array", True),
        ("checkrun_format.errors", True),
        ("checkrun_format", True),
        ("checkrun_format.errors", True),
        ("torch", False),
        ("json", True),
        ("checkrun_format.cli.rows", True),
        ("checkrun_format.errors", False),
        ("numba", False),
    ]


def test_the_check_of_the_order_finds_a_wrong_import() -> None:
    assert wrong_way(f"{PACKAGE}.dtypes", ("errors", "dtypes")) == []
    assert len(wrong_way(f"{PACKAGE}.dtypes", ("dtypes", "errors"))) == 1
    assert len(wrong_way(f"{PACKAGE}.dtypes", ("dtypes",))) == 1


def test_the_code_map_names_exactly_the_rooms_of_the_library() -> None:
    rooms = {room_of(module) for module in sources()}
    assert len(rooms) > 1
    assert len(code_map()) == len(set(code_map()))
    assert set(code_map()) == rooms


@pytest.mark.parametrize("module", sources())
def test_imports_go_up_the_code_map(module: str) -> None:
    assert wrong_way(module, code_map()) == []


def test_no_import_cycles() -> None:
    graph = {module: {i.target for i in imports_of(module)} & sources().keys() for module in sources()}
    assert any(graph.values())
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) == set(sources())


@pytest.mark.parametrize("module", sources())
def test_heavy_packages_stay_at_home(module: str) -> None:
    """Each is imported by the modules that need it, when they need it.

    `s3fs` and `safetensors` are never imported while importing, `zarr.core` never. `torch` is imported by the torch
    package, by the modules for tensors, which only a tensor or a device imports, and when a state dict is read. `numba`
    is imported by the modules that it compiles, which themselves are imported when they are needed.
    """
    always = [i.target for i in imports_of(module)]
    at_import = [i.target for i in imports_of(module) if i.at_import]
    if room_of(module) != "torch" and module not in TENSORS | {f"{PACKAGE}.interchange.state_dict"}:
        assert not [target for target in always if is_in(target, "torch")]
    if room_of(module) != "torch" and module not in TENSORS:
        assert not [target for target in at_import if is_in(target, "torch")]
    assert not [target for target in at_import if target.partition(".")[0] in {"s3fs", "safetensors"}]
    assert not [target for target in at_import if target in COMPILED and module not in COMPILED]
    assert room_of(module) == "torch" or module in TENSORS or not TENSORS & set(at_import)
    if module not in COMPILED:
        assert not [target for target in always if is_in(target, "numba")]
    assert not [target for target in always if is_in(target, "zarr.core")]


@pytest.mark.parametrize("module", sources())
def test_nothing_unpickles(module: str) -> None:
    """EXT-1: no reader of this format may unpickle a blob."""
    assert not {i.target.partition(".")[0] for i in imports_of(module)} & UNPICKLERS
    assert not re.search(r"allow_pickle\s*=\s*True", sources()[module].read_text("utf-8"))


@pytest.mark.parametrize("module", sources())
def test_every_module_is_a_noun(module: str) -> None:
    assert not {part.strip("_") for part in module.split(".")} & NO_NOUNS


def test_importing_the_library_loads_nothing_heavy() -> None:
    program = "import json, sys, checkrun_format; print(json.dumps(sorted(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in json.loads(printed.stdout)}
    assert PACKAGE in loaded
    assert not loaded & NOT_LOADED


def test_public_names_are_sorted_and_exist() -> None:
    """Sorted as ruff sorts: constants, classes, functions."""
    names = checkrun_format.__all__
    assert names
    assert list(names) == sorted(set(names), key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert [name for name in names if not hasattr(checkrun_format, name)] == []
