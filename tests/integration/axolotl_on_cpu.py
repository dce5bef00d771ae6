"""axolotl's own command without a GPU, in the folder that it is started in: it trains a small Llama without
offload, and by the keys of its YAML with it. The last line that is printed names the runs whose weights have
the bits of none, and whose log has the figures.
"""

import json
import os
import random
import subprocess
import sys

import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<unk>", "<s>", "</s>", "the", "cat", "dog", "sat", "ran", "on", "mat", "fast", "slow", "red"]
PLAIN = {
    "base_model": "./model",
    "datasets": [{"path": "./rows.jsonl", "type": "completion", "field": "text"}],
    **{"sequence_len": 64, "micro_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 3},
    **{"num_epochs": 1, "optimizer": "adamw_torch_fused", "learning_rate": 1e-3, "lr_scheduler": "constant"},
    **{"bf16": False, "fp16": False, "tf32": False, "attn_implementation": "eager", "val_set_size": 0},
    **{"logging_steps": 1, "save_strategy": "no", "plugins": []},
}
RUNS = {
    "nothing": {},
    "hidden_states": {
        "gradient_checkpointing": True,
        "activation_offloading": "hidden_states",
        "layer_offloading": True,
        "offload": {"min_numel": 1},
    },
    "optimizer": {"offload": {"mode": "auto", "min_numel": 1, "optimizer": True}},
}


def make_model_and_rows():
    numbers = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained("model")
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(WORDS), max_position_embeddings=64))
    model.save_pretrained("model")
    rows = random.Random(0)
    with open("rows.jsonl", "w") as file:
        for _ in range(16):
            file.write(json.dumps({"text": " ".join(rows.choices(WORDS[3:], k=30))}) + "\n")


def trained(name):
    ours = {"plugins": ["offload.integrations.axolotl.OffloadPlugin"]} if RUNS[name] else {}
    with open(f"{name}.yml", "w") as file:
        yaml.safe_dump({**PLAIN, **ours, **RUNS[name], "output_dir": f"./{name}"}, file)
    done = subprocess.run(
        [sys.executable, "-m", "axolotl.cli.train", f"{name}.yml"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("offload/to_host_bytes") == (3 if RUNS[name] else 0)
    return load_file(f"{name}/model.safetensors")


if __name__ == "__main__":
    make_model_and_rows()
    plain, *others = (trained(name) for name in RUNS)
    for found in others:
        assert all(torch.equal(found[name], wanted) for name, wanted in plain.items())
    sys.stdout.write(f"equal: {', '.join(list(RUNS)[1:])}\n")
