"""The house: who may import whom, and what the wheel holds."""

import ast
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest

from surgery.evaluation.settings import EvalSettings
from surgery.heads.settings import HeadSettings
from surgery.recipe import VERBS, Recipe
from surgery.recipe_names import check_names
from surgery.settings import (
    ConvertSettings,
    CrossLayerSettings,
    HybridSettings,
    KVHeadsSettings,
    LowRankSettings,
    QuantizedSettings,
)
from surgery.training.settings import HealSettings

ROOT = Path(__file__).resolve().parent.parent

# What a room may import of the package beside itself; see CONTRIBUTING.md.
ROOMS = {
    "surgery/checkpoint": {"errors"},
    "surgery/model": set(),
    "eval": {"attention_tap", "errors", "human", "model"},
    "kernels": set(),
    "surgery/anatomy.py": set(),
    "surgery/rope.py": {"errors"},
    "surgery/attention.py": {"anatomy", "kernels", "rope"},
    "surgery/families": {"anatomy", "errors", "rope"},
    "surgery/attention_tap.py": {"errors"},
    "surgery/acceleration": {"kernels", "model"},
    "surgery/layer_stream.py": {"errors", "families"},
    "training": {
        "calibration",
        "checkpoint",
        "errors",
        "eval",
        "file_settings",
        "human",
        "kernels",
        "loading",
        "model",
        "progress",
        "version",
    },
    "surgery/calibration": {
        "anatomy",
        "attention",
        "checkpoint",
        "errors",
        "eval",
        "layer_files",
        "layer_stream",
        "rope",
        "version",
    },
    "surgery/heads": {"attention_tap", "checkpoint", "errors", "eval", "file_settings"},
    "surgery/engines": {"checkpoint", "errors"},
    "surgery_vllm": set(),
    "surgery/export": {"architectures", "checkpoint", "engines", "errors"},
    "surgery/transforms": {"anatomy", "attention", "calibration", "engines", "errors", "kernels", "rope", "settings"},
    "surgery/architectures": {"anatomy", "checkpoint", "errors", "families", "model", "rope", "transforms"},
}


def python_files(room: str) -> list[Path]:
    path = ROOT / room
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def module_name(file: Path) -> str:
    """What a file is imported as; the rooms at the top of the repository are linked into the package."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "surgery" else ("surgery", *parts)
    return ".".join(parts).removesuffix(".__init__")


FILES = {
    module_name(file): file
    for top in ("surgery", "eval", "kernels", "training")
    for file in sorted((ROOT / top).rglob("*.py"))
    if not any(part.is_symlink() for part in file.parents)
}


@cache
def imported(file: Path) -> frozenset[str]:
    """Modules of the package that a file imports, wherever in it, but for those that only its annotations name."""
    package = module_name(file) if file.name == "__init__.py" else module_name(file).rpartition(".")[0]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
                base = ".".join([*above, *([child.module] if child.module else [])])
                # A name is a module of its own, or something in one.
                found.update(
                    f"{base}.{alias.name}" if f"{base}.{alias.name}" in FILES else base for alias in child.names
                )
            visit(child)

    visit(ast.parse(file.read_text(encoding="utf-8")))
    return frozenset(name for name in found if name.startswith("surgery."))


def imported_rooms(file: Path) -> set[str]:
    """First names below ``surgery`` that a file imports."""
    return {name.split(".")[1] for name in imported(file)}


def circles() -> list[list[str]]:
    """Modules that import each other, directly or through others, inside functions too: one list a circle."""
    graph = {name: sorted(imported(file) & FILES.keys() - {name}) for name, file in FILES.items()}
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found = []

    def follow(name: str) -> None:  # Tarjan's strongly connected components
        order[name] = lowest[name] = len(order)
        path.append(name)
        for other in graph[name]:
            if other not in order:
                follow(other)
            if other in path:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == order[name]:
            circle = path[path.index(name) :]
            del path[path.index(name) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in graph:
        if name not in order:
            follow(name)
    return found


def test_no_module_imports_itself_through_others():
    assert circles() == []


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_one_way(room):
    allowed = ROOMS[room] | {Path(room).stem}
    for file in python_files(room):
        inner = next((r for r in sorted(ROOMS, key=len, reverse=True) if file.is_relative_to(ROOT / r)), room)
        if inner == room:
            assert imported_rooms(file) <= allowed, file


def test_the_wheel_holds_two_packages_and_their_data(tmp_path):
    tree = tmp_path / "tree"
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if names.returncode:
        pytest.skip("not a git checkout")
    for name in names.stdout.splitlines():
        source, copy = ROOT / name, tree / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            copy.symlink_to(source.readlink())
        elif source.exists():
            shutil.copy(source, copy)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=tree, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in held if ".dist-info/" not in name} == {"surgery", "surgery_vllm"}
    (entry_points,) = (name for name in held if name.endswith(".dist-info/entry_points.txt"))
    assert "[vllm.general_plugins]" in zipfile.ZipFile(wheel).read(entry_points).decode()
    for name in (
        "surgery/kernels/mla_decode/reference.py",
        "surgery/kernels/mla_decode/kernel.py",
        "surgery/eval/recall.py",
        "surgery/configs/mla.yaml",
        "surgery/configs/accelerate/fsdp2.yaml",
        "surgery/training/heal.py",
        "surgery/configs/mla-everywhere.yaml",
        "surgery/recipes/testbed-report.yaml",
        "surgery/configs/eval.yaml",
        "surgery/eval/report/page.css",
        "surgery/model/modeling_surgery.py",
        "surgery_vllm/model.py",
        "surgery/assets/demo-model/model.safetensors",
        "surgery/assets/heldout-stdlib.txt",
    ):
        assert name in held, name


def test_shipped_settings_are_the_defaults():
    assert ConvertSettings.from_file(ROOT / "configs" / "mla.yaml") == ConvertSettings()
    assert KVHeadsSettings.from_file(ROOT / "configs" / "gqa.yaml") == KVHeadsSettings()
    assert LowRankSettings.from_file(ROOT / "configs" / "lowrank.yaml") == LowRankSettings()
    assert CrossLayerSettings.from_file(ROOT / "configs" / "crosslayer.yaml") == CrossLayerSettings()
    assert QuantizedSettings.from_file(ROOT / "configs" / "quantized.yaml") == QuantizedSettings()
    assert HybridSettings.from_file(ROOT / "configs" / "hybrid.yaml") == HybridSettings()
    assert HealSettings.from_file(ROOT / "configs" / "heal.yaml") == HealSettings()
    assert HeadSettings.from_file(ROOT / "configs" / "heads.yaml") == HeadSettings()
    assert EvalSettings.from_file(ROOT / "configs" / "eval.yaml") == EvalSettings()
    ConvertSettings.from_file(ROOT / "configs" / "mla-everywhere.yaml")


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_recipes_are_valid(path):
    recipe = Recipe.read(path)
    for step in recipe.steps:
        VERBS[step.verb](step, step.name)
    check_names(path, recipe.steps)
