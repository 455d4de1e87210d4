"""Text of the running environment, held out from calibration: descriptions of installed packages, and source.

Prose is the long descriptions of installed distributions, first those of 2025 and later, which older models cannot have
read. Code is the source of torch and transformers. Results are comparable if the hashes of their windows are equal.
"""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from surgery.calibration.prose import LEAST_DOCUMENT, docstrings, paragraphs
from surgery.calibration.text import MODULE_BYTES

RECENT_METADATA = (2, 4)
"""Metadata version that build tools have written since the end of 2024."""
RECENT_YEAR = re.compile(r"\b20(2[5-9]|[3-9]\d)\b")
MOST_OF_ONE = 8_192
"""Maximum characters per document, so that no long changelog dominates the text."""
OWN = "model-surgery"
OWN_MODULE = "surgery"
CODE_PACKAGES = ("torch", "transformers")
"""Packages whose source is held-out code; they are required dependencies."""
SKIPPED_CODE = re.compile(r"(^|/)(tests?|testing|_vendor|include)(/|_)|_pb2\.py$")


def installed_prose(seed: int) -> Iterator[tuple[str, str]]:
    """Yield the long descriptions of installed distributions as running text: (name and version, document).

    Recent distributions come first, each group shuffled by the seed. Repeated paragraphs are dropped.
    """
    distributions = {_name(distribution): distribution for distribution in metadata.distributions()}
    order = sorted(name for name in distributions if name.split()[0] != OWN)
    random.Random(seed).shuffle(order)
    described = {name: _description(distributions[name]) for name in order}
    texts: set[str] = set()
    for name in sorted(order, key=lambda name: not _is_recent(distributions[name], described[name])):
        fresh = [paragraph for paragraph in dict.fromkeys(paragraphs(described[name])) if paragraph not in texts]
        texts.update(fresh)
        document = "\n\n".join(fresh)[:MOST_OF_ONE]
        if len(document) >= LEAST_DOCUMENT:
            yield name, document


def installed_code(seed: int) -> Iterator[tuple[str, str]]:
    """Yield the modules of torch and transformers, shuffled by the seed: (name and version, source)."""
    modules = [module for package in CODE_PACKAGES for module in _modules(package)]
    random.Random(seed).shuffle(modules)
    for name, path in modules:
        yield name, path.read_text(encoding="utf-8", errors="replace")


def installed_docstrings(seed: int) -> Iterator[str]:
    """Yield a document of docstrings per module, shuffled by the seed, of all packages whose source is not held out.

    For training and calibration: a few million tokens of technical prose, where the standard library has a third of a
    million. Repeated paragraphs are dropped, and those of distributions' descriptions, which are held out.
    """
    left_out = {*CODE_PACKAGES, OWN_MODULE}
    packages = sorted({name for name in metadata.packages_distributions() if name.isidentifier()} - left_out)
    modules = [path for package in packages for path in _sources(package)]
    random.Random(seed).shuffle(modules)
    texts = {
        paragraph for distribution in metadata.distributions() for paragraph in paragraphs(_description(distribution))
    }  # held out as prose
    for path in modules:
        fresh = [text for text in dict.fromkeys(paragraphs(docstrings(path.read_bytes()))) if text not in texts]
        texts.update(fresh)
        document = "\n\n".join(fresh)[:MOST_OF_ONE]
        if len(document) >= LEAST_DOCUMENT:
            yield document


def _modules(package: str) -> list[tuple[str, Path]]:
    """List a package's modules by path, each with the name and version of its distribution."""
    name = _name(metadata.distribution(package))
    return [(name, path) for path in _sources(package)]


def _sources(package: str) -> list[Path]:
    """List a package's source files by path, without tests; empty for a package without a folder."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(next(iter(spec.submodule_search_locations)))
    paths = sorted(path for path in root.rglob("*.py") if not SKIPPED_CODE.search(str(path.relative_to(root))))
    return [path for path in paths if path.stat().st_size in MODULE_BYTES]


def _name(distribution: metadata.Distribution) -> str:
    return f"{(distribution.metadata['Name'] or 'unnamed').lower()} {distribution.version}"


def _description(distribution: metadata.Distribution) -> str:
    body = distribution.metadata.get_payload() or distribution.metadata["Description"] or ""
    return body if isinstance(body, str) else ""


def _is_recent(distribution: metadata.Distribution, description: str) -> bool:
    version = tuple(int(part) for part in re.findall(r"\d+", distribution.metadata["Metadata-Version"] or "1"))
    return version >= RECENT_METADATA or RECENT_YEAR.search(description) is not None
