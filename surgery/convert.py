"""``surgery convert --to mla``: read, calibrate, transform, write, verify; one layer at a time.

The order of events: the source is opened and checked, statistics are taken (two sweeps over calibration text, or the
weights alone), candidate splits of the budget are tried on held-out text, then one pass converts every layer, carries
all stages of the conversion through it and writes its tensors. The written files are loaded again, run and compared
before they get their final name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from surgery import mla_split, mla_statistics
from surgery.anatomy import AttentionAnatomy
from surgery.architectures.choose import Carrier, choose_carrier
from surgery.architectures.spec import MLASpec
from surgery.calibration.library import StatisticsLibrary
from surgery.calibration.sweep import BoundaryStore
from surgery.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec, check_output, verify_files
from surgery.errors import SurgeryError
from surgery.families import Family, family_of
from surgery.held_out import HeldOut
from surgery.ladder import Ladder
from surgery.layer_stream import LayerStream
from surgery.mla_split import MLAPlan
from surgery.progress import Progress
from surgery.report import LayerReport, Report, build_report
from surgery.sequential_fit import SequentialFit
from surgery.settings import NO_CALIBRATION, ConvertSettings
from surgery.texts import Texts, load_texts
from surgery.transforms import mla
from surgery.transforms.budget import candidate_splits
from surgery.verification import Verification, load_config, verify_by_running

REPORT, CARD, SOURCE_CARD = "surgery_report.json", "README.md", "README.source.md"


@dataclass
class Source:
    """An opened source checkpoint with all that its family says about it."""

    reader: CheckpointReader
    family: Family
    config: object
    stream: LayerStream

    @classmethod
    def open(cls, source: str | Path, settings: ConvertSettings, *, allow_pickle: bool = False) -> Source:
        """Opens and checks a checkpoint.

        Raises:
            SurgeryError: it cannot be read, or its family, RoPE or weights are not supported.
        """
        reader = CheckpointReader.open(source, allow_pickle=allow_pickle)
        family = family_of(reader.config)
        config = load_config(reader.path)
        for layer in range(config.num_hidden_layers):
            family.attention_names(reader, layer)
        stream = LayerStream(
            reader,
            config,
            family.single_layer_config,
            device=settings.device,
            dtype=getattr(torch, settings.dtype),
        )
        return cls(reader, family, config, stream)

    @property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    def anatomy(self, layer: int) -> AttentionAnatomy:
        """The anatomy of one layer.

        Raises:
            SurgeryError: one of its weights is not finite.
        """
        anatomy = self.family.anatomy(self.reader, self.config, layer)
        for name in "qkvo":
            if not getattr(anatomy, name).isfinite().all():
                raise SurgeryError(f"{self.reader.path}: NaN or infinity in {name}_proj of layer {layer}")
        return anatomy

    def input_scale(self, layer: int) -> Tensor:
        """The weight of the norm before a layer's attention, [D]."""
        return self.reader.tensor(f"model.layers.{layer}.input_layernorm.weight")


@dataclass(frozen=True)
class Conversion:
    """A finished conversion: where it is and what is known of it."""

    path: Path
    report: Report


def default_output(source: str | Path, target: str) -> Path:
    """Beside the source, its name with the target behind it; beside the working folder for a hub id."""
    path = Path(source)
    return path.parent / f"{path.name}-{target}" if path.is_dir() else Path(f"{path.name}-{target}")


def convert_to_mla(
    source: str | Path,
    out: str | Path | None = None,
    settings: ConvertSettings | None = None,
    *,
    overwrite: bool = False,
    allow_pickle: bool = False,
    command: str = "",
    progress: Progress | None = None,
) -> Conversion:
    """Converts a checkpoint's attention to MLA and writes the result as a Hugging Face checkpoint.

    Args:
        source: local folder or hub id.
        out: folder to write; default as :func:`default_output`.
        settings: default :class:`ConvertSettings`.
        overwrite: replace an existing checkpoint in ``out``.
        allow_pickle: read pickled weights if there are no others.
        command: what the user typed, for the report.
        progress: bars; silent if None.

    Raises:
        SurgeryError: bad input or an impossible request; nothing is left behind.
    """
    settings, progress = settings or ConvertSettings(), progress or Progress(silent=True)
    opened = Source.open(source, settings, allow_pickle=allow_pickle)
    out = Path(out) if out else default_output(source, "mla")
    check_output(opened.reader.path, out)
    if (out.exists() or out.is_symlink()) and not overwrite:
        raise SurgeryError(f"{out}: exists; choose another --out or pass --overwrite")

    first = opened.anatomy(0)
    splits = candidate_splits(settings, first, reserved_numbers(opened, settings, first))
    texts = load_texts(opened, settings, progress)
    with StatisticsLibrary() as library, BoundaryStore() as store:
        if settings.calibration == NO_CALIBRATION:
            context = opened.config.max_position_embeddings
            mla_statistics.from_weights(
                library, opened.layers, opened.anatomy, opened.input_scale, settings, progress, context
            )
        else:
            mla_statistics.from_text(
                library, opened.stream, opened.anatomy, texts.calibration, store, settings, progress
            )
        plan, tried = _choose_plan(splits, opened, library, texts.held_out, settings, progress)
        carrier = _carrier(opened, plan, settings)
        tensors = _planned_tensors(opened, carrier)
        with CheckpointWriter(
            out, tensors, max_shard_size=settings.max_shard_size, overwrite=overwrite
        ) as writer:
            fit = _sequential_fit(opened, texts, store, settings)
            stages = ("partial RoPE", "truncated", "fitted")[: 3 if fit else 2]
            ladder = Ladder(opened.stream, texts.held_out, settings.batch_size, stages)
            layers = _convert_layers(opened, plan, library, fit, carrier, ladder, writer, progress)
            scores = ladder.scores()
            _copy_the_rest(opened, carrier, writer, progress)
            writer.write_json("config.json", carrier.writer.config(opened.reader.config))
            _copy_sidecars(opened.reader, carrier, writer)
            writer.finish()
            verify_files(writer.partial, tensors)
            simulated = ladder.hidden[stages[-1]]
            verification = _verify(opened, carrier, simulated, texts, writer, settings, progress)
            report = build_report(
                opened, settings, command, plan, tried, carrier, texts, scores, layers, verification, progress
            )
            writer.write_json(REPORT, report.to_dict())
            writer.write_text(CARD, report.card(out.name))
            writer.commit()
    return Conversion(writer.out, report)


