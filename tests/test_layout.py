"""The house: who may import whom, and what its files of settings are."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import surgery
from surgery.structures.registry import TARGETS
from surgery.workflow.names import check_names
from surgery.workflow.recipe import COMMANDS, Recipe

ROOT = Path(__file__).resolve().parent.parent

FLOORS = (
    ("version", "common", "kernels", "model", "registration", "own_program"),
    ("checkpoint", "families", "acceleration"),
    ("running",),
    ("eval", "engines"),
    ("calibration",),
    ("transforms",),
    ("architectures", "verification", "reporting"),
    ("export", "training", "evaluation"),
    ("heads",),
    ("structures",),
    ("healing", "inspection", "bench", "planning"),
    ("console",),
    ("demo", "workflow", "api"),
    ("cli",),
)
"""The folders of the package from the ground up; a file imports from its own folder and from floors below. The ground
floor and the one above it hold apart folders that know nothing of each other but what ``EXCEPTIONS`` says."""

EXCEPTIONS = {
    "own_program": {"common", "registration"},
    "registration": {"acceleration", "model"},  # inside its functions: what AutoModel learns when it is loaded
    "families": {"common", "kernels"},
    "acceleration": {"kernels", "model"},
    "checkpoint": {"common"},
    "common": set(),
    "kernels": set(),
    "model": set(),
    "version": set(),
    "engines": {"checkpoint", "common", "model"},  # the entries of layers alone
    "eval": {"common", "model", "running"},
    "training": {"calibration", "checkpoint", "common", "eval", "kernels", "model", "running", "version"},
}
"""Packages that may import less than all floors below them, or more."""

BUILDS_ON = {"cross_layer": {"low_rank"}, "quantized": {"low_rank"}}
"""Structures that stand on others."""


def module_name(file: Path) -> str:
    """Return the name by which a file is imported; the packages at the top of the repository are linked into the
    package."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "surgery" else ("surgery", *parts)
    return ".".join(parts).removesuffix(".__init__")


FILES = {
    module_name(file): file
    for top in ("surgery", "eval", "kernels", "training")
    for file in sorted((ROOT / top).rglob("*.py"))
    if not any(part.is_symlink() for part in file.parents)
}


MODULES = {name.rsplit(".", above)[0] for name in FILES for above in range(name.count(".") + 1)}
"""Files and the folders that they lie in, as they are imported."""


@cache
def imported(file: Path) -> frozenset[str]:
    """Modules of the package that a file imports, wherever in it, but for those that only its annotations name."""
    package = module_name(file) if file.name == "__init__.py" else module_name(file).rpartition(".")[0]
    return imports_of(file.read_text(encoding="utf-8"), package)


def imports_of(source: str, package: str) -> frozenset[str]:
    """Return the imports in the text of a module of a package."""
    result: set[str] = set()

    def visit(statements: list[ast.AST]) -> None:
        for child in statements:
            if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.Import):
                result.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
                base = ".".join([*above, *([child.module] if child.module else [])])
                result.update(home(base, alias.name) for alias in child.names)
            for part in ("body", "orelse", "finalbody", "handlers", "cases"):
                visit(getattr(child, part, []))

    visit(ast.parse(source).body)
    return frozenset(name for name in result if name.startswith("surgery."))


def home(base: str, name: str) -> str:
    """Return the module that ``from base import name`` loads: a module or folder of that name, or the module that has
    it."""
    if f"{base}.{name}" in MODULES:
        return f"{base}.{name}"
    return surgery._HOMES.get(name, base) if base == "surgery" else base


def package_of(name: str) -> str:
    """First name below ``surgery`` of a module."""
    return name.split(".")[1] if "." in name else ""


@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("import surgery.heads.plan", "surgery.heads.plan"),
        ("from surgery import heads", "surgery.heads"),
        ("from surgery import training", "surgery.training"),  # a folder without an __init__.py
        ("from surgery import convert", "surgery.api.rewriting"),
        ("from surgery.heads import plan", "surgery.heads.plan"),
        ("from surgery.heads.plan import compile_plan", "surgery.heads.plan"),
        ("from . import disk", "surgery.checkpoint.disk"),
        ("from .disk import free_bytes", "surgery.checkpoint.disk"),
        ("from ..heads import plan", "surgery.heads.plan"),
        ("from .. import heads", "surgery.heads"),
    ],
)
def test_every_way_to_import_is_seen(line, module):
    assert imports_of(f"def inside():\n    {line}\n", "surgery.checkpoint") == {module}


