"""Distributions: sdist and wheel, built as a release builds them and tried away from the repository."""

import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from project_tools import tool

from surgery.eval.report.document import read_report
from surgery.version import __version__

ROOT = Path(__file__).resolve().parent.parent


release, versions = tool("release"), tool("versions")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The files of a commit of everything that is here: sdist and wheel."""
    tree = tmp_path_factory.mktemp("package") / "tree"
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
    return release.build(tree, tree.parent / "dist")


def test_the_wheel_holds_two_packages_and_their_data(built):
    values = set(zipfile.ZipFile(built[1]).namelist())
    assert {name.split("/")[0] for name in values if ".dist-info/" not in name} == {"surgery", "surgery_vllm"}
    (entry_points,) = (name for name in values if name.endswith(".dist-info/entry_points.txt"))
    assert "[vllm.general_plugins]" in zipfile.ZipFile(built[1]).read(entry_points).decode()
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
        "surgery/model/modeling_surgery.py",
        "surgery_vllm/model.py",
        "surgery/assets/demo-model/model.safetensors",
        "surgery/assets/heldout-stdlib.txt",
    ):
        assert name in values, name


def test_the_sdist_has_what_the_wheel_has(built):
    """The wheel was built from it; a wheel of the repository itself holds the same."""
    with tarfile.open(built[0]) as archive:
        values = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "surgery/configs/eval.yaml"} <= values


@pytest.mark.slow
def test_the_wheel_runs_away_from_the_repository(built, tmp_path):
    message = release.try_wheel(built[1], tmp_path)
    assert message["--version"].strip() == __version__
    assert "Usage: surgery" in message["--help"]
    assert "possible conversions" in message["inspect builtin"] and "best quality" in message["inspect builtin"]
    assert "testbed-mla" in message["run"] and "mla-everywhere" in message["config"]


@pytest.fixture
def tree(tmp_path):
    """A repository that could be released, as far as versions say."""
    (tmp_path / "surgery").mkdir()
    (tmp_path / "surgery" / "version.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0 (2030-01-31)\n\n- New.\n\n## 1.1.0 (2029-01-31)\n")
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.2.0\n")
    return tmp_path


def test_versions_must_agree(tree):
    assert release.check_versions(tree) == "1.2.0"
    for name, old, new, message in (
        ("CHANGELOG.md", "1.2.0 (2030-01-31)", "1.2.0 (unreleased)", "write the date"),
        ("CHANGELOG.md", "## 1.2.0", "## 1.3.0", "CHANGELOG.md has version 1.3.0"),
        ("CITATION.cff", "version: 1.2.0\n", "version: 1.1.0\n", "CITATION.cff has version 1.1.0"),
    ):
        whole = (tree / name).read_text()
        (tree / name).write_text(whole[::-1].replace(old[::-1], new[::-1], 1)[::-1])
        with pytest.raises(release.NotReady, match=message):
            release.check_versions(tree)
        (tree / name).write_text(whole)


def test_the_tree_must_be_committed_and_not_tagged(tree):
    def git(*arguments):
        person = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *person, *arguments], cwd=tree, check=True, capture_output=True)

    git("init")
    with pytest.raises(release.NotReady, match="uncommitted changes"):
        release.check_repository("1.2.0", tree)
    git("add", "-A")
    git("commit", "-m", "a")
    release.check_repository("1.2.0", tree)
    git("tag", "v1.2.0")
    with pytest.raises(release.NotReady, match="tagged already"):
        release.check_repository("1.2.0", tree)


def test_a_release_names_the_address_of_the_project(tmp_path):
    settings = {
        "pyproject.toml": "[project]\n[project.urls]\n",
        "CITATION.cff": "repository-code: https://example.org\n",
        "mkdocs.yml": "repo_url: https://example.org\n",
        "SECURITY.md": "Write to security@example.org.\n",
    }
    for name, text in settings.items():
        (tmp_path / name).write_text(text)
    release.check_address(tmp_path)
    for name, text in settings.items():
        (tmp_path / name).write_text("# none yet\n")
        with pytest.raises(release.NotReady, match=f"{name}: no public address"):
            release.check_address(tmp_path)
        (tmp_path / name).write_text(text)


def test_this_version_stands_on_top_of_the_changelog():
    newest = release._found(ROOT / "CHANGELOG.md", r"^## (.+)$")
    assert newest.split()[0] == __version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__


def test_the_size_that_is_claimed_is_one_of_reports():
    ratios = [
        row["kv"]["ratio"]
        for path in (ROOT / "docs").glob("**/report.json")
        for row in read_report(path.parent)["rows"]
        if row["role"] == "checkpoint"
    ]
    claimed = release._found(ROOT / "pyproject.toml", r"becomes 2-(\d+)x smaller")
    assert int(claimed) <= 1 / min(ratios) < int(claimed) + 1


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_issue_templates_are_forms(path):
    form = yaml.safe_load(path.read_text())
    if path.stem != "config":
        assert form["name"] and form["description"] and all(each["attributes"]["label"] for each in form["body"])


def test_what_runs_on_every_push_is_what_people_are_told():
    """Installing and testing in the words of README and CONTRIBUTING.md, as `.ci/run` does."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    here, site = ([step["run"] for step in job["steps"] if "run" in step] for job in jobs.values())
    message = "".join((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
    install, check, tests = here
    assert install in message and check in message and f"\n{tests} " in message
    assert site[0].replace("dev,docs", "dev") == install and "tests/test_docs.py" in site[1]
    script = (ROOT / ".ci" / "run").read_text().replace("--quiet ", "")
    for part in (*install.split(" && "), *check.split(" && "), tests):
        assert f"\n{part}" in script, part
    oldest = min(jobs["tests"]["strategy"]["matrix"]["python"], key=lambda version: tuple(map(int, version.split("."))))
    assert f'requires-python = ">={oldest}"' in (ROOT / "pyproject.toml").read_text()


def test_both_ends_of_what_is_declared_were_tried(built):
    """docs/versions.md has a row of every pair; tools/versions.py takes every bound of the wheel for the floor."""
    values = zipfile.ZipFile(built[1])
    (name,) = (each for each in values.namelist() if each.endswith(".dist-info/METADATA"))
    message = values.read(name).decode()
    minors = re.findall(r"^Classifier: .* Python :: (3\.\d+)$", message, re.MULTILINE)
    assert {pair.partition(":")[0] for pair in versions.PAIRS} == set(minors)
    assert f"\nRequires-Python: >={minors[0]}\n" in message
    bounds = versions.floors(built[1])
    assert all(f"Requires-Dist: {each.replace('==', '>=')}" in message.replace("[hf]", "") for each in bounds)
    assert {"torch", "transformers", "pytest"} < {each.partition("==")[0] for each in bounds}
    assert not [each for each in bounds if "triton" in each]
    page = versions.PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (3\.\d+)\.\d+ \| (\w+) \|.* (\d+) \| (\d+) \| \d+ \| [\d-]+ \|$", page, re.MULTILINE)
    assert [f"{minor}:{end}" for minor, end, *_ in rows] == list(versions.PAIRS)
    assert all(int(passed) > 100 and failed == "0" for *_, passed, failed in rows)
