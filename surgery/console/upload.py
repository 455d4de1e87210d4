"""Preview of what ``surgery push`` uploads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surgery.common.human import size
from surgery.console.page import make_table, new_page, plain, print_json

if TYPE_CHECKING:
    from surgery.reporting.publish import Publication
    from surgery.reporting.upload import Upload


def show_upload(upload: Upload, publication: Publication, *, as_json: bool = False) -> None:
    """Print the files with sizes, and those that are not uploaded."""
    if as_json:
        files = {"files": upload.sizes, "not_uploaded": upload.strays}
        print_json({"repo": publication.repo, "public": publication.public, **files})
        return
    page, seen_by = new_page(), "everybody (public)" if publication.public else "you and those with access (private)"
    page.print(f"\n[bold]{plain(publication.repo)}[/bold], visible to {seen_by}:")
    page.print(make_table(["file", "size"], [(name, size(count)) for name, count in upload.sizes.items()]))
    if upload.strays:
        page.print(f"not uploaded: {plain(', '.join(upload.strays))}", soft_wrap=True)
