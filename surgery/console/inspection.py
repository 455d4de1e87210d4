"""Output of `surgery inspect`."""

from __future__ import annotations

from rich.console import Console

from surgery.architectures.custom_class import MODEL_TYPE
from surgery.common.human import count, origin, per_token, shares_at, size
from surgery.common.tables.table import Column
from surgery.console.conversion import class_and_why
from surgery.console.page import make_table, new_page, plain, print_json, show_title, typed
from surgery.console.verdicts import show_next
from surgery.engines.facts import OWN_CLASSES
from surgery.engines.table import support_lines
from surgery.engines.verdict import ran
from surgery.families import LATENT_FAMILIES
from surgery.inspection.targets import COMMAND


def show_inspection(
    inspection, called: str = "CKPT", *, as_json: bool = False, verbose: bool = False, titled: bool = True
) -> None:
    """Print an inspection; ``called`` names the checkpoint in commands, ``titled`` prints it first.

    If verbose, with the reasons of each target's class and the verdicts of all engines.
    """
    if as_json:
        print_json(inspection.to_dict())
        return
    page, called = new_page(), typed(called)
    if titled:
        show_title(inspection.name)
    page.print(make_table(["", ""], [*_facts(inspection), ("KV cache", _cache(inspection))], header=False))
    if inspection.targets:
        _show_targets(page, inspection)
        if verbose:
            _show_targets_verbose(page, inspection.targets)
        else:
            cautions = [
                f"{target['command'].removeprefix(COMMAND)} ({shares_at(target['kv_ratio_at'], target['kv_ratio'])}): "
                f"{plain(target['caution'])}; "
                for target in inspection.targets
                if target["applies"] and target["caution"]
            ]
            page.print(
                f"[dim]{''.join(cautions)}--verbose shows reasons and the engines' commands[/dim]", soft_wrap=True
            )
    if inspection.advice:
        _show_advice(page, inspection.advice)
    if any(target["applies"] for target in inspection.targets):
        plan = f"surgery plan {called} --kv-ratio 0.25 --out plan.yaml"
        dry = f"surgery convert {called} --to ... --dry-run"
        width = max(len(plan), len(dry))
        show_next(
            page,
            (
                f"{plan:{width}}   measures which loses least at a quarter of the bytes",
                f"{dry:{width}}   estimates memory, disk and time of a conversion",
            ),
        )
    elif inspection.architecture["model_type"] in LATENT_FAMILIES:
        show_next(page, [f"surgery convert {called} --to mla --dry-run   a smaller latent rank, in the same class"])
    elif inspection.architecture["model_type"].startswith(OWN_CLASSES):  # "surgery over llama"
        show_next(page, [f"surgery doctor {called}   lists the engines that load it, with their commands"])


def _cache(inspection) -> str:
    """Format the KV bytes per token, and per sequence at lengths within the model's limit."""
    kv, limit = inspection.kv, inspection.architecture["max_positions"]
    at = [f"{size(kv_bytes)} at {length // 1024}k" for length, kv_bytes in kv["bytes_at"].items() if length <= limit]
    return f"{per_token(kv['bytes_per_token'])} per token" + (f"; {', '.join(at)} tokens" if at else "")


def _show_targets(page: Console, inspection) -> None:
    rows, refused = [], []
    for target in inspection.targets:
        name = target["command"].removeprefix(COMMAND)
        if not target["applies"]:
            refused.append(f"{name}: does not apply, {'; '.join(target['reasons'])}")
            continue
        if target["caution"]:
            continue
        kv_cell = f"{size(target['kv_bytes_per_token'])}, {shares_at(target['kv_ratio_at'], target['kv_ratio'])}"
        loads = [engine.removesuffix(" on CPU") for engine, row in target["engines"].items() if ran(row)]
        rows.append((name, kv_cell, target["class"], ", ".join(loads) or "-"))
    columns = ["", Column("KV per token", align="left"), "class", "tested in (CPU)"]
    page.print("possible conversions (surgery convert ...)")
    page.print(make_table(columns, rows))
    for line in refused:
        page.print(f"[dim]{plain(line)}[/dim]", soft_wrap=True)


def _show_advice(page: Console, advice: dict) -> None:
    """Print the recommendations that need no calibration text."""
    of = "ranked by the losses of SmolLM2-135M; surgery plan measures this model"
    page.print(f"recommended (not measured here: {of})", soft_wrap=True)

    def command_of(row: dict) -> str:
        return f"{row['command'].removeprefix(COMMAND)} ({shares_at(row['kv_ratio_at'], row['kv_ratio'])})"

    page.print(f"  best quality: {plain(command_of(advice['quality']))}", soft_wrap=True)
    page.print(f"  smallest: {plain(command_of(advice['smallest']))}", soft_wrap=True)
    takers: dict[str, list[str]] = {}
    for name, row in advice["engines"].items():
        # Conversions in bits, all of the custom class, lose too little for healing to be the next step.
        heal = "" if row["class"] == MODEL_TYPE else ", then surgery heal"
        takers.setdefault(command_of(row) + heal, []).append(
            name if ran(row["engines"][name]) else f"{name} (passes its own check, not run)"
        )
    for command, names in takers.items():
        page.print(f"  for {', '.join(names)}: {plain(command)}", soft_wrap=True)


def _show_targets_verbose(page: Console, targets: list[dict]) -> None:
    for target in targets:
        page.print(f"[bold]{plain(target['command'])}[/bold]")
        if not target["applies"]:
            page.print(f"  does not apply: {plain('; '.join(target['reasons']))}\n", soft_wrap=True)
            continue
        page.print(f"  {class_and_why(target['class'], target['reasons'])}", soft_wrap=True)
        page.print(make_table(["engine", "support"], support_lines(target["engines"]).items()))


def _facts(inspection) -> list[tuple[str, str]]:
    facts = inspection.architecture
    base = f", base {facts['rope_theta']:,g}" if facts["rope_theta"] else ""
    extras = [
        f"biases on {', '.join(facts['biases'])}" if facts["biases"] else "",
        "q/k-norm" if facts["qk_norm"] else "",
        "mixture of experts" if facts["experts"] else "",
        "tied embeddings" if facts["tied_embeddings"] else "",
    ]
    stored = origin(f"{count(facts['parameters'])} in {facts['dtype']}", facts.get("dequantised_from"))
    return [
        ("family", facts["model_type"] + (f", stored as {facts['stored_as']}" if facts.get("stored_as") else "")),
        ("parameters", f"{stored}, vocabulary of {facts['vocabulary']:,}"),
        ("layers", f"{facts['layers']} of hidden size {facts['hidden']:,}"),
        ("heads", f"{facts['heads']} query heads{_cached_heads(facts)}"),
        *[("attention", kind) for kind in facts.get("attention", [])],
        *[("ruined by", ", ".join(formats)) for formats in [facts.get("ruined_by")] if formats],
        ("RoPE", f"{facts['rope_type']}{base}, {facts['max_positions']:,} positions"),
        *[("attention windows", value) for value in _windows(inspection.windows)],
        *[("also", ", ".join(value)) for value in [list(filter(None, extras))] if value],
    ]


def _cached_heads(facts: dict) -> str:
    """Format KV heads and head size; empty if the "attention" lines describe the cache."""
    return "" if "attention" in facts else f", {facts['kv_heads']} KV heads, head size {facts['head_dim']}"


def _windows(windows: list[int | None]) -> list[str]:
    limited = [window for window in windows if window is not None]
    sizes = ", ".join(f"{window:,}" for window in sorted(set(limited)))
    return [f"{sizes} tokens in {len(limited)} of {len(windows)} layers"] if limited else []
