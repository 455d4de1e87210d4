"""Make a release: check that all files name one version, build sdist and wheel, and try the wheel elsewhere.

    python tools/release.py            # check, build into dist/, try; print the remaining manual steps
    python tools/release.py --check    # check only

The wheel is built from the unpacked sdist, so that both install the same files.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
TRIED = (["--help"], ["--version"], ["inspect", "builtin"], ["run"], ["config"])
ADDRESSES = {
    "pyproject.toml": r"^\[project\.urls\]$",
    "CITATION.cff": r"^repository-code: ",
    "mkdocs.yml": r"^repo_url: ",
    "SECURITY.md": r"https://|\S@\S",
}
"""Files that must name the repository's public address or a contact, and a pattern that finds it."""
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


class NotReady(Exception):
    """Error with the one-line reason why a release cannot be made."""


def check_versions(root: Path = ROOT) -> str:
    """Return the version of surgery/version.py, which CHANGELOG.md (with a date) and CITATION.cff must share.

    Raises NotReady: versions differ, or the date is missing.
    """
    version = _found(root / "surgery" / "version.py", r'__version__ = "([^"]+)"')
    newest = _found(root / "CHANGELOG.md", r"^## (.+)$")
    changelog_version, _, dated = newest.partition(" ")
    if changelog_version != version:
        raise NotReady(f"CHANGELOG.md has version {changelog_version}, surgery/version.py {version}; make them equal")
    if not re.fullmatch(r"\(\d{4}-\d{2}-\d{2}\)", dated):
        raise NotReady(f"CHANGELOG.md: write the date of {version}, as in `## {version} (2026-01-31)`, not {dated!r}")
    cited = _found(root / "CITATION.cff", r"^version: (.+)$")
    if cited != version:
        raise NotReady(f"CITATION.cff has version {cited}, surgery/version.py {version}; make them equal")
    return version


def check_address(root: Path = ROOT) -> None:
    """Check that all files of `ADDRESSES` name the public address or a contact.

    Raises NotReady: a file without an address.
    """
    silent = [name for name, pattern in ADDRESSES.items() if not re.search(pattern, _text(root / name), re.MULTILINE)]
    if silent:
        raise NotReady(f"{', '.join(silent)}: no public address (CONTRIBUTING.md, Make a release)")


def check_repository(version: str, root: Path = ROOT) -> None:
    """Check that the working tree is clean and that the version has no tag.

    Raises NotReady: uncommitted changes, or an existing tag.
    """
    if _git(root, "status", "--porcelain"):
        raise NotReady("the working tree has uncommitted changes; commit them")
    if _git(root, "tag", "--list", f"v{version}"):
        raise NotReady(f"v{version} is tagged already: raise surgery/version.py and add a heading to CHANGELOG.md")


def build(root: Path, out: Path) -> tuple[Path, Path]:
    """Build the sdist of a tree, and the wheel from the sdist.

    Returns:
        Paths of both files, in ``out``.
    """
    out.mkdir(parents=True, exist_ok=True)
    sdist = out / _built(root, "build_sdist", out)
    with TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            # Early patch releases of Python 3.10 and 3.11 have no filters.
            archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        (tree,) = Path(folder).iterdir()
        return sdist, out / _built(tree, "build_wheel", out)


def try_wheel(wheel: Path, folder: Path) -> dict[str, str]:
    """Install a wheel offline into a new environment that sees this one's packages, and run its commands.

    Args:
        folder: empty folder outside the repository.

    Returns:
        Output of each command of ``TRIED``.

    Raises:
        NotReady: a command failed, or ran other code than the wheel's.
    """
    venv.create(folder / "venv", with_pip=True)
    python, here = folder / "venv" / "bin" / "python", folder / "elsewhere"
    here.mkdir()
    # A .pth file rather than system_site_packages, which would not see the packages of an environment like this one.
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    paths = [path for path in sys.path if path.endswith("site-packages")]
    (site / "packages.pth").write_text("".join(f"{path}\n" for path in paths))
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", wheel]
    _run(install, here)
    module_path = Path(_run([python, "-c", "import surgery; print(surgery.__file__)"], here).strip())
    if site not in module_path.parents:
        raise NotReady(f"imported {module_path} instead of the wheel")
    surgery = folder / "venv" / "bin" / "surgery"
    return {" ".join(arguments): _run([surgery, *arguments], here) for arguments in TRIED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="check only")
    arguments = parser.parse_args()
    try:
        version = check_versions()
        check_address()
        check_repository(version)
        if arguments.check:
            print(f"{version} can be released")
            return
        built = build(ROOT, ROOT / "dist")
        with TemporaryDirectory() as folder:
            try_wheel(built[1], Path(folder))
    except NotReady as error:
        sys.exit(f"release: {error}")
    print(*built, sep="\n")
    print(f"Next: git tag v{version} && git push --tags && twine upload dist/*{version}*")


def _found(path: Path, pattern: str) -> str:
    match = re.search(pattern, _text(path), re.MULTILINE)
    if match is None:
        raise NotReady(f"{path.name}: no version found")
    return match[1].strip()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _built(tree: Path, hook: str, out: Path) -> str:
    """Run a hook of the build backend and return the name of the file that it wrote."""
    return _run([sys.executable, "-c", BUILD, hook, out.resolve()], tree).strip().splitlines()[-1]


def _git(root: Path, *arguments: str) -> str:
    return _run(["git", *arguments], root).strip()


def _run(command: list, folder: Path) -> str:
    process = subprocess.run(
        [str(each) for each in command], cwd=folder, capture_output=True, text=True, env=environment()
    )
    if process.returncode:
        raise NotReady(f"{' '.join(map(str, command[:4]))} failed: {process.stderr.strip()[-500:]}")
    return process.stdout


def environment() -> dict[str, str]:
    """Return the environment without PYTHONPATH, so that the installed package is imported."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


if __name__ == "__main__":
    main()
