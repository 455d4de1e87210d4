"""YAML file with all settings of a class: defaults, with help as comments."""

from __future__ import annotations

import textwrap

from surgery.common.setting import Setting, settings_of

WIDTH = 118


def settings_page(cls: type, of: str) -> str:
    """Render the settings file.

    Args:
        cls: a settings class.
        of: command or target that it configures, such as "`surgery eval`".
    """
    sections: dict[str, list[Setting]] = {}
    for each in settings_of(cls).values():
        sections.setdefault(each.info.section, []).append(each)
    lines = _comment(f"Every setting of {of}, with its default. Use it with --config; flags win over it.")
    for section, settings in sections.items():
        lines += ["", f"## {section}"]
        for each in settings:
            lines += [*_comment(_about(each)), _line(each)]
    return "\n".join(lines) + "\n"


def _about(setting: Setting) -> str:
    info, choices = setting.info, ", ".join(map(str, setting.choices))
    parts = [info.help, choices and f"One of {choices}." if not setting.many else choices and f"Of {choices}."]
    if setting.optional and setting.default is None and info.unset:
        parts.append(f"null: {info.unset}.")
    return " ".join(part for part in (*parts, info.more) if part)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _line(setting: Setting) -> str:
    import yaml

    value = list(setting.default) if isinstance(setting.default, tuple) else setting.default
    value_text = yaml.safe_dump(value, default_flow_style=True, width=10 * WIDTH).removesuffix("...\n").rstrip()
    return f"{setting.name}: {value_text}"
