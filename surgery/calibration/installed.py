"""Text of the running environment: what its packages say of themselves, their source, and their docstrings.

The first two are held out, no calibration holds them. Prose is the long descriptions of installed distributions, those
first that were built or written in 2025 and later, which models of before cannot have read. Code is the source of torch
and transformers. All depends on what is installed: results compare where the hashes of their windows, which every
report states, are equal. A file of one's own does not depend on anything.
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
"""Metadata version that tools write since the end of 2024."""
RECENT_YEAR = re.compile(r"\b20(2[5-9]|[3-9]\d)\b")
MOST_OF_ONE = 8_192
"""Characters of one distribution, so that no long list of changes is most of the text."""
OWN = "model-surgery"
OWN_MODULE = "surgery"
CODE_PACKAGES = ("torch", "transformers")
"""Packages whose source is held-out code: everyone who runs this has them."""
SKIPPED_CODE = re.compile(r"(^|/)(tests?|testing|_vendor|include)(/|_)|_pb2\.py$")


def installed_prose(seed: int) -> Iterator[tuple[str, str]]:
    """Long descriptions of the installed distributions as running text: (name and version, document).

    Recent distributions come first, otherwise the order is the seed's. A paragraph comes once, however many
    distributions have it.
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
    """Modules of torch and transformers, in the seed's order: (name and version, source)."""
    modules = [module for package in CODE_PACKAGES for module in _modules(package)]
    random.Random(seed).shuffle(modules)
    for name, path in modules:
        yield name, path.read_text(encoding="utf-8", errors="replace")


def installed_docstrings(seed: int) -> Iterator[str]:
    """Documents of the docstrings of a module, in the seed's order, of all packages but those whose source is held out.

    To train and to calibrate on: as running text they are a few million tokens of technical prose where the standard
    library has a third of one. A paragraph comes once, and none that a distribution's description has.
    """
    left_out = {*CODE_PACKAGES, OWN_MODULE}
    packages = sorted({name for name in metadata.packages_distributions() if name.isidentifier()} - left_out)
    modules = [path for package in packages for path in _sources(package)]
    random.Random(seed).shuffle(modules)
    texts = {
        paragraph for distribution in metadata.distributions() for paragraph in paragraphs(_description(distribution))
    }  # what is held out as prose
    for path in modules:
        fresh = [text for text in dict.fromkeys(paragraphs(docstrings(path.read_bytes()))) if text not in texts]
        texts.update(fresh)
        document = "\n\n".join(fresh)[:MOST_OF_ONE]
        if len(document) >= LEAST_DOCUMENT:
            yield document


def _modules(package: str) -> list[tuple[str, Path]]:
    """A package's modules in the order of their names, each with the name and version of the distribution."""
    name = _name(metadata.distribution(package))
    return [(name, path) for path in _sources(package)]


def _sources(package: str) -> list[Path]:
    """Files of a package in the order of their names, without tests; none of one that has no folder."""
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
