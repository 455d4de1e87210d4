"""Triton's interpreter without work that has no results; what kernels compute is the same."""

from dataclasses import replace

from triton.runtime import interpreter


def make_quick() -> None:
    """Sums are computed again in 64 bits, for an assertion that is made with `debug` only: they need not be."""
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
