"""Our reading of KVTC: its arithmetic against small computations of another kind, its bytes, what attention reads."""

import itertools
import zlib

import pytest
import torch
from sample_report import sample_report
from sessions import session
from tiny_models import HELD_OUT
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig

from surgery.common.errors import SurgeryError
from surgery.eval.held_out_text import Document, held_out_text
from surgery.eval.kv_cache import cache_bytes
from surgery.eval.report import markdown, pareto
from surgery.eval.report.document import STORED, finish
from surgery.eval.report.tables import headline
from surgery.eval.report.verdict import compared_rows, verdict
from surgery.eval.tasks.loss import LossTask
from surgery.eval.variants.cache_hook import NoVariant
from surgery.eval.variants.kvtc_cache import FIRST, PRESETS, RECENT, STEP, KeysAndValues, kvtc_cache, kvtc_spectra
from surgery.eval.variants.transform_coding import (
    BITS,
    OVERHEAD,
    Group,
    Spectrum,
    TransformCoder,
    allocate,
    deflated,
    window_errors,
)
from surgery.evaluation.rows import plan_variants
from surgery.model.cache_argument import CACHE

D, LAYERS, HEADS = 16, 3, 2
TOKEN_BYTES = LAYERS * HEADS * 2 * D * 4

pytestmark = pytest.mark.usefixtures("no_gradients")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vectors(count=200, width=40):
    """Vectors [n, p] with a decaying spectrum and a mean."""
    return random(count, width) * torch.logspace(1, -2, width) @ torch.linalg.qr(random(width, width, seed=1)).Q + 3


def spectrum_of(rows):
    mean = rows.double().mean(0)
    return Spectrum.of(mean, (rows.double() - mean).T @ (rows.double() - mean) / len(rows), rows[:32])


def model_of(**more):
    torch.manual_seed(0)
    shape = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 32, "num_attention_heads": 4, "head_dim": D}
    config = LlamaConfig(**{**shape, "num_key_value_heads": HEADS, "num_hidden_layers": LAYERS, **more})
    return AutoModelForCausalLM.from_config(config).eval()


def tokens_of(length, batch=1):
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(1))


def stored(format="kvtc_16x", model=None):
    model = model_of() if model is None else model
    return kvtc_cache(model, format, kvtc_spectra(model, tokens_of(80, 8)))


def test_components_are_principal_and_their_inverse_is_exact():
    rows = vectors().double()
    spectrum = spectrum_of(rows)
    centered = rows - rows.mean(0)
    components = centered @ spectrum.basis.double()
    torch.testing.assert_close(components @ spectrum.basis.double().T, centered, rtol=0, atol=1e-4)
    expected = torch.linalg.svdvals(centered)
    torch.testing.assert_close(components.norm(dim=0), expected, rtol=1e-3, atol=2e-4 * expected[0].item())
    off = components.T @ components - torch.diag(components.square().sum(0))
    assert off.abs().max() < 1e-4 * expected[0] ** 2


def test_a_budget_for_every_component_alone_leaves_the_rounding_of_fp16():
    rows, spectrum = vectors(), spectrum_of(vectors())
    groups = spectrum.allocate(40 * (OVERHEAD + 2))
    assert groups == [Group(start, 1, 2) for start in range(40)]
    coder = TransformCoder(spectrum, groups)
    components = (rows - coder.mean) @ coder.basis
    error = (coder.decode(coder.encode(rows)) - rows).norm(dim=1)
    assert (error <= components.norm(dim=1) * 2**-11 + 1e-4).all()


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("bits", BITS)
def test_errors_of_groups_are_those_of_even_steps_and_e4m3(size, bits):
    components = vectors(10, 20)
    expected = []
    for start in range(21 - size):
        group, total = components[:, start : start + size], 0.0
        for row in group.tolist():
            low, high = min(row), max(row)
            middle, half = torch.tensor([(low + high) / 2, (high - low) / 896]).half().tolist()
            shift, step = torch.tensor([low, (high - low) / (2**bits - 1)]).half().tolist()
            for value in row:
                if bits == 8:
                    code = max(-448.0, min(448.0, (value - middle) / half if half else 0.0))
                    read = torch.tensor(code).to(torch.float8_e4m3fn).item() * half + middle
                else:
                    code = max(0, min(2**bits - 1, round((value - shift) / step if step else 0.0)))
                    read = code * step + shift
                total += (read - value) ** 2
        expected.append(total)
    errors = window_errors(components, size, bits)
    torch.testing.assert_close(errors, torch.tensor(expected).double(), rtol=1e-3, atol=1e-6)