def test_no_module_imports_itself_through_others():
    """Inside functions too."""
    graph = {name: imported(file) & FILES.keys() - {name} for name, file in FILES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names a circle


def test_every_folder_has_a_floor():
    packages = [package for floor in FLOORS for package in floor]
    assert sorted(packages) == sorted({package_of(name) for name in FILES} - {"", "__main__"})


def test_imports_go_one_way():
    allowed, below = {"": {package for floor in FLOORS for package in floor} | {""}}, set()
    for floor in FLOORS:
        allowed |= {package: EXCEPTIONS.get(package, below) | {package} for package in floor}
        below = below.union(floor)
    allowed["__main__"] = allowed[""]
    for name, file in FILES.items():
        assert {package_of(other) for other in imported(file)} <= allowed[package_of(name)], file


def asked_for(tree: ast.AST) -> set[str]:
    """Words that a file compares with, looks up or keeps things by."""
    nodes: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            nodes += [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            nodes += node.keys
        elif isinstance(node, ast.Subscript):
            nodes.append(node.slice)
        elif isinstance(node, ast.MatchValue):
            nodes.append(node.value)
    nodes += [
        each for each_node in nodes if isinstance(each_node, ast.Tuple | ast.List | ast.Set) for each in each_node.elts
    ]
    return {
        each_node.value
        for each_node in nodes
        if isinstance(each_node, ast.Constant) and isinstance(each_node.value, str)
    }


def test_nothing_outside_a_structures_folder_asks_for_its_name():
    """Search what knows targets; in floors below them "hybrid" is a kind of attention, as config.json has it."""
    floor = next(index for index, packages in enumerate(FLOORS) if "structures" in packages)
    above = {package for packages in FLOORS[floor:] for package in packages}
    names = set(TARGETS)
    quoted = re.compile(rf"""["']({"|".join(names)})["']""")
    for name, file in FILES.items():
        inside = name.startswith("surgery.structures.") and name.count(".") > 2
        source = file.read_text(encoding="utf-8") if package_of(name) in above and not inside else ""
        if quoted.search(source):
            assert not asked_for(ast.parse(source)) & names, file


@pytest.mark.parametrize("folder", ["surgery_vllm", "surgery/engines"])
def test_the_plugin_and_engines_read_entries_without_a_model(folder):
    for file in sorted((ROOT / folder).rglob("*.py")):
        models = {name for name in imported(file) if package_of(name) == "model"}
        # The plugin quantizes, and reads rows on a CPU, by the code that the model class does.
        others = {"surgery.model.parts", "surgery.model.token_format"} | (
            {f"surgery.model.{name}" for name in ("token_quantizer", "head_pairs", "blockwise_rows")}
            if folder == "surgery_vllm"
            else set()
        )
        assert all(name.endswith("_entry") or name in others for name in models), file
        others = {name for name in imported(file) - models if package_of(name) != "kernels"}
        assert folder != "surgery_vllm" or not others, file


def test_the_plugin_imports_no_triton():
    """CPU machines have none: kernels are imported when the first of them runs."""
    modules = {name for file in (ROOT / "surgery_vllm").glob("*.py") for name in imported(file)}
    modules = {name for name in modules if package_of(name) == "kernels"}
    program = "import importlib, sys; sys.modules['triton'] = None; [*map(importlib.import_module, sys.argv[1:])]"
    assert modules
    subprocess.run([sys.executable, "-c", program, *modules], check=True, cwd=ROOT)


def test_entries_are_read_without_torch():
    entries = [file for name, file in FILES.items() if name.startswith("surgery.model.") and name.endswith("_entry")]
    assert len(entries) > 5
    for file in (*entries, FILES["surgery.model.parts"]):
        assert not {"torch", "transformers"} & set(
            re.findall(r"^(?:import|from) (\w+)", file.read_text(), re.MULTILINE)
        )


@pytest.mark.parametrize(
    "structure", sorted(path.parent.name for path in ROOT.glob("surgery/structures/*/__init__.py"))
)
def test_structures_do_not_know_each_other(structure):
    reference = {
        other.split(".")[2]
        for name, file in FILES.items()
        if name.startswith(f"surgery.structures.{structure}.")
        for other in imported(file)
        if other.startswith("surgery.structures.") and other.count(".") > 2
    }
    assert reference - {structure} <= BUILDS_ON.get(structure, set())


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_recipes_are_valid(path):
    recipe = Recipe.read(path)
    for step in recipe.steps:
        COMMANDS[step.command](step, step.name)
    check_names(path, recipe.steps)
