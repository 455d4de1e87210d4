"""Loading of whole models through transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

from surgery import model as own_model
from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.model_folder import model_folder
from surgery.common.errors import SurgeryError
from surgery.families.multimodal import MULTIMODAL
from surgery.running.loading import (
    attention_of,
    causal_class,
    load_config,
    load_tokenizer,
    loading,
    model_type_of,
    with_standard_names,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def causal_model(
    reader: CheckpointReader, *, dtype: torch.dtype | str = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a checkpoint's language model on the CPU: the whole model, or the view that `language_model` returned.

    Families with other module names load as the custom model class. Raises SurgeryError: transformers cannot load it,
    or its files were modified since they were opened.
    """
    try:
        return causal_model_unchecked(reader, dtype=dtype, trust_remote_code=trust_remote_code)
    finally:  # also on failure, of which this may be the cause
        reader.check_untouched()


def tokenizer_of(reader: CheckpointReader, **options: Any) -> PreTrainedTokenizerBase:
    """Load a checkpoint's tokenizer; options are those of :func:`surgery.running.loading.load_tokenizer`.

    Raises SurgeryError: transformers cannot load a tokenizer, or files were modified since they were opened.
    """
    if reader.source.is_file() and not (reader.path / "tokenizer_config.json").is_file():  # a GGUF file
        remedy = options.get("remedy") or "use the Hugging Face checkpoint instead"
        raise SurgeryError.at(reader.source, f"contains no tokenizer; {remedy}")
    try:
        return load_tokenizer(reader.path, **{"called": str(reader.source), **options})
    finally:
        reader.check_untouched()


def causal_model_unchecked(
    reader: CheckpointReader, *, dtype: torch.dtype | str = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load as `causal_model`, for callers that verify the files by hash."""
    renamed = reader.config.get("model_type") in own_model.DECODERS
    if not reader.stored_names and not renamed:
        return whole_model(model_folder(reader), dtype=dtype, trust_remote_code=trust_remote_code)
    weights = {name: reader.tensor(name) for name in reader.names() if renamed or name in reader.stored_names}
    config = with_standard_names(load_config(reader.path))
    logging.disable_progress_bar()
    with loading(str(reader.source)):
        return causal_class(config).from_pretrained(  # the auto class requires a folder
            None, config=config, state_dict=weights, dtype=dtype, **attention_of(reader.path)
        )


def whole_model(folder: Path, *, dtype: torch.dtype | str = "auto", trust_remote_code: bool = False) -> PreTrainedModel:
    """Load the model of a folder on the CPU in evaluation mode; vision-language models include the vision tower.

    Raises SurgeryError: transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    own_model.register()
    logging.disable_progress_bar()  # transformers' bar would interrupt ours
    with loading(str(folder)):
        auto = AutoModelForImageTextToText if model_type_of(folder) in MULTIMODAL else AutoModelForCausalLM
        return auto.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=trust_remote_code, **attention_of(folder)
        )