def cuts(rank, sizes):
    """Yield every way to cut components into groups of `sizes`, with bits, and dropped components."""
    if rank == 0:
        yield []
        return
    for last in [None, *itertools.product(sizes, BITS)]:
        width = 1 if last is None else last[0]
        if width <= rank:
            for before in cuts(rank - width, sizes):
                yield before if last is None else [*before, Group(rank - width, *last)]


@pytest.mark.parametrize("budget", [0, 33, 34, 36, 70, 101, 138, 500])
@pytest.mark.parametrize("seed", range(4))
def test_allocation_is_the_best_of_all_cuts(budget, seed):
    components = random(6, 5, seed=seed) * torch.tensor([4, 3, 1, 0.5, 0.3])
    errors = {(size, bits): window_errors(components, size, bits) for size in (1, 2, 4) for bits in BITS}
    energies = components.double().square().sum(0)

    def error(groups):
        covered = [index for group in groups for index in range(group.start, group.start + group.size)]
        lost = sum(energies[index] for index in range(5) if index not in covered)
        return float(lost + sum(errors[group.size, group.bits][group.start] for group in groups))

    def cost(groups):
        return sum(OVERHEAD + group.size * group.bits for group in groups)

    groups = allocate(errors, energies, budget)
    assert cost(groups) <= budget
    assert error(groups) == pytest.approx(min(error(cut) for cut in cuts(5, (1, 2, 4)) if cost(cut) <= budget))


def test_components_without_a_group_are_those_of_the_mean():
    rows, spectrum = vectors(width=24), spectrum_of(vectors(width=24))
    coder = TransformCoder(spectrum, spectrum.allocate(OVERHEAD + 1))
    assert coder.groups == [] and coder.encode(rows) == [] and coder.serialize([]) == b""
    assert torch.equal(coder.decode([]), coder.mean)
    # Of the groups that fit, the leading components avoid most of the error.
    assert spectrum.allocate(OVERHEAD + 32) == [Group(0, 16, 2)]
    coder = TransformCoder(spectrum, [Group(2, 4, 4)])
    components = (coder.decode(coder.encode(rows)) - coder.mean) @ coder.basis
    assert components.shape[1] == 6 and components[:, :2].abs().max() < 1e-5 < components[:, 2:].abs().min()


def codes_of(body, bits):
    """Read codes from packed bytes, bit by bit."""
    if bits == 8:
        return torch.frombuffer(bytearray(body), dtype=torch.float8_e4m3fn).float()
    stream = [byte >> shift & 1 for byte in body for shift in range(8)]
    words = [stream[start : start + bits] for start in range(0, len(stream), bits)]
    return torch.tensor([float(sum(bit << shift for shift, bit in enumerate(word))) for word in words])


