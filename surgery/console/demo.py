"""Output of ``surgery demo``: a table, or with ``as_json`` one JSON object."""

from __future__ import annotations

from surgery.common.human import cost, duration, share
from surgery.common.machine import seconds_since_start
from surgery.common.tables import terminal
from surgery.console.page import new_page, plain, print_json, typed
from surgery.console.verdicts import show_next
from surgery.reporting.quality import before_and_after


def show_demo(demo, *, as_json: bool = False) -> None:
    """Print the results of the demo (:class:`surgery.demo.run.Demo`)."""
    if as_json:
        print_json(demo.to_dict())
        return
    page, source, converted = new_page(), demo.source, demo.converted
    page.print("\n[bold]before and after, measured in transformers without this package[/bold]")
    page.print(f"source: {plain(demo.name)}", soft_wrap=True)
    both = source, converted
    kv_bytes, stages = zip(*((m.kv_bytes_per_token, {"loss": m.loss, "recall": m.recall}) for m in both), strict=True)
    names = source.model_class, converted.model_class
    page.print(terminal.render(before_and_after(kv_bytes, stages, names)))
    for name, measured in (("source", source), ("converted", converted)):
        page.print(f"[bold]{name}[/bold] writes:")
        page.print(f"[dim]{plain(demo.prompt)}[/dim]{plain(measured.completion.rstrip())}\n", highlight=False)
    result, model = typed(demo.path), typed(demo.model)
    ratio = share(converted.kv_bytes_per_token / source.kv_bytes_per_token)
    change = cost(converted.loss - source.loss, (source.recall, converted.recall))
    page.print(duration(seconds_since_start()))
    page.print(f"[bold]{plain(result)}[/bold]: {ratio} of the KV bytes for {change}", soft_wrap=True)
    commands = {
        f"surgery eval {result} --baseline {model}": "evaluates both next to cheap baselines",
        f"surgery convert --to mla {model} --kv-ratio 0.125": "an eighth of the bytes",
        "surgery inspect CKPT/": "KV cache and possible conversions of your model",
    }
    width = max(map(len, commands))
    show_next(page, [f"{command:{width}}   {why}" for command, why in commands.items()])
