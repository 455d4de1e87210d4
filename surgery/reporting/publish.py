"""A converted checkpoint on the Hugging Face hub, with a card that names it there; in one commit, or none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.checkpoint.carry_over import CARD
from surgery.checkpoint.hub import is_hub_id, reason
from surgery.common.errors import SurgeryError
from surgery.reporting.front_matter import of_source
from surgery.reporting.report import Report, read_report

OF_THE_HUB = ".gitattributes"


@dataclass(frozen=True)
class Publication:
    """What was asked for.

    Attributes:
        repo: org/name.
        public: whether everybody may see a repository that has to be made.
        base_model: hub id of the source, for the card; None: as the report knows it.
        overwrite: replace what the repository holds.
    """

    repo: str
    public: bool = False
    base_model: str | None = None
    overwrite: bool = False

    def check_names(self) -> None:
        """What can be refused without a network.

        Raises:
            SurgeryError: a name is none of the hub's.
        """
        for flag, name in (("--push-to-hub", self.repo), ("--base-model", self.base_model)):
            if name is not None and not is_hub_id(name):
                raise SurgeryError(f"{flag} {name}: not a name on the hub; give org/name")

    def check(self) -> None:
        """What can be refused before the work: asks the hub, and changes nothing there.

        Raises:
            SurgeryError: a wrong name, nobody is logged in, the namespace is another's, or the repository holds files.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError

        self.check_names()
        api = HfApi()
        try:
            user = api.whoami()
        except Exception as error:  # the hub's own errors, those of its HTTP library
            why = f"the hub does not know you, run `hf auth login`: {reason(error)}"
            raise SurgeryError(f"{self.repo}: {why}") from error
        mine = [user["name"], *(org["name"] for org in user.get("orgs", []))]
        if self.repo.partition("/")[0] not in mine:
            raise SurgeryError(f"{self.repo}: you may write to {', '.join(mine)}")
        try:
            held = [name for name in api.list_repo_files(self.repo) if name != OF_THE_HUB]
        except RepositoryNotFoundError:
            return
        except Exception as error:
            raise SurgeryError(f"{self.repo}: {reason(error)}") from error
        if held and not self.overwrite:
            raise SurgeryError(f"{self.repo}: holds {len(held)} files; choose another name or pass --overwrite")

    def push(self, folder: Path) -> str:
        """Uploads a checkpoint in one commit, into a repository that is made if there is none.

        Returns:
            Its address.

        Raises:
            SurgeryError: the folder holds no checkpoint of ours, or the hub refuses it; what lies in the folder stays.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        card = self._card(folder)
        files = {
            path.relative_to(folder).as_posix(): path
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        }
        api = HfApi()
        try:
            address = api.create_repo(self.repo, private=not self.public, exist_ok=True)
            gone = [name for name in api.list_repo_files(self.repo) if name not in (*files, OF_THE_HUB)]
            operations: list[Any] = [
                CommitOperationAdd(name, card.encode() if name == CARD else path) for name, path in files.items()
            ]
            operations += [CommitOperationDelete(name) for name in gone]
            api.create_commit(self.repo, operations, commit_message="Converted by model-surgery")
        except Exception as error:  # the hub's own errors, those of its HTTP library, the disk's
            again = f"the checkpoint is in {folder}, `surgery push {folder} {self.repo}` tries again"
            raise SurgeryError(f"{self.repo}: {reason(error)}; {again}") from error
        return str(address)

    def _card(self, folder: Path) -> str:
        """The card under the name on the hub."""
        report = read_report(folder)
        if report is None:
            raise SurgeryError(f"{folder}: has no surgery_report.json; of other checkpoints use `hf upload`")
        return Report.of(report).card(self.repo, base_model=self.base_model, inherited=of_source(folder))