def test_serialized_bytes_are_shifts_scales_and_codes_by_group():
    rows, count = vectors(), 8
    groups = [Group(0, 1, 2), Group(1, 1, 2), Group(2, 16, 8), Group(20, 4, 4), Group(24, 4, 4), Group(28, 1, 4)]
    coder = TransformCoder(spectrum_of(rows), groups)
    parts = coder.encode(rows[:count])
    stream, at = coder.serialize(parts), 0
    assert len(stream) == sum(count * (4 * 8 + group.size * group.bits) // 8 for group in groups)
    components = torch.zeros(count, 29)
    for group in groups:
        shift, scale = torch.frombuffer(bytearray(stream[at : at + 4 * count]), dtype=torch.float16).view(2, count, 1)
        length = count * group.size * group.bits // 8
        codes = codes_of(stream[at + 4 * count : at + 4 * count + length], group.bits).view(count, group.size)
        components[:, group.start : group.start + group.size] = codes * scale.float() + shift.float()
        at += 4 * count + length
    assert at == len(stream)
    torch.testing.assert_close(components @ coder.basis.T + coder.mean, coder.decode(parts))
    own = (rows[:count] - coder.mean) @ coder.basis
    coded = [index for group in groups for index in range(group.start, group.start + group.size)]
    assert (components - own)[:, coded].norm() < 0.1 * own[:, coded].norm()
    assert deflated(stream) == len(zlib.compress(stream)) and deflated(bytes(10_000)) < 50


def test_vectors_hold_the_keys_before_rope_and_go_back():
    model, tokens = model_of(), tokens_of(30, 2)
    cache = model(tokens, use_cache=True)[CACHE]
    positions, cut = torch.arange(5, 25)[None], slice(5, 25)
    angles = model.model.rotary_emb(torch.empty(0), positions)
    both = KeysAndValues(model)
    keys, values = both.gather(cache, cut, angles)
    states = model.model.layers[0].input_layernorm(model.get_input_embeddings()(tokens))[:, cut]
    torch.testing.assert_close(keys[..., : HEADS * D], model.model.layers[0].self_attn.k_proj(states))
    torch.testing.assert_close(values[..., : HEADS * D], model.model.layers[0].self_attn.v_proj(states))
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    both.scatter(cache, cut, angles, keys, values)
    for layer, (own_keys, own_values) in zip(cache.layers, before, strict=True):
        torch.testing.assert_close(layer.keys, own_keys)
        torch.testing.assert_close(layer.values, own_values)
    both.scatter(cache, cut, angles, keys + 1, values)
    assert not torch.allclose(cache.layers[-1].keys[:, :, cut], before[-1][0][:, :, cut], atol=0.1)
    assert torch.equal(cache.layers[-1].keys[:, :, 25:], before[-1][0][:, :, 25:])


def test_spectra_are_of_all_tokens_but_the_first_and_the_same_again():
    model, tokens = model_of(), tokens_of(80, 4)
    spectra = kvtc_spectra(model, tokens)
    cache = model(tokens, use_cache=True)[CACHE]
    values = torch.cat([layer.values[:, :, FIRST:].transpose(1, 2).flatten(2) for layer in cache.layers], -1)
    torch.testing.assert_close(spectra[1].mean, values.flatten(0, 1).mean(0), rtol=1e-4, atol=1e-6)
    for one, other in zip(spectra, kvtc_spectra(model, tokens), strict=True):
        assert torch.equal(one.mean, other.mean) and torch.equal(one.basis, other.basis)
        assert one.allocate(500) == other.allocate(500)


def decoded(model, tokens, first):
    output = model(tokens[:, :first])
    parts = [output.logits]
    for position in range(first, tokens.shape[1]):
        output = model(tokens[:, position : position + 1], **{CACHE: output[CACHE]})
        parts.append(output.logits)
    return torch.cat(parts, dim=1), output[CACHE]


def test_one_pass_and_decoding_are_the_same_and_the_live_cache_is_whole():
    tokens, length = tokens_of(300, 2), 300
    exact = model_of()(tokens, use_cache=False).logits
    model = stored()
    plain = model(tokens, use_cache=False)
    assert getattr(plain, CACHE) is None
    bytes_of_pass = model.stored_bytes()
    logits, cache = decoded(model, tokens, 250)
    torch.testing.assert_close(logits, plain.logits, rtol=0, atol=1e-4)
    changed = (plain.logits - exact).abs().amax((0, 2)) > 1e-4
    assert not changed[: RECENT + STEP].any() and changed[RECENT + STEP :].float().mean() > 0.9
    assert cache_bytes(cache) == 2 * model.kv_bytes(length) == 2 * length * TOKEN_BYTES
    coded = length // STEP * STEP - RECENT - FIRST
    for own, other in zip(bytes_of_pass, model.stored_bytes(), strict=True):
        assert own.exact == other.exact == (length - coded) * TOKEN_BYTES
        assert own.packed == other.packed and abs(own.deflated - other.deflated) < 0.02 * own.packed
        groups = [group for coder in cache.layers[0].coders for group in coder.groups]
        assert own.packed == coded * sum(OVERHEAD + group.size * group.bits for group in groups) // 8
        assert own.packed <= coded * TOKEN_BYTES // 2 // 16 and own.deflated != own.packed


def test_first_tokens_and_window_are_exact_and_the_others_are_what_coders_return():
    tokens, length = tokens_of(208), 208
    exact = model_of()(tokens, use_cache=True)[CACHE]
    model = stored()
    cache = model(tokens, use_cache=True)[CACHE]
    # Keys and values of the first layer do not depend on what attention read.
    for name in ("keys", "values"):
        own, other = (getattr(each.layers[0], name) for each in (cache, exact))
        assert torch.allclose(own[:, :, :FIRST], other[:, :, :FIRST]) and cache.get_seq_length() == length
        assert torch.allclose(own[:, :, length - RECENT :], other[:, :, length - RECENT :])
        difference = (own - other).abs().amax((0, 1, 3))[FIRST : length - RECENT]
        assert (difference > 1e-4).all()
    storage, angles = cache.layers[0].storage, model.model.rotary_emb(torch.empty(0), torch.arange(FIRST, 96)[None])
    vectors = KeysAndValues(model).gather(cache, slice(FIRST, 96), angles)
    for coder, encodings, own in zip(storage.coders, storage.parts, vectors, strict=True):
        read = torch.cat([coder.decode(encoding) for encoding in encodings], 1)
        torch.testing.assert_close(read, own, rtol=0, atol=1e-5)


def test_a_padded_batch_generation_and_beams():
    model, prompt = stored(), tokens_of(180, 2)
    mask = torch.ones_like(prompt)
    mask[1, :20] = 0
    common = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    whole = model.generate(prompt, **common)
    assert [each.exact for each in model.stored_bytes()] == [(199 - 192 + RECENT + FIRST) * TOKEN_BYTES] * 2
    assert torch.equal(model.generate(prompt, **common, prefill_chunk_size=50), whole)
    assert model.generate(prompt, **common, num_beams=2).shape == (2, 200)
    assert len(model.stored_bytes()) == 4
    assert model(prompt[:, :20]).logits.shape == (2, 20, 97) and model.stored_bytes()[1].deflated == 0


def test_what_has_no_such_storage_is_refused():
    model = model_of()
    spectra = kvtc_spectra(model, tokens_of(20))
    with pytest.raises(SurgeryError, match="kvtc_64x"):
        kvtc_cache(model, "kvtc_5x", spectra)
    kvtc_cache(model, "kvtc_8x", spectra)
    with pytest.raises(SurgeryError, match="already"):
        kvtc_cache(model, "kvtc_8x", spectra)
    shape = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 32, "num_attention_heads": 4, "head_dim": D}
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**shape, num_key_value_heads=2, num_hidden_layers=2, layer_types=kinds, sliding_window=16)
    for other in (Gemma3ForCausalLM(config), AutoModelForCausalLM.from_config(GPT2Config(n_embd=48, n_layer=2))):
        with pytest.raises(NoVariant):
            kvtc_spectra(other, tokens_of(20))


