"""Granite with experts of which some are shared: the attention of Granite 3."""

from dataclasses import replace

from surgery.families.granite import GRANITE_MOE

GRANITE_SHARED = replace(GRANITE_MOE, model_type="granitemoeshared")
