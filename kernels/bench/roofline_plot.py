"""The roofline plot of a record: achieved TFLOP/s over FLOPs a byte, under the two ceilings of the same run."""

from __future__ import annotations

from pathlib import Path

MARKERS = "osD^vPX*"


def draw_roofline(record: dict, path: Path, metadata: dict[str, str] | None = None) -> None:
    """Draws the measured rows of a record of `run.Bench`.

    Args:
        metadata: of the picture, by the names of its format.

    Raises:
        ValueError: nothing was measured, or the suffix is no format of pictures.
    """
    rows = [row for row in record["rows"] if "seconds" in row]
    if not rows:
        raise ValueError(f"{path}: nothing was measured, there is no roofline to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    limits = record["ceilings"]
    copy, product = limits["bytes_per_second"], limits["flops_per_second"]
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    intensity = [row["flops"] / row["bytes"] for row in rows]
    low, high = min(*intensity, 1.0) / 2, max(*intensity, product / copy) * 2
    ridge = product / copy
    axes.plot([low, ridge, high], [low * copy / 1e12, product / 1e12, product / 1e12], color="black", linewidth=1)
    axes.annotate(f"copy {copy / 1e12:.2f} TB/s", (low * 1.1, low * 1.3 * copy / 1e12), rotation=35, fontsize=8)
    axes.annotate(f"bf16 product {product / 1e12:.0f} TFLOP/s", (ridge, product / 1e12 * 1.1), fontsize=8)
    for number, name in enumerate(dict.fromkeys(row["operation"] for row in rows)):
        points = [(x, row) for x, row in zip(intensity, rows, strict=True) if row["operation"] == name]
        axes.scatter(
            [x for x, _ in points],
            [row["flops_per_second"] / 1e12 for _, row in points],
            marker=MARKERS[number % len(MARKERS)],
            s=24,
            alpha=0.8,
            label=name,
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOPs a byte (every cached byte counted once)",
        ylabel="TFLOP/s",
        title=record["device"]["name"],
    )
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata=metadata)