def test_the_loss_task_counts_storage_on_its_windows(tokenizer):
    model = stored("kvtc_8x", model_of(vocab_size=len(tokenizer)))
    content = HELD_OUT.read_text(encoding="utf-8")
    text = held_out_text(tokenizer, [Document(content, ((0, "first"),))], 3, 160, seed=0)
    storage = LossTask(text, decoded=8).run(model, session(tokenizer, batch_size=2), None)["storage"]
    expected = []
    for row in text.tokens:
        model(row[None], use_cache=False)
        expected.append(model.stored_bytes()[0].deflated)
    assert storage["deflated_bytes"] == pytest.approx(sum(expected) / 3, rel=0.01)
    assert storage["exact_bytes"] == (FIRST + RECENT) * TOKEN_BYTES
    assert storage["share"] == pytest.approx((storage["exact_bytes"] + storage["deflated_bytes"]) / 160 / TOKEN_BYTES)
    assert storage["coded_share"] == pytest.approx(storage["deflated_bytes"] / (160 - FIRST - RECENT) / TOKEN_BYTES)
    assert "storage" not in LossTask(text).run(model_of(vocab_size=len(tokenizer)), session(tokenizer), None)


def test_reports_name_it_storage_and_compare_its_bytes_with_no_live_cache():
    rows, _ = plan_variants(list(PRESETS), None, [], 1024)
    assert [row.name for row in rows] == [f"our reading of {name}, storage" for name in PRESETS]
    report = sample_report()
    before = verdict(report), pareto._points(report, "loss")
    rival = next(row for row in report["rows"] if row["name"] == "gqa int8 KV")
    row = {**rival, "name": rows[0].name, "variant": rows[0].variant, "kv": {**rival["kv"]}}
    row["comparison"] = {**rival["comparison"]}
    loss = {**rival["results"]["loss"], "storage": {"share": 0.125}}
    row["results"] = {**rival["results"], "loss": loss}
    assert row["variant"]["kind"] == STORED
    report["rows"].append(row)
    # Its bytes and loss beat all rivals, as far as a live cache is concerned.
    row["kv"]["ratio"] = 0.4
    row["comparison"]["loss"] = {**rival["comparison"]["loss"], "difference": -1.0}
    assert row["name"] not in {each["name"] for each in compared_rows(report, "variant")}
    after = verdict(report), pareto._points(report, "loss")
    assert before[0] == after[0]
    assert [each.row["name"] for each in before[1]] == [each.row["name"] for each in after[1]]
    table = headline(report)
    column = next(each for each in table.columns if each.key == "storage_share")
    assert column.title == "in storage" and column.text(row, report) == "12.5%"
    assert any("full precision" in note and "storage" in note for note in table.notes)
    text = markdown.render(report)
    assert "| our reading of kvtc_8x, storage |" in text and "in storage" in text
    assert finish(report)["rows"][-1]["kv"]["ratio"] == pytest.approx(rival["kv"]["ratio"])