def reserved_numbers(opened: Source, settings: ConvertSettings, anatomy: AttentionAnatomy) -> int:
    """Cached numbers per token that are neither latent nor rotated key: an exact key norm's, a constant channel's.

    The carrier is known for sure only after the split; what it may need at most is set aside, so that the budget holds.
    """
    if anatomy.k_norm is not None:
        return anatomy.kv_heads
    stock = settings.carrier != "own" and not opened.family.experts
    eps = opened.reader.config.get("rms_norm_eps", 1e-6)
    constant = settings.latent_norm == "constant" or (
        settings.latent_norm == "auto" and (anatomy.q.dtype == torch.float16 or abs(eps - 1e-6) > 1e-12)
    )
    return int(stock and constant)


def _choose_plan(
    splits: list[mla.Split],
    opened: Source,
    library: StatisticsLibrary,
    held_out: HeldOut,
    settings: ConvertSettings,
    progress: Progress,
) -> tuple[MLAPlan, list[tuple[mla.Split, float | None]]]:
    """The plan of least held-out loss, and the loss of every candidate."""
    method = mla.METHODS[settings.method]
    plans = [
        mla_split.plan_for(split, method, opened.anatomy, library, opened.layers, settings.rope_frequencies)
        for split in splits
    ]
    if len(plans) == 1:
        return plans[0], [(splits[0], None)]
    if not held_out.texts:
        # Nothing to try them on: a third for rotated numbers, the middle of what calibrated conversions choose.
        middle = min(range(len(splits)), key=lambda i: abs(splits[i].rope_dim - (splits[i].rope_dim + splits[i].rank) / 3))
        return plans[middle], [(splits[middle], None)]
    losses = mla_split.try_plans(
        plans, opened.stream, opened.anatomy, library, held_out, settings.batch_size, progress
    )
    best = min(range(len(plans)), key=losses.__getitem__)
    return plans[best], list(zip(splits, losses, strict=True))


