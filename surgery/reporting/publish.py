"""Upload of a converted checkpoint with its model card to the Hugging Face hub, in a single commit."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.checkpoint.hub import is_hub_id, reason
from surgery.common.errors import SurgeryError
from surgery.reporting.upload import Upload, prepare_upload

OF_THE_HUB = ".gitattributes"


@dataclass(frozen=True)
class Publication:
    """Request to publish a checkpoint to org/name; ``public``: whether a new repository is.

    ``base_model`` is the hub id of the source, for the card, by default the report's; ``overwrite`` replaces files.
    """

    repo: str
    public: bool = False
    base_model: str | None = None
    overwrite: bool = False

    def check_names(self) -> None:
        """Check the names without network access. Raises SurgeryError: a name is not a valid hub id."""
        for flag, name in (("surgery push", self.repo), ("--base-model", self.base_model)):
            if name is not None and not is_hub_id(name):
                raise SurgeryError(f"{flag} {name}: not a hub repository name; use org/name")

    def check(self) -> None:
        """Check names, login and repository on the hub, without changing anything.

        Raises SurgeryError: a name is invalid, the user is not logged in or may not write to the namespace, or the
        repository has files and `overwrite` is false.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError

        self.check_names()
        api = HfApi()
        try:
            user = api.whoami()
        except Exception as error:  # errors of the hub and of its HTTP library
            why = f"not logged in to the hub, run `hf auth login`: {reason(error)}"
            raise SurgeryError(f"{self.repo}: {why}") from error
        namespaces = [user["name"], *(org["name"] for org in user.get("orgs", []))]
        if self.repo.partition("/")[0] not in namespaces:
            raise SurgeryError(f"{self.repo}: no write access; choose a name in {', '.join(namespaces)}")
        try:
            files = [name for name in api.list_repo_files(self.repo) if name != OF_THE_HUB]
        except RepositoryNotFoundError:
            return
        except Exception as error:
            raise SurgeryError(f"{self.repo}: {reason(error)}") from error
        if files and not self.overwrite:
            raise SurgeryError(f"{self.repo}: holds {len(files)} files; choose another name or pass --overwrite")

    def push(self, folder: Path, show: Callable[[Upload], None] | None = None) -> str:
        """Upload a checkpoint in one commit, to a new repository if missing; return its URL.

        ``show`` is called with the upload before it starts. Raises SurgeryError: the folder is not an unmodified
        checkpoint of this package, or the upload fails. The folder is not changed.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        upload = prepare_upload(folder, self.repo, self.base_model)
        if show is not None:
            show(upload)
        api = HfApi()
        try:
            address = api.create_repo(self.repo, private=not self.public, exist_ok=True)
            obsolete = [name for name in api.list_repo_files(self.repo) if name not in (*upload.files, OF_THE_HUB)]
            added = [CommitOperationAdd(name, content) for name, content in upload.files.items()]
            for each in added:
                if upload.hashes.get(each.path_in_repo) not in (None, each.upload_info.sha256.hex()):
                    raise SurgeryError(f"{folder / each.path_in_repo}: was changed while it was read; start again")
            operations: list[Any] = [*added, *(CommitOperationDelete(name) for name in obsolete)]
            api.create_commit(self.repo, operations, commit_message="Converted by model-surgery")
        except SurgeryError:
            raise
        except Exception as error:  # errors of the hub, of its HTTP library and of the disk
            again = shlex.join(["surgery", "push", str(folder), self.repo])
            where = f"the checkpoint is in {folder}, `{again}` repeats the upload"
            raise SurgeryError(f"{self.repo}: {reason(error)}; {where}") from error
        return str(address)
