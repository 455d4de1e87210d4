"""Healing of a converted model: `accelerate launch -m surgery.training.heal --config FILE`, or `python -m` alone.

The file holds `HealSettings`. The healed checkpoint is moved to `out` when it is complete, in the student's class and
dtypes, with `heal.json` and the log `heal.jsonl`. `<out>.run` holds the training checkpoints: the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from transformers import PreTrainedModel

from surgery.checkpoint import CheckpointReader, check_output
from surgery.checkpoint.carried_files import CarriedFiles
from surgery.checkpoint.disk import as_json, disk_errors, read_json
from surgery.checkpoint.file_hashes import hash_files
from surgery.checkpoint.file_kinds import REPORT as CONVERSION
from surgery.checkpoint.file_kinds import list_files
from surgery.checkpoint.named_models import model_named
from surgery.checkpoint.output_path import output_lock
from surgery.checkpoint.staging import Staging
from surgery.checkpoint.work_folder import WorkFolder
from surgery.common.errors import SurgeryError
from surgery.common.machine_faults import fault_message
from surgery.common.ownership import inventory
from surgery.common.progress import Progress
from surgery.common.wandb_service import check_wandb
from surgery.model import register
from surgery.model.parts import entries_of
from surgery.running.models import causal_model, tokenizer_of
from surgery.running.processes import Processes, world_size
from surgery.running.source_check import open_source
from surgery.running.unfused import language_model
from surgery.training.balanced import balance_latents
from surgery.training.checkpoints import Checkpoints, latest
from surgery.training.distillation import Distillation, vocabulary_of
from surgery.training.document_masks import honours_document_masks
from surgery.training.guards import Interrupted
from surgery.training.loop import Loop, Training
from surgery.training.lr_multipliers import Factors, LRMultipliers, adapter_factors, factors_of
from surgery.training.measure import peak_memory
from surgery.training.models import check_writable, set_dtypes, trained_tensors, use_attention, write_healed
from surgery.training.nested import nested_attentions
from surgery.training.open_data import HealingData, open_data
from surgery.training.preparation import COMPUTED, open_accelerator, prepare
from surgery.training.run_log import LOG, RunLog, drop_later_lines
from surgery.training.settings import HealSettings
from surgery.training.teacher_logits import open_logits
from surgery.training.trackers import start_tracker, tracker_folder
from surgery.training.trainable import choose_parameters
from surgery.version import __version__

register()

REPORT = "heal.json"
DECIDING = ("length", "train", "lora_rank", "lora_alpha", "learning_rate", "schedule", "warmup", "betas", "clip")
DECIDING += ("dtype", "seed", "entry_factors")
"""Settings that must not change when a run resumes. Logging and saving may, and limits with a note."""


def heal(settings: HealSettings, progress: Progress | None = None) -> dict[str, Any]:
    """Train a student and write its checkpoint; every process must call it.

    Returns:
        The content of heal.json.

    Raises:
        Interrupted: SIGTERM or SIGINT arrived; the state was saved.
        SurgeryError: invalid settings, models or data, or a failure that the user can fix.
    """
    settings.check_complete()
    student, teacher = model_named(settings.student), settings.teacher and model_named(settings.teacher)
    settings = replace(settings, student=student, teacher=teacher)
    if settings.wandb is not None:
        check_wandb(settings.wandb_mode)
    settings = settings.with_batches(world_size())
    accelerator = open_accelerator(settings)
    processes = Processes(cpu=settings.device == "cpu")
    progress = (progress or Progress()) if processes.is_main else Progress(silent=True)
    student_reader, teacher_reader = (
        None if path is None else language_model(open_source(path, trust_remote_code=settings.trust_remote_code))
        for path in (settings.student, settings.teacher or None)
    )
    check_writable(student_reader)
    processes.from_main(lambda: _staging(settings, student_reader, teacher_reader) and None)
    run = Path(settings.out).expanduser().resolve()
    run = run.with_name(f"{run.name}.run")
    with ExitStack() as alone:
        processes.from_main(lambda: _create_run_folder(run, alone))
        # The tracker starts before the models load, so that it fails early.
        log = _open_log(settings, accelerator, run, processes, progress)
        alone.callback(log.close)
        return _Run(settings, accelerator, run, log, processes, progress).train(student_reader, teacher_reader)


@dataclass
class _Run:
    """Running healing: settings, accelerator, run folder, log and progress."""

    settings: HealSettings
    accelerator: Accelerator
    folder: Path
    log: RunLog
    processes: Processes
    progress: Progress

    @property
    def sharded(self) -> bool:
        """Return whether accelerate shards the student."""
        return self.accelerator.distributed_type == DistributedType.FSDP

    def train(self, student_reader: CheckpointReader, teacher_reader: CheckpointReader | None) -> dict[str, Any]:
        """Train the student, write it, and return the content of heal.json."""
        settings, processes, progress = self.settings, self.processes, self.progress
        with progress.phase("hashing the models", None, "B") as advance:
            shas = processes.from_main(
                lambda: [reader and reader.fingerprint(advance) for reader in (student_reader, teacher_reader)]
            )
        # Trusted remote code is copied to the result, which does not load without it.
        carried: list[CarriedFiles] = []  # empty except on the main process, which writes
        keep_code = settings.trust_remote_code
        processes.from_main(lambda: carried.append(CarriedFiles.of(student_reader, keep_code=keep_code)))
        set_seed(settings.seed)
        student, teacher = self._models(student_reader, teacher_reader)
        rules: dict[str, Factors] = {}
        if settings.entry_factors:
            rules = factors_of(read_json(Path(settings.entry_factors)), student, settings.entry_factors)
        masks = all(honours_document_masks(each, settings.length) for each in (student, teacher) if each is not None)
        if not masks:
            progress.note("attention crosses documents in packed rows: the models do not support document masks")
        tokenizer = tokenizer_of(student_reader, trust_remote_code=settings.trust_remote_code)
        data = open_data(settings, tokenizer, self.folder / "data", processes=processes, progress=progress)
        logits = None
        if settings.teacher_logits:
            logits = open_logits(
                settings,
                data.sequences,
                vocabulary_of(student),
                document_masks=masks,
                teacher=teacher,
                teacher_sha256=shas[1],
                processes=processes,
                progress=progress,
            )
        factors = self._set_trainable(student, rules)
        counts = {
            "trained": sum(each.numel() for each in student.parameters() if each.requires_grad),
            "all": sum(each.numel() for each in student.parameters()),
            "with_factors": len(factors),
        }
        module, optimizer = prepare(settings, self.accelerator, student, None if logits else teacher, masks)
        distillation: Distillation = self.accelerator.unwrap_model(module)
        loop = Loop(
            Training(
                accelerator=self.accelerator,
                settings=settings,
                module=module,
                names=distillation.measured(),
                optimizer=optimizer,
                factors=LRMultipliers(distillation.student.named_parameters(), factors),
                sequences=data.sequences,
                held_out=data.held_out,
                checkpoints=Checkpoints(
                    self.folder / "checkpoints", self.accelerator, processes=processes, keep_last=settings.keep_last
                ),
                log=self.log,
                progress=progress,
                identity=_identity(settings, shas, data, processes.count) | {"document_masks": masks},
                cached=logits.batch if logits and distillation.needs_logits else None,
                keeps_best=any(entry.quantizes for entry in entries_of(student.config.get_text_config())),
            )
        )
        self._run_loop(loop, counts)
        facts = {
            **_versions(),
            "settings": settings.to_dict(),
            "student_sha256": shas[0],
            "teacher_sha256": shas[1],
            "data": data.describe(),
            "document_masks": masks,
            **self._facts(),
            "parameters": counts,
            **_summary(loop, settings, processes.count),
        }
        trained = trained_tensors(distillation.student)
        processes.from_main(lambda: _write(settings, student_reader, carried[0], trained, facts, self.folder / LOG))
        return facts

    def _models(
        self, student_reader: CheckpointReader, teacher_reader: CheckpointReader | None
    ) -> tuple[PreTrainedModel, PreTrainedModel | None]:
        """Load student and teacher to the device and set their attention functions."""
        settings, accelerator = self.settings, self.accelerator
        student = causal_model(student_reader, trust_remote_code=settings.trust_remote_code)
        if settings.nested_ranks:
            nested_attentions(student)  # fails early if a layer has no latents
        if not self.sharded:
            student.to(accelerator.device)
        use_attention(student, accelerator.device)
        if teacher_reader is None:
            return student, None
        teacher = causal_model(teacher_reader, trust_remote_code=settings.trust_remote_code)
        set_dtypes(teacher.requires_grad_(False), COMPUTED[accelerator.mixed_precision])
        teacher.to(accelerator.device)
        use_attention(teacher, accelerator.device)
        return student, teacher

    def _set_trainable(self, student: PreTrainedModel, rules: dict[str, Factors]) -> dict[str, torch.Tensor]:
        """Set the trainable parameters; return the learning-rate multipliers by the names of trainable parameters."""
        factors = {name: rules[name].dense(each) for name, each in student.named_parameters() if name in rules}
        choose_parameters(student, self.settings)
        for name, parameter in student.named_parameters():
            if name in factors and not factors[name].any():
                parameter.requires_grad_(False)
        if self.settings.train == "lora":
            return adapter_factors(rules, student)
        if balanced := balance_latents(student, factors):
            self.progress.note(
                f"{balanced:,} latents rescaled, so that the weights before and after them have equal scale"
            )
        return factors

    def _run_loop(self, loop: Loop, counts: dict[str, int]) -> None:
        settings, processes, trained, total = self.settings, self.processes, counts["trained"], counts["all"]
        self.log.write(
            "start", settings=settings.to_dict(), trains=trained, parameters=total, processes=processes.count
        )
        self.progress.note(f"{trained:,} of {total:,} parameters are trained; processes: {processes.count}")
        loop.resume()
        loop.run()

    def _facts(self) -> dict[str, Any]:
        """Return the entries of heal.json about this machine and the tracker."""
        return {
            "precision": self.accelerator.mixed_precision,
            "device": self.accelerator.device.type,
            "processes": self.processes.count,
            "peak_memory_bytes": peak_memory(self.accelerator.device),
            "wandb": self.log.wandb_run(),
            "tracker_failed": self.log.failed,
        }


def _versions() -> dict[str, Any]:
    versions = {"torch": torch, "transformers": transformers, "accelerate": accelerate}
    versions = {name: module.__version__ for name, module in versions.items()}
    return {"version": __version__, "versions": {**versions, "python": platform.python_version()}}


def _identity(settings: HealSettings, shas: list[str | None], data: HealingData, processes: int) -> dict[str, Any]:
    """Return the values that must not change when the run resumes, as plain JSON values."""
    deciding = {name: as_json(getattr(settings, name)) for name in DECIDING}
    models = {"student": shas[0], "teacher": shas[1], "data": data.data_sha256}
    return {
        **deciding,
        **models,
        "objective": asdict(settings.weights()),
        "global_batch": settings.global_batch(processes),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m surgery.training.heal", description=heal.__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="YAML file of settings; configs/heal.yaml has all of them")
    options = parser.parse_args(arguments)
    code = 0
    try:
        heal(HealSettings.from_file(options.config))
    except SurgeryError as error:
        print(f"surgery: {error}", file=sys.stderr)
        code = error.code if isinstance(error, Interrupted) else 1
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of tokenizers does not derive from Exception
        if (line := fault_message(error)) is None:
            raise
        print(f"surgery: {line}", file=sys.stderr)
        code = 1
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return code


def _staging(settings: HealSettings, *readers: CheckpointReader | None) -> Staging:
    """Check that the output folder can be written at the end, and return its staging folder."""
    for reader in readers:
        if reader is not None:
            check_output(reader.source, Path(settings.out).expanduser())
    return Staging(Path(settings.out), overwrite=settings.overwrite)


def _open_log(
    settings: HealSettings, accelerator: Accelerator, run: Path, processes: Processes, progress: Progress
) -> RunLog:
    """Open the log, without lines of steps that run again, and start the tracker on the main process."""

    def start() -> None:
        path = latest(run / "checkpoints")
        drop_later_lines(run / LOG, int(path.name.split("-")[-1]) if path else -1)
        folder = tracker_folder(settings)
        if settings.wandb is not None:
            with disk_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
            start_tracker(accelerator, settings, folder)

    processes.from_main(start)
    tracked = accelerator if settings.wandb is not None and processes.is_main else None
    return RunLog(run / LOG, writes=processes.is_main, tracked=tracked, note=progress.note)


def _create_run_folder(run: Path, alone: ExitStack) -> None:
    WorkFolder(run, ("checkpoints",)).open()
    with disk_errors(run):
        # The lock also guards against a training that outlives its killed `surgery heal` and still saves its state.
        alone.enter_context(output_lock(run))
        (run / "data").mkdir(exist_ok=True)


def _summary(loop: Loop, settings: HealSettings, processes: int) -> dict[str, Any]:
    at = loop.at
    return {
        "ended": loop.ended,
        "steps": at.step,
        "sequences_per_step": settings.global_batch(processes),
        "tokens": at.tokens,
        "seconds": at.seconds,
        "measuring_seconds": at.measuring_seconds,
        "tokens_per_second": at.tokens / at.step_seconds if at.step_seconds else None,
        "loss": {"first": at.first_loss, "last": at.last_loss},
        "held_out": {
            "first": at.first_held_out,
            "last": at.last_held_out,
            f"best_{loop.judge}": at.best_held_out,
            "best_step": at.best_step,
            "written": "best" if loop.takes_best else "last",
        },
    }


def _write(
    settings: HealSettings,
    reader: CheckpointReader,
    carried: CarriedFiles,
    trained: dict[str, torch.Tensor],
    facts: dict[str, Any],
    log: Path,
) -> None:
    staging = _staging(settings, reader)
    staging.create()
    try:
        write_healed(reader, settings, trained, staging.partial, carried)
        with disk_errors(staging.partial):
            facts["left_out"] = carried.record(list_files(staging.partial))["left_out"]
            shutil.copyfile(log, staging.partial / LOG)
            _update_report(staging.partial)
            facts = {**facts, "files": inventory(staging.partial, [REPORT])}
            (staging.partial / REPORT).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        staging.commit()
    except BaseException:
        staging.discard()
        raise


def _update_report(folder: Path) -> None:
    """Replace the hashes in the student's report and remove its logits; `surgery heal` adds the rest."""
    path = folder / CONVERSION
    with suppress(FileNotFoundError, ValueError, TypeError):  # a damaged report stays as it is
        report = {**json.loads(path.read_bytes()), "files": hash_files(folder), "probe": None}
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