def _carrier(opened: Source, plan: MLAPlan, settings: ConvertSettings) -> Carrier:
    anatomy = opened.anatomy(0)
    if plan.counts is None:
        split = plan.split
        pairs = anatomy.head_dim // 2
        frequency = torch.arange(0, pairs, pairs // (split.rope_dim // 2))
    else:
        frequency = torch.arange(len(plan.counts)).repeat_interleave(plan.counts)
    layers = opened.layers
    names = opened.family.attention_names(opened.reader, 0)
    spec = MLASpec(
        heads=anatomy.heads,
        kv_heads=anatomy.kv_heads,
        head_dim=anatomy.head_dim,
        value_dim=anatomy.value_dim,
        hidden=anatomy.hidden,
        ranks=(plan.split.rank,) * layers,
        inv_freq=(anatomy.inv_freq[frequency],) * layers,
        dtype=anatomy.q.dtype,
        query_bias=any(name.endswith("q_proj.bias") for name in names),
        latent_bias=any(name.endswith(("k_proj.bias", "v_proj.bias")) for name in names),
        output_bias=any(name.endswith("o_proj.bias") for name in names),
        key_norm_eps=anatomy.k_norm.eps if anatomy.k_norm else None,
        windows=tuple(opened.family.window(opened.config, layer) for layer in range(layers)),
    )
    return choose_carrier(
        opened.reader.config,
        spec,
        experts=opened.family.experts,
        mlp_bias=opened.family.mlp_bias(opened.config),
        wanted=settings.carrier,
        latent_norm=settings.latent_norm,
    )


def _replaced_names(opened: Source, carrier: Carrier) -> dict[str, int]:
    """The source's tensors that the conversion does away with or writes anew, and their layers."""
    replaced = {}
    for layer in range(opened.layers):
        names = opened.family.attention_names(opened.reader, layer)
        kept = set() if carrier.stock else set(carrier.writer.copied(names))
        replaced |= {name: layer for name in names if name not in kept}
    if opened.config.tie_word_embeddings:
        # Loaders take the embeddings for it; a copy in the files would only say the same again.
        replaced["lm_head.weight"] = -1
    return replaced


def _planned_tensors(opened: Source, carrier: Carrier) -> dict[str, TensorSpec]:
    """Every tensor of the output in the source's order, a layer's new attention where the old one began."""
    replaced = _replaced_names(opened, carrier)
    plan: dict[str, TensorSpec] = {}
    for name in opened.reader.names():
        if name not in replaced:
            info = opened.reader.info(name)
            plan[name] = TensorSpec(info.dtype, info.shape)
        elif replaced[name] >= 0:
            plan |= carrier.writer.plan(replaced[name])
    return plan


def _sequential_fit(
    opened: Source, texts: Texts, store: BoundaryStore, settings: ConvertSettings
) -> SequentialFit | None:
    """The least-squares fit, where the method has one and there is text to fit on."""
    if texts.calibration is None or not mla.METHODS[settings.method].gradients or not settings.fit_steps:
        return None
    return SequentialFit(
        opened.stream,
        store,
        texts.calibration,
        steps=settings.fit_steps,
        iterations=settings.fit_iterations,
        queries=settings.fit_queries,
        batch_size=settings.batch_size,
        seed=settings.seed,
    )


def _convert_layers(
    opened: Source,
    plan: MLAPlan,
    library: StatisticsLibrary,
    fit: SequentialFit | None,
    carrier: Carrier,
    ladder: Ladder,
    writer: CheckpointWriter,
    progress: Progress,
) -> list[LayerReport]:
    """Converts, measures and writes one layer after the other."""
    reports = []
    with progress.phase("convert", opened.layers) as advance:
        for index in range(opened.layers):
            anatomy = opened.anatomy(index).to(torch.float64)
            statistics, _ = library.load(index)
            basis = mla.key_basis(plan.method, anatomy, statistics, plan.split)
            converted = plan.convert(anatomy, library, index)
            result = converted.truncated
            stages = {"partial RoPE": converted.partial, "truncated": converted.truncated}
            with opened.stream.layer(index) as layer:
                if fit:
                    result, _ = fit.fit(index, layer, anatomy, converted.truncated, statistics.output_gradient)
                    stages["fitted"] = result
                errors = ladder.advance(layer, anatomy, basis, stages)
            for name, tensor in carrier.writer.tensors(index, result.to("cpu", torch.float64)).items():
                writer.write(name, tensor)
            reports.append(LayerReport.of(index, converted, errors))
            advance()
    return reports


def _copy_the_rest(opened: Source, carrier: Carrier, writer: CheckpointWriter, progress: Progress) -> None:
    """Everything but the attention, byte for byte; scaled only where a rescaled residual stream asks for it."""
    replaced = _replaced_names(opened, carrier)
    names = [name for name in opened.reader.names() if name not in replaced]
    factors = carrier.writer.rescaled(names) if carrier.stock else {}
    with progress.phase("copy the rest", sum(opened.reader.info(name).nbytes for name in names), "B") as advance:
        for name in names:
            if name in factors:
                tensor = opened.reader.tensor(name)
                writer.write(name, (tensor.double() * factors[name]).to(tensor.dtype))
            else:
                writer.copy(name, opened.reader)
            advance(opened.reader.info(name).nbytes)


def _copy_sidecars(reader: CheckpointReader, carrier: Carrier, writer: CheckpointWriter) -> None:
    for path in reader.sidecars():
        relative = path.relative_to(reader.path).as_posix()
        if relative != REPORT:
            writer.copy_file(path, SOURCE_CARD if relative == CARD else relative)
    if not carrier.stock:
        from surgery.architectures.latent import remote_code_files

        for path in remote_code_files():
            writer.copy_file(path, path.name)


def _verify(
    opened: Source,
    carrier: Carrier,
    simulated: Tensor,
    texts: Texts,
    writer: CheckpointWriter,
    settings: ConvertSettings,
    progress: Progress,
) -> Verification:
    verification = verify_by_running(
        writer.partial,
        carrier.writer.spec.dtype,
        opened.stream,
        simulated,
        texts.held_out,
        carrier.writer.spec.windows,
        settings.batch_size,
        progress,
    )
    itemsize = carrier.writer.spec.dtype.itemsize
    predicted = sum(carrier.writer.kv_width(layer) for layer in range(opened.layers)) * itemsize
    if verification.kv_bytes_per_token != predicted:
        raise SurgeryError(
            f"the live cache takes {verification.kv_bytes_per_token:g} bytes per token where {predicted} were predicted"
        )
    return verification
