"""``surgery push``: upload of a converted checkpoint to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.options import JsonOption, flag, option

HUB = "Hub"


def push(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CKPT", help="Folder of a converted, sliced or healed checkpoint.")
    ],
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Repository on the hub; created if missing.")],
    public: Annotated[bool, flag("--public", "Create a public repository; the default is private.", HUB)] = False,
    base_model: Annotated[
        str | None, option("--base-model", "ORG/NAME", "Hub id of the source, if it was a local folder.", HUB)
    ] = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace the files in the repository.", HUB)] = False,
    dry_run: Annotated[bool, flag("--dry-run", "Only show what would be uploaded.", HUB)] = False,
    as_json: JsonOption = False,
) -> None:
    """Upload a converted checkpoint with its card: source, tags, measurements. Private unless --public.

    Only files that its report lists are uploaded. Absolute paths in its records are reduced to file names.

    Examples:

        surgery push ckpt-mla/ me/ckpt-mla

        surgery push ckpt-mla-healed/ me/ckpt-mla --public --base-model org/ckpt
    """
    from surgery.checkpoint.location import find_local
    from surgery.common.errors import SurgeryError

    if find_local(str(checkpoint)) is None:
        raise SurgeryError(f"{checkpoint}: no such folder")

    from surgery.console.page import new_page, plain, print_json
    from surgery.console.upload import show_upload
    from surgery.reporting.publish import Publication
    from surgery.reporting.upload import prepare_upload

    publication = Publication(repo, public=public, base_model=base_model, overwrite=overwrite)
    if dry_run:
        publication.check_names()
        show_upload(prepare_upload(checkpoint.expanduser(), repo, base_model), publication, as_json=as_json)
        return
    publication.check()
    address = publication.push(
        checkpoint.expanduser(), None if as_json else lambda each: show_upload(each, publication)
    )
    print_json({"repo": repo, "url": address}) if as_json else new_page().print(plain(address), soft_wrap=True)
